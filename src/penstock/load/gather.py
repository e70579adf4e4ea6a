"""Rows of a plan to batches, as they go on the wire: tokens in store width, loss mask, document borders.

A stretch of batches is filled at once, because numpy costs a microsecond per call however little it is asked. Tokens
that lie together are copied together (copying.py), straight out of the segments' maps; mask and borders take a handful
of calls over the spans of all rows, whatever the plan's policy. Blocks of tokens are checked on first touch.
More than half of the time is memory's, which is read at random.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.load.copying import TokenCopier
from penstock.load.loss import LossRuns
from penstock.pack import Plan, Spans

__all__ = ["Allocate", "Batch", "Gatherer", "StretchBuffer"]

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
        )

    def fill(self, rows: Integers, buffer: StretchBuffer) -> None:
        """Makes `rows`, [batches, rows per batch], the first batches of the buffer."""
        plan, used = self._plan, slice(0, len(rows))
        flat = rows.reshape(-1)
        spans = plan.spans(flat)
        row_ends = spans.row_ends()
        self._copier.copy(plan.stretches(flat, spans), row_ends, buffer.tokens[used].reshape(-1, plan.seq_len + 1))
        mask = buffer.loss_mask[used].reshape(-1, plan.seq_len)
        self._mark_labels(spans, row_ends, mask)
        if self._loss_runs is not None:
            self._loss_runs.apply(spans, mask)
        self._mark_borders(spans, row_ends, batch_rows=rows.shape[1], cu_seqlens=buffer.cu_seqlens[used])

    def _mark_labels(self, spans: Spans, row_ends: Integers, mask: npt.NDArray[np.bool_]) -> None:
        """Which labels count: those of the same document that no earlier row has counted."""
        plan, width = self._plan, self._plan.seq_len
        mask.fill(True)
        if plan.waste_tokens:
            padded = np.flatnonzero(row_ends <= width)
            mask[padded] = self._places < row_ends[padded, None] - 1
        # The label before a span is its first token: another document's or, where `first` is above 0, counted already.
        crossed = spans.place > 0 if plan.boundaries else (spans.place > 0) & (spans.first > 0)
        mask.reshape(-1)[(spans.row * width + spans.place - 1)[crossed]] = False
        if plan.context:
            mask[spans.row[spans.first > 0], : plan.context] = False

    def _mark_borders(
        self, spans: Spans, row_ends: Integers, *, batch_rows: int, cu_seqlens: npt.NDArray[np.int32]
    ) -> None:
        """Where documents begin in each batch; padding counts as one, and so does a row where borders are off."""
        width = self._plan.seq_len
        num_batches = len(cu_seqlens)
        if self._plan.boundaries:
            inside = spans.place < width
            borders = (spans.row * width + spans.place)[inside]
            padded = np.flatnonzero(row_ends < width)
            if len(padded):
                borders = np.sort(np.concatenate([borders, padded * width + row_ends[padded]]))
        else:
            borders = np.arange(len(row_ends)) * width
        batch_places = batch_rows * width
        first_of_batch = np.searchsorted(borders, np.arange(num_batches + 1) * batch_places)
        batch_of = np.repeat(np.arange(num_batches), np.diff(first_of_batch))
        cu_seqlens.fill(batch_places)
        cu_seqlens[batch_of, np.arange(len(borders)) - first_of_batch[batch_of]] = borders - batch_of * batch_places
