"""Tokens of segments into rows: the copying itself.

Most rows are one stretch of a segment: they are taken whole, straight from the maps (taking.py), at about 0.3 ns a
token. The others are *broken*: made of several stretches, or padded. Where they are few they are taken like the rest,
with what lies around their longest stretch, and the other stretches are put in afterwards; where they are many, all
rows are gathered by Arrow: every stretch is an entry of a `binary_view` array whose buffers are the segments' maps,
and casting that to plain binary lays all of them side by side, in one call that holds no Python lock either. A few
stretches are copied slice by slice instead, at 0.2 µs each besides the memory's own time, and so are those of so few
bytes that Arrow would keep them in the view itself; where such are many they are gathered token by token (4 ns a
token). Blocks that nobody has touched yet are checked first, so that no token is copied unchecked.

Memory: the tokens of the rows, once more where they are copied on; of a layout, some hundred bytes a stretch.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.load.taking import Maps
from penstock.pack import Stretches
from penstock.pack.plan import Integers, ranges
from penstock.store import Store
from penstock.store.reader import Segment

__all__ = ["TokenCopier", "TokenLayout"]

# A call to Arrow, or for whole rows, costs as much as so many slices.
FEW_STRETCHES = 48
# So many stretches of broken rows, over a layout, are copied one by one, which is less to work out.
FEW_BROKEN = 8192
# Of more rows than this share Arrow gathers all: it takes less than taking whole rows in vain and copying twice.
MOST_BROKEN = 0.05
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
        segment: [rows]; of a broken row that of its longest stretch, or of some other row.
        offset: [rows], first token; of a broken row such that the stretch comes to where it belongs.
        unchecked: whole rows that hold a block which nobody had read when this was made.
        segments: numbers of the segments, ascending.
        opened: these segments when they were last asked for, their maps, and the rows' places in these.
    """

    segment: Integers
    offset: Integers
    unchecked: Integers
    segments: list[int]
    opened: tuple[list[Segment], Maps, Integers] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StretchLayout:
    """Where rows lie that are made of stretches.

    Attributes:
        stretches: of all rows.
        stretch_starts: [rows + 1], where the stretches of each row begin.
        unchecked: stretches that hold a block which nobody had read when this was made.
        copies: the padding of rows and the stretches, but for those that are taken with the whole rows, to be copied
            slice by slice; or all of them by Arrow.
    """

    stretches: Stretches
    stretch_starts: Integers
    unchecked: Integers
    copies: Slices | Views


@dataclass(frozen=True, slots=True, kw_only=True)
class Slices:
    """Stretches, and paddings of rows, that are copied one by one.

    Attributes:
        copies: of each the segment (-1 for padding), its first byte there, its bytes, and the first byte over all rows.
        starts: [rows + 1], where those of each row begin.
    """

    copies: list[tuple[int, int, int, int]]
    starts: Integers


@dataclass(slots=True, kw_only=True)
class Views:
    """Stretches, and paddings of rows, as entries of a `binary_view` array.

    Attributes:
        views: [stretches and paddings, 4]: bytes, the first four of them, buffer, offset.
        starts: [rows + 1], where those of each row begin.
        inline: stretches that Arrow would keep in the view itself.
        segments: numbers of the segments, in the order in which views count them.
        opened: these segments when they were last asked for, their maps as buffers of Arrow, the maps themselves, and
            the stretches' places in these.
    """

    views: npt.NDArray[np.int32]
    starts: Integers
    inline: Integers
    segments: list[int]
    opened: tuple[list[Segment], list[pa.Buffer], Maps, Integers] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenLayout:
    """Where the tokens of some rows lie, worked out for many rows at once.

    Attributes:
        whole: all rows; None where all count as broken.
        broken: rows that are not, ascending.
        pieces: the broken rows.
    """

    whole: WholeLayout | None
    broken: Integers
    pieces: StretchLayout


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
        self._is_long = self._padding.nbytes > LONGEST_ROW_BYTES
        entries = [store.manifest.segments for store in stores]
        self.first_segments = np.concatenate([[0], np.cumsum([len(of_store) for of_store in entries])])
        self._segment_tokens = np.array([entry.tokens for of_store in entries for entry in of_store], np.int64)

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1]: the stretches, then padding from each row's end."""
        self.fill(self._all_broken(stretches, row_ends), 0, len(row_ends), out)

    def lay_out(self, segment: Integers, offset: Integers, stretches: Stretches, row_ends: Integers) -> TokenLayout:
        """What `fill` has to know of some rows.

        Args:
            segment: [rows], of a row that lies there whole; -1 for broken ones.
            offset: [rows], the first token there.
            stretches: of the broken rows.
            row_ends: [rows], where padding begins.
        """
        num_rows, broken = len(segment), np.flatnonzero(segment < 0)
        if num_rows < FEW_STRETCHES or self._is_long or len(broken) > num_rows * MOST_BROKEN:
            if len(broken) < num_rows:
                stretches = self._with_whole(stretches, np.flatnonzero(segment >= 0), segment, offset)
            return self._all_broken(stretches, row_ends)
        stretches = replace(stretches, row=np.searchsorted(broken, stretches.row))
        taken, is_whole = None, segment >= 0
        if len(broken):
            # What is taken for a broken row may be any other row, since it is overwritten. Best is what lies around its
            # longest stretch, which then needn't be.
            other = int(np.argmax(segment))
            segment, offset = segment.copy(), offset.copy()
            segment[broken], offset[broken] = segment[other], offset[other]
            taken = self._takeable(stretches)
            rows = broken[stretches.row[taken]]
            segment[rows], offset[rows] = stretches.segment[taken], (stretches.offset - stretches.place)[taken]
        pieces = self._pieces(stretches, row_ends[broken], broken, few=FEW_BROKEN, taken=taken)
        whole = self._whole(segment, offset, is_whole)
        return TokenLayout(whole=whole, broken=broken, pieces=pieces)

    def _all_broken(self, stretches: Stretches, row_ends: Integers) -> TokenLayout:
        """As if no row were whole."""
        rows = np.arange(len(row_ends))
        pieces = self._pieces(stretches, row_ends, rows, few=FEW_STRETCHES)
        return TokenLayout(whole=None, broken=rows, pieces=pieces)

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

    def _takeable(self, stretches: Stretches) -> Integers:
        """Of each row the longest stretch around which there is a row's length of its segment, if there is one."""
        if not len(stretches.row):
            return np.empty(0, np.int64)
        first = stretches.offset - stretches.place
        fits = (first >= 0) & (first + self._row_tokens <= self._segment_tokens[stretches.segment])
        usable = np.where(fits, stretches.length, 0)
        order = np.lexsort((usable, stretches.row))
        longest = order[np.append(np.flatnonzero(np.diff(stretches.row[order])), len(order) - 1)]
        found: Integers = longest[usable[longest] > 0]
        return found

    def _whole(self, segment: Integers, offset: Integers, is_whole: npt.NDArray[np.bool_]) -> WholeLayout:
        # Nobody else looks at bounds: between two maps lies memory of anybody's, or none.
        if (offset < 0).any() or (offset + self._row_tokens > self._segment_tokens[segment]).any():
            raise IndexError("a row begins before its segment or ends after it")
        unchecked = self._unchecked(segment, offset, np.int64(self._row_tokens))
        return WholeLayout(
            segment=segment,
            offset=offset,
            unchecked=unchecked[is_whole[unchecked]],
            segments=np.flatnonzero(np.bincount(segment)).tolist(),
        )

    def _pieces(
        self,
        stretches: Stretches,
        row_ends: Integers,
        rows: Integers,
        *,
        few: int,
        taken: Integers | None = None,
    ) -> StretchLayout:
        """Rows made of stretches; fewer than `few` of these are copied one by one, to where `rows` says, without those
        that are `taken` with what lies around them."""
        # Arrow itself looks at no bounds.
        ends = stretches.offset + stretches.length
        if (stretches.offset < 0).any() or (ends > self._segment_tokens[stretches.segment]).any():
            raise IndexError("a stretch begins before its segment or ends after it")
        starts = np.searchsorted(stretches.row, np.arange(len(rows) + 1))
        copies: Slices | Views
        if len(stretches.row) < few or self._is_long:
            copies = self._slices(stretches, row_ends, rows, taken)
        else:
            copies = self._views(stretches, row_ends, starts)
        unchecked = self._unchecked(stretches.segment, stretches.offset, stretches.length)
        return StretchLayout(stretches=stretches, stretch_starts=starts, unchecked=unchecked, copies=copies)

    def _slices(self, stretches: Stretches, row_ends: Integers, rows: Integers, taken: Integers | None) -> Slices:
        padded = np.flatnonzero(row_ends < self._row_tokens)
        if taken is not None:
            left = np.ones(len(stretches.row), np.bool_)
            left[taken] = False
            whole = (stretches.row, stretches.place, stretches.segment, stretches.offset, stretches.length)
            stretches = Stretches(*(column[left] for column in whole))
        row = np.concatenate([stretches.row, padded])
        order = np.argsort(row, kind="stable")
        segment, first, length, place = (
            np.concatenate(parts)[order]
            for parts in (
                (stretches.segment, np.full(len(padded), -1)),
                (stretches.offset, np.zeros(len(padded), np.int64)),
                (stretches.length, self._row_tokens - row_ends[padded]),
                (stretches.place, row_ends[padded]),
            )
        )
        width, row = self._padding.itemsize, row[order]
        columns = (segment, first * width, length * width, (rows[row] * self._row_tokens + place) * width)
        copies = list(zip(*(column.tolist() for column in columns), strict=True))
        return Slices(copies=copies, starts=np.searchsorted(row, np.arange(len(rows) + 1)))

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

    def _views(self, stretches: Stretches, row_ends: Integers, stretch_starts: Integers) -> Views:
        """Those that Arrow looks for in the view itself are zero, but for padding."""
        segments = np.flatnonzero(np.bincount(stretches.segment)).tolist()
        padded = np.flatnonzero(row_ends < self._row_tokens)
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
        return Views(
            views=views,
            starts=stretch_starts + np.searchsorted(padded, np.arange(len(stretch_starts))),
            inline=np.flatnonzero(~far),
            segments=segments,
        )

    def fill(self, layout: TokenLayout, first: int, last: int, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1], with the rows first .. last."""
        if layout.whole is None and isinstance(layout.pieces.copies, Slices):
            self._copy_slices(layout.pieces, layout.pieces.copies, (first, last), first, out)
        else:
            np.copyto(out, self.gathered(layout, first, last))

    def gathered(self, layout: TokenLayout, first: int, last: int) -> npt.NDArray[Any]:
        """[rows, T + 1], the rows first .. last in memory of their own."""
        pieces, copies = layout.pieces, layout.pieces.copies
        if layout.whole is None:
            if isinstance(copies, Views):
                return self._side_by_side(pieces, copies, first, last)
            rows = np.empty((last - first, self._row_tokens), self._padding.dtype)
            begin, end = first, last
        else:
            begin, end = layout.broken.searchsorted((first, last)).tolist()
            self._check_stretches(pieces, begin, end)  # some of which are taken with the whole rows
            rows = self._taken(layout.whole, first, last)
        if isinstance(copies, Slices):
            self._copy_slices(pieces, copies, (begin, end), first, rows)
        elif begin < end:
            rows[layout.broken[begin:end] - first] = self._side_by_side(pieces, copies, begin, end)
        return rows

    def _taken(self, layout: WholeLayout, first: int, last: int) -> npt.NDArray[Any]:
        segment, offset = layout.segment, layout.offset
        if len(layout.unchecked):
            rows = _between(layout.unchecked, first, last)
            rows = rows[self._unchecked(segment[rows], offset[rows], np.int64(self._row_tokens))]  # some are by now
            for row in rows.tolist():
                self._check(int(segment[row]), int(offset[row]), self._row_tokens)
        segments = self._segments(layout.segments)
        if layout.opened is None or layout.opened[0] != segments:
            maps = self._maps(segments, layout.segments)
            starts = self._by_segment(layout.segments, maps.starts)[segment]
            layout.opened = segments, maps, starts + offset * self._padding.itemsize
        _, maps, places = layout.opened
        return maps.take(places[first:last], row_tokens=self._row_tokens)

    def _by_segment(self, numbers: list[int], values: Integers) -> Integers:
        """Values of some segments, to be looked up by number."""
        found = np.zeros(len(self._segment_tokens), np.int64)
        found[numbers] = values
        return found

    def _maps(self, segments: list[Segment], numbers: list[int]) -> Maps:
        if [len(segment.tokens) for segment in segments] != self._segment_tokens[numbers].tolist():
            raise IndexError("a segment isn't as long as its manifest says")  # which bounds were compared with
        return Maps([segment.tokens for segment in segments])

    def _copy_slices(
        self, layout: StretchLayout, slices: Slices, rows: tuple[int, int], first_row: int, out: npt.NDArray[Any]
    ) -> None:
        """Some of the rows slice by slice into `out`, which begins with the row `first_row` of what is filled."""
        begin, end = (int(slices.starts[row]) for row in rows)
        if begin == end:
            return
        self._check_stretches(layout, *rows)
        target, before = out.reshape(-1).data.cast("B"), first_row * self._padding.nbytes
        sources = {-1: self._padding.data.cast("B")}
        for segment, first, size, place in slices.copies[begin:end]:
            source = sources.get(segment)
            if source is None:
                source = sources[segment] = self._segment(segment).tokens.data.cast("B")
            target[place - before : place - before + size] = source[first : first + size]

    def _check_stretches(self, layout: StretchLayout, first: int, last: int) -> None:
        """Checks the stretches of the rows first .. last where nobody has."""
        if not len(layout.unchecked):
            return
        stretches = layout.stretches
        which = _between(layout.unchecked, int(layout.stretch_starts[first]), int(layout.stretch_starts[last]))
        parts = (stretches.segment[which], stretches.offset[which], stretches.length[which])
        for i in which[self._unchecked(*parts)].tolist():  # some have been checked by now
            self._check(int(stretches.segment[i]), int(stretches.offset[i]), int(stretches.length[i]))

    def _check(self, number: int, offset: int, length: int) -> None:
        """Compares those of a stretch's blocks with their checksums that nobody has read yet."""
        store, segment = self._place_of(number)
        store.read(segment, offset, length)

    def _side_by_side(self, layout: StretchLayout, views: Views, first: int, last: int) -> npt.NDArray[Any]:
        """[rows, T + 1], the rows first .. last in memory of Arrow's, which is kept as long as the array is."""
        self._check_stretches(layout, first, last)
        segments = self._segments(views.segments)
        if views.opened is None or views.opened[0] != segments:
            buffers = [buffer for segment in segments for buffer in _buffers(segment.tokens)]
            buffers.append(pa.py_buffer(self._padding))
            maps = self._maps(segments, views.segments)
            starts = self._by_segment(views.segments, maps.starts)[layout.stretches.segment]
            views.opened = segments, buffers, maps, starts + layout.stretches.offset * self._padding.itemsize
        _, buffers, maps, places = views.opened
        begin, end = int(layout.stretch_starts[first]), int(layout.stretch_starts[last])
        maps.touch(places[begin:end])
        own = views.views[int(views.starts[first]) : int(views.starts[last])]
        sources = [None, pa.py_buffer(own), *buffers]
        laid_out = pa.Array.from_buffers(pa.binary_view(), len(own), sources, null_count=0).cast(pa.large_binary())
        flat = np.frombuffer(laid_out.buffers()[2], self._padding.dtype)
        inline = _between(views.inline, begin, end)
        if len(inline):
            self._copy_inline(layout.stretches, inline, first, flat)
        return flat.reshape(-1, self._row_tokens)

    def _copy_inline(self, stretches: Stretches, which: Integers, first_row: int, out: npt.NDArray[Any]) -> None:
        """Some stretches slice by slice or, where they are many, token by token."""
        offset, length = stretches.offset[which], stretches.length[which]
        place = (stretches.row[which] - first_row) * self._row_tokens + stretches.place[which]
        for segment, group in _by_value(stretches.segment[which]):
            tokens = self._segment(segment).tokens
            if len(which) < MANY_INLINE:
                for i in group.tolist():
                    out[place[i] : place[i] + length[i]] = tokens[offset[i] : offset[i] + length[i]]
            else:
                owner, source = ranges(offset[group], length[group])
                out[source + (place - offset)[group][owner]] = tokens[source]

    def _segments(self, numbers: list[int]) -> list[Segment]:
        """Segments of the stores; asked for each time, because a store may let go of one in between."""
        if len(self._stores) == 1:
            return self._stores[0].segments(numbers)
        return [self._segment(number) for number in numbers]

    def _segment(self, number: int) -> Segment:
        store, segment = self._place_of(number)
        return store.segment(segment)

    def _place_of(self, number: int) -> tuple[Store, int]:
        if len(self._stores) == 1:
            return self._stores[0], number
        owner = int(np.searchsorted(self.first_segments, number, side="right")) - 1
        return self._stores[owner], number - int(self.first_segments[owner])


def _between(ascending: Integers, begin: int, end: int) -> Integers:
    """Those of some numbers that are begin .. end."""
    first, last = ascending.searchsorted((begin, end))
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
