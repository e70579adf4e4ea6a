"""An endless stream of batches from a plan, in a computed order, filled ahead by a thread.

Batch k of a global size B holds positions k * B .. (k + 1) * B, whatever the world size; rank r takes the r-th share of
it. The saved state is the position in rows and the identity of what it is a position in: under 1 KB, restored in
constant time, good for any world size, worker count and batch size. Worker processes and shared memory are not needed:
filling a batch takes less than a training step spends waiting for a lock.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np

from penstock.errors import ConfigError, ResumeError
from penstock.hashing import digest_of
from penstock.load.gather import Allocate, Batch, BatchBuffer, Gatherer, RowBlock
from penstock.load.order import rows_at
from penstock.pack import Plan

__all__ = ["Loader"]

STATE_FORMAT = 1
# Rows whose order and places are computed at once: enough to spread numpy's cost per call.
BLOCK_ROWS = 4096


class Loader:
    """Iterate it for `Batch` after `Batch`, for ever; save and restore it with `state_dict` and `load_state_dict`.

    Args:
        plan: the rows.
        batch_rows: rows per global batch, over all ranks.
        seed: of the order.
        shuffle: False for the plan's own order.
        rank: which share of each global batch this loader gives.
        world_size: number of shares; must divide `batch_rows`.
        prefetch_batches: batches filled ahead by a thread, handed over in two halves; 0 fills on demand in the
            caller's thread.
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
        prefetch_batches: int = 8,
        allocate: Allocate = np.empty,
    ) -> None:
        if batch_rows < 1 or world_size < 1 or batch_rows % world_size or not 0 <= rank < world_size:
            raise ConfigError(
                f"a global batch of {batch_rows} rows can't be shared by {world_size} ranks (this is rank {rank})",
                hint="choose a batch size that the number of ranks divides",
            )
        if prefetch_batches < 0:
            raise ConfigError(
                f"{prefetch_batches} batches can't be filled ahead", hint="choose 0 (fill on demand) or a few batches"
            )
        self.plan = plan
        self.batch_rows = batch_rows
        self.position = 0
        self._seed = seed
        self._shuffle = shuffle
        self._share = slice(rank * (batch_rows // world_size), (rank + 1) * (batch_rows // world_size))
        self._gatherer = Gatherer(plan)
        self._block: tuple[int, RowBlock] | None = None
        rows = batch_rows // world_size
        self._buffers = [
            self._gatherer.new_buffer(rows, allocate) for _ in range(prefetch_batches + prefetch_batches % 2 or 1)
        ]
        self._prefetch = prefetch_batches > 0
        self._producer: _Producer | None = None

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
        if self._prefetch:
            if self._producer is None:
                self._producer = _Producer(self, self._buffers)
            batch = self._producer.next_batch()
        else:
            batch = self._fill(self.position, self._buffers[0])
        self.position += self.batch_rows
        return batch

    def _fill(self, position: int, buffer: BatchBuffer) -> Batch:
        start, block = self._block_at(position)
        rows = self._share.stop - self._share.start
        begin = (position - start) // self.batch_rows * rows
        self._gatherer.fill(block, begin, begin + rows, buffer)
        return Batch(buffer.tokens, buffer.loss_mask, buffer.cu_seqlens, block.rows[begin : begin + rows], position)

    def _block_at(self, position: int) -> tuple[int, RowBlock]:
        """This rank's rows of the next few hundred batches, with the position of the first."""
        if self._block is not None:
            start, block = self._block
            ahead = (position - start) // self.batch_rows * (self._share.stop - self._share.start)
            if start <= position and ahead < len(block.rows) and (position - start) % self.batch_rows == 0:
                return start, block
        batches = max(BLOCK_ROWS // self.batch_rows, 1)
        rows = rows_at(
            position,
            batches * self.batch_rows,
            num_rows=self.plan.num_rows,
            seed=self._seed,
            shuffle=self._shuffle,
        )
        own = rows.reshape(batches, self.batch_rows)[:, self._share].reshape(-1)
        self._block = position, self._gatherer.block(own)
        return self._block

    def _stop(self) -> None:
        if self._producer is not None:
            self._producer.stop()
            self._producer = None

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


class _Producer:
    """The thread that fills buffers ahead of the consumer. An error in it is raised where the batch is asked for.

    Buffers go back and forth in two halves: while the consumer uses one half, the other is filled. A hand-over costs
    two thread switches, some 50 µs, as much as filling a batch, so several batches share one.
    """

    def __init__(self, loader: Loader, buffers: list[BatchBuffer]) -> None:
        self._free: queue.SimpleQueue[list[BatchBuffer] | None] = queue.SimpleQueue()
        self._ready: queue.SimpleQueue[tuple[list[Batch], list[BatchBuffer]] | BaseException] = queue.SimpleQueue()
        half = len(buffers) // 2
        self._free.put(buffers[:half])
        self._free.put(buffers[half:])
        self._batches: Iterator[Batch] = iter(())
        self._lent: list[BatchBuffer] | None = None
        self._failure: BaseException | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._run, args=(loader,), name="penstock-load", daemon=True)
        self._thread.start()

    def _run(self, loader: Loader) -> None:
        position = loader.position
        batches: list[Batch] = []
        buffers: list[BatchBuffer] | None = None
        try:
            while (buffers := self._free.get()) is not None and not self._stopping:
                batches = []
                for buffer in buffers:
                    batches.append(loader._fill(position, buffer))
                    position += loader.batch_rows
                self._ready.put((batches, buffers))
        except BaseException as error:  # noqa: BLE001  handed to the consumer, who raises it
            if buffers and batches:  # good batches before the bad one are given out first, as without a thread
                self._ready.put((batches, buffers))
            self._ready.put(error)

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
        self._stopping = True
        self._free.put(None)
        self._thread.join()
