"""Rows of a plan to batches, as they go on the wire: tokens in store width, loss mask, document borders.

What stands where is worked out for many batches at once (a `Layout`), because numpy costs a microsecond per call
however little it is asked; a stretch of them is then filled in a dozen calls. Tokens that lie together are copied
together (copying.py), straight out of the maps of segments. Blocks of tokens are checked on first touch. More than half
of the time is memory's, which is read at random, and passes without Python's lock.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.load.copying import TokenCopier, TokenLayout
from penstock.load.loss import LossRuns
from penstock.pack import Plan, Spans, Stretches

__all__ = ["Allocate", "Batch", "Gatherer", "Layout", "StretchBuffer"]

Integers = npt.NDArray[np.int64]
Allocate = Callable[[tuple[int, ...], np.dtype[Any]], npt.NDArray[Any]]
LARGEST_BATCH = 2**31 - 1


@dataclass(slots=True)
class StretchBuffer:
    """Memory for a stretch of batches, made once and used again.

    Attributes:
        tokens: [batches, rows, T + 1], store width; inputs are `[..., :-1]`, labels `[..., 1:]`.
        loss_mask: [batches, rows, T], whether the label at this position counts.
        cu_seqlens: [batches, fixed size] int32, flat position at which each document begins over rows x T, then
            rows x T repeated to the end.
        is_plain: whether any memory will do; then `tokens` is an array of Arrow's after each filling.
    """

    tokens: npt.NDArray[Any]
    loss_mask: npt.NDArray[np.bool_]
    cu_seqlens: npt.NDArray[np.int32]
    is_plain: bool = False


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


LossOfRows = tuple[LossRuns, Integers, Spans]
"""Loss runs of a store, the rows that are of it, and their spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What stands where in some batches: worked out for many at once, filled a few at a time.

    Attributes:
        rows: [batches, rows per batch], the plan's row numbers.
        row_ends: [all rows], where padding begins.
        tokens: where the tokens lie.
        silent: places over all rows x T whose label is of another document, or counted already.
        silent_starts: [batches + 1], where those of each batch begin.
        continued: rows, counted from 0, that begin with labels which an earlier row counts.
        loss: what carries loss where not everything does.
        borders: where documents begin, counted from each batch's begin.
        border_starts: [batches + 1], where those of each batch begin.
    """

    rows: Integers
    row_ends: Integers
    tokens: TokenLayout
    silent: Integers
    silent_starts: list[int]
    continued: Integers
    loss: list[LossOfRows]
    borders: npt.NDArray[np.int32]
    border_starts: list[int]


class Gatherer:
    """Fills buffers with rows of one plan."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._copier = TokenCopier(plan.store, row_tokens=plan.seq_len + 1)
        self._loss_runs = LossRuns.of(plan.store, plan.documents)
        self._places = np.arange(plan.seq_len)

    def new_buffer(self, *, num_batches: int, batch_rows: int, allocate: Allocate = np.empty) -> StretchBuffer:
        """A buffer for stretches of up to `num_batches`.

        Raises:
            ConfigError: a batch is too large for its borders to be counted in 32 bits.
        """
        plan = self._plan
        if batch_rows * plan.seq_len > LARGEST_BATCH:
            raise ConfigError(
                f"a batch of {batch_rows} x {plan.seq_len} tokens is more than {LARGEST_BATCH}",
                hint="choose a smaller batch or shorter rows",
            )
        borders = batch_rows * (plan.most_documents_in_a_row if plan.boundaries else 1) + 1
        return StretchBuffer(
            tokens=allocate((num_batches, batch_rows, plan.seq_len + 1), plan.store.dtype),
            loss_mask=allocate((num_batches, batch_rows, plan.seq_len), np.dtype(np.bool_)),
            cu_seqlens=allocate((num_batches, borders), np.dtype(np.int32)),
            is_plain=allocate is np.empty,
        )

    def fill(self, rows: Integers, buffer: StretchBuffer) -> None:
        """Makes `rows`, [batches, rows per batch], the first batches of the buffer."""
        self.fill_from(self.lay_out(rows), 0, len(rows), buffer)

    def lay_out(self, rows: Integers) -> Layout:
        """Works out what stands where in some batches, [batches, rows per batch]."""
        flat = rows.reshape(-1)
        spans = self._plan.spans(flat)
        everything = np.arange(len(flat))
        loss = [] if self._loss_runs is None else [(self._loss_runs, everything, spans)]
        return self._laid_out(rows, spans, self._plan.stretches(flat, spans), loss)

    def _laid_out(self, rows: Integers, spans: Spans, stretches: Stretches, loss: list[LossOfRows]) -> Layout:
        plan, width, (num_batches, batch_rows) = self._plan, self._plan.seq_len, rows.shape
        row_ends = spans.row_ends()
        # The label before a span is its first token: another document's or, where `first` is above 0, counted already.
        crossed = spans.place > 0 if plan.boundaries else (spans.place > 0) & (spans.first > 0)
        silent = (spans.row * width + spans.place - 1)[crossed]
        borders = self._borders(spans, row_ends)
        first_places = np.arange(num_batches + 1) * (batch_rows * width)
        border_starts = np.searchsorted(borders, first_places)
        return Layout(
            rows=rows,
            row_ends=row_ends,
            tokens=self._copier.lay_out(stretches, row_ends, batch_rows=batch_rows),
            silent=silent,
            silent_starts=np.searchsorted(silent, first_places).tolist(),
            continued=spans.row[spans.first > 0] if plan.context else np.empty(0, np.int64),
            loss=loss,
            borders=(borders - np.repeat(first_places[:-1], np.diff(border_starts))).astype(np.int32),
            border_starts=border_starts.tolist(),
        )

    def _borders(self, spans: Spans, row_ends: Integers) -> Integers:
        """Where documents begin; padding counts as one, and so does a row where borders are off."""
        width = self._plan.seq_len
        if not self._plan.boundaries:
            return np.arange(len(row_ends)) * width
        borders: Integers = (spans.row * width + spans.place)[spans.place < width]
        padded = np.flatnonzero(row_ends < width)
        return np.sort(np.concatenate([borders, padded * width + row_ends[padded]])) if len(padded) else borders

    def fill_from(self, layout: Layout, first: int, last: int, buffer: StretchBuffer) -> None:
        """Makes the batches first .. last of a layout the first ones of the buffer."""
        used, width = slice(0, last - first), self._plan.seq_len
        self._fill_tokens(layout, first, last, buffer)
        self._mark_labels(layout, first, last, buffer.loss_mask[used].reshape(-1, width))
        batch_places = layout.rows.shape[1] * width
        for cu_seqlens, batch in zip(buffer.cu_seqlens[used], range(first, last), strict=True):
            begin, end = layout.border_starts[batch : batch + 2]
            cu_seqlens[: end - begin] = layout.borders[begin:end]
            cu_seqlens[end - begin :] = batch_places

    def _fill_tokens(self, layout: Layout, first: int, last: int, buffer: StretchBuffer) -> None:
        shape = (last - first, layout.rows.shape[1], self._plan.seq_len + 1)
        if buffer.is_plain and layout.tokens.views is not None:
            buffer.tokens = buffer.tokens[:0].copy()  # given back, before as much is taken
            buffer.tokens = self._copier.gathered(layout.tokens, first, last).reshape(shape)
            return
        if len(buffer.tokens) < len(buffer.loss_mask):
            buffer.tokens = np.empty((len(buffer.loss_mask), *shape[1:]), buffer.tokens.dtype)
        self._copier.fill(layout.tokens, first, last, buffer.tokens[: shape[0]].reshape(-1, shape[2]))

    def _mark_labels(self, layout: Layout, first: int, last: int, mask: npt.NDArray[np.bool_]) -> None:
        """Which labels count: those of the same document that no earlier row has counted."""
        plan, width, batch_rows = self._plan, self._plan.seq_len, layout.rows.shape[1]
        first_row, last_row = first * batch_rows, last * batch_rows
        mask.fill(True)
        if plan.waste_tokens:
            row_ends = layout.row_ends[first_row:last_row]
            padded = np.flatnonzero(row_ends <= width)
            mask[padded] = self._places < row_ends[padded, None] - 1
        silent = layout.silent[layout.silent_starts[first] : layout.silent_starts[last]]
        mask.reshape(-1)[silent - first_row * width] = False
        if plan.context:
            begin, end = np.searchsorted(layout.continued, [first_row, last_row])
            mask[layout.continued[begin:end] - first_row, : plan.context] = False
        for runs, rows, spans in layout.loss:
            begin, end = np.searchsorted(rows, [first_row, last_row]).tolist()
            if begin < end:
                own = rows[begin:end] - first_row
                carrying = mask[own]
                runs.apply(spans.of_rows(begin, end), carrying)
                mask[own] = carrying
