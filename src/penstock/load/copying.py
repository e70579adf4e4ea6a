"""Stretches of segments into rows: the copying itself.

A stretch is copied by assigning one slice of bytes to another, which costs about 0.2 µs besides the memory's own time:
less than gathering rows by an index, which writes every token twice. Where stretches are so short that this would be
most of the cost, and many, they are gathered token by token instead (4 ns a token). Blocks that nobody has touched yet
are checked first, so that no token is copied unchecked.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack import Stretches
from penstock.pack.plan import Integers, ranges
from penstock.store import Store

__all__ = ["TokenCopier"]

# Below this a stretch is cheaper token by token, if enough of them share the cost of the calls.
SHORT_TOKENS = 32
MANY_SHORT = 512


class TokenCopier:
    """Copies tokens of one store into rows of one length."""

    def __init__(self, store: Store, *, row_tokens: int) -> None:
        self._store = store
        self._row_tokens = row_tokens
        pad_id = store.manifest.tokenizer["end_id"]
        self._padding = np.full(row_tokens, pad_id, store.dtype).data.cast("B")

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1]: the stretches, then padding from each row's end."""
        self._check(stretches)
        to = stretches.row * self._row_tokens + stretches.place
        flat = out.reshape(-1)
        short = stretches.length < SHORT_TOKENS
        if int(np.count_nonzero(short)) < MANY_SHORT:
            self._copy_slices(stretches, to, slice(None), flat)
        else:
            self._copy_slices(stretches, to, np.flatnonzero(~short), flat)
            self._gather(stretches, to, np.flatnonzero(short), flat)
        self._pad(row_ends, flat)

    def _check(self, stretches: Stretches) -> None:
        unchecked = self._store.unchecked(stretches.segment, stretches.offset, stretches.length)
        for i in np.flatnonzero(unchecked).tolist():
            self._store.read(int(stretches.segment[i]), int(stretches.offset[i]), int(stretches.length[i]))

    def _copy_slices(self, stretches: Stretches, to: Integers, which: slice | Integers, out: npt.NDArray[Any]) -> None:
        width = out.itemsize
        segments, begins, offsets = stretches.segment[which], to[which] * width, stretches.offset[which] * width
        num_bytes = stretches.length[which] * width
        # Made anew each time: a store may let go of a segment in between.
        used = np.unique(segments).tolist()
        sources = {segment: self._store.segment(segment).tokens.data.cast("B") for segment in used}
        target = out.data.cast("B")
        columns = (segments, begins, begins + num_bytes, offsets, offsets + num_bytes)
        for segment, begin, end, first, last in zip(*(column.tolist() for column in columns), strict=True):
            target[begin:end] = sources[segment][first:last]

    def _gather(self, stretches: Stretches, to: Integers, which: Integers, out: npt.NDArray[Any]) -> None:
        for segment, group in _by_value(stretches.segment, which):
            owner, source = ranges(stretches.offset[group], stretches.length[group])
            shift = to[group] - stretches.offset[group]
            out[source + shift[owner]] = self._store.segment(segment).tokens[source]

    def _pad(self, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        width, places = out.itemsize, self._row_tokens
        padded = np.flatnonzero(row_ends < places)
        target = out.data.cast("B")
        missing = (places - row_ends[padded]) * width
        ends = (padded + 1) * (places * width)
        for end, size in zip(ends.tolist(), missing.tolist(), strict=True):
            target[end - size : end] = self._padding[:size]


def _by_value(values: Integers, places: Integers) -> Iterator[tuple[int, Integers]]:
    """The places grouped by the value there."""
    ordered = places[np.argsort(values[places], kind="stable")]
    sorted_values = values[ordered]
    starts = [0, *(np.flatnonzero(np.diff(sorted_values)) + 1).tolist(), len(ordered)]
    for start, end in itertools.pairwise(starts):
        yield int(sorted_values[start]), ordered[start:end]
