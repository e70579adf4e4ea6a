"""The page of a comparison: one static file that needs nothing else.

In: a `Comparison`. Out: a page under the same rules as the page of a run (page.py): no script, nothing fetched, every
name escaped. Cost: linear in the steps of both runs; some 60 kB.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from penstock import fs
from penstock.report import measures, quantities
from penstock.report.charts import Chart, Look, Series, bar, chart_figure
from penstock.report.comparison import Comparison, Side
from penstock.report.comparison_text import (
    bits_text,
    evaluated_sentence,
    setting_rows,
    speed_rows,
    spread_sentence,
    verdict_line,
)
from penstock.report.curves import LOG_FROM_RATIO
from penstock.report.markup import Markup, clipped, joined, tag
from penstock.report.page import glued, whole_page
from penstock.report.run import Run
from penstock.report.scales import Point
from penstock.report.sections import figure
from penstock.report.tables import NOTHING, NUMBER, line, table

__all__ = ["render_comparison_page", "write_comparison_page"]

FOOTER = "Written by penstock from the records of two runs. This page loads nothing and runs nothing."
MOST_NAME_CHARACTERS = 60


def write_comparison_page(path: Path, comparison: Comparison) -> None:
    """Writes the page, whole or not at all."""
    with fs.fail_as_disk_error("writing the page"):
        fs.write_atomic(path, render_comparison_page(comparison).encode())


def render_comparison_page(comparison: Comparison) -> str:
    """The whole page."""
    title = f"{_name(comparison.before)} → {_name(comparison.after)}"
    parts = [
        ("Quality", _quality(comparison)),
        ("Speed", _speed(comparison)),
        ("Curves", _curves(comparison)),
        ("Settings that differ", _settings(comparison)),
        ("How it was compared", _method(comparison)),
    ]
    return whole_page(
        title=title,
        header=_header(comparison, title),
        figures=_figures(comparison),
        parts=[(name, content) for name, content in parts if content],
        footer=FOOTER,
    )


def _name(side: Side) -> str:
    return clipped(side.name, most_characters=MOST_NAME_CHARACTERS) or "run"


def _header(comparison: Comparison, title: str) -> Markup:
    word, tone = ("held", "completed") if comparison.held else ("not held", "failed")
    return tag(
        "header",
        tag("p", "penstock comparison", class_="mark"),
        tag("h1", tag("bdi", title), " ", tag("span", word, class_=f"pill {tone}")),
        tag("p", f"{glued(verdict_line(comparison).capitalize())}.", class_="lead"),
    )


def _figures(comparison: Comparison) -> Markup:
    figures = []
    if math.isfinite(comparison.difference):
        small = f"bits per byte, {comparison.threshold_percent:+g} % allowed"
        figures.append(figure("Quality", f"{comparison.difference_percent:+.2f} %", small))
    before, after = comparison.before.speed, comparison.after.speed
    if comparison.tokens_per_second_ratio is not None:
        small = "tokens/s, steady state"
        figures.append(figure("Speed", f"{comparison.tokens_per_second_ratio:.2f}x", small))
    if before.seconds is not None and after.seconds is not None:
        small = f"before: {quantities.duration(before.seconds)}"
        figures.append(figure("Whole run", quantities.duration(after.seconds), small))
    peak_before = before.peak_gpu_memory_bytes or before.peak_memory_bytes
    peak_after = after.peak_gpu_memory_bytes or after.peak_memory_bytes
    if peak_before and peak_after:
        small = f"before: {quantities.bytes_text(peak_before)}"
        figures.append(figure("Peak memory", quantities.bytes_text(peak_after), small))
    return tag("dl", *figures, class_="figures") if figures else NOTHING


def _quality(comparison: Comparison) -> Markup:
    bits = {"Before": comparison.before_bits, "After": comparison.after_bits}
    finite_bits = [value for value in bits.values() if math.isfinite(value)]
    longest = max(finite_bits)
    items = [
        tag(
            "li",
            tag("b", f"{word}: ", tag("bdi", _name(side))),
            tag("span", f"{bits_text(value)} bits per byte", class_="seconds"),
            bar(min(value / longest, 1.0), tone=tone),
            tag("small", f"step {side.score.step:,}, seed {line(side.seed)}"),
        )
        for (word, value), side, tone in zip(
            bits.items(), (comparison.before, comparison.after), ("train", "validation"), strict=True
        )
    ]
    notes = [spread_sentence(comparison), evaluated_sentence(comparison)]
    return joined(
        [
            tag("ol", *items, class_="phases"),
            *(tag("p", f"{note[0].upper()}{note[1:]}.", class_="quiet below") for note in notes),
        ]
    )


def _speed(comparison: Comparison) -> Markup:
    header = [("Figure", ""), ("Before", NUMBER), ("After", NUMBER), ("Ratio", NUMBER)]
    left_out = "Steady state leaves out the first steps after every start"
    return table(left_out, header, speed_rows(comparison))


def _curves(comparison: Comparison) -> Markup:
    charts = [
        _chart(
            comparison,
            title="Held-out bits per byte",
            subtitle="as each run scored itself",
            points=_bits,
            text=lambda value: f"{value:.2f}",
        ),
        _chart(
            comparison,
            title="Tokens per second",
            subtitle="by step",
            points=_rates,
            text=lambda value: quantities.compact(value).replace(" ", ""),
            from_zero=True,
        ),
    ]
    return tag("div", *map(chart_figure, charts), class_="pair first")


def _chart(
    comparison: Comparison,
    *,
    title: str,
    subtitle: str,
    points: Callable[[Run], list[Point]],
    text: Callable[[float], str],
    from_zero: bool = False,
) -> Chart:
    series = [
        Series(name=f"{word}: {_name(side)}", points=points(side.run), look=Look.LINE, tone=tone)
        for word, side, tone in (
            ("before", comparison.before, "train"),
            ("after", comparison.after, "validation"),
        )
    ]
    values = [y for one in series for _, y in one.points if y is not None]
    return Chart(
        title=title,
        subtitle=subtitle,
        description=f"{title} of both runs by step.",
        readout="",
        series=series,
        value_text=text,
        from_zero=from_zero,
        is_log=not from_zero and bool(values) and 0 < LOG_FROM_RATIO * min(values) <= max(values),
    )


def _bits(run: Run) -> list[Point]:
    return [(one.step, one.bits_per_byte) for one in measures.validations(run)]


def _rates(run: Run) -> list[Point]:
    return [(one.step, one.tokens / one.seconds if one.tokens and one.seconds else None) for one in run.steps]


def _settings(comparison: Comparison) -> Markup:
    rows = setting_rows(comparison)
    if not rows:
        return tag("p", "None: both runs were made with the same settings and choices.", class_="quiet")
    header = [("Setting", ""), ("Before", "value"), ("After", "value")]
    return tag("div", table("Config and choices", header, rows), class_="stacked")


def _method(comparison: Comparison) -> Markup:
    sentences = [
        "Quality is bits per byte of held-out text: what the model needs to write the text down, whatever its "
        "tokenizer. Less is better. Losses per token compare only between runs of one tokenizer.",
        f"Held means that the second run needs at most {comparison.threshold_percent:g} % more bits than the first. "
        "Where reruns with other seeds are given, means are compared, and the spread says how much is chance.",
    ]
    first, *rest = (tag("p", sentence, class_="below" if place else None) for place, sentence in enumerate(sentences))
    return joined([first, *rest])
