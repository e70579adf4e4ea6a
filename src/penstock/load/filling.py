"""Rows of a plan, in an order, through transforms, into a buffer: what every reader of a stream shares.

In: positions or row numbers. Out: batches in wire format (see `gather`). What stands at a position follows from plan,
order, transforms and seed, which are the filler's identity; who reads, with how many workers and in which framework,
is no part of it.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.load.gather import Allocate, Batch, Gatherer, Layout, StretchBuffer
from penstock.load.order import InBlocks, Order, Sequential, Shuffled, refuse_seed
from penstock.load.state import check_identity_size
from penstock.load.sweeping import SweepingCopier
from penstock.load.transforms import Transform, row_keys
from penstock.pack import Plan

__all__ = ["Filler"]

Integers = npt.NDArray[np.int64]


class Filler:
    """Fills buffers with rows of one stream. A buffer belongs to one thread; fillers may be shared, and transforms are
    asked by one thread at a time.

    Args:
        plan: the rows.
        seed: of the shuffled order and of the transforms.
        shuffle: False for the plan's own order.
        order: an order of its own, in place of `shuffle`.
        transforms: applied to every batch, in this order.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        transforms: Sequence[Transform] = (),
    ) -> None:
        if order is not None and order.num_rows != plan.num_rows:
            raise ConfigError(
                f"the order is one of {order.num_rows} rows, the plan has {plan.num_rows}",
                hint="make the order for this plan",
            )
        refuse_seed(seed)  # also of transforms alone
        computed = Shuffled(num_rows=plan.num_rows, seed=seed) if shuffle else Sequential(num_rows=plan.num_rows)
        self.plan, self.seed = plan, seed
        self.order: Order = InBlocks(computed if order is None else order)
        self.transforms = tuple(transforms)
        self.identity = {**plan.identity, "seed": seed}
        self.identity |= {"shuffle": shuffle} if order is None else {"order": order.identity}
        if self.transforms:
            self.identity["transforms"] = [transform.identity for transform in self.transforms]
        check_identity_size(self.identity)
        self._gatherer = Gatherer(plan)
        self._transforming = threading.Lock()
        if self.sweeper is None:
            plan.store.expect(plan.documents)
        self._more_borders = sum(transform.extra_borders_per_row for transform in self.transforms)

    @property
    def sweeper(self) -> SweepingCopier | None:
        """See `Gatherer`."""
        return self._gatherer.sweeper

    def new_buffer(self, *, num_batches: int, batch_rows: int, allocate: Allocate = np.empty) -> StretchBuffer:
        """A buffer for stretches of up to `num_batches`."""
        buffer = self._gatherer.new_buffer(num_batches=num_batches, batch_rows=batch_rows, allocate=allocate)
        if self._more_borders:
            borders = buffer.cu_seqlens.shape[1] + batch_rows * self._more_borders
            buffer.cu_seqlens = allocate((num_batches, borders), np.dtype(np.int32))
        return buffer

    def fill(self, rows: Integers, passes: Integers, buffer: StretchBuffer, *, position: int, step: int) -> list[Batch]:
        """Batches of `rows`, [batches, rows per batch], in these passes; batch i is at position + i * step."""
        return self.fill_from(self.lay_out(rows), passes, buffer, first=0, position=position, step=step)

    def lay_out(self, rows: Integers) -> Layout:
        """Works out many batches of `rows` at once, for `fill_from` to fill a few at a time."""
        return self._gatherer.lay_out(rows)

    def fill_from(
        self, layout: Layout, passes: Integers, buffer: StretchBuffer, *, first: int, position: int, step: int
    ) -> list[Batch]:
        """As many batches as `passes` has, from batch `first` of a layout on."""
        count, width = len(passes), buffer.cu_seqlens.shape[1]
        rows = layout.rows[first : first + count]
        gathered = buffer
        if self._more_borders:
            # The gatherer fills what it would have allocated; the room behind it is the transforms'.
            width -= rows.shape[1] * self._more_borders
            buffer.cu_seqlens[:count, width:] = rows.shape[1] * self.plan.seq_len
            gathered = replace(buffer, cu_seqlens=buffer.cu_seqlens[:, :width])
        self._gatherer.fill_from(layout, first, first + count, gathered)
        buffer.tokens = gathered.tokens
        parts = zip(buffer.tokens[:count], buffer.loss_mask[:count], buffer.cu_seqlens[:count], rows, strict=True)
        batches = [Batch(*arrays, position + number * step) for number, arrays in enumerate(parts)]
        if self.transforms:
            with self._transforming:
                self._transform(batches, passes)
        return batches

    def _transform(self, batches: list[Batch], passes: Integers) -> None:
        for place, transform in enumerate(self.transforms):
            for batch, own_passes in zip(batches, passes, strict=True):
                transform(batch, row_keys(self.seed, batch.rows, own_passes, salt=place))

    def read(self, rows: Integers, passes: Integers, *, position: int = 0) -> Batch:
        """One batch of some rows in memory of its own."""
        buffer = self.new_buffer(num_batches=1, batch_rows=len(rows))
        return self.fill(rows[None], passes[None], buffer, position=position, step=0)[0]

    def at(self, start: int, count: int) -> tuple[Integers, Integers]:
        """The rows at positions start .. start + count, and the pass of each."""
        passes = np.arange(start, start + count) // self.order.num_rows
        return self.order.rows_at(start, count), passes
