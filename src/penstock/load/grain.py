"""A plan or a mixture in Grain: a data source over its rows, and a ready pipeline that is the stream of `Loader`.

The pipeline's element k is batch k, gathered in one go by Grain's own threads. Its iterator is saved and restored by
Grain (`get_state`, `set_state`, its Orbax handler) in constant time; the state holds the stream's identity and the
position in rows besides, so that another stream's is refused and any other reader can go on from there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, MissingExtraError, ResumeError
from penstock.load.fields import DEFAULT_FIELDS, check_fields, fields_of
from penstock.load.filling import Filler
from penstock.load.mixed import MixedFiller, filler_of, restored_position, state_at
from penstock.load.reopening import address_of
from penstock.load.sharing import Share
from penstock.pack import Plan
from penstock.pack.mixture import Mixture

try:
    import grain
except ImportError as error:
    raise MissingExtraError("grain", extra="jax", wanted_for="the Grain pipeline") from error

__all__ = ["BatchSource", "RowSource", "grain_pipeline"]

Fields = dict[str, npt.NDArray[Any]]

# Grain asks every source for its length; no training sees that many batches.
ENDLESS = 2**50


class _Source:
    """What both sources share; it goes to Grain's worker processes as an address and opens the store there."""

    def __init__(
        self,
        plan: Plan | Mixture,
        *,
        fields: Sequence[str] = DEFAULT_FIELDS,
        labels: str = "next",
        dtype: npt.DTypeLike = np.int32,
        **stream: Any,
    ) -> None:
        self.plan = plan
        self._fields, self._labels, self._dtype = check_fields(fields, labels), labels, np.dtype(dtype)
        self._stream = stream
        self.filler = filler_of(plan, **stream)

    def _read(self, rows: npt.NDArray[np.int64], passes: npt.NDArray[np.int64]) -> Fields:
        return fields_of(self.filler.read(rows, passes), self._fields, labels=self._labels, dtype=self._dtype)

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("plan", "filler")}
        stages = self.filler.schedule.stages if isinstance(self.filler, MixedFiller) else ()
        return {**kept, "plan": address_of(self.plan), "stages": stages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stages = state.pop("stages")
        self.__dict__.update(state)
        self.plan = state["plan"].open()
        self.filler = filler_of(self.plan, **self._stream)
        if isinstance(self.filler, MixedFiller):
            self.filler.schedule = self.filler.schedule_of(stages)


class RowSource(_Source):
    """A Grain `RandomAccessDataSource`: item r is row r of the plan, a dict of arrays. Grain orders, repeats, batches.

    Args:
        plan: the rows.
        fields: which of `input_ids`, `labels`, `position_ids`, `document_ids`, `row`.
        labels: "next" or "hugging-face".
        dtype: of the arrays.
        stream: transforms and their seed.
    """

    def __init__(self, plan: Plan, **options: Any) -> None:
        if isinstance(plan, Mixture):
            raise ConfigError(
                "a mixture is a stream, of which Grain can't reorder the rows", hint="use `grain_pipeline(mixture, …)`"
            )
        super().__init__(plan, **options)

    def __len__(self) -> int:
        return self.plan.num_rows

    def __getitem__(self, row: int) -> Fields:
        number = int(row)
        if not 0 <= number < len(self):
            raise IndexError(f"the plan has no row {number}: rows are numbered 0 to {len(self) - 1}")
        made = self._read(np.array([number]), np.zeros(1, np.int64))
        return {name: array[0] for name, array in made.items()}

    def __repr__(self) -> str:
        return f"RowSource({self.plan.fingerprint[:12]}, rows={len(self)})"


class BatchSource(_Source):
    """A Grain `RandomAccessDataSource`: item k is this process's share of the stream's k-th global batch.

    Args:
        plan: the rows, of one plan or of a mixture.
        share: which rows are this process's.
        options: see `RowSource`; and seed, shuffle, order, transforms as in `Loader`.
    """

    def __init__(self, plan: Plan | Mixture, share: Share, **options: Any) -> None:
        super().__init__(plan, **options)
        self.share = share

    def __len__(self) -> int:
        return ENDLESS if self.share.end is None else self.share.num_pieces()

    def __getitem__(self, number: int) -> Fields:
        piece = self.share.piece(int(number))
        if piece is None:
            raise IndexError(f"the stream has no batch {number}: it ends before")
        return self._read(*self.filler.at(*piece))

    def __repr__(self) -> str:
        return f"BatchSource({self.plan.fingerprint[:12]}, batch_rows={self.share.batch_rows})"


def grain_pipeline(
    plan: Plan | Mixture,
    *,
    batch_rows: int,
    passes: int | None = None,
    rank: int = 0,
    world_size: int = 1,
    state: dict[str, Any] | None = None,
    num_threads: int = 2,
    prefetch_batches: int = 4,
    **options: Any,
) -> grain.IterDataset[Fields]:
    """The stream of `Loader` as a Grain pipeline of batches.

    Args:
        plan: the rows, of one plan or of a mixture.
        batch_rows: rows per global batch.
        passes: end after this many passes (of a mixture: epochs); None for an endless stream.
        rank: which share of each global batch (`jax.process_index()`).
        world_size: number of shares (`jax.process_count()`).
        state: where to begin: a state of this stream by whatever reader, batch size and world size.
        num_threads: Grain's reading threads; 0 reads in the caller's.
        prefetch_batches: how far they read ahead.
        options: fields, labels, dtype, seed, shuffle, order, transforms; see `BatchSource`.

    Raises:
        ResumeError: the state belongs to another stream.
    """
    share = Share(batch_rows=batch_rows, rank=rank, world_size=world_size, piece_rows=max(1, batch_rows // world_size))
    source = BatchSource(plan, share, **options)
    start = 0 if state is None else restored_position(source.filler, state)
    size = plan.epoch_rows if isinstance(plan, Mixture) else plan.num_rows
    end = None if passes is None else (start // size + passes) * size
    source.share = Share(
        batch_rows=batch_rows, rank=rank, world_size=world_size, piece_rows=share.piece_rows, start=start, end=end
    )
    reading = grain.ReadOptions(num_threads=num_threads, prefetch_buffer_size=prefetch_batches if num_threads else 0)
    batches = grain.MapDataset.source(source).to_iter_dataset(reading)
    return _Checked(batches, source.filler, source.share)


class _Checked(grain.IterDataset[Fields]):
    """The same elements; the iterator's state says what it is a state of."""

    def __init__(self, parent: grain.IterDataset[Fields], filler: Filler, share: Share) -> None:
        super().__init__(parent)
        self._filler, self._share = filler, share

    def __iter__(self) -> grain.DatasetIterator[Fields]:
        return _CheckedIterator(self._parent.__iter__(), self._filler, self._share)


class _CheckedIterator(grain.DatasetIterator[Fields]):
    def __init__(self, parent: grain.DatasetIterator[Fields], filler: Filler, share: Share) -> None:
        super().__init__(parent)
        self._filler, self._share = filler, share
        self._given = 0

    def __next__(self) -> Fields:
        batch: Fields = next(self._parent)
        self._given += 1
        return batch

    def get_state(self) -> dict[str, Any]:
        """Grain's own state, and the stream's."""
        share = self._share
        position = share.start + self._given * share.batch_rows
        position = position if share.end is None else min(position, share.end)
        place = {"start": share.start, "batch_rows": share.batch_rows, "given": self._given}
        return {**state_at(self._filler, position), "place": place, "grain": self._parent.get_state()}

    def set_state(self, state: dict[str, Any]) -> None:
        """Goes to a saved state.

        Raises:
            ResumeError: it belongs to another stream, or to one begun or cut otherwise.
        """
        restored_position(self._filler, state)
        place = state.get("place")
        here = {"start": self._share.start, "batch_rows": self._share.batch_rows}
        if not isinstance(place, dict) or {name: place.get(name) for name in here} != here or "grain" not in state:
            raise ResumeError(
                f"the pipeline's state was saved with {place}, here it is {here}",
                hint="make the pipeline with `grain_pipeline(…, state=state)`, which goes on with any batch size",
            )
        self._parent.set_state(state["grain"])
        self._given = int(place["given"])
