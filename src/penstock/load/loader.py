"""An endless stream of batches from a plan, in a computed order, filled ahead by a thread.

Batch k of a global size B holds positions k * B .. (k + 1) * B, whatever the world size; rank r takes the r-th share of
it. The saved state is the position in rows and the identity of what it is a position in: under 1 KB, restored in
constant time, good for any world size, worker count and batch size. Worker processes and shared memory are not needed:
filling a batch takes less than a training step spends waiting for a lock.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from penstock.errors import ConfigError
from penstock.load.filling import Filler
from penstock.load.gather import Allocate, Batch, StretchBuffer
from penstock.load.order import Order
from penstock.load.state import position_in, saved_state
from penstock.load.transforms import Transform
from penstock.pack import Plan

__all__ = ["Loader"]

# Tokens filled at once where nothing else is asked: enough to spread the cost per call, little enough for the caches.
STRETCH_TOKENS = 2**20
MOST_BATCHES_IN_A_STRETCH = 64


class Loader:
    """Iterate it for `Batch` after `Batch`, for ever; save and restore it with `state_dict` and `load_state_dict`.

    Args:
        plan: the rows.
        batch_rows: rows per global batch, over all ranks.
        seed: of the order and the transforms.
        shuffle: False for the plan's own order.
        order: another order, in place of `shuffle`; see `penstock.load.order`.
        transforms: applied to each batch as it is filled; see `penstock.load.transforms`.
        rank: which share of each global batch this loader gives.
        world_size: number of shares; must divide `batch_rows`.
        prefetch_batches: batches filled ahead by a thread, in two stretches; None for two stretches of about a million
            tokens; 0 fills a stretch on demand in the caller's thread.
        allocate: makes buffer memory (pinned memory, for instance).
    """

    def __init__(
        self,
        plan: Plan,
        *,
        batch_rows: int,
        seed: int = 0,
        shuffle: bool = True,
        order: Order | None = None,
        transforms: Sequence[Transform] = (),
        rank: int = 0,
        world_size: int = 1,
        prefetch_batches: int | None = None,
        allocate: Allocate = np.empty,
    ) -> None:
        if batch_rows < 1 or world_size < 1 or batch_rows % world_size or not 0 <= rank < world_size:
            raise ConfigError(
                f"a global batch of {batch_rows} rows can't be shared by {world_size} ranks (this is rank {rank})",
                hint="choose a batch size that the number of ranks divides",
            )
        if prefetch_batches is not None and prefetch_batches < 0:
            raise ConfigError(
                f"{prefetch_batches} batches can't be filled ahead", hint="choose 0 (fill on demand) or a few batches"
            )
        self.plan = plan
        self.batch_rows = batch_rows
        self.position = 0
        self._stream = self._new_stream(plan, seed=seed, shuffle=shuffle, order=order, transforms=transforms)
        share = slice(rank * (batch_rows // world_size), (rank + 1) * (batch_rows // world_size))
        self._filler = _Batches(self._stream, batch_rows=batch_rows, share=share)
        stretch = self._filler.stretch_batches(prefetch_batches)
        num_buffers = 1 if prefetch_batches == 0 else 2
        self._buffers = [self._filler.new_buffer(stretch, allocate) for _ in range(num_buffers)]
        self._producer: _Producer | None = None
        self._ready: Iterator[Batch] = iter(())
        self._next_stretch = 1

    def _new_stream(
        self, plan: Plan, *, seed: int, shuffle: bool, order: Order | None, transforms: Sequence[Transform]
    ) -> Filler:
        return Filler(plan, seed=seed, shuffle=shuffle, order=order, transforms=transforms)

    @property
    def identity(self) -> dict[str, Any]:
        """What a position of this loader is a position in."""
        return self._stream.identity

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches given out so far; those filled ahead don't count."""
        return saved_state(self.position, self.identity)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
            ResumeError: the state belongs to another store, plan, order or transform; both sides are shown.
        """
        position = position_in(state, self.identity)
        self._stop()
        self.position = position

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        if len(self._buffers) > 1:
            if self._producer is None:
                self._producer = _Producer(self._filler, self._buffers, self.position)
                weakref.finalize(self, self._producer.stop)  # a loader that is dropped takes its thread along
            batch = self._producer.next_batch()
        else:
            batch = self._filled_on_demand()
        self.position += self.batch_rows
        return batch

    def _filled_on_demand(self) -> Batch:
        batch = next(self._ready, None)
        if batch is not None:
            return batch
        batches, error = self._filler.fill(self.position, self._next_stretch, self._buffers[0])
        if not batches and error is not None:
            raise error
        self._ready = iter(batches)
        self._next_stretch = _longer(self._next_stretch, self._buffers[0])
        return next(self._ready)

    def _stop(self) -> None:
        if self._producer is not None:
            self._producer.stop()
            self._producer = None
        self._ready = iter(())

    def close(self) -> None:
        """Ends the thread; the loader can still be used and will start another."""
        self._stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class _Batches:
    """This rank's batches at a position. Used by one thread at a time."""

    def __init__(self, filler: Filler, *, batch_rows: int, share: slice) -> None:
        self._filler = filler
        self._share = share
        self.batch_rows = batch_rows
        self.own_rows: int = share.stop - share.start

    def stretch_batches(self, prefetch_batches: int | None) -> int:
        """Batches per stretch: half of what is to be filled ahead, or by rule."""
        if prefetch_batches:
            return -(-prefetch_batches // 2)
        fitting = STRETCH_TOKENS // (self.own_rows * self._filler.plan.seq_len)
        return min(max(fitting, 1), MOST_BATCHES_IN_A_STRETCH)

    def new_buffer(self, num_batches: int, allocate: Allocate) -> StretchBuffer:
        """Memory for a stretch."""
        return self._filler.new_buffer(num_batches=num_batches, batch_rows=self.own_rows, allocate=allocate)

    def fill(self, position: int, count: int, buffer: StretchBuffer) -> tuple[list[Batch], BaseException | None]:
        """Up to `count` batches from a position on; fewer, and the error, where one can't be filled."""
        try:
            return self._filled(position, count, buffer), None
        except Exception as error:  # noqa: BLE001  handed to the caller, who raises it where it belongs
            if count == 1:
                return [], error
        # The batches before the bad one are good: find it one by one.
        good = 0
        while good < count:
            batches, failure = self.fill(position + good * self.batch_rows, 1, buffer)
            if not batches:
                return self._filled(position, good, buffer) if good else [], failure
            good += 1
        return self._filled(position, count, buffer), None

    def _filled(self, position: int, count: int, buffer: StretchBuffer) -> list[Batch]:
        rows, passes = (
            values.reshape(count, self.batch_rows)[:, self._share]
            for values in self._filler.at(position, count * self.batch_rows)
        )
        return self._filler.fill(rows, passes, buffer, position=position, step=self.batch_rows)


def _longer(stretch: int, buffer: StretchBuffer) -> int:
    """The first stretch is one batch, so that it comes at once; each later one is longer, up to the buffer's size."""
    return min(4 * stretch, len(buffer.tokens))


class _Producer:
    """The thread that fills stretches ahead of the consumer. An error in it is raised where the batch is asked for.

    Two buffers go back and forth: while the consumer uses one, the other is filled. A hand-over costs two thread
    switches, some 50 µs, more than filling a batch; a stretch shares one.
    """

    def __init__(self, filler: _Batches, buffers: list[StretchBuffer], position: int) -> None:
        self._free: queue.SimpleQueue[StretchBuffer | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[list[Batch], StretchBuffer] | BaseException] = queue.SimpleQueue()
        for buffer in buffers:
            self._free.put(buffer)
        self._batches: Iterator[Batch] = iter(())
        self._lent: StretchBuffer | None = None
        self._failure: BaseException | None = None
        # The thread knows the queues and the filler, not the loader: a loader nobody holds can be collected.
        self._thread = threading.Thread(
            target=_produce, args=(filler, position, self._free, self._ready), name="penstock-load", daemon=True
        )
        self._thread.start()

    def next_batch(self) -> Batch:
        """The next batch; asking for it gives up the one before."""
        batch = next(self._batches, None)
        if batch is not None:
            return batch
        if self._failure is not None:
            raise self._failure
        if self._lent is not None:
            self._free.put(self._lent)
            self._lent = None
        item = self._ready.get()
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        batches, self._lent = item
        self._batches = iter(batches)
        return next(self._batches)

    def stop(self) -> None:
        """Ends the thread and waits for it."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait()
        self._free.put(None)
        self._thread.join()


def _produce(
    filler: _Batches,
    position: int,
    free: queue.SimpleQueue[StretchBuffer | None],
    ready: queue.SimpleQueue[tuple[list[Batch], StretchBuffer] | BaseException],
) -> None:
    stretch = 1
    while (buffer := free.get()) is not None:
        batches, error = filler.fill(position, stretch, buffer)
        if batches:
            ready.put((batches, buffer))
        if error is not None:
            ready.put(error)
            return
        position += stretch * filler.batch_rows
        stretch = _longer(stretch, buffer)
