"""Line charts and columns as inline SVG, drawn without a script.

In: series of points. Out: a `figure` whose drawing follows the width of the page: the axis has a fixed width, the plot
places things across in percent and down in pixels, so text keeps its size on a phone. Colours come from the page's
style sheet by class, hence light and dark. A chart of fewer than two points would look broken: it is not drawn, and the
caller gets a sentence instead. Cost: at most about 800 points a series, whatever the length of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from penstock.report.markup import Markup, joined, tag
from penstock.report.quantities import compact
from penstock.report.scales import Point, Scale, scale_over, thinned

__all__ = ["Chart", "Columns", "Look", "Series", "bar", "chart_figure", "columns_figure"]

MOST_POINTS = 800
MOST_DOTS = 120
PLOT_UNITS = 1000  # width of the lines' own coordinate system, stretched over the plot
TOP_PIXELS = 8
TICK_ROW_PIXELS = 24
DIGIT_PIXELS = 7.2
EDGE_SHARE = 0.04
BARE_SHARE = 0.12
COLUMN_GAP_SHARE = 0.12
MOST_EDGE_LABELS = 8


class Look(Enum):
    """How a series is drawn."""

    FAINT = "faint"
    LINE = "line"
    DOTS = "dots"
    AREA = "area"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points with a name; `tone` is the colour class: train, validation or plain."""

    name: str
    points: Sequence[Point]
    look: Look = Look.LINE
    tone: str = "train"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What to draw. `readout` is the figure to remember, printed beside the title."""

    title: str
    subtitle: str
    description: str
    readout: str
    series: Sequence[Series]
    value_text: Callable[[float], str]
    height_pixels: int = 180
    is_log: bool = False
    from_zero: bool = False
    high_at_least: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Columns:
    """A histogram: `values` between `edges`, of which there is one more; `hints` are shown over a column.

    `number` counts those of one title on a page.
    """

    title: str
    subtitle: str
    description: str
    readout: str
    values: Sequence[float]
    edges: Sequence[str]
    hints: Sequence[str]
    value_text: Callable[[float], str]
    tone: str = "train"
    number: int = 1
    height_pixels: int = 180


Drawing = Chart | Columns


def chart_figure(chart: Chart) -> Markup:
    """The chart, or a sentence where there are not two points to join."""
    drawn = [one for one in chart.series if any(y is not None for _, y in one.points)]
    steps = {x for one in drawn for x, y in one.points if y is not None}
    head = tag("figcaption", _caption(chart), _legend(drawn) if len(drawn) > 1 else Markup(""))
    if len(steps) < 2:
        note = "Nothing recorded." if not steps else "One point recorded; a line needs two."
        return tag("figure", head, tag("p", note, class_="quiet"), class_="chart")
    values = [y for one in drawn for _, y in one.points if y is not None]
    down = scale_over(values, is_log=chart.is_log, from_zero=chart.from_zero, high_at_least=chart.high_at_least)
    across = scale_over(sorted(steps), tight=True)
    frame = tag("div", _axis(chart, down), _plot(chart, drawn, across=across, down=down), class_="frame")
    return tag("figure", head, frame, class_="chart")


def columns_figure(chart: Columns) -> Markup:
    """The histogram; the labels below it are thinned to what fits a phone."""
    down = scale_over(chart.values, from_zero=True)
    width = 100 / len(chart.values)
    columns = [
        tag(
            "rect",
            tag("title", hint),
            x=f"{place * width + width * COLUMN_GAP_SHARE / 2:.3f}%",
            width=f"{width * (1 - COLUMN_GAP_SHARE):.3f}%",
            y=_pixel(chart, down, value),
            height=round(_pixel(chart, down, 0) - _pixel(chart, down, value), 1),
            class_=f"column {chart.tone}",
        )
        for place, (value, hint) in enumerate(zip(chart.values, chart.hints, strict=True))
    ]
    stride = -(-len(chart.edges) // MOST_EDGE_LABELS)
    labels = [
        _label_below(chart, chart.edges[place], place / len(chart.values))
        for place in range(0, len(chart.edges), stride)
    ]
    plot = _named_plot(chart, [*_grid(chart, down), *labels, *columns], number=chart.number)
    head = tag("figcaption", _caption(chart))
    return tag("figure", head, tag("div", _axis(chart, down), plot, class_="frame"), class_="chart")


def bar(share: float, *, tone: str = "train") -> Markup:
    """A horizontal bar, `share` of the width it is given; decoration beside a printed number."""
    width = min(max(share, 0.0), 1.0) * 100
    track = tag("rect", width="100%", height=8, rx=4, class_="track")
    filled = tag("rect", width=f"{width:.2f}%", height=8, rx=4, class_=f"fill {tone}") if width else Markup("")
    return tag("svg", track, filled, class_="bar", height=8, aria_hidden="true", focusable="false")


def _caption(chart: Drawing) -> Markup:
    title = tag("span", tag("strong", chart.title), " ", tag("small", chart.subtitle))
    return tag("div", title, tag("span", chart.readout, class_="readout"), class_="caption")


def _legend(drawn: Sequence[Series]) -> Markup:
    entries = []
    for one in drawn:
        if one.look is Look.DOTS:
            mark = tag("circle", cx=9, cy=5, r=3.5, class_=f"dot {one.tone}")
        else:
            mark = tag("path", d="M0 5H18", class_=f"{one.look.value} {one.tone}")
        entries.append(tag("li", tag("svg", mark, width=18, height=10, aria_hidden="true"), one.name))
    return tag("ul", *entries, class_="legend")


def _pixel(chart: Drawing, down: Scale, value: float) -> float:
    return round(TOP_PIXELS + chart.height_pixels * (1 - down.share(value)), 1)


def _axis(chart: Drawing, down: Scale) -> Markup:
    texts = [chart.value_text(tick) for tick in down.ticks]
    width = round(max(len(text) for text in texts) * DIGIT_PIXELS + 10)
    labels = [
        tag("text", text, x=width - 8, y=_pixel(chart, down, tick), dy="0.32em", text_anchor="end")
        for text, tick in zip(texts, down.ticks, strict=True)
    ]
    return tag("svg", *labels, class_="axis", width=width, height=_total_height(chart), aria_hidden="true")


def _total_height(chart: Drawing) -> int:
    return TOP_PIXELS + chart.height_pixels + TICK_ROW_PIXELS


def _grid(chart: Drawing, down: Scale) -> list[Markup]:
    return [
        tag("line", x1=0, x2="100%", y1=_pixel(chart, down, tick), y2=_pixel(chart, down, tick), class_="grid")
        for tick in down.ticks
    ]


def _named_plot(chart: Drawing, drawn: Sequence[Markup], *, number: int = 1) -> Markup:
    """The drawing with its name and what it says, for those who can't see it."""
    name = f"chart-{chart.title.lower().replace(' ', '-')}" + (f"-{number}" if number > 1 else "")
    return tag(
        "svg",
        tag("title", chart.title, id=f"{name}-title"),
        tag("desc", chart.description, id=f"{name}-desc"),
        *drawn,
        class_="plot",
        role="img",
        aria_labelledby=f"{name}-title {name}-desc",
        height=_total_height(chart),
    )


def _plot(chart: Chart, drawn: Sequence[Series], *, across: Scale, down: Scale) -> Markup:
    paths = joined([_lines(chart, one, across=across, down=down) for one in drawn])
    dots = [_dots(chart, one, across=across, down=down) for one in drawn]
    # The nested drawing alone is stretched; strokes keep their width by vector-effect, text and dots lie outside it.
    stretched = tag(
        "svg",
        paths,
        viewBox=f"0 0 {PLOT_UNITS} {_total_height(chart)}",
        preserveAspectRatio="none",
        width="100%",
        height=_total_height(chart),
        overflow="visible",
    )
    return _named_plot(chart, [*_grid(chart, down), *_step_labels(chart, across), stretched, *dots])


def _step_labels(chart: Chart, across: Scale) -> list[Markup]:
    labels = []
    # The first step is labelled too where no tick is near: steps are counted from 1, ticks are round.
    is_bare = not across.ticks or across.share(across.ticks[0]) > BARE_SHARE
    for tick in (across.low, *across.ticks) if is_bare else across.ticks:
        text = f"{tick:,.0f}" if tick < 1e5 else compact(tick)
        labels.append(_label_below(chart, text, across.share(tick)))
    return labels


def _label_below(chart: Drawing, text: str, share: float) -> Markup:
    anchor = "start" if share < EDGE_SHARE else "end" if share > 1 - EDGE_SHARE else "middle"
    return tag("text", text, x=f"{share * 100:.2f}%", y=_total_height(chart) - 6, text_anchor=anchor)


def _runs_of_known(points: Sequence[Point]) -> list[list[tuple[float, float]]]:
    """The points cut where a value is missing: a gap is drawn as a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in points:
        if y is None:
            runs.append([])
        else:
            runs[-1].append((x, y))
    return [run for run in runs if run]


def _lines(chart: Chart, one: Series, *, across: Scale, down: Scale) -> Markup:
    commands = []
    floor = _pixel(chart, down, down.low)
    for run in _runs_of_known(thinned(one.points, most=MOST_POINTS)):
        if len(run) == 1:
            continue  # drawn as a dot
        places = [f"{across.share(x) * PLOT_UNITS:.1f} {_pixel(chart, down, y)}" for x, y in run]
        path = "M" + "L".join(places)
        if one.look is Look.AREA:
            first, last = (f"{across.share(x) * PLOT_UNITS:.1f}" for x in (run[0][0], run[-1][0]))
            path = f"{path}L{last} {floor}L{first} {floor}Z"
        commands.append(path)
    look = "thread" if one.look is Look.DOTS else one.look.value
    return tag("path", d="".join(commands), class_=f"{look} {one.tone}", vector_effect="non-scaling-stroke")


def _dots(chart: Chart, one: Series, *, across: Scale, down: Scale) -> Markup:
    """A dot for every point of a series of dots; in the others, for points without a neighbour to draw a line to."""
    runs = _runs_of_known(thinned(one.points, most=MOST_DOTS if one.look is Look.DOTS else MOST_POINTS))
    points = [point for run in runs if len(run) == 1 or one.look is Look.DOTS for point in run]
    dots = [
        tag(
            "circle",
            tag("title", f"{one.name}, step {x:,.0f}: {chart.value_text(y)}"),
            cx=f"{across.share(x) * 100:.2f}%",
            cy=_pixel(chart, down, y),
            r=3.5,
            class_=f"dot {one.tone}",
        )
        for x, y in points
    ]
    return joined(dots)
