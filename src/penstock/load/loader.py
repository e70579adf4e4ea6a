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
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import ConfigError, ResumeError
from penstock.hashing import digest_of
from penstock.load.gather import Allocate, Batch, Gatherer, StretchBuffer
from penstock.load.order import rows_at
from penstock.pack import Plan

__all__ = ["Loader"]

STATE_FORMAT = 1
# Tokens filled at once where nothing else is asked: enough to spread the cost per call, little enough for the caches.
STRETCH_TOKENS = 2**20
MOST_BATCHES_IN_A_STRETCH = 64


class Loader:
    """Iterate it for `Batch` after `Batch`, for ever; save and restore it with `state_dict` and `load_state_dict`.

    Args:
        plan: the rows.
        batch_rows: rows per global batch, over all ranks.
        seed: of the order.
        shuffle: False for the plan's own order.
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
        self._seed = seed
        self._shuffle = shuffle
        share = slice(rank * (batch_rows // world_size), (rank + 1) * (batch_rows // world_size))
        self._filler = _Filler(plan, batch_rows=batch_rows, share=share, seed=seed, shuffle=shuffle)
        stretch = self._filler.stretch_batches(prefetch_batches)
        num_buffers = 1 if prefetch_batches == 0 else 2
        self._buffers = [self._filler.new_buffer(stretch, allocate) for _ in range(num_buffers)]
        self._producer: _Producer | None = None
        self._ready: Iterator[Batch] = iter(())
        self._next_stretch = 1

    @property
    def identity(self) -> dict[str, Any]:
        """What a position of this loader is a position in."""
        return {**self.plan.identity, "seed": self._seed, "shuffle": self._shuffle}

    def state_dict(self) -> dict[str, Any]:
        """The position after the batches given out so far; those filled ahead don't count."""
        return {"format": STATE_FORMAT, "position": self.position, "identity": self.identity}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
            ResumeError: the state belongs to another store, plan or order; both sides are shown.
        """
        position, saved = _checked_state(state)
        own = self.identity
        if saved != own:
            differing = [name for name in {**own, **saved} if saved.get(name) != own.get(name)]
            shown = "; ".join(f"{name}: saved {saved.get(name)!r}, here {own.get(name)!r}" for name in differing)
            raise ResumeError(
                f"the state {digest_of(saved)[:12]} doesn't fit this loader {digest_of(own)[:12]}: {shown}",
                hint="open the same store version with the same row length, split and seed, or start afresh",
            )
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


def _checked_state(state: Any) -> tuple[int, dict[str, Any]]:
    """Position and identity of a saved state; a checkpoint is input, so its shape is looked at first."""
    fields = state if isinstance(state, dict) else {}
    position, identity = fields.get("position"), fields.get("identity")
    if (
        fields.get("format") != STATE_FORMAT
        or not isinstance(identity, dict)
        or not isinstance(position, int)
        or isinstance(position, bool)
        or position < 0
    ):
        raise ResumeError("this isn't the saved state of a loader", hint="pass what `state_dict()` returned")
    return position, identity


class _Filler:
    """Batches at a position: order, share and gathering in one place. Used by one thread at a time."""

    def __init__(self, plan: Plan, *, batch_rows: int, share: slice, seed: int, shuffle: bool) -> None:
        self._plan = plan
        self._gatherer = Gatherer(plan)
        self._share = share
        self._seed, self._shuffle = seed, shuffle
        self.batch_rows = batch_rows
        self.own_rows: int = share.stop - share.start

    def stretch_batches(self, prefetch_batches: int | None) -> int:
        """Batches per stretch: half of what is to be filled ahead, or by rule."""
        if prefetch_batches:
            return -(-prefetch_batches // 2)
        fitting = STRETCH_TOKENS // (self.own_rows * self._plan.seq_len)
        return min(max(fitting, 1), MOST_BATCHES_IN_A_STRETCH)

    def new_buffer(self, num_batches: int, allocate: Allocate) -> StretchBuffer:
        """Memory for a stretch."""
        return self._gatherer.new_buffer(num_batches=num_batches, batch_rows=self.own_rows, allocate=allocate)

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
        rows = rows_at(
            position, count * self.batch_rows, num_rows=self._plan.num_rows, seed=self._seed, shuffle=self._shuffle
        )
        own = rows.reshape(count, self.batch_rows)[:, self._share]
        self._gatherer.fill(own, buffer)
        parts = zip(buffer.tokens[:count], buffer.loss_mask[:count], buffer.cu_seqlens[:count], own, strict=True)
        return [Batch(*arrays, position + number * self.batch_rows) for number, arrays in enumerate(parts)]


def _longer(stretch: int, buffer: StretchBuffer) -> int:
    """The first stretch is one batch, so that it comes at once; each later one is longer, up to the buffer's size."""
    return min(4 * stretch, len(buffer.tokens))


class _Producer:
    """The thread that fills stretches ahead of the consumer. An error in it is raised where the batch is asked for.

    Two buffers go back and forth: while the consumer uses one, the other is filled. A hand-over costs two thread
    switches, some 50 µs, more than filling a batch; a stretch shares one.
    """

    def __init__(self, filler: _Filler, buffers: list[StretchBuffer], position: int) -> None:
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
    filler: _Filler,
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
