"""Batches as PyTorch tensors on a device.

Tokens travel in store width from pinned memory, without blocking, and are widened where they arrive; labels, document
numbers and positions are made there, when asked for. On a CPU the same code is a plain copy.

Two ways in: `TorchLoader` (threads, no processes: the fast one) and the data sets of `torch_datasets` for whatever
wants a DataLoader.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, MissingExtraError
from penstock.load.gather import Batch, Gatherer
from penstock.load.loader import Loader
from penstock.load.materialise import IGNORED_LABEL, labels, position_ids
from penstock.load.mixed import MixedLoader
from penstock.load.recycling import recycled_empty
from penstock.load.torch_datasets import RowDataset, RowSampler, RowStream
from penstock.load.wrapping import WrappedLoader
from penstock.pack import Plan
from penstock.pack.mixture import Mixture
from penstock.store.mirror import Check

try:
    import torch
except ImportError as error:
    raise MissingExtraError("torch", extra="torch", wanted_for="the PyTorch loader") from error

__all__ = [
    "IGNORED_LABEL",
    "RowDataset",
    "RowSampler",
    "RowStream",
    "TorchBatch",
    "TorchLoader",
    "batches_of_rows",
    "num_border_places",
    "sequential_batches",
]

# Rows that are brought together at once where segments don't stay here: as few fetches as a loader's layout takes.
SWEPT_TOKENS = 2**25


@dataclass(frozen=True, kw_only=True)
class TorchBatch:
    """A batch on the device; rows can be sliced off it as micro-batches.

    Attributes:
        tokens: [B, T + 1] int64.
        loss_mask: [B, T] bool, whether the label at this position counts.
        cu_seqlens: [K] int32, where documents begin over the flat B x T positions, padded with B x T.
        host_mask: the loss mask once more, on the host, so that counting targets never waits for the device.
        host_borders: `cu_seqlens` once more, on the host, for the same reason.
        first_row: row of the whole batch at which this slice begins.
    """

    tokens: torch.Tensor
    loss_mask: torch.Tensor
    cu_seqlens: torch.Tensor
    host_mask: npt.NDArray[np.bool_]
    host_borders: npt.NDArray[np.int32]
    first_row: int = 0

    @property
    def inputs(self) -> torch.Tensor:
        """[B, T] int64, a view."""
        return self.tokens[:, :-1]

    @cached_property
    def labels(self) -> torch.Tensor:
        """[B, T] int64, the next tokens, `IGNORED_LABEL` where the label doesn't count."""
        if self.tokens.device.type == "cpu":
            return torch.from_numpy(labels(self.tokens.numpy(), self.host_mask))
        return self.tokens[:, 1:].masked_fill(~self.loss_mask, IGNORED_LABEL)

    @cached_property
    def document_ids(self) -> torch.Tensor:
        """[B, T] int32, equal inside a document; attention stays inside equal numbers.

        A position's number is the count of borders up to it. On a GPU by search, which is deterministic there; on a
        CPU by a running sum, 20 times as fast.
        """
        shape = self.loss_mask.shape
        begin = self.first_row * shape[1]
        if self.tokens.device.type == "cpu":
            borders = self.cu_seqlens.numpy() - begin
            marks = np.zeros(self.loss_mask.numel() + 1, np.int32)
            marks[np.clip(borders, 0, len(marks) - 1)] = 1  # earlier ones on the first place, a border itself
            counted = np.cumsum(marks[:-1], dtype=np.int32) + np.int32((borders < 0).sum())
            return torch.from_numpy(counted).view(shape)
        positions = torch.arange(begin, begin + self.loss_mask.numel(), dtype=torch.int32, device=self.tokens.device)
        return torch.bucketize(positions, self.cu_seqlens, right=True, out_int32=True).view(shape)

    @cached_property
    def borders(self) -> torch.Tensor:
        """[places + 1] int32: where the documents of these rows begin over their own flat positions, then B x T.

        Unlike `cu_seqlens` it has few more places than it needs, for kernels whose time grows with them; there are few
        different numbers of places (see `num_border_places`), since compiled code is made for each.
        """
        total, begin = self.loss_mask.numel(), self.first_row * self.loss_mask.shape[1]
        inside = self.host_borders[(self.host_borders >= begin) & (self.host_borders < begin + total)]
        table = np.full(num_border_places(len(inside), len(self)) + 1, total, np.int32)
        table[: len(inside)] = inside - begin
        borders, device = torch.from_numpy(table), self.tokens.device
        return borders if device.type == "cpu" else borders.pin_memory().to(device, non_blocking=True)

    @cached_property
    def position_ids(self) -> torch.Tensor:
        """[B, T] int64, counted from the begin of each document, or of its part in the row."""
        shape, device = self.loss_mask.shape, self.tokens.device
        begin, size = self.first_row * shape[1], self.loss_mask.numel()
        if device.type == "cpu":
            borders, size_of_rows = self.cu_seqlens.numpy(), (shape[0], shape[1])
            return torch.from_numpy(position_ids(borders, size_of_rows, first_row=self.first_row))
        places = torch.arange(begin, begin + size, dtype=torch.int32, device=device)
        latest_border = self.cu_seqlens[torch.bucketize(places, self.cu_seqlens, right=True) - 1]
        return (places - latest_border).long().view(shape)

    @property
    def num_targets(self) -> int:
        """Labels that count."""
        return int(np.count_nonzero(self.host_mask))

    def __len__(self) -> int:
        return len(self.host_mask)

    def __getitem__(self, rows: slice) -> TorchBatch:
        begin, _, step = rows.indices(len(self))
        if step != 1:  # document numbers count flat positions, so a slice is a run of rows
            raise ValueError(f"rows are sliced off in order, not in steps of {step}")
        return TorchBatch(
            tokens=self.tokens[rows],
            loss_mask=self.loss_mask[rows],
            cu_seqlens=self.cu_seqlens,
            host_mask=self.host_mask[rows],
            host_borders=self.host_borders,
            first_row=self.first_row + begin,
        )


class TorchLoader(WrappedLoader):
    """`Loader` with tensors: an endless iterator of `TorchBatch`.

    Args:
        plan: the rows, of one plan or of a mixture.
        batch_rows: rows per global batch, over all ranks.
        device: where batches go.
        loader_options: seed, shuffle, order, transforms, rank, world_size, prefetch_batches; see `Loader`.
    """

    def __init__(
        self,
        plan: Plan | Mixture,
        *,
        batch_rows: int,
        device: str | torch.device = "cpu",
        **loader_options: Any,
    ) -> None:
        self._device = torch.device(device)
        self._pinned = self._device.type == "cuda"
        self._copies = torch.cuda.Stream(self._device) if self._pinned else None  # type: ignore[no-untyped-call]
        self._copied: torch.cuda.Event | None = None
        allocate = _pinned_empty if self._pinned else np.empty
        options = {"batch_rows": batch_rows, "allocate": allocate, **loader_options}
        self._loader = MixedLoader(plan, **options) if isinstance(plan, Mixture) else Loader(plan, **options)

    def wait(self, seconds: float) -> bool:
        """See `Loader.wait`."""
        self._end_copy()
        return super().wait(seconds)

    def _end_copy(self) -> None:
        # Asking for a batch gives up the buffer of the one before, so its copy must have ended; it has a stream of its
        # own and waits for no computation.
        if self._copied is not None:
            self._copied.synchronize()

    def __next__(self) -> TorchBatch:
        if self._copies is None:
            return on_device(next(self._loader), self._device)
        self._end_copy()
        with torch.cuda.stream(self._copies):
            batch = on_device(next(self._loader), self._device)
            self._copied = self._copies.record_event()
        current = torch.cuda.current_stream(self._device)
        current.wait_event(self._copied)
        for tensor in (batch.tokens, batch.loss_mask, batch.cu_seqlens):
            tensor.record_stream(current)  # its memory was taken in the other stream and is used in this one
        return batch


def sequential_batches(
    plan: Plan, *, batch_rows: int, device: str | torch.device = "cpu", limit_rows: int | None = None
) -> Iterator[TorchBatch]:
    """Every row of a plan once, in order, for evaluation; the last batch may be short."""
    end = plan.num_rows if limit_rows is None else min(plan.num_rows, limit_rows)
    return batches_of_rows(plan, np.arange(end), batch_rows=batch_rows, device=device)


def batches_of_rows(
    plan: Plan,
    rows: npt.NDArray[np.int64],
    *,
    batch_rows: int,
    device: str | torch.device = "cpu",
    is_cancelled: Check = lambda: False,
) -> Iterator[TorchBatch]:
    """These rows of a plan, in this order; the last batch may be short.

    While segments of a remote store come that the cache can't hold, `is_cancelled` is asked several times a second; if
    so, the next batch raises `Cancelled`. Each of these segments is fetched once for `SWEPT_TOKENS` of rows.
    """
    if batch_rows < 1:
        raise ConfigError(f"a batch of {batch_rows} rows is impossible", hint="choose 1 row or more")
    if not len(rows):
        return
    batch_rows = min(batch_rows, len(rows))
    gatherer = Gatherer(plan, is_cancelled=is_cancelled)
    at_once = 1 if gatherer.sweeper is None else max(1, SWEPT_TOKENS // (batch_rows * plan.seq_len))
    buffer = gatherer.new_buffer(num_batches=1, batch_rows=batch_rows)
    # The last row again where the last batch is short, so that its rows are laid out with those before; then cut off.
    table = np.append(rows, np.repeat(rows[-1], -len(rows) % batch_rows)).reshape(-1, batch_rows)
    for first in range(0, len(table), at_once):
        layout = gatherer.lay_out(table[first : first + at_once])
        for number, own in enumerate(layout.rows):
            gatherer.fill_from(layout, number, number + 1, buffer)
            position = (first + number) * batch_rows
            batch = Batch(buffer.tokens[0], buffer.loss_mask[0], buffer.cu_seqlens[0], own, position)
            yield on_device(batch, torch.device(device))[: len(rows) - position]


def on_device(batch: Batch, device: torch.device) -> TorchBatch:
    """Sends the wire format and widens the tokens where they arrive. Nothing in the result refers to the buffer."""
    host_mask, host_borders = batch.loss_mask.copy(), batch.cu_seqlens.copy()
    if device.type == "cpu":
        # numpy widens on this thread; PyTorch would wake its thread pool for a copy of a few microseconds.
        tokens = recycled_empty(batch.tokens.shape, np.int64)
        tokens[:] = batch.tokens
        return TorchBatch(
            tokens=torch.from_numpy(tokens),
            loss_mask=torch.from_numpy(host_mask),
            cu_seqlens=torch.from_numpy(host_borders),
            host_mask=host_mask,
            host_borders=host_borders,
        )
    return TorchBatch(
        tokens=torch.from_numpy(batch.tokens).to(device, non_blocking=True).long(),
        loss_mask=torch.from_numpy(batch.loss_mask).to(device, non_blocking=True),
        cu_seqlens=torch.from_numpy(batch.cu_seqlens).to(device, non_blocking=True),
        host_mask=host_mask,
        host_borders=host_borders,
    )


def num_border_places(num_documents: int, num_rows: int) -> int:
    """Places for the borders of so many documents: a power of two, and two for each row or more."""
    return 1 << (max(num_documents, 2 * num_rows) - 1).bit_length()


def _pinned_empty(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    array: npt.NDArray[Any] = torch.empty(shape, dtype=_torch_dtype(dtype), pin_memory=True).numpy()
    return array


def _torch_dtype(dtype: np.dtype[Any]) -> torch.dtype:
    return torch.from_numpy(np.empty(0, dtype)).dtype
