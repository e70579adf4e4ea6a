"""The charts of a training run.

In: a `Run`. Out: charts of loss, throughput, data stall, learning rate and gradient norm, by step. Raw values are drawn
faint behind their smoothed course once there are enough of them. Cost: linear in the steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from penstock.report import measures, quantities
from penstock.report.charts import Chart, Look, Series
from penstock.report.run import Run, Step
from penstock.report.scales import Point, running_middle, stretch_means

__all__ = ["loss_chart", "small_charts"]

FEWEST_TO_SMOOTH = 30
WINDOWS_PER_RUN = 25
MOST_TO_SMOOTH = 2000
# From here on a linear axis would squeeze the later, interesting part of a loss curve into its lowest tenth.
LOG_FROM_RATIO = 10


def _points(run: Run, value: Callable[[Step], float | None]) -> list[Point]:
    return [(step.step, value(step)) for step in run.steps]


def _raw_and_smooth(points: list[Point], *, name: str, tone: str = "train") -> list[Series]:
    if sum(y is not None for _, y in points) < FEWEST_TO_SMOOTH:
        return [Series(name=name, points=points, tone=tone)]
    # A long run is averaged first: the eye can't tell, and smoothing 100,000 points by themselves takes seconds.
    stretch = math.ceil(len(points) / MOST_TO_SMOOTH)
    coarse = stretch_means(points, stretch=stretch)
    window = max(5, len(coarse) // WINDOWS_PER_RUN) | 1
    smooth = running_middle(coarse, window=window)
    return [
        Series(name=name, points=points, look=Look.FAINT, tone=tone),
        Series(name=f"smoothed over {window * stretch:,} points", points=smooth, tone=tone),
    ]


def loss_chart(run: Run) -> Chart:
    """Training loss, raw and smoothed, with the validation losses as dots."""
    training = _points(run, lambda step: step.loss)
    split = measures.validation_split(run) or "val"
    held_out: list[Point] = [(one.step, one.loss) for one in measures.validations(run)]
    series = _raw_and_smooth(training, name="train")
    if held_out:
        series.append(Series(name=split, points=held_out, look=Look.DOTS, tone="validation"))
    values = [y for _, y in [*training, *held_out] if y is not None]
    is_log = bool(values) and min(values) > 0 and max(values) / min(values) >= LOG_FROM_RATIO
    change = measures.loss_change(run)
    readout = " → ".join(dict.fromkeys(quantities.decimal(loss) for loss in change)) if change else ""
    return Chart(
        title="Loss",
        subtitle=f"nats per token, by step{', logarithmic' if is_log else ''}",
        description=_loss_description(run, change, held_out, split=split),
        readout=readout,
        series=series,
        value_text=_tick_text,
        height_pixels=280,
        is_log=is_log,
    )


def _loss_description(run: Run, change: tuple[float, float] | None, held_out: list[Point], *, split: str) -> str:
    if change is None:
        return "No finite training loss was recorded."
    first, last = (quantities.decimal(loss) for loss in change)
    text = f"Training loss from {first} to {last} over {measures.steps_done(run):,} steps."
    known = [y for _, y in held_out if y is not None]
    return f"{text} Loss on {split}: {quantities.decimal(known[-1])} at the last evaluation." if known else text


def _tick_text(value: float) -> str:
    if value and not 1e-3 <= abs(value) < 1e5:
        return quantities.scientific(value)
    return f"{value:,.3f}".rstrip("0").rstrip(".") if value % 1 else f"{value:,.0f}"


def small_charts(run: Run) -> list[Chart]:
    """The four charts below the loss; those without two values to join are left out."""
    charts = [_throughput_chart(run), _stall_chart(run), _learning_rate_chart(run), _gradient_chart(run)]
    return [chart for chart in charts if sum(y is not None for _, y in chart.series[0].points) > 1]


def _throughput_chart(run: Run) -> Chart:
    points = _points(run, lambda step: step.tokens / step.seconds if step.tokens and step.seconds else None)
    rate = measures.timing(run)["tokens_per_second_median"]
    text = f"median {quantities.compact(rate)}" if rate else ""
    return Chart(
        title="Throughput",
        subtitle="tokens per second",
        description=f"Real tokens per second of step time, {text}.",
        readout=text,
        series=_raw_and_smooth(points, name="each step"),
        value_text=lambda value: quantities.compact(value).replace(" ", ""),
        from_zero=True,
    )


def _stall_chart(run: Run) -> Chart:
    points = _points(
        run,
        lambda step: 100 * step.data_seconds / step.seconds if step.data_seconds is not None and step.seconds else None,
    )
    share = measures.data_stall_percent(run)
    text = quantities.percent(share) if share is not None else ""
    return Chart(
        title="Data stall",
        subtitle="share of step time spent waiting for a batch",
        description=f"Share of step time spent waiting for data, {text} of all step time.",
        readout=text,
        series=[Series(name="each step", points=points, look=Look.AREA, tone="validation")],
        value_text=lambda value: f"{_tick_text(value)} %",
        from_zero=True,
        high_at_least=4,
    )


def _learning_rate_chart(run: Run) -> Chart:
    points = _points(run, lambda step: step.learning_rate)
    rates = [y for _, y in points if y is not None]
    text = f"peak {quantities.scientific(max(rates))}" if rates else ""
    return Chart(
        title="Learning rate",
        subtitle="by step",
        description=f"Learning rate over the run, {text}.",
        readout=text,
        series=[Series(name="learning rate", points=points)],
        value_text=quantities.scientific,
        from_zero=True,
    )


def _gradient_chart(run: Run) -> Chart:
    points = _points(run, lambda step: step.grad_norm)
    norms = [y for _, y in points if y is not None]
    middle = measures.gradient_summary(run)["norm_median"]
    text = f"median {quantities.decimal(middle)}" if middle is not None else ""
    return Chart(
        title="Gradient norm",
        subtitle="before clipping",
        description=f"Norm of the gradient before clipping, {text}.",
        readout=text,
        series=_raw_and_smooth(points, name="each step"),
        value_text=_tick_text,
        from_zero=not norms or max(norms) < LOG_FROM_RATIO * max(min(norms), 1e-12),
        is_log=bool(norms) and min(norms) > 0 and max(norms) >= LOG_FROM_RATIO * min(norms),
    )
