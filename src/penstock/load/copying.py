"""Stretches of segments into rows: the copying itself.

Rows are gathered by Arrow: every stretch is an entry of a `binary_view` array whose buffers are the segments' maps,
and casting that to plain binary lays all of them side by side, in one call that holds no Python lock. About 0.35 ns a
token where a loop over slices takes 0.7, and other threads run meanwhile; a second copy, where tokens are wanted in
memory of the caller's, takes 0.15. A few stretches are copied slice by slice instead, at 0.2 µs each besides
the memory's own time, and so are those of so few bytes that Arrow would keep them in the view itself; where such are
many they are gathered token by token (4 ns a token). Blocks that nobody has touched yet are checked first, so that no
token is copied unchecked.

Memory: the tokens of the rows, once more where they are copied on; of a layout, some hundred bytes a stretch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.pack import Stretches
from penstock.pack.plan import Integers, ranges
from penstock.store import Store
from penstock.store.reader import Segment

__all__ = ["TokenCopier", "TokenLayout"]

# A call to Arrow costs as much as so many slices.
FEW_STRETCHES = 48
# A view of so many bytes holds them itself, instead of where they are.
INLINE_BYTES = 12
# So many of those are cheaper token by token: they share the cost of the calls.
MANY_INLINE = 512
# Views count bytes of a buffer in 31 bits: a longer segment is several buffers, which begin so far apart.
BUFFER_BYTES = 2**30
LONGEST_ROW_BYTES = 2**30


@dataclass(slots=True, kw_only=True)
class TokenLayout:
    """Where the tokens of some batches lie, worked out for many batches at once.

    Attributes:
        stretches: of all rows.
        row_ends: [rows], where padding begins.
        batch_rows: rows of each batch.
        stretch_starts: [batches + 1], where the stretches of each batch begin.
        unchecked: stretches that hold a block which nobody had read when this was made.
        views: an entry of a `binary_view` array for each stretch and for the padding of each row that has some; None
            where rows are to be copied slice by slice.
        view_starts: [batches + 1], where the views of each batch begin.
        inline: stretches that Arrow would keep in the view itself.
        segments: numbers of the segments, in the order in which views count them.
        opened: these segments, and their maps as buffers of Arrow, when they were last asked for.
    """

    stretches: Stretches
    row_ends: Integers
    batch_rows: int
    stretch_starts: Integers
    unchecked: Integers
    views: npt.NDArray[np.int32] | None = None
    view_starts: Integers
    inline: Integers
    segments: list[int]
    opened: tuple[list[Segment], list[pa.Buffer]] = ([], [])


class TokenCopier:
    """Copies tokens of one store, or of several alike, into rows of one length. Threads may share it.

    Attributes:
        first_segments: of each store the number that its first segment has here; then the number of all.
    """

    def __init__(self, *stores: Store, row_tokens: int) -> None:
        self._stores = stores
        self._row_tokens = row_tokens
        self._padding = np.full(row_tokens, stores[0].manifest.tokenizer["end_id"], stores[0].dtype)
        self._inline_padding = np.resize(self._padding, INLINE_BYTES // self._padding.itemsize).view(np.int32)
        entries = [store.manifest.segments for store in stores]
        self.first_segments = np.concatenate([[0], np.cumsum([len(of_store) for of_store in entries])])
        self._segment_tokens = np.array([entry.tokens for of_store in entries for entry in of_store], np.int64)

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1]: the stretches, then padding from each row's end."""
        self.fill(self.lay_out(stretches, row_ends, batch_rows=len(row_ends)), 0, 1, out)

    def lay_out(self, stretches: Stretches, row_ends: Integers, *, batch_rows: int) -> TokenLayout:
        """What `fill` has to know of some batches of `batch_rows`."""
        # Arrow itself looks at no bounds.
        if (stretches.offset + stretches.length > self._segment_tokens[stretches.segment]).any():
            raise IndexError("a stretch ends after its segment")
        first_rows = np.arange(0, len(row_ends) + 1, batch_rows)
        stretch_starts = np.searchsorted(stretches.row, first_rows)
        padded = np.flatnonzero(row_ends < self._row_tokens)
        layout = TokenLayout(
            stretches=stretches,
            row_ends=row_ends,
            batch_rows=batch_rows,
            stretch_starts=stretch_starts,
            unchecked=self._unchecked(stretches, np.arange(len(stretches.row))),
            view_starts=stretch_starts + np.searchsorted(padded, first_rows),
            inline=np.flatnonzero(stretches.length * self._padding.itemsize <= INLINE_BYTES),
            segments=np.flatnonzero(np.bincount(stretches.segment, minlength=len(self._segment_tokens))).tolist(),
        )
        longest = self._row_tokens * self._padding.itemsize
        if len(stretches.row) >= FEW_STRETCHES and longest <= LONGEST_ROW_BYTES:
            layout.views = self._views(stretches, row_ends, padded, layout.segments)
        return layout

    def _unchecked(self, stretches: Stretches, which: Integers) -> Integers:
        """Those of some stretches that hold a block which nobody has read yet."""
        owner = np.searchsorted(self.first_segments, stretches.segment[which], side="right") - 1
        found = [np.empty(0, np.int64)]
        for number, store in enumerate(self._stores):
            own = which if len(self._stores) == 1 else which[owner == number]
            segment = stretches.segment[own] - self.first_segments[number]
            found.append(own[store.unchecked(segment, stretches.offset[own], stretches.length[own])])
        return found[1] if len(self._stores) == 1 else np.sort(np.concatenate(found))

    def _views(
        self, stretches: Stretches, row_ends: Integers, padded: Integers, segments: list[int]
    ) -> npt.NDArray[np.int32]:
        """[stretches and paddings, 4]: bytes, the first four of them, buffer, offset. Those that Arrow looks for in the
        view itself are zero, but for padding."""
        width = self._padding.itemsize
        num_buffers = -(-self._segment_tokens[segments] * width // BUFFER_BYTES)
        first_buffer = np.zeros(len(self._segment_tokens), np.int64)
        first_buffer[segments] = np.cumsum(num_buffers) - num_buffers
        views = np.zeros((len(stretches.row) + len(padded), 4), np.int32)
        at: slice | Integers = slice(None)
        if len(padded):
            at = np.arange(len(stretches.row)) + np.searchsorted(padded, stretches.row)
            behind = np.arange(len(padded)) + np.searchsorted(stretches.row, padded, side="right")
            missing = (self._row_tokens - row_ends[padded]) * width
            views[behind, 0], views[behind, 2] = missing, num_buffers.sum()
            views[behind[missing <= INLINE_BYTES], 1:] = self._inline_padding
        chunk, offset = np.divmod(stretches.offset * width, BUFFER_BYTES)
        far = stretches.length * width > INLINE_BYTES
        views[at, 0] = stretches.length * width
        views[at, 2] = (first_buffer[stretches.segment] + chunk) * far
        views[at, 3] = offset * far
        return views

    def fill(self, layout: TokenLayout, first: int, last: int, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1], with the batches first .. last."""
        if layout.views is not None:
            np.copyto(out, self.gathered(layout, first, last))
            return
        begin, end = layout.stretch_starts[[first, last]].tolist()
        first_row, flat = first * layout.batch_rows, out.reshape(-1)
        self._check(layout.stretches, _between(layout.unchecked, begin, end))
        self._copy_slices(layout.stretches, np.arange(begin, end), first_row, flat)
        self._pad(layout.row_ends[first_row : last * layout.batch_rows], flat)

    def gathered(self, layout: TokenLayout, first: int, last: int) -> npt.NDArray[Any]:
        """[rows, T + 1], the batches first .. last of a layout that has views, in memory of Arrow's, which is kept as
        long as the array is."""
        begin, end = layout.stretch_starts[[first, last]].tolist()
        view_begin, view_end = layout.view_starts[[first, last]].tolist()
        stretches, first_row = layout.stretches, first * layout.batch_rows
        self._check(stretches, _between(layout.unchecked, begin, end))
        if layout.views is None:
            raise ValueError("a layout without views has nothing to gather by")
        flat = self._side_by_side(layout, layout.views[view_begin:view_end])
        inline = _between(layout.inline, begin, end)
        if len(inline) < MANY_INLINE:
            self._copy_slices(stretches, inline, first_row, flat)
        else:
            self._copy_tokens(stretches, inline, first_row, flat)
        return flat.reshape(-1, self._row_tokens)

    def _check(self, stretches: Stretches, which: Integers) -> None:
        """Compares blocks that nobody has read yet with their checksums."""
        for i in self._unchecked(stretches, which).tolist() if len(which) else ():
            store, segment = self._place_of(int(stretches.segment[i]))
            store.read(segment, int(stretches.offset[i]), int(stretches.length[i]))

    def _side_by_side(self, layout: TokenLayout, views: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
        """All rows side by side, padded, in memory of Arrow's."""
        segments = [self._segment(number) for number in layout.segments]
        opened, buffers = layout.opened
        if len(opened) != len(segments) or any(map(operator.is_not, opened, segments)):
            buffers = [buffer for segment in segments for buffer in _buffers(segment.tokens)]
            buffers.append(pa.py_buffer(self._padding))
            layout.opened = segments, buffers
        sources = [None, pa.py_buffer(views), *buffers]
        laid_out = pa.Array.from_buffers(pa.binary_view(), len(views), sources, null_count=0).cast(pa.large_binary())
        return np.frombuffer(laid_out.buffers()[2], self._padding.dtype)

    def _segment(self, number: int) -> Segment:
        """A segment of one of the stores; asked for each time, because a store may let go of it in between."""
        store, segment = self._place_of(number)
        return store.segment(segment)

    def _place_of(self, number: int) -> tuple[Store, int]:
        if len(self._stores) == 1:
            return self._stores[0], number
        owner = int(np.searchsorted(self.first_segments, number, side="right")) - 1
        return self._stores[owner], number - int(self.first_segments[owner])

    def _copy_slices(self, stretches: Stretches, which: Integers, first_row: int, out: npt.NDArray[Any]) -> None:
        width = out.itemsize
        segments, offsets, num_bytes = (
            stretches.segment[which],
            stretches.offset[which],
            stretches.length[which] * width,
        )
        begins = self._places(stretches, which, first_row) * width
        sources = {segment: self._segment(segment).tokens.data.cast("B") for segment in np.unique(segments).tolist()}
        target = out.data.cast("B")
        columns = (segments, begins, begins + num_bytes, offsets * width, offsets * width + num_bytes)
        for segment, begin, end, first, last in zip(*(column.tolist() for column in columns), strict=True):
            target[begin:end] = sources[segment][first:last]

    def _copy_tokens(self, stretches: Stretches, which: Integers, first_row: int, out: npt.NDArray[Any]) -> None:
        for segment, group in _by_value(stretches.segment, which):
            owner, source = ranges(stretches.offset[group], stretches.length[group])
            shift = self._places(stretches, group, first_row) - stretches.offset[group]
            out[source + shift[owner]] = self._segment(segment).tokens[source]

    def _places(self, stretches: Stretches, which: Integers, first_row: int) -> Integers:
        """Where some stretches begin among the tokens of all rows from `first_row` on."""
        return (stretches.row[which] - first_row) * self._row_tokens + stretches.place[which]

    def _pad(self, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        rows = out.reshape(-1, self._row_tokens)
        for row in np.flatnonzero(row_ends < self._row_tokens).tolist():
            rows[row, row_ends[row] :] = self._padding[0]


def _between(ascending: Integers, begin: int, end: int) -> Integers:
    """Those of some numbers that are begin .. end."""
    first, last = np.searchsorted(ascending, [begin, end])
    return ascending[first:last]


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
