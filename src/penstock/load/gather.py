"""Rows of a plan to a batch, as it goes on the wire: tokens in store width, loss mask, document borders.

All arithmetic is done for a block of thousands of rows at once (`RowBlock`), because numpy costs a microsecond per call
however little it is asked; what is left per row is one copy out of a map, straight into a reusable buffer. Blocks of
tokens are checked on first touch. A batch of 32 x 1024 takes about 40 µs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack import Plan

__all__ = ["Allocate", "Batch", "BatchBuffer", "Gatherer", "RowBlock"]

Integers = npt.NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]


@dataclass(slots=True)
class BatchBuffer:
    """Memory for one batch, made once and used again.

    Attributes:
        tokens: [rows, T + 1], store width; inputs are `[:, :-1]`, labels `[:, 1:]`.
        loss_mask: [rows, T], whether the label at this position counts.
        cu_seqlens: [fixed size] int32, flat position at which each document begins over rows x T, then rows x T
            repeated to the end.
    """

    tokens: npt.NDArray[Any]
    loss_mask: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """One batch of this rank. The arrays belong to the loader and are valid until the next batch is asked for.

    Attributes:
        tokens: see `BatchBuffer`.
        loss_mask: see `BatchBuffer`.
        cu_seqlens: see `BatchBuffer`.
        rows: the plan's row numbers.
        position: rows consumed by all ranks before this batch.
    """

    tokens: npt.NDArray[Any]
    loss_mask: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    position: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RowBlock:
    """The arithmetic of some rows, in the order in which they will be given out.

    Attributes:
        rows: the plan's row numbers.
        segments: where each row's first piece lies, as Python integers: they drive a loop of copies.
        offsets: the same piece's place in the segment.
        lengths: tokens of the row in that piece (T + 1 when it holds the whole row).
        unchecked: whether that piece's checksums must still be looked at.
        borders: flat positions, over all rows of the block, at which a document begins.
        border_ends: where each row's borders end in `borders`, preceded by 0.
        uncounted: flat positions whose label belongs to another document or to padding.
        uncounted_ends: as `border_ends`.
    """

    rows: Integers
    segments: list[int]
    offsets: list[int]
    lengths: list[int]
    unchecked: list[bool]
    borders: Integers
    border_ends: Integers
    uncounted: Integers
    uncounted_ends: Integers


class Gatherer:
    """Fills buffers with rows of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._store = plan.store
        self._pad_id = plan.store.manifest.tokenizer["end_id"]
        self._views: dict[int, memoryview] = {}
        loss_documents = plan.store.arrays["loss_documents"].astype(np.int64)
        with_runs = np.isin(plan.documents, loss_documents)
        # Per document of the plan its number in `loss_documents`, or -1; searched once, not for each row.
        self._loss_entries = np.where(with_runs, np.searchsorted(loss_documents, plan.documents), -1)
        self._has_runs = bool(with_runs.any())

    def new_buffer(self, num_rows: int, allocate: Allocate = np.empty) -> BatchBuffer:
        """A buffer for batches of `num_rows`."""
        plan = self._plan
        borders = num_rows * (plan.most_documents_in_a_row if plan.boundaries else 1) + 1
        return BatchBuffer(
            tokens=allocate((num_rows, plan.seq_len + 1), plan.store.dtype),
            loss_mask=allocate((num_rows, plan.seq_len), np.dtype(np.bool_)),
            cu_seqlens=allocate((borders,), np.dtype(np.int32)),
        )

    def block(self, rows: Integers) -> RowBlock:
        """Works out where the rows' tokens and borders are."""
        plan = self._plan
        starts = rows * plan.seq_len
        counts = np.minimum(plan.seq_len + 1, plan.num_tokens - starts)
        pieces = plan.first_piece[rows]
        segments = plan.piece_segments[pieces]
        offsets = plan.piece_offsets[pieces] + starts - plan.piece_starts[pieces]
        lengths = np.minimum(plan.piece_starts[pieces + 1] - starts, counts)
        borders, border_ends, uncounted, uncounted_ends = self._borders(rows)
        return RowBlock(
            rows=rows,
            segments=segments.tolist(),
            offsets=offsets.tolist(),
            lengths=lengths.tolist(),
            unchecked=self._store.unchecked(segments, offsets, lengths).tolist(),
            borders=borders,
            border_ends=border_ends,
            uncounted=uncounted,
            uncounted_ends=uncounted_ends,
        )

    def _borders(self, rows: Integers) -> tuple[Integers, Integers, Integers, Integers]:
        """Flat positions where documents begin, and those whose label crosses a border, each with ends per row."""
        plan, width = self._plan, self._plan.seq_len
        if not plan.boundaries:
            begins, row_of = np.zeros(len(rows), np.int64), np.arange(len(rows))
        else:
            first = plan.first_document[rows]
            counts = plan.first_document[rows + 1] - first + 1  # up to the document that holds the next row's start
            row_of = np.repeat(np.arange(len(rows)), counts)
            documents = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts - first, counts)
            begins = plan.document_starts[documents] - rows[row_of] * width
        inside = begins < width
        crossing = (begins > 0) & (begins <= width)
        return (
            (row_of * width + np.maximum(begins, 0))[inside],
            _ends(row_of[inside], len(rows)),
            (row_of * width + begins - 1)[crossing],
            _ends(row_of[crossing], len(rows)),
        )

    def fill(self, block: RowBlock, begin: int, end: int, buffer: BatchBuffer) -> None:
        """Makes rows begin .. end of the block a batch in the buffer."""
        width = self._plan.seq_len
        self._copy_tokens(block, begin, end, buffer.tokens)
        buffer.loss_mask.fill(True)
        uncounted = block.uncounted[block.uncounted_ends[begin] : block.uncounted_ends[end]]
        buffer.loss_mask.reshape(-1)[uncounted - begin * width] = False
        borders = block.borders[block.border_ends[begin] : block.border_ends[end]]
        buffer.cu_seqlens[: len(borders)] = borders - begin * width
        buffer.cu_seqlens[len(borders) :] = (end - begin) * width
        rows = block.rows[begin:end]
        if self._plan.waste_tokens and self._plan.num_rows - 1 in rows:
            self._mask_padding(rows, buffer.loss_mask)
        if self._has_runs:
            self._apply_loss_runs(rows, buffer.loss_mask)

    def _copy_tokens(self, block: RowBlock, begin: int, end: int, out: npt.NDArray[Any]) -> None:
        """One copy per row; memory views, because slicing them costs half of what slicing arrays does."""
        flat = out.reshape(-1).data
        width = self._plan.seq_len + 1
        rows = slice(begin, end)
        places = zip(block.segments[rows], block.offsets[rows], block.lengths[rows], block.unchecked[rows], strict=True)
        at = 0
        for segment, offset, length, unchecked in places:
            if unchecked:
                self._store.read(segment, offset, length)
            view = self._views.get(segment) or self._view(segment)
            flat[at : at + length] = view[offset : offset + length]
            if length != width:
                row = at // width
                self._copy_rest(int(block.rows[begin + row]), length, out[row])
            at += width

    def _view(self, segment: int) -> memoryview:
        view = self._views[segment] = self._store.segment(segment).tokens.data
        return view

    def _copy_rest(self, row: int, done: int, out: npt.NDArray[Any]) -> None:
        """The later pieces of a row that has several, then padding in the plan's last row."""
        plan = self._plan
        _, count = plan.row_range(row)
        piece = int(plan.first_piece[row])
        while done < count:
            piece += 1
            length = min(int(plan.piece_starts[piece + 1] - plan.piece_starts[piece]), count - done)
            segment, offset = int(plan.piece_segments[piece]), int(plan.piece_offsets[piece])
            out[done : done + length] = self._store.read(segment, offset, length)
            done += length
        out[count:] = self._pad_id

    def _mask_padding(self, rows: Integers, mask: npt.NDArray[np.bool_]) -> None:
        last = self._plan.num_rows - 1
        _, count = self._plan.row_range(last)
        mask[np.flatnonzero(rows == last), count - 1 :] = False

    def _apply_loss_runs(self, rows: npt.NDArray[np.int64], mask: npt.NDArray[np.bool_]) -> None:
        """Labels outside the loss runs of documents that don't carry loss throughout."""
        plan = self._plan
        arrays = plan.store.arrays
        for number, row in enumerate(rows.tolist()):
            start, count = plan.row_range(row)
            for place in range(int(plan.first_document[row]), int(plan.first_document[row + 1]) + 1):
                if place >= len(plan.documents) or (found := int(self._loss_entries[place])) < 0:
                    continue
                begin, end = plan.document_starts[place : place + 2] - start - 1  # label of position p is token p + 1
                carries = np.zeros(int(end - begin), np.bool_)
                runs = slice(2 * int(arrays["loss_starts"][found]), 2 * int(arrays["loss_starts"][found + 1]))
                for first, length in arrays["loss_runs"][runs].reshape(-1, 2).tolist():
                    carries[first : first + length] = True
                low, high = max(int(begin), 0), min(int(end), plan.seq_len, count - 1)
                if low < high:
                    mask[number, low:high] &= carries[low - int(begin) : high - int(begin)]


def _ends(row_of: Integers, num_rows: int) -> Integers:
    """For sorted row numbers, where each row's entries end, preceded by 0."""
    return np.searchsorted(row_of, np.arange(num_rows + 1))
