"""The stages of a mixture: from which position on which weights hold. Append-only.

In: rows per source, and stages. Out: for any position the source, and how many rows of it came before (its cursor).
A stage begins at a position with the cursors that the one before it had reached there, so that a change of weights
repeats and skips nothing. Inside a stage a source that has had all its epochs leaves, and the others share its place in
their proportions; each such *leg* begins where arithmetic says the last row was. Cost: one interleaving per leg, made
once; positions are found in constant time however far they are (see `interleave`).
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from penstock.errors import PlanError, ResumeError
from penstock.pack.interleave import Interleaving
from penstock.pack.plan import Integers

__all__ = ["LEAST_WEIGHT", "MOST_WEIGHT", "Schedule", "Stage", "is_weight", "stages_from"]

LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6


def is_weight(weight: float) -> bool:
    """Whether a number can be a weight: 0, or neither so small nor so large that shares could no longer be told."""
    return weight == 0 or LEAST_WEIGHT <= weight <= MOST_WEIGHT


@dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """Weights from a position on.

    Attributes:
        start: the first position.
        weights: of each source: passes per epoch.
        cursors: rows of each source before `start`.
    """

    start: int
    weights: tuple[float, ...]
    cursors: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """For a saved state."""
        return {"start": self.start, "weights": list(self.weights), "cursors": list(self.cursors)}


def stages_from(value: Any) -> tuple[Stage, ...]:
    """The stages of a saved state, which is input.

    Raises:
        ResumeError: these aren't stages.
    """
    try:
        found = tuple(
            Stage(start=one["start"], weights=tuple(one["weights"]), cursors=tuple(one["cursors"])) for one in value
        )
        whole = [number for stage in found for number in (stage.start, *stage.cursors)]
        real = [weight for stage in found for weight in stage.weights]
        is_good = all(type(number) is int and number >= 0 for number in whole)
        is_good &= all(type(weight) in (int, float) and is_weight(weight) for weight in real)
        is_good &= bool(found) and found[0].start == 0
    except (TypeError, KeyError, ValueError):
        is_good = False
    if not is_good:
        raise ResumeError("this isn't the saved state of a mixture", hint="pass what `state_dict()` returned")
    return found


@dataclass(frozen=True, slots=True)
class _Leg:
    start: int
    interleaving: Interleaving | None  # None: every source has had its epochs
    cursors: tuple[int, ...]

    def cursors_at(self, position: int) -> tuple[int, ...]:
        counts = {} if self.interleaving is None else self.interleaving.counts(position - self.start)
        return tuple(cursor + counts.get(source, 0) for source, cursor in enumerate(self.cursors))


class Schedule:
    """Which source stands at which position, over all stages.

    Args:
        num_rows: natural number of rows of each source.
        last_rows: rows after which a source leaves, None for never.
        stages: ascending; the first begins at 0.
    """

    def __init__(self, num_rows: Sequence[int], last_rows: Sequence[int | None], stages: Sequence[Stage]) -> None:
        self._num_rows, self._last_rows = tuple(num_rows), tuple(last_rows)
        self.stages: tuple[Stage, ...] = ()
        self._legs: list[_Leg] = []
        self._starts: list[int] = []
        for stage in stages:
            self._append(stage)

    @classmethod
    def begun(cls, num_rows: Sequence[int], last_rows: Sequence[int | None], weights: Sequence[float]) -> Schedule:
        """A schedule of one stage."""
        first = Stage(start=0, weights=tuple(weights), cursors=(0,) * len(num_rows))
        return cls(num_rows, last_rows, [first])

    def changed(self, position: int, weights: Sequence[float]) -> Schedule:
        """The same schedule up to a position, from there on with other weights."""
        kept = [stage for stage in self.stages if stage.start < position]
        if len(kept) < len(self.stages) - 1 or self.stages[-1].start > position:
            raise PlanError(
                f"weights can't change at position {position}, the last change was at {self.stages[-1].start}",
                hint="stages are only appended: change weights at a later position",
            )
        appended = Stage(start=position, weights=tuple(weights), cursors=self.cursors_at(position))
        return Schedule(self._num_rows, self._last_rows, [*kept, appended])

    def cursors_at(self, position: int) -> tuple[int, ...]:
        """Rows of each source before a position."""
        return self._legs[self._leg_at(position)].cursors_at(position)

    def runs(self, start: int, count: int) -> Iterator[tuple[int, Integers, int]]:
        """Of the positions start .. start + count, by source: the source, at which of them (counted from `start`), and
        its cursor at the first; from there on it is one more each time. A source may come up again in a later leg.

        Raises:
            PlanError: every source has had its epochs before the last of these positions.
        """
        position, end = start, start + count
        while position < end:
            number = self._leg_at(position)
            leg = self._legs[number]
            if leg.interleaving is None:
                raise PlanError(
                    f"the mixture ends at position {leg.start}: every source has had its epochs",
                    hint="allow more epochs, or take fewer steps",
                )
            until = min(end, self._starts[number + 1]) if number + 1 < len(self._legs) else end
            for source, places, before in leg.interleaving.runs(position - leg.start, until - position):
                yield source, places + (position - start), leg.cursors[source] + before
            position = until

    def _leg_at(self, position: int) -> int:
        return bisect.bisect_right(self._starts, position) - 1

    def _append(self, stage: Stage) -> None:
        cursors = self.cursors_at(stage.start) if self._legs else (0,) * len(self._num_rows)
        if stage.cursors != cursors or len(stage.weights) != len(cursors):
            raise ResumeError(
                f"the stage at position {stage.start} begins at rows {list(stage.cursors)} of its sources, "
                f"expected is {list(cursors)}",
                hint="the state is of another mixture, or was changed by hand; start afresh",
            )
        # Legs that would have begun later, had the weights stayed, never come.
        keep = bisect.bisect_left(self._starts, stage.start)
        del self._legs[keep:], self._starts[keep:]
        for leg in self._legs_of(stage):
            self._legs.append(leg)
            self._starts.append(leg.start)
        self.stages = (*self.stages, stage)

    def _legs_of(self, stage: Stage) -> Iterator[_Leg]:
        start, cursors = stage.start, stage.cursors
        shares = {
            source: Fraction(str(weight)) * rows
            for source, (weight, rows) in enumerate(zip(stage.weights, self._num_rows, strict=True))
            if weight > 0
        }
        while True:
            left = {source: rows - cursors[source] for source, rows in enumerate(self._last_rows) if rows is not None}
            shares = {source: share for source, share in shares.items() if left.get(source, 1) > 0}
            leg = _Leg(start, Interleaving(shares) if shares else None, cursors)
            yield leg
            ends = (
                [leg.interleaving.place_of(s, left[s] - 1) + 1 for s in shares if s in left] if leg.interleaving else []
            )
            if not ends:
                return
            start += min(ends)
            cursors = leg.cursors_at(start)
