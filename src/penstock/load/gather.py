"""Rows of a plan to batches, as they go on the wire: tokens in store width, loss mask, document borders.

What stands where is worked out for many batches at once (a `Layout`), because numpy costs a microsecond per call
however little it is asked; a stretch of them is then filled in a dozen calls. Tokens that lie together are copied
together (copying.py), straight out of the maps of segments. Blocks of tokens are checked on first touch. More than half
of the time is memory's, which is read at random, and passes without Python's lock.

Of remote stores that the local cache can't hold, the tokens are brought together where the layout is (sweeping.py).
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.load.loss import LossRuns
from penstock.load.sweeping import SweepingCopier, copier_of
from penstock.pack import Plan, Spans, Stretches
from penstock.store.mirror import Check

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
        is_plain: whether any memory will do; then `tokens` is another array after each filling.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A plan whose rows are some of those to be laid out.

    Attributes:
        places: which, ascending.
        rows: their numbers in the plan.
        first_segment: what the copier calls its store's first segment.
        loss_runs: of its store, where not everything carries loss.
    """

    plan: Plan
    places: Integers
    rows: Integers
    first_segment: int
    loss_runs: LossRuns | None

    def spans(self, own: Integers) -> tuple[Integers, Spans]:
        """The places of some of its rows, and their spans."""
        return self.places[own], self.plan.spans(self.rows[own])

    def stretches(self, own: Integers, spans: Spans | None) -> tuple[Integers, ...]:
        """The stretches of some of its rows, as columns; `spans` are those of the rows, where they are known."""
        found = self.plan.stretches(self.rows[own], spans)
        return self.places[own][found.row], found.place, found.segment + self.first_segment, found.offset, found.length


LossOfRows = tuple[LossRuns, Integers, Spans]
"""Loss runs of a store, the rows that are of it, and their spans."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """What stands where in some batches: worked out for many at once, filled a few at a time.

    Attributes:
        rows: [batches, rows per batch], the plan's row numbers.
        tokens: where the tokens lie, or all of them; what the copier made.
        padded: rows, counted from 0, that have no label at some place.
        padded_ends: where padding begins in these.
        silent: places over all rows x T whose label is of another document, or counted already.
        silent_starts: [batches + 1], where those of each batch begin.
        continued: rows, counted from 0, that begin with labels which an earlier row counts.
        loss: what carries loss where not everything does.
        borders: where documents begin, counted from each batch's begin.
        border_starts: [batches + 1], where those of each batch begin.
    """

    rows: Integers
    tokens: Any
    padded: Integers
    padded_ends: Integers
    silent: Integers
    silent_starts: list[int]
    continued: Integers
    loss: list[LossOfRows]
    borders: npt.NDArray[np.int32]
    border_starts: list[int]


class Gatherer:
    """Fills buffers with rows of one plan. Threads may share it, each with a buffer of its own: they copy tokens at the
    same time, and do all else in turn. Numpy lets go of Python's lock in every other call, and threads that are between
    such calls at the same time spend more on handing it over than on the calls. `is_cancelled`: see `copier_of`."""

    def __init__(self, plan: Plan, *, is_cancelled: Check = lambda: False) -> None:
        self._plan = plan
        self._copier = copier_of([plan], row_tokens=plan.seq_len + 1, is_cancelled=is_cancelled)
        self._loss_runs = LossRuns.of(plan.store, plan.documents)
        self._places = np.arange(plan.seq_len)
        self._working = threading.Lock()

    @property
    def sweeper(self) -> SweepingCopier | None:
        """What fetches segments while rows are laid out; None where their stores keep all of them."""
        return self._copier if isinstance(self._copier, SweepingCopier) else None

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
        """Works out what stands where in some batches, [batches, rows per batch]. It takes as long as filling some of
        them, so other threads go on meanwhile."""
        plan, width, (num_batches, batch_rows) = self._plan, self._plan.seq_len, rows.shape
        segment, offset = np.empty(rows.size, np.int64), np.empty(rows.size, np.int64)
        row_ends = np.full(rows.size, width + 1)
        divided: list[tuple[Integers, ...]] = []
        broken: list[tuple[Integers, ...]] = []
        loss: list[LossOfRows] = []
        for source in self._sources(rows.reshape(-1)):
            whole = source.plan.whole(source.rows)
            segment[source.places] = whole.segment + source.first_segment * (whole.segment >= 0)
            offset[source.places] = whole.offset
            # Most rows have no border, and nothing that spans would tell.
            needs_all = source.loss_runs is not None or source.plan.context > 0
            own = np.arange(len(source.rows)) if needs_all else np.flatnonzero(~whole.is_undivided)
            pieces, spans = np.flatnonzero(whole.segment < 0), None
            if len(own):
                places, spans = source.spans(own)
                row_ends[places] = spans.row_ends()
                divided.append((places[spans.row], spans.place, spans.first))
                if source.loss_runs is not None:
                    loss.append((source.loss_runs, places, spans))
            if len(pieces):
                broken.append(source.stretches(pieces, spans if len(pieces) == len(own) else None))
        row, place, first = _by_row(divided, num_columns=3)
        # The label before a span is its first token: another document's or, where `first` is above 0, counted already.
        crossed = place > 0 if plan.boundaries else (place > 0) & (first > 0)
        silent = (row * width + place - 1)[crossed]
        borders, border_starts = self._borders(row, place, row_ends, batch_rows=batch_rows)
        padded = np.flatnonzero(row_ends <= width)
        return Layout(
            rows=rows,
            tokens=self._copier.lay_out(segment, offset, Stretches(*_by_row(broken, num_columns=5)), row_ends),
            padded=padded,
            padded_ends=row_ends[padded],
            silent=silent,
            silent_starts=np.searchsorted(silent, np.arange(num_batches + 1) * (batch_rows * width)).tolist(),
            continued=row[first > 0] if plan.context else np.empty(0, np.int64),
            loss=loss,
            borders=borders,
            border_starts=border_starts,
        )

    def _sources(self, rows: Integers) -> list[Source]:
        """Whose rows these are."""
        everything = np.arange(len(rows))
        return [Source(plan=self._plan, places=everything, rows=rows, first_segment=0, loss_runs=self._loss_runs)]

    def _borders(
        self, row: Integers, place: Integers, row_ends: Integers, *, batch_rows: int
    ) -> tuple[npt.NDArray[np.int32], list[int]]:
        """Where documents begin, counted from each batch's begin, and where the borders of each batch begin. Padding
        counts as a document, and so does a row where borders are off."""
        width, num_rows = self._plan.seq_len, len(row_ends)
        row_starts = np.resize(np.arange(0, batch_rows * width, width, dtype=np.int32), num_rows)
        first_rows = np.arange(0, num_rows + 1, batch_rows)
        if not self._plan.boundaries:
            return row_starts, first_rows.tolist()
        is_inner = (place > 0) & (place < width)
        inner_row, inner_place = row[is_inner], place[is_inner]
        padded = np.flatnonzero(row_ends < width)
        if len(padded):
            inner = np.sort(np.concatenate([inner_row * width + inner_place, padded * width + row_ends[padded]]))
            inner_row, inner_place = np.divmod(inner, width)
        # A row's own border comes first, then those inside it: each behind all rows up to its own, and those before it.
        borders = np.empty(num_rows + len(inner_row), np.int32)
        is_row_start = np.ones(len(borders), np.bool_)
        inner_at = np.arange(1, len(inner_row) + 1) + inner_row
        is_row_start[inner_at] = False
        borders[is_row_start] = row_starts
        borders[inner_at] = inner_row % batch_rows * width + inner_place
        return borders, (first_rows + np.searchsorted(inner_row, first_rows)).tolist()

    def fill_from(self, layout: Layout, first: int, last: int, buffer: StretchBuffer) -> None:
        """Makes the batches first .. last of a layout the first ones of the buffer."""
        used, width, batch_rows = slice(0, last - first), self._plan.seq_len, layout.rows.shape[1]
        with self._working:
            self._mark_labels(layout, first, last, buffer.loss_mask[used].reshape(-1, width))
            cu_seqlens, starts = buffer.cu_seqlens[used], layout.border_starts[first : last + 1]
            cu_seqlens.fill(batch_rows * width)
            for own, (begin, end) in zip(cu_seqlens, itertools.pairwise(starts), strict=True):
                own[: end - begin] = layout.borders[begin:end]
        self._fill_tokens(layout, first * batch_rows, last * batch_rows, buffer)

    def _fill_tokens(self, layout: Layout, first_row: int, last_row: int, buffer: StretchBuffer) -> None:
        shape = buffer.loss_mask.shape[1], self._plan.seq_len + 1
        if buffer.is_plain:
            buffer.tokens = buffer.tokens[:0].copy()  # given back, before as much is taken
            buffer.tokens = self._copier.gathered(layout.tokens, first_row, last_row).reshape(-1, *shape)
            return
        out = buffer.tokens.reshape(-1, shape[1])[: last_row - first_row]
        self._copier.fill(layout.tokens, first_row, last_row, out)

    def _mark_labels(self, layout: Layout, first: int, last: int, mask: npt.NDArray[np.bool_]) -> None:
        """Which labels count: those of the same document that no earlier row has counted."""
        plan, width, batch_rows = self._plan, self._plan.seq_len, layout.rows.shape[1]
        first_row, last_row = first * batch_rows, last * batch_rows
        mask.fill(True)
        if len(layout.padded):
            begin, end = np.searchsorted(layout.padded, [first_row, last_row]).tolist()
            mask[layout.padded[begin:end] - first_row] = self._places < layout.padded_ends[begin:end, None] - 1
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


def _by_row(parts: Sequence[tuple[Integers, ...]], *, num_columns: int) -> Sequence[Integers]:
    """Columns of several sources, the first of which is the row, as those of one: row after row."""
    if len(parts) <= 1:
        return parts[0] if parts else [np.empty(0, np.int64)] * num_columns
    columns = [np.concatenate(column) for column in zip(*parts, strict=True)]
    order = np.argsort(columns[0], kind="stable")
    return [column[order] for column in columns]
