"""Tokens of segments into rows: the copying itself.

Most rows are one stretch of a segment: they are taken whole, straight from the maps (taking.py), at about 0.3 ns a
token. The others are *broken*: made of several stretches, or padded. Where they are few they are put in afterwards;
where they are many, all rows are gathered by Arrow: every stretch is an entry of a `binary_view` array whose buffers
are the segments' maps, and casting that to plain binary lays all of them side by side, in one call that holds no Python
lock either. A few stretches are copied slice by slice instead, at 0.2 µs each besides the memory's own time, and so are
those of so few bytes that Arrow would keep them in the view itself; where such are many they are gathered token by
token (4 ns a token). Blocks that nobody has touched yet are checked first, so that no token is copied unchecked.

Memory: the tokens of the rows, once more where they are copied on; of a layout, some hundred bytes a stretch.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.load.taking import MappedRows
from penstock.pack import Stretches
from penstock.pack.plan import Integers, ranges
from penstock.store import Store
from penstock.store.reader import Segment

__all__ = ["TokenCopier", "TokenLayout"]

# A call to Arrow, or for whole rows, costs as much as so many slices.
FEW_STRETCHES = 48
# So many stretches of broken rows, over a layout, are copied one by one, which is less to work out.
FEW_BROKEN = 512
# Of more rows than this share Arrow gathers all: it takes less than taking whole rows in vain and copying twice.
MOST_BROKEN = 0.25
# A view of so many bytes holds them itself, instead of where they are.
INLINE_BYTES = 12
# So many of those are cheaper token by token: they share the cost of the calls.
MANY_INLINE = 512
# Views count bytes of a buffer in 31 bits: a longer segment is several buffers, which begin so far apart.
BUFFER_BYTES = 2**30
LONGEST_ROW_BYTES = 2**30


@dataclass(slots=True, kw_only=True)
class WholeLayout:
    """Where whole rows lie.

    Attributes:
        segment: [rows]; of a broken row that of some other row.
        offset: [rows], first token; of a broken row that of the same other row.
        unchecked: rows that hold a block which nobody had read when this was made.
        segments: numbers of the segments, ascending.
        opened: these segments when they were last asked for, their maps, and the rows' entries in these.
    """

    segment: Integers
    offset: Integers
    unchecked: Integers
    segments: list[int]
    opened: tuple[list[Segment], MappedRows, Integers] | None = None


@dataclass(slots=True, kw_only=True)
class StretchLayout:
    """Where rows lie that are made of stretches.

    Attributes:
        stretches: of all rows.
        row_ends: [rows], where padding begins.
        stretch_starts: [rows + 1], where the stretches of each row begin.
        unchecked: stretches that hold a block which nobody had read when this was made.
        views: an entry of a `binary_view` array for each stretch and for the padding of each row that has some; None
            where rows are to be copied slice by slice.
        view_starts: [rows + 1], where the views of each row begin.
        inline: stretches that Arrow would keep in the view itself.
        segments: numbers of the segments, in the order in which views count them.
        opened: these segments, and their maps as buffers of Arrow, when they were last asked for.
    """

    stretches: Stretches
    row_ends: Integers
    stretch_starts: Integers
    unchecked: Integers
    views: npt.NDArray[np.int32] | None = None
    view_starts: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    inline: Integers = field(default_factory=lambda: np.empty(0, np.int64))
    segments: list[int] = field(default_factory=list)
    opened: tuple[list[Segment], list[pa.Buffer]] = ([], [])


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Where the tokens of some rows lie, worked out for many rows at once.

    Attributes:
        whole: all rows; None where all count as broken.
        broken: rows that are not, ascending.
        pieces: the broken rows; None where there are none.
    """

    whole: WholeLayout | None
    broken: Integers
    pieces: StretchLayout | None


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
        layout = TokenLayout(whole=None, broken=np.arange(len(row_ends)), pieces=self._pieces(stretches, row_ends))
        self.fill(layout, 0, len(row_ends), out)

    def lay_out(self, segment: Integers, offset: Integers, stretches: Stretches, row_ends: Integers) -> TokenLayout:
        """What `fill` has to know of some rows.

        Args:
            segment: [rows], of a row that lies there whole; -1 for broken ones.
            offset: [rows], the first token there.
            stretches: of the broken rows.
            row_ends: [rows], where padding begins.
        """
        num_rows, broken = len(segment), np.flatnonzero(segment < 0)
        # Arrow copies up to a gigabyte for a row; numpy counts the bytes of an entry in 31 bits.
        can_take = num_rows >= FEW_STRETCHES and self._row_tokens * self._padding.itemsize <= LONGEST_ROW_BYTES
        if not can_take or len(broken) > num_rows * MOST_BROKEN:
            if len(broken) < num_rows:
                stretches = self._with_whole(stretches, np.flatnonzero(segment >= 0), segment, offset)
            return TokenLayout(whole=None, broken=np.arange(num_rows), pieces=self._pieces(stretches, row_ends))
        if len(broken):
            # What is taken for a broken row is overwritten: any other row will do.
            other = int(np.argmax(segment))
            segment, offset = segment.copy(), offset.copy()
            segment[broken], offset[broken] = segment[other], offset[other]
            stretches = replace(stretches, row=np.searchsorted(broken, stretches.row))
        return TokenLayout(
            whole=self._whole(segment, offset),
            broken=broken,
            pieces=self._pieces(stretches, row_ends[broken], few=FEW_BROKEN) if len(broken) else None,
        )

    def _with_whole(self, broken: Stretches, rows: Integers, segment: Integers, offset: Integers) -> Stretches:
        """Stretches of all rows: those of the broken ones, and one of each whole row."""
        row = np.concatenate([broken.row, rows])
        order = np.argsort(row, kind="stable")
        columns = (
            (broken.place, np.zeros(len(rows), np.int64)),
            (broken.segment, segment[rows]),
            (broken.offset, offset[rows]),
            (broken.length, np.full(len(rows), self._row_tokens)),
        )
        return Stretches(row[order], *(np.concatenate(parts)[order] for parts in columns))

    def _whole(self, segment: Integers, offset: Integers) -> WholeLayout:
        # Nobody else looks at bounds: between two maps lies memory of anybody's, or none.
        if (offset + self._row_tokens > self._segment_tokens[segment]).any():
            raise IndexError("a row ends after its segment")
        return WholeLayout(
            segment=segment,
            offset=offset,
            unchecked=self._unchecked(segment, offset, np.int64(self._row_tokens)),
            segments=np.flatnonzero(np.bincount(segment)).tolist(),
        )

    def _pieces(self, stretches: Stretches, row_ends: Integers, *, few: int | None = None) -> StretchLayout:
        """Of rows that are made of stretches; fewer than `few` of these are copied one by one."""
        # Arrow itself looks at no bounds.
        if (stretches.offset + stretches.length > self._segment_tokens[stretches.segment]).any():
            raise IndexError("a stretch ends after its segment")
        first_rows = np.arange(len(row_ends) + 1)
        layout = StretchLayout(
            stretches=stretches,
            row_ends=row_ends,
            stretch_starts=np.searchsorted(stretches.row, first_rows),
            unchecked=self._unchecked(stretches.segment, stretches.offset, stretches.length),
        )
        longest = self._row_tokens * self._padding.itemsize
        if len(stretches.row) >= (FEW_STRETCHES if few is None else few) and longest <= LONGEST_ROW_BYTES:
            padded = np.flatnonzero(row_ends < self._row_tokens)
            layout.view_starts = layout.stretch_starts + np.searchsorted(padded, first_rows)
            layout.inline = np.flatnonzero(stretches.length * self._padding.itemsize <= INLINE_BYTES)
            layout.segments = np.flatnonzero(np.bincount(stretches.segment)).tolist()
            layout.views = self._views(stretches, row_ends, padded, layout.segments)
        return layout

    def _unchecked(self, segment: Integers, offset: Integers, length: Integers | np.int64) -> Integers:
        """Which of some stretches hold a block that nobody has read yet."""
        if len(self._stores) == 1:
            return np.flatnonzero(self._stores[0].unchecked(segment, offset, length))
        found = np.zeros(len(segment), np.bool_)
        owner = np.searchsorted(self.first_segments, segment, side="right") - 1
        lengths = np.broadcast_to(length, segment.shape)
        for number, store in enumerate(self._stores):
            own = np.flatnonzero(owner == number)
            found[own] = store.unchecked(segment[own] - self.first_segments[number], offset[own], lengths[own])
        return np.flatnonzero(found)

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
        """Fills `out`, [rows, T + 1], with the rows first .. last."""
        if layout.whole is None and layout.pieces is not None and layout.pieces.views is None:
            self._copy_pieces(layout.pieces, first, last, out)
        else:
            np.copyto(out, self.gathered(layout, first, last))

    def gathered(self, layout: TokenLayout, first: int, last: int) -> npt.NDArray[Any]:
        """[rows, T + 1], the rows first .. last in memory of their own."""
        if layout.whole is None:
            return self._gathered_pieces(layout.pieces, first, last)
        rows = self._taken(layout.whole, first, last)
        begin, end = np.searchsorted(layout.broken, [first, last]).tolist()
        if begin < end:
            broken = layout.broken[begin:end] - first
            if layout.pieces is not None and layout.pieces.views is None:
                self._copy_pieces(layout.pieces, begin, end, rows, broken)
            else:
                rows[broken] = self._gathered_pieces(layout.pieces, begin, end)
        return rows

    def _taken(self, layout: WholeLayout, first: int, last: int) -> npt.NDArray[Any]:
        segment, offset = layout.segment, layout.offset
        if len(rows := _between(layout.unchecked, first, last)):
            rows = rows[self._unchecked(segment[rows], offset[rows], np.int64(self._row_tokens))]  # some are by now
            for row in rows.tolist():
                self._check(int(segment[row]), int(offset[row]), self._row_tokens)
        segments = [self._segment(number) for number in layout.segments]
        if layout.opened is None or any(map(operator.is_not, layout.opened[0], segments)):
            maps = [one.tokens for one in segments]
            if [len(tokens) for tokens in maps] != self._segment_tokens[layout.segments].tolist():
                raise IndexError("a segment isn't as long as its manifest says")  # which bounds were compared with
            mapped = MappedRows(maps, row_tokens=self._row_tokens)
            starts = mapped.starts[np.searchsorted(layout.segments, segment)]
            layout.opened = segments, mapped, starts + offset * self._padding.itemsize
        _, mapped, entries = layout.opened
        return mapped.take(entries[first:last])

    def _gathered_pieces(self, layout: StretchLayout | None, first: int, last: int) -> npt.NDArray[Any]:
        if layout is None:
            raise ValueError("a layout of whole rows has no pieces to gather")
        if layout.views is None:
            out = np.empty((last - first, self._row_tokens), self._padding.dtype)
            self._copy_pieces(layout, first, last, out)
            return out
        begin, end = layout.stretch_starts[[first, last]].tolist()
        view_begin, view_end = layout.view_starts[[first, last]].tolist()
        self._check_stretches(layout, begin, end)
        flat = self._side_by_side(layout, layout.views[view_begin:view_end])
        inline = _between(layout.inline, begin, end)
        if len(inline) >= MANY_INLINE:
            self._copy_tokens(layout.stretches, inline, self._places(layout.stretches, inline, first), flat)
        elif len(inline):
            self._copy_slices(layout.stretches, inline, self._places(layout.stretches, inline, first), flat)
        return flat.reshape(-1, self._row_tokens)

    def _copy_pieces(
        self, layout: StretchLayout, first: int, last: int, out: npt.NDArray[Any], out_rows: Integers | None = None
    ) -> None:
        """The rows first .. last slice by slice into the rows of `out`, or into `out_rows` of them."""
        begin, end = layout.stretch_starts[[first, last]].tolist()
        out_rows = np.arange(last - first) if out_rows is None else out_rows
        which = np.arange(begin, end)
        places = out_rows[layout.stretches.row[which] - first] * self._row_tokens + layout.stretches.place[which]
        self._check_stretches(layout, begin, end)
        self._copy_slices(layout.stretches, which, places, out.reshape(-1))
        for row in np.flatnonzero(layout.row_ends[first:last] < self._row_tokens).tolist():
            out[out_rows[row], layout.row_ends[first + row] :] = self._padding[0]

    def _check_stretches(self, layout: StretchLayout, begin: int, end: int) -> None:
        stretches, which = layout.stretches, _between(layout.unchecked, begin, end)
        if len(which):  # some have been checked by now
            parts = (stretches.segment[which], stretches.offset[which], stretches.length[which])
            which = which[self._unchecked(*parts)]
        for i in which.tolist():
            self._check(int(stretches.segment[i]), int(stretches.offset[i]), int(stretches.length[i]))

    def _check(self, number: int, offset: int, length: int) -> None:
        """Compares those of a stretch's blocks with their checksums that nobody has read yet."""
        store, segment = self._place_of(number)
        store.read(segment, offset, length)

    def _side_by_side(self, layout: StretchLayout, views: npt.NDArray[np.int32]) -> npt.NDArray[Any]:
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

    def _copy_slices(self, stretches: Stretches, which: Integers, places: Integers, out: npt.NDArray[Any]) -> None:
        """Some stretches, one by one, to their places in `out`."""
        width = out.itemsize
        segments, offsets, num_bytes = (
            stretches.segment[which],
            stretches.offset[which],
            stretches.length[which] * width,
        )
        begins = places * width
        sources = {segment: self._segment(segment).tokens.data.cast("B") for segment in np.unique(segments).tolist()}
        target = out.data.cast("B")
        columns = (segments, begins, begins + num_bytes, offsets * width, offsets * width + num_bytes)
        for segment, begin, end, first, last in zip(*(column.tolist() for column in columns), strict=True):
            target[begin:end] = sources[segment][first:last]

    def _copy_tokens(self, stretches: Stretches, which: Integers, places: Integers, out: npt.NDArray[Any]) -> None:
        """Some stretches, token by token, to their places in `out`."""
        for segment, group in _by_value(stretches.segment[which]):
            offsets = stretches.offset[which[group]]
            owner, source = ranges(offsets, stretches.length[which[group]])
            out[source + (places[group] - offsets)[owner]] = self._segment(segment).tokens[source]

    def _places(self, stretches: Stretches, which: Integers, first_row: int) -> Integers:
        """Where some stretches begin among the tokens of all rows from `first_row` on."""
        return (stretches.row[which] - first_row) * self._row_tokens + stretches.place[which]


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


def _by_value(values: Integers) -> Iterator[tuple[int, Integers]]:
    """The places grouped by the value there."""
    ordered = np.argsort(values, kind="stable")
    sorted_values = values[ordered]
    starts = [0, *(np.flatnonzero(np.diff(sorted_values)) + 1).tolist(), len(ordered)]
    for start, end in itertools.pairwise(starts):
        yield int(sorted_values[start]), ordered[start:end]
