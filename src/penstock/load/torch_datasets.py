"""A plan or a mixture as PyTorch data sets, for a plain DataLoader, Hugging Face's Trainer, TRL and Lightning.

    RowDataset   map-style: item r is row r of the plan; of a mixture, the row at position r of an epoch of its stream
    RowSampler   the order in which to ask for the rows of a plan
    RowStream    iterable: the stream of `Loader`, shared among ranks and worker processes, each row exactly once

Items are dicts of int64 tensors; see `fields` for their names and the two styles of labels. In a worker process the
data sets open the store themselves: what travels there is its path, the plan's identity and the settings, nothing of
the data. Where nothing else asks for a DataLoader, `TorchLoader` is faster: it needs no processes.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.errors import ConfigError, MissingExtraError, ResumeError
from penstock.load.fields import DEFAULT_FIELDS, check_fields, fields_of
from penstock.load.filling import Filler
from penstock.load.mixed import MixedFiller, filler_of, restored_position, state_at
from penstock.load.order import Order, Sequential, Shuffled
from penstock.load.reopening import address_of
from penstock.load.sharing import Share
from penstock.load.transforms import Transform
from penstock.pack import Plan
from penstock.pack.mixture import Mixture

try:
    import torch
    from torch.utils import data as torch_data
except ImportError as error:
    raise MissingExtraError("torch", extra="torch", wanted_for="a PyTorch data set") from error

__all__ = ["RowDataset", "RowSampler", "RowStream"]

Item = dict[str, torch.Tensor]


class _Travelling(ABC):
    """Goes to another process without its plan, and opens it there; the stages of a mixture travel along."""

    plan: Plan | Mixture
    _filler: Filler

    def __getstate__(self) -> dict[str, Any]:
        kept = {name: value for name, value in self.__dict__.items() if name not in ("plan", "_filler")}
        stages = self._filler.schedule.stages if isinstance(self._filler, MixedFiller) else ()
        return {**kept, "plan": address_of(self.plan), "stages": stages}

    def __setstate__(self, state: dict[str, Any]) -> None:
        stages = state.pop("stages")
        self.__dict__.update(state)
        self.plan = state["plan"].open()
        self._filler = self._new_filler()
        if isinstance(self._filler, MixedFiller):
            self._filler.schedule = self._filler.schedule_of(stages)

    @abstractmethod
    def _new_filler(self) -> Filler:
        """What fills rows of the plan, in the process that has just opened it."""


class RowDataset(_Travelling, torch_data.Dataset[Item]):
    """Item r is row r of the plan, as a dict of int64 tensors. `RowSampler` gives an order.

    Of a mixture, item r is the row at position epoch x len + r of its stream, and `set_epoch` names the epoch: asked
    for in order, without a sampler, the items are what `MixedLoader` gives.

    Args:
        plan: the rows, of one plan or of a mixture.
        fields: which of `input_ids`, `labels`, `position_ids`, `document_ids`, `row`.
        labels: "next" or "hugging-face"; see `penstock.load.fields`.
        transforms: applied to each item, with the pass that `set_epoch` named.
        seed: of the transforms, and of a mixture's order.
    """

    def __init__(
        self,
        plan: Plan | Mixture,
        *,
        fields: Sequence[str] = DEFAULT_FIELDS,
        labels: str = "next",
        transforms: Sequence[Transform] = (),
        seed: int = 0,
    ) -> None:
        self.plan = plan
        self.fields, self.labels = check_fields(fields, labels), labels
        self._transforms, self._seed = tuple(transforms), seed
        self.epoch = 0
        self._filler = self._new_filler()

    def _new_filler(self) -> Filler:
        is_mixture = isinstance(self.plan, Mixture)
        return filler_of(self.plan, seed=self._seed, shuffle=is_mixture, transforms=self._transforms)

    def set_epoch(self, epoch: int) -> None:
        """Names the pass, for the transforms: they change a row otherwise in each; of a mixture the epoch."""
        self.epoch = epoch

    def __len__(self) -> int:
        return _rows_per_pass(self.plan)

    def __getitem__(self, row: int) -> Item:
        return self.__getitems__([row])[0]

    def __getitems__(self, rows: list[int]) -> list[Item]:
        """Several rows at once, which PyTorch's DataLoader asks for: they are gathered in one go."""
        numbers = np.array([self._checked(row) for row in rows], np.int64)
        passes = np.full(len(numbers), self.epoch)
        if isinstance(self._filler, MixedFiller):
            numbers, passes = self._filler.at_positions(self.epoch * len(self) + numbers)
        batch = self._filler.read(numbers, passes)
        return _items(fields_of(batch, self.fields, labels=self.labels))

    def _checked(self, row: int) -> int:
        number = row + len(self) if row < 0 else row
        if not 0 <= number < len(self):
            raise IndexError(f"there is no row {row}: rows are numbered 0 to {len(self) - 1}")
        return number


class RowSampler(torch_data.Sampler[int]):
    """The rows of one pass in a loader's order, for a DataLoader over `RowDataset`; `set_epoch` names the pass.

    Args:
        plan: the rows.
        seed: of the shuffled order.
        shuffle: False for the plan's own order.
        order: another order, in place of `shuffle`.
    """

    def __init__(self, plan: Plan, *, seed: int = 0, shuffle: bool = True, order: Order | None = None) -> None:
        if isinstance(plan, Mixture):
            raise ConfigError(
                "a sampler orders the rows of one plan, this is a mixture",
                hint="leave the sampler out: the items of a mixture's RowDataset are in the stream's order",
            )
        computed = Shuffled(num_rows=plan.num_rows, seed=seed) if shuffle else Sequential(num_rows=plan.num_rows)
        self._order: Order = computed if order is None else order
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Names the pass that the next iteration gives."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self._order.num_rows

    def __iter__(self) -> Iterator[int]:
        stretch = 4096
        begin, size = self.epoch * len(self), len(self)
        for place in range(0, size, stretch):
            yield from self._order.rows_at(begin + place, min(stretch, size - place)).tolist()


class RowStream(_Travelling, torch_data.IterableDataset[Item]):
    """The stream of `Loader` as an iterable data set; in a DataLoader with any number of workers it is the same.

    Give the DataLoader `batch_size=micro_rows` (or `batch_size=None` with `batched=True`, which is faster: a batch is
    then gathered in one go and not put together again). An iteration begins at `position`, which `set_epoch` and
    `load_state_dict` move; it is the state of `Loader`, so either goes on where the other stopped. A DataLoader fills
    ahead, so how far the training got is for the training to say: `state_after(batches)` makes a state of it.
    torchdata's StatefulDataLoader keeps count itself.

    Args:
        plan: the rows, of one plan or of a mixture.
        batch_rows: rows per global batch, over all ranks.
        micro_rows: rows that the DataLoader puts in a batch; None for this rank's share of a global batch.
        passes: end after this many passes (of a mixture: epochs), counted from the one that `position` is in; None for
            an endless stream.
        batched: give batches of `micro_rows` rather than rows.
        rank: which share of each global batch; None for that of torch.distributed or torchrun. Where the trainer shares
            rows among processes itself (Hugging Face's Trainer does), say `rank=0, world_size=1`.
        world_size: number of shares.
        fields, labels: see `RowDataset`.
        stream: seed, shuffle, order, transforms; see `Loader`.
    """

    def __init__(
        self,
        plan: Plan | Mixture,
        *,
        batch_rows: int,
        micro_rows: int | None = None,
        passes: int | None = None,
        batched: bool = False,
        rank: int | None = None,
        world_size: int | None = None,
        fields: Sequence[str] = DEFAULT_FIELDS,
        labels: str = "next",
        **stream: Any,
    ) -> None:
        if passes is not None and passes < 1:
            raise ConfigError(f"{passes} passes give nothing", hint="choose 1 or more, or None for an endless stream")
        self.plan = plan
        self.fields, self.labels, self.batched = check_fields(fields, labels), labels, batched
        self.position = 0
        self._passes, self._stream = passes, stream
        known_rank, known_size = _own_place()
        size = known_size if world_size is None else world_size
        own_rows = batch_rows // size if size else 0
        self._places = {
            "batch_rows": batch_rows,
            "rank": known_rank if rank is None else rank,
            "world_size": size,
            "piece_rows": own_rows if micro_rows is None else micro_rows,
        }
        self.share()  # refuses what can't be shared
        self._filler = self._new_filler()

    def _new_filler(self) -> Filler:
        return filler_of(self.plan, **self._stream)

    def share(self, start: int | None = None) -> Share:
        """Which rows are this rank's, from a position on."""
        begin = self.position if start is None else start
        size = _rows_per_pass(self.plan)
        end = None if self._passes is None else (begin // size + self._passes) * size
        return Share(**self._places, start=begin, end=end)

    @property
    def identity(self) -> dict[str, Any]:
        """What a position is a position in; that of a `Loader` with the same settings."""
        return self._filler.identity

    def set_epoch(self, epoch: int) -> None:
        """The next iteration begins with this pass; inside it, when a state was loaded that is.

        An endless stream has no passes to begin: it goes on where it is, whatever a trainer calls an epoch.
        """
        size = _rows_per_pass(self.plan)
        if self._passes is not None and self.position // size != epoch:
            self.position = epoch * size

    def state_dict(self) -> dict[str, Any]:
        """The state at which an iteration begins."""
        return state_at(self._filler, self.position)

    def state_after(self, batches: int) -> dict[str, Any]:
        """The state after that many global batches of an iteration, however they were shared and cut; the last batch of
        a stream that ends may be short."""
        position, end = self.position + batches * self._places["batch_rows"], self.share().end
        return state_at(self._filler, position if end is None else min(position, end))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next iteration begins there.

        Raises:
            ResumeError: the state belongs to another stream; both sides are shown.
        """
        self.position = restored_position(self._filler, state)

    def __len__(self) -> int:
        share = self.share()
        return share.num_pieces() if self.batched else share.num_rows()

    def __iter__(self) -> Iterator[Item]:
        worker = torch_data.get_worker_info()
        number, count = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return _Pieces(self._filler, self, worker=number, num_workers=count)


class _Pieces(Iterator[Item]):
    """One iteration in one worker process; torchdata's StatefulDataLoader saves and restores it."""

    def __init__(self, filler: Filler, stream: RowStream, *, worker: int, num_workers: int) -> None:
        self._filler, self._stream = filler, stream
        self._share = stream.share()
        self._worker, self._num_workers = worker, num_workers
        self._next_piece = worker
        self._ready: list[Item] = []
        self._given = 0  # rows of the piece in `_ready` given out

    def __next__(self) -> Item:
        if self._stream.batched:
            made = self._made(self._next_piece)
            self._next_piece += self._num_workers
            return {name: torch.from_numpy(array) for name, array in made.items()}
        if not self._ready:
            self._ready = _items(self._made(self._next_piece))
        item = self._ready[self._given]
        self._given += 1
        if self._given == len(self._ready):
            self._ready, self._given = [], 0
            self._next_piece += self._num_workers
        return item

    def _made(self, number: int) -> dict[str, Any]:
        piece = self._share.piece(number)
        if piece is None:
            raise StopIteration
        rows, passes = self._filler.at(*piece)
        batch = self._filler.read(rows, passes, position=piece[0])
        return fields_of(batch, self._stream.fields, labels=self._stream.labels)

    def _division(self) -> dict[str, int]:
        """How the stream is divided; a worker's place in it means nothing under another division."""
        share = self._share
        numbers = (share.batch_rows, share.piece_rows, share.world_size, share.rank, self._num_workers, self._worker)
        return dict(zip(("batch_rows", "micro_rows", "world_size", "rank", "workers", "worker"), numbers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """Where this worker is."""
        place = {**self._division(), "next_piece": self._next_piece, "given": self._given}
        return {**state_at(self._filler, self._share.start), "place": place}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to where a worker was."""
        start = restored_position(self._filler, state)
        place = state.get("place")
        division = self._division()
        if not isinstance(place, dict) or {name: place.get(name) for name in division} != division:
            raise ResumeError(
                f"the state of a worker was saved with the division {place}, here it is {division}",
                hint="use the same workers and batch sizes, or resume with `RowStream.state_after`, which fits any",
            )
        self._share = self._stream.share(start)
        self._next_piece, self._given = int(place["next_piece"]), int(place["given"])
        self._ready = _items(self._made(self._next_piece)) if self._given else []


def _rows_per_pass(rows: Plan | Mixture) -> int:
    return rows.epoch_rows if isinstance(rows, Mixture) else rows.num_rows


def _items(arrays: dict[str, Any]) -> list[Item]:
    """One dict of tensors per row; the tensors share memory."""
    tensors = {name: torch.from_numpy(array) for name, array in arrays.items()}
    count = len(next(iter(tensors.values()))) if tensors else 0
    return [{name: tensor[row] for name, tensor in tensors.items()} for row in range(count)]


def _own_place() -> tuple[int, int]:
    """Rank and world size of this process, from torch.distributed, else from the environment that torchrun sets."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and size.isdecimal()):
        raise ConfigError(
            f"RANK is {rank!r} and WORLD_SIZE {size!r} in the environment, numbers are wanted",
            hint="start with torchrun, or give `rank` and `world_size`",
        )
    return int(rank), int(size)
