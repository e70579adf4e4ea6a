"""From data to drawing: ranges, ticks, smoothing, thinning.

In: points (x, y), y None where a value is missing or not finite. Out: ticks at round numbers, positions between 0 and
1, and point lists short enough to draw. Pure functions. Cost: linear in the
points, times the window where they are smoothed.
"""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Point", "Scale", "running_middle", "scale_over", "stretch_means", "thinned"]

Point = tuple[float, float | None]

ROUND_STEPS = (1.0, 2.0, 2.5, 5.0, 10.0)
LOG_MULTIPLES = (1.0, 2.0, 5.0)
MOST_LOG_TICKS = 7
FEWEST_IN_WINDOW = 5
LEAST_SPREAD = 1e-9  # below it, ticks would differ only in digits that floats barely have
TINY = 1e-200


@dataclass(frozen=True, kw_only=True)
class Scale:
    """A range of values along an axis, and where its ticks are."""

    low: float
    high: float
    ticks: tuple[float, ...]
    is_log: bool = False

    def share(self, value: float) -> float:
        """How far along the axis a value lies, 0 to 1."""
        low, high = self.low, self.high
        if self.is_log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, low))
        return min(max((value - low) / (high - low), 0.0), 1.0)


def scale_over(
    values: Sequence[float],
    *,
    is_log: bool = False,
    from_zero: bool = False,
    high_at_least: float = 0.0,
    tight: bool = False,
) -> Scale:
    """The axis that holds the values; its ends are round numbers unless `tight`."""
    low, high = (0.0 if from_zero else min(values)), max(*values, high_at_least)
    if is_log and low > TINY and high > low:
        return _log_scale(low, high)
    if high - low <= max(abs(low), abs(high)) * LEAST_SPREAD + TINY:
        # A constant gets a range of its own size, so that its line lies in the middle.
        spread = abs(high) / 2 if abs(high) > TINY else 1.0
        low, high = (0.0 if from_zero else low - spread), high + spread
    step = _round_step((high - low) / 4)
    first, last = math.floor(low / step), math.ceil(high / step)
    ticks = tuple(float(f"{place * step:.12g}") for place in range(first, last + 1))
    if tight:
        return Scale(low=low, high=high, ticks=tuple(tick for tick in ticks if low <= tick <= high))
    return Scale(low=ticks[0], high=ticks[-1], ticks=ticks)


def _round_step(least: float) -> float:
    magnitude = 10.0 ** math.floor(math.log10(least))
    return next(multiple * magnitude for multiple in ROUND_STEPS if multiple * magnitude >= least * 0.999)


def _log_scale(low: float, high: float) -> Scale:
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    ticks = [multiple * 10.0**power for power in range(first, last + 1) for multiple in LOG_MULTIPLES]
    inside = [tick for tick in ticks if low <= tick <= high]
    below = max((tick for tick in ticks if tick <= low), default=low)
    above = min((tick for tick in ticks if tick >= high), default=high)
    shown = sorted({below, *inside, above})
    if len(shown) > MOST_LOG_TICKS:
        decades = [10.0**power for power in range(first, last + 1) if below <= 10.0**power <= above]
        shown = decades[:: math.ceil(len(decades) / MOST_LOG_TICKS)]
    return Scale(low=below, high=above, ticks=tuple(shown), is_log=True)


def running_middle(points: Sequence[Point], *, window: int) -> list[Point]:
    """Each value's interquartile mean with its neighbours: the mean of the middle half of the window.

    As deaf to one slow step or odd batch as a median, and smoother. Near the start the window grows evenly on both
    sides, so that a steep fall isn't drawn late; places that would have fewer than five values there get none. At the
    end it is cut, so that the last value alone doesn't decide where the line ends.
    """
    known = [(x, y) for x, y in points if y is not None]
    half, last = window // 2, len(known) - 1
    ordered: list[float] = []
    start = end = 0
    smooth: list[Point] = []
    for place, (x, _) in enumerate(known):
        while end <= min(place + min(half, place), last):
            insort(ordered, known[end][1])
            end += 1
        while start < place - half:
            del ordered[bisect_left(ordered, known[start][1])]
            start += 1
        if len(ordered) >= FEWEST_IN_WINDOW:
            outside = len(ordered) // 4
            inside = ordered[outside : len(ordered) - outside]
            smooth.append((x, sum(inside) / len(inside)))
    return smooth


def stretch_means(points: Sequence[Point], *, stretch: int) -> list[Point]:
    """The mean of every `stretch` points that have a value, at the middle of their places."""
    known = [(x, y) for x, y in points if y is not None]
    parts = [known[start : start + stretch] for start in range(0, len(known), stretch)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts]


def thinned(points: Sequence[Point], *, most: int) -> list[Point]:
    """At most about `most` points: the lowest and highest of each stretch, in order, so that no spike is lost."""
    if len(points) <= most:
        return list(points)
    stretch = math.ceil(2 * len(points) / most)
    kept: list[Point] = []
    for start in range(0, len(points), stretch):
        part = [(x, y) for x, y in points[start : start + stretch] if y is not None]
        if not part:
            kept.append((points[start][0], None))
            continue
        kept += sorted({min(part, key=lambda point: point[1]), max(part, key=lambda point: point[1])})
    return kept
