"""Rows out of stores of which this machine can't keep all segments at once.

In: the stretches of a layout's rows. Out: their tokens, in one array. Segment after segment is fetched, read once for
all rows that lie in it, and let go of: what a layout costs is a *sweep* over its segments. Those that are here already
come first, so a sweep over N segments, of which the cache holds K, fetches N - K. Then threads fetch several at once,
in no order, so that processes that share a cache fetch different ones, and each finds what the others have. All sweeps
over a cache, of whatever process, wait for room that others give back soon: what lies on the disk stays within the
bound (see `mirror`).

Memory: the tokens of the layout, 40 bytes a stretch. Time, besides fetching: a checked copy, slice by slice, at 0.3 µs
a stretch.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.load.copying import TokenCopier
from penstock.pack import Plan, Stretches
from penstock.pack.plan import Integers
from penstock.store import Store
from penstock.store.mirror import Cancelled, Check
from penstock.store.reader import Segment

__all__ = ["Copier", "SweepingCopier", "copier_of"]

MOST_THREADS = 4
# Whoever waits for a sweep looks so often whether it is still wanted.
SECONDS_BETWEEN_LOOKS = 0.1
# A server that doesn't answer is given up after minutes; whoever ends a sweep doesn't wait for that.
SECONDS_TO_END = 3.0


class Copier(Protocol):
    """What brings the tokens of rows together: `TokenCopier` and `SweepingCopier`, each with a layout of its own."""

    @property
    def first_segments(self) -> Integers:
        """Of each store the number that its first segment has here; then the number of all."""

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """See `TokenCopier`."""

    def lay_out(self, segment: Integers, offset: Integers, stretches: Stretches, row_ends: Integers) -> Any:
        """See `TokenCopier`."""

    def fill(self, layout: Any, first: int, last: int, out: npt.NDArray[Any]) -> None:
        """See `TokenCopier`."""

    def gathered(self, layout: Any, first: int, last: int) -> npt.NDArray[Any]:
        """See `TokenCopier`."""


def copier_of(plans: Sequence[Plan], *, row_tokens: int, is_cancelled: Check = lambda: False) -> Copier:
    """What copies the rows of some plans: straight from the maps where all of their segments may stay here.

    Where they may not, `is_cancelled` is asked several times a second while segments come; if so, `Cancelled` is
    raised.

    A store that one reader sweeps is swept by all that come after it, small ones too: evaluation goes on beside
    training, and what it kept open would leave no room, or take it from the disk unseen.
    """
    stores = [plan.store for plan in plans]
    bounded = {store: store.cache_bytes for store in stores if store.cache_bytes is not None}
    if bounded:
        needed = _segment_bytes([plan for plan in plans if plan.store in bounded])
        if needed > min(bounded.values()) or any(store.is_swept for store in bounded):
            for store in bounded:
                store.is_swept = True
            return SweepingCopier(*stores, row_tokens=row_tokens, is_cancelled=is_cancelled)
    return TokenCopier(*stores, row_tokens=row_tokens)


def _segment_bytes(plans: Sequence[Plan]) -> int:
    """Bytes of the segments that hold documents of some plans; two stores, or two versions, may share one."""
    sizes = {}
    for plan in plans:
        entries = plan.store.manifest.segments
        for number in np.flatnonzero(np.bincount(plan.store.arrays["segment"][plan.documents])).tolist():
            sizes[plan.store.path, entries[number].name] = entries[number].bytes
    return sum(sizes.values())


class SweepingCopier:
    """Copies tokens of rows of one length where they are laid out. Threads may share it.

    Attributes:
        first_segments: of each store the number that its first segment has here; then the number of all.
        interrupted: while it is set, or while `is_cancelled` says so, sweeps end with `Cancelled`.
    """

    def __init__(self, *stores: Store, row_tokens: int, is_cancelled: Check = lambda: False) -> None:
        self._stores = stores
        self._row_tokens = row_tokens
        self._end_id = stores[0].manifest.tokenizer["end_id"]
        entries = [store.manifest.segments for store in stores]
        self.first_segments: Integers = np.concatenate([[0], np.cumsum([len(of_store) for of_store in entries])])
        self._segment_tokens = np.array([entry.tokens for of_store in entries for entry in of_store], np.int64)
        # Several plans of one store call a segment by several numbers; it is visited once.
        same = [stores.index(store) for store in stores]
        self._shifts = self.first_segments[same] - self.first_segments[:-1]
        self.interrupted = threading.Event()
        self._is_cancelled = is_cancelled

    def lay_out(
        self, segment: Integers, offset: Integers, stretches: Stretches, row_ends: Integers
    ) -> npt.NDArray[Any]:
        """[rows, T + 1], all of the tokens; arguments as of `TokenCopier.lay_out`."""
        rows = np.empty((len(segment), self._row_tokens), self._stores[0].dtype)
        rows[row_ends < self._row_tokens] = self._end_id
        pieces = self._pieces(segment, offset, stretches)
        target = rows.reshape(-1).data.cast("B")
        _Sweep(pieces, target, is_interrupted=lambda: self.interrupted.is_set() or self._is_cancelled()).run()
        return rows

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """See `TokenCopier`."""
        none_whole = np.full(len(row_ends), -1)
        np.copyto(out, self.lay_out(none_whole, np.zeros_like(none_whole), stretches, row_ends))

    def fill(self, layout: npt.NDArray[Any], first: int, last: int, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1], with the rows first .. last."""
        np.copyto(out, layout[first:last])

    def gathered(self, layout: npt.NDArray[Any], first: int, last: int) -> npt.NDArray[Any]:
        """[rows, T + 1], the rows first .. last in memory of their own, which transforms may change."""
        return layout[first:last].copy()

    def _pieces(self, segment: Integers, offset: Integers, stretches: Stretches) -> dict[Store, dict[int, _Pieces]]:
        """What is to be read of each segment, in the order in which it lies there."""
        whole = np.flatnonzero(segment >= 0)
        number, first, length, place = (
            np.concatenate(parts)
            for parts in (
                (segment[whole], stretches.segment),
                (offset[whole], stretches.offset),
                (np.full(len(whole), self._row_tokens), stretches.length),
                (whole * self._row_tokens, stretches.row * self._row_tokens + stretches.place),
            )
        )
        if (first < 0).any() or (first + length > self._segment_tokens[number]).any():
            raise IndexError("a stretch begins before its segment or ends after it")
        number += self._shifts[np.searchsorted(self.first_segments, number, side="right") - 1]
        order = np.lexsort((first, number))
        number, first, length, place = (column[order] for column in (number, first, length, place))
        found: dict[Store, dict[int, _Pieces]] = {}
        used, begins = np.unique(number, return_index=True)
        # In any order: see the module's docstring.
        for one in np.random.default_rng().permutation(len(used)).tolist():
            owner = int(np.searchsorted(self.first_segments, used[one], side="right")) - 1
            own = slice(begins[one], begins[one + 1] if one + 1 < len(used) else None)
            pieces = _Pieces(first=first[own], length=length[own], place=place[own])
            found.setdefault(self._stores[owner], {})[int(used[one] - self.first_segments[owner])] = pieces
        return found


@dataclass(frozen=True, slots=True)
class _Pieces:
    """Stretches of one segment: first token, tokens, and the first token's place over all rows."""

    first: Integers
    length: Integers
    place: Integers


class _Sweep:
    """Reads what some rows need of each segment."""

    def __init__(self, left: dict[Store, dict[int, _Pieces]], target: memoryview, *, is_interrupted: Check) -> None:
        self._left, self._target = left, target
        self._is_interrupted = is_interrupted
        self._present = self._look()
        self._failures: list[BaseException] = []
        self._choosing = threading.Lock()

    def run(self) -> None:
        """Reads all of it, in threads of its own: whoever waits for them can be interrupted, a request can't. An error
        of one ends the others."""
        if self._present:  # by one alone: another would take the room of those that haven't been read yet
            self._work_in_threads(self._read_present, 1)
        absent = sum(map(len, self._left.values()))
        self._work_in_threads(self._read_all, min(MOST_THREADS, absent))

    def _work_in_threads(self, work: Callable[[], None], num_threads: int) -> None:
        threads = [
            threading.Thread(target=self._work, args=(work,), name=f"penstock-sweep-{number}", daemon=True)
            for number in range(num_threads)
        ]
        try:
            for thread in threads:
                thread.start()
            self._wait(threads)
        except BaseException as error:
            self._failures.append(error)
            self._wait(threads)
            raise
        if self._failures:
            raise self._failures[0]
        if self._is_interrupted():
            # Noted down: who is still at a request has to see it when nothing interrupts any more.
            self._failures.append(Cancelled())
            raise Cancelled

    def _wait(self, threads: Sequence[threading.Thread]) -> None:
        """For all of them or, once the sweep is over, no longer than `SECONDS_TO_END`: those that are left write to
        nobody's memory but this sweep's, and end at their next chunk."""
        end = None
        for thread in threads:
            while thread.is_alive():
                if self._is_over():
                    end = time.monotonic() + SECONDS_TO_END if end is None else end
                    if time.monotonic() > end:
                        return
                thread.join(SECONDS_BETWEEN_LOOKS)

    def _work(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001  raised by `run`
            self._failures.append(error)

    def _read_present(self) -> None:
        while self._present:
            self._read_one()

    def _read_all(self) -> None:
        while self._read_one():
            pass

    def _read_one(self) -> bool:
        chosen = self._chosen()
        if chosen is not None:
            store, number, pieces = chosen
            store.visit(number, partial(self._read, store, number, pieces), is_cancelled=self._is_over)
        return chosen is not None

    def _is_over(self) -> bool:
        return bool(self._failures) or self._is_interrupted()

    def _chosen(self) -> tuple[Store, int, _Pieces] | None:
        """A segment that is here, also one that has come since; else any. None where none is left."""
        with self._choosing:
            if self._is_over():
                raise Cancelled
            self._present = self._present or self._look()
            if self._present:
                store, number = self._present.pop()
                return store, number, self._left[store].pop(number)
            for store, left in self._left.items():
                if left:
                    number = next(iter(left))
                    return store, number, left.pop(number)
            return None

    def _look(self) -> list[tuple[Store, int]]:
        return [(store, number) for store, left in self._left.items() for number in store.present(left)]

    def _read(self, store: Store, number: int, pieces: _Pieces, segment: Segment) -> None:
        first, length, place = pieces.first, pieces.length, pieces.place
        for piece in np.flatnonzero(store.unchecked(np.full(len(first), number), first, length)).tolist():
            segment.check(int(first[piece]), int(length[piece]))
        width, target = segment.tokens.itemsize, self._target
        columns = (first * width, (first + length) * width, place * width, (place + length) * width)
        # Released at once: the map, and with it the file's place on the disk, lives as long as anything refers to it.
        with segment.tokens.data.cast("B") as source:
            for begin, end, into, until in zip(*(column.tolist() for column in columns), strict=True):
                target[into:until] = source[begin:end]
