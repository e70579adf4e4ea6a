"""Stretches of segments into rows: the copying itself.

Rows are gathered by Arrow: every stretch is an entry of a `binary_view` array whose buffers are the segments' maps,
and casting that to plain binary lays all of them side by side, in one call that holds no Python lock. A second copy, of
memory that is still warm, brings them to where the batch wants them. About 0.45 ns a token where a loop over slices
takes 0.7, and other threads run meanwhile. A few stretches are copied slice by slice instead, at 0.2 µs each besides
the memory's own time, and so are those of so few bytes that Arrow would keep them in the view itself; where such are
many they are gathered token by token (4 ns a token). Blocks that nobody has touched yet are checked first, so that no
token is copied unchecked.

Memory: the tokens of the rows once more, while they are copied.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.pack import Stretches
from penstock.pack.plan import Integers, ranges
from penstock.store import Store
from penstock.store.reader import Segment

__all__ = ["TokenCopier"]

# A call to Arrow costs as much as so many slices.
FEW_STRETCHES = 48
# A view of so many bytes holds them itself, instead of where they are.
INLINE_BYTES = 12
# So many of those are cheaper token by token: they share the cost of the calls.
MANY_INLINE = 512
# Views count bytes of a buffer in 31 bits: a longer segment is several buffers, which begin so far apart.
BUFFER_BYTES = 2**30
LONGEST_ROW_BYTES = 2**30


class TokenCopier:
    """Copies tokens of one store, or of several alike, into rows of one length. Threads may share it.

    Attributes:
        first_segments: of each store the number that its first segment has here; then the number of all.
    """

    def __init__(self, *stores: Store, row_tokens: int) -> None:
        self._stores = stores
        self._row_tokens = row_tokens
        self._padding = np.full(row_tokens, stores[0].manifest.tokenizer["end_id"], stores[0].dtype)
        entries = [store.manifest.segments for store in stores]
        self.first_segments = np.concatenate([[0], np.cumsum([len(of_store) for of_store in entries])])
        self._segment_tokens = np.array([entry.tokens for of_store in entries for entry in of_store], np.int64)
        self._inline_padding = np.resize(self._padding, INLINE_BYTES // self._padding.itemsize).view(np.int32)
        # Weak: a store may let go of a segment, and its map must not be kept here then.
        self._buffers: weakref.WeakKeyDictionary[Segment, list[pa.Buffer]] = weakref.WeakKeyDictionary()

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1]: the stretches, then padding from each row's end."""
        self._check(stretches)
        num_bytes, flat = stretches.length * out.itemsize, out.reshape(-1)
        to = stretches.row * self._row_tokens + stretches.place
        if len(to) < FEW_STRETCHES or self._row_tokens * out.itemsize > LONGEST_ROW_BYTES:
            self._copy_slices(stretches, to, slice(None), flat)
            self._pad(row_ends, flat)
            return
        np.copyto(flat, self._gathered(stretches, num_bytes, row_ends))
        inline = np.flatnonzero(num_bytes <= INLINE_BYTES)
        if len(inline) < MANY_INLINE:
            self._copy_slices(stretches, to, inline, flat)
        else:
            self._copy_tokens(stretches, to, inline, flat)

    def _check(self, stretches: Stretches) -> None:
        """Compares blocks that nobody has read yet with their checksums. Arrow itself looks at no bounds."""
        if (stretches.offset + stretches.length > self._segment_tokens[stretches.segment]).any():
            raise IndexError("a stretch ends after its segment")
        for number, store in enumerate(self._stores):
            first, last = self.first_segments[number : number + 2].tolist()
            which: slice | Integers = slice(None)
            if len(self._stores) > 1:
                which = np.flatnonzero((stretches.segment >= first) & (stretches.segment < last))
            segment, offset, length = stretches.segment[which] - first, stretches.offset[which], stretches.length[which]
            for i in np.flatnonzero(store.unchecked(segment, offset, length)).tolist():
                store.read(int(segment[i]), int(offset[i]), int(length[i]))

    def _gathered(self, stretches: Stretches, num_bytes: Integers, row_ends: Integers) -> npt.NDArray[Any]:
        """All rows side by side, padded, in memory of Arrow's; stretches that views would hold themselves are zeros."""
        width = self._padding.itemsize
        buffers, first_buffers = self._buffers_of(stretches.segment)
        padded = np.flatnonzero(row_ends < self._row_tokens)
        views = np.zeros((len(num_bytes) + len(padded), 4), np.int32)  # bytes, the first four of them, buffer, offset
        at: slice | Integers = slice(None)
        if len(padded):
            at = np.arange(len(num_bytes)) + np.searchsorted(padded, stretches.row)
            behind = np.arange(len(padded)) + np.searchsorted(stretches.row, padded, side="right")
            missing = (self._row_tokens - row_ends[padded]) * width
            views[behind, 0], views[behind, 2] = missing, len(buffers)
            views[behind[missing <= INLINE_BYTES], 1:] = self._inline_padding
        chunk, offset = np.divmod(stretches.offset * width, BUFFER_BYTES)
        far = num_bytes > INLINE_BYTES
        views[at, 0] = num_bytes
        views[at, 2] = (first_buffers + chunk) * far
        views[at, 3] = offset * far
        sources = [None, pa.py_buffer(views), *buffers, pa.py_buffer(self._padding)]
        laid_out = pa.Array.from_buffers(pa.binary_view(), len(views), sources).cast(pa.large_binary())
        return np.frombuffer(laid_out.buffers()[2], self._padding.dtype)

    def _buffers_of(self, segments: Integers) -> tuple[list[pa.Buffer], Integers]:
        """The maps of some segments as buffers of Arrow, and for each of `segments` the number of its first one."""
        is_used = np.zeros(len(self._segment_tokens), np.bool_)
        is_used[segments] = True
        buffers: list[pa.Buffer] = []
        first_buffer = np.zeros(len(is_used), np.int64)
        for number in np.flatnonzero(is_used).tolist():
            segment = self._segment(number)
            found = self._buffers.get(segment)
            if found is None:
                found = self._buffers[segment] = _buffers(segment.tokens)
            first_buffer[number] = len(buffers)
            buffers += found
        return buffers, first_buffer[segments]

    def _segment(self, number: int) -> Segment:
        """A segment of one of the stores; asked for each time, because a store may let go of it in between."""
        owner = 0
        if len(self._stores) > 1:
            owner = int(np.searchsorted(self.first_segments, number, side="right")) - 1
        return self._stores[owner].segment(number - int(self.first_segments[owner]))

    def _copy_slices(self, stretches: Stretches, to: Integers, which: slice | Integers, out: npt.NDArray[Any]) -> None:
        width = out.itemsize
        segments, begins, offsets = stretches.segment[which], to[which] * width, stretches.offset[which] * width
        num_bytes = stretches.length[which] * width
        sources = {segment: self._segment(segment).tokens.data.cast("B") for segment in np.unique(segments).tolist()}
        target = out.data.cast("B")
        columns = (segments, begins, begins + num_bytes, offsets, offsets + num_bytes)
        for segment, begin, end, first, last in zip(*(column.tolist() for column in columns), strict=True):
            target[begin:end] = sources[segment][first:last]

    def _copy_tokens(self, stretches: Stretches, to: Integers, which: Integers, out: npt.NDArray[Any]) -> None:
        for segment, group in _by_value(stretches.segment, which):
            owner, source = ranges(stretches.offset[group], stretches.length[group])
            shift = to[group] - stretches.offset[group]
            out[source + shift[owner]] = self._segment(segment).tokens[source]

    def _pad(self, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        rows = out.reshape(-1, self._row_tokens)
        for row in np.flatnonzero(row_ends < self._row_tokens).tolist():
            rows[row, row_ends[row] :] = self._padding[0]


def _buffers(tokens: npt.NDArray[Any]) -> list[pa.Buffer]:
    """A segment's map as buffers that begin `BUFFER_BYTES` apart; each reaches into the next by a stretch."""
    whole = pa.py_buffer(tokens)
    return [
        whole.slice(begin, min(2 * BUFFER_BYTES, whole.size - begin)) for begin in range(0, whole.size, BUFFER_BYTES)
    ]


def _by_value(values: Integers, places: Integers) -> Iterator[tuple[int, Integers]]:
    """The places grouped by the value there."""
    ordered = places[np.argsort(values[places], kind="stable")]
    sorted_values = values[ordered]
    starts = [0, *(np.flatnonzero(np.diff(sorted_values)) + 1).tolist(), len(ordered)]
    for start, end in itertools.pairwise(starts):
        yield int(sorted_values[start]), ordered[start:end]
