"""Rows of a plan to batches, as they go on the wire: tokens in store width, loss mask, document borders.

A stretch of batches is filled at once, because numpy costs a microsecond per call however little it is asked: per
stretch there is one copy per segment, straight out of its map, and a handful of calls for mask and borders. The copies
run without the GIL. Blocks of tokens are checked on first touch. A batch of 32 x 1024 takes about 30 µs, which is what
memory takes to read 32 places at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack import Plan

__all__ = ["Allocate", "Batch", "Gatherer", "StretchBuffer"]

Integers = npt.NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]


@dataclass(slots=True)
class StretchBuffer:
    """Memory for a stretch of batches, made once and used again.

    Attributes:
        tokens: [batches, rows, T + 1], store width; inputs are `[..., :-1]`, labels `[..., 1:]`.
        loss_mask: [batches, rows, T], whether the label at this position counts.
        cu_seqlens: [batches, fixed size] int32, flat position at which each document begins over rows x T, then
            rows x T repeated to the end.
    """

    tokens: npt.NDArray[Any]
    loss_mask: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]


@dataclass(slots=True)
class Batch:
    """One batch of this rank. The arrays belong to the loader and are valid until the next batch is asked for.

    Attributes:
        tokens: [rows, T + 1]; see `StretchBuffer`.
        loss_mask: [rows, T].
        cu_seqlens: [fixed size].
        rows: the plan's row numbers.
        position: rows consumed by all ranks before this batch.
    """

    tokens: npt.NDArray[Any]
    loss_mask: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]
    rows: npt.NDArray[np.int64]
    position: int


class Gatherer:
    """Fills buffers with rows of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._store = plan.store
        self._pad_id = plan.store.manifest.tokenizer["end_id"]
        self._windows: dict[int, npt.NDArray[Any]] = {}
        loss_documents = plan.store.arrays["loss_documents"].astype(np.int64)
        with_runs = np.isin(plan.documents, loss_documents)
        # Per document of the plan its number in `loss_documents`, or -1; searched once, not for each row.
        self._loss_entries = np.where(with_runs, np.searchsorted(loss_documents, plan.documents), -1)
        self._has_runs = bool(with_runs.any())

    def new_buffer(self, *, num_batches: int, batch_rows: int, allocate: Allocate = np.empty) -> StretchBuffer:
        """A buffer for stretches of up to `num_batches`."""
        plan = self._plan
        borders = batch_rows * (plan.most_documents_in_a_row if plan.boundaries else 1) + 1
        return StretchBuffer(
            tokens=allocate((num_batches, batch_rows, plan.seq_len + 1), plan.store.dtype),
            loss_mask=allocate((num_batches, batch_rows, plan.seq_len), np.dtype(np.bool_)),
            cu_seqlens=allocate((num_batches, borders), np.dtype(np.int32)),
        )

    def fill(self, rows: Integers, buffer: StretchBuffer) -> None:
        """Makes `rows`, [batches, rows per batch], the first batches of the buffer."""
        plan, used = self._plan, slice(0, len(rows))
        flat = rows.reshape(-1)
        mask = buffer.loss_mask[used].reshape(-1, plan.seq_len)
        self._copy_tokens(flat, buffer.tokens[used].reshape(-1, plan.seq_len + 1))
        mask.fill(True)
        self._mark_borders(rows, mask, buffer.cu_seqlens[used])
        if plan.waste_tokens:
            self._mask_padding(flat, mask)
        if self._has_runs:
            self._apply_loss_runs(flat, mask)

    def _copy_tokens(self, rows: Integers, out: npt.NDArray[Any]) -> None:
        """Rows that lie in one piece are copied together, segment by segment; the others piece by piece."""
        plan = self._plan
        starts = rows * plan.seq_len
        pieces = plan.first_piece[rows]
        segments = plan.piece_segments[pieces]
        offsets = plan.piece_offsets[pieces] + starts - plan.piece_starts[pieces]
        counts = np.minimum(plan.seq_len + 1, plan.num_tokens - starts)
        lengths = np.minimum(plan.piece_starts[pieces + 1] - starts, counts)
        for row in np.flatnonzero(self._store.unchecked(segments, offsets, lengths)).tolist():
            self._store.read(int(segments[row]), int(offsets[row]), int(lengths[row]))
        whole = lengths == plan.seq_len + 1
        for segment, places in _by_value(segments, np.flatnonzero(whole)):
            out[places] = self._rows_of(segment)[offsets[places]]
        for row in np.flatnonzero(~whole).tolist():
            done, offset = int(lengths[row]), int(offsets[row])
            out[row, :done] = self._store.segment(int(segments[row])).tokens[offset : offset + done]
            self._copy_rest(int(rows[row]), done, out[row])

    def _rows_of(self, segment: int) -> npt.NDArray[Any]:
        """A view of a segment in which entry i is the row of T + 1 tokens that begins at token i."""
        windows = self._windows.get(segment)
        if windows is None:
            tokens = self._store.segment(segment).tokens
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self._plan.seq_len + 1)
            self._windows[segment] = windows
        return windows

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

    def _mark_borders(self, rows: Integers, mask: npt.NDArray[np.bool_], cu_seqlens: npt.NDArray[np.int32]) -> None:
        """Where documents begin in each batch; the label before a border is another document's and doesn't count."""
        plan, width = self._plan, self._plan.seq_len
        num_batches, batch_rows = rows.shape
        flat = rows.reshape(-1)
        if plan.boundaries:
            first = plan.first_document[flat]
            counts = plan.first_document[flat + 1] - first + 1  # up to the document that holds the next row's start
            row_of = np.repeat(np.arange(len(flat)), counts)
            documents = np.arange(len(row_of)) - np.repeat(np.cumsum(counts) - counts - first, counts)
            begins = plan.document_starts[documents] - flat[row_of] * width
            crossing = (begins > 0) & (begins <= width)
            mask.reshape(-1)[(row_of * width + begins - 1)[crossing]] = False
            inside = begins < width
            row_of, begins = row_of[inside], np.maximum(begins[inside], 0)
        else:
            row_of, begins = np.arange(len(flat)), np.zeros(len(flat), np.int64)
        batch_of = row_of // batch_rows
        first_of_batch = np.searchsorted(batch_of, np.arange(num_batches))
        cu_seqlens.fill(batch_rows * width)
        cu_seqlens[batch_of, np.arange(len(batch_of)) - first_of_batch[batch_of]] = row_of % batch_rows * width + begins

    def _mask_padding(self, rows: Integers, mask: npt.NDArray[np.bool_]) -> None:
        """The plan's last row ends early: what lies behind its last token is no label."""
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


def _by_value(values: Integers, places: Integers) -> list[tuple[int, Integers]]:
    """The places grouped by the value there."""
    ordered = places[np.argsort(values[places], kind="stable")]
    cuts = np.flatnonzero(np.diff(values[ordered])) + 1
    return [(int(values[group[0]]), group) for group in np.split(ordered, cuts) if len(group)]
