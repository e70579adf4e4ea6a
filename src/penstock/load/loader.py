"""An endless stream of batches from a plan, in a computed order, filled ahead by threads.

Batch k of a global size B holds positions k * B .. (k + 1) * B, whatever the world size; rank r takes the r-th share of
it. The saved state is the position in rows and the identity of what it is a position in: under 1 KB, restored in
constant time, good for any world size, worker count and batch size. Worker processes and shared memory are not needed:
filling a batch takes less than a training step spends waiting for a lock, and most of it without Python's.

Where the segments of remote stores don't fit into the local cache, what is worked out ahead are the tokens themselves
(see `sweeping`), and the next of it is begun as soon as the one before is there.

Memory: the buffers, one more than there are threads, and what is worked out ahead.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, DamagedStoreError, DiskError, StoreError
from penstock.hardware import available_cores
from penstock.load.filling import Filler
from penstock.load.gather import Allocate, Batch, Layout, StretchBuffer
from penstock.load.order import Order
from penstock.load.state import position_in, saved_state
from penstock.load.transforms import Transform
from penstock.pack import Plan
from penstock.pack.mixture import Mixture
from penstock.store.mirror import Cancelled

__all__ = ["Loader"]

# Tokens filled at once where nothing else is asked: enough to spread the cost per call, little enough for the caches;
# more where threads fill, because handing a stretch over costs them some 50 µs besides.
STRETCH_TOKENS = 2**20
STRETCH_TOKENS_AHEAD = 2**22
MOST_BATCHES_IN_A_STRETCH = 256
# Worked out at once, some stretches of them: numpy's calls cost as much for a thousand rows. Of long rows fewer,
# because what is worked out grows with the documents in them.
LAID_OUT_ROWS = 2**15
LAID_OUT_TOKENS = 2**25
# When so many stretches are left of what is worked out, more of it is, while other threads fill those.
STRETCHES_LEFT = 3
# More threads would wait for Python's lock, or for memory.
MOST_THREADS = 4


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
        prefetch_batches: batches that the buffers hold together, those in use and those filled ahead; None for
            stretches of about four million tokens, one for each thread and one in use; 0 fills a stretch of a million
            on demand in the caller's thread.
        fill_threads: threads that fill ahead, a stretch each; None for one per core, at most four. Fewer where
            `prefetch_batches` leaves them nothing to fill. Changes nothing about the batches.
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
        fill_threads: int | None = None,
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
        if fill_threads is not None and fill_threads < 1:
            raise ConfigError(
                f"{fill_threads} threads can't fill batches",
                hint="choose 1 or more, or prefetch_batches=0 to fill on demand",
            )
        self.plan = plan
        self.batch_rows = batch_rows
        self.position = 0
        self._stream = self._new_stream(plan, seed=seed, shuffle=shuffle, order=order, transforms=transforms)
        share = slice(rank * (batch_rows // world_size), (rank + 1) * (batch_rows // world_size))
        self._filler = _Batches(self._stream, batch_rows=batch_rows, share=share)
        num_buffers = _num_buffers(prefetch_batches, fill_threads)
        stretch = self._filler.stretch_batches(prefetch_batches, num_buffers)
        self._buffers = [self._filler.new_buffer(stretch, allocate) for _ in range(num_buffers)]
        self._producer: _Producer | None = None
        self._end_producer: weakref.finalize[[], Loader] | None = None
        self._process: int | None = None  # in which threads fill, or were when it was forked
        self._ready: Iterator[Batch] = iter(())
        self._ahead: _Stretches | None = None

    def _new_stream(
        self, plan: Plan, *, seed: int, shuffle: bool, order: Order | None, transforms: Sequence[Transform]
    ) -> Filler:
        if isinstance(plan, Mixture):
            raise ConfigError(
                "a Loader reads one plan, this is a mixture",
                hint="use MixedLoader of penstock.load.mixed, with the same arguments",
            )
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
        producer = self._started_producer()
        try:
            batch = self._filled_on_demand() if producer is None else producer.next_batch()
        except Exception:
            self._stop()  # what can't be filled is tried again when it is asked for again
            raise
        self.position += self.batch_rows
        return batch

    def wait(self, seconds: float) -> bool:
        """Waits for the next batch, no longer than that; gives up the one before. True where asking for it, or for the
        error in its place, won't wait for threads any more."""
        producer = self._started_producer()
        return producer is None or producer.wait(seconds)

    def _started_producer(self) -> _Producer | None:
        """What fills ahead; None where batches are filled on demand."""
        if len(self._buffers) == 1:
            return None
        if self._process != os.getpid():
            self._refuse_fork()
        if self._producer is None:
            self._producer = _Producer(self._filler, self._buffers, self.position)
            # A loader that is dropped takes its threads along.
            self._end_producer = weakref.finalize(self, self._producer.stop)
        return self._producer

    def _refuse_fork(self) -> None:
        """A fork takes none of the threads along, but whatever they had locked."""
        if self._process is not None:
            raise ConfigError(
                "this loader was reading in the process from which this one was forked",
                hint="make a loader in the process that reads it, with `load_state_dict` of this one's state",
            )
        self._process = os.getpid()

    def _filled_on_demand(self) -> Batch:
        batch = next(self._ready, None)
        if batch is not None:
            return batch
        if self._ahead is None:
            self._ahead = _Stretches(self._filler, self.position, len(self._buffers[0].loss_mask))
        batches, error = self._filler.fill(self._ahead.take(), self._buffers[0])
        if error is not None:
            self._ahead = None
            if not batches:
                raise error
        self._ready = iter(batches)
        return next(self._ready)

    def _stop(self) -> None:
        if self._producer is not None and self._end_producer is not None:
            self._end_producer()  # and holds it no longer, with what it had worked out
            self._producer = self._end_producer = None
            if self._process == os.getpid():
                self._process = None
        self._ready = iter(())
        self._ahead = None

    def close(self) -> None:
        """Ends the threads; the loader can still be used and will start others."""
        self._stop()

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _num_buffers(prefetch_batches: int | None, fill_threads: int | None) -> int:
    """One in use, and one for each thread that fills; a single one to fill on demand."""
    if prefetch_batches == 0:
        return 1
    threads = min(available_cores(), MOST_THREADS) if fill_threads is None else fill_threads
    return 1 + (threads if prefetch_batches is None else max(1, min(threads, prefetch_batches - 1)))


class _Batches:
    """This rank's batches at a position. Threads may share it, each with a buffer of its own."""

    def __init__(self, filler: Filler, *, batch_rows: int, share: slice) -> None:
        self._filler = filler
        self._share = share
        self.sweeper = filler.sweeper
        self.batch_rows = batch_rows
        self.own_rows: int = share.stop - share.start
        self.own_tokens: int = self.own_rows * filler.plan.seq_len

    def stretch_batches(self, prefetch_batches: int | None, num_buffers: int) -> int:
        """Batches per stretch: a buffer's part of what all of them are to hold, or by rule."""
        if prefetch_batches:
            return -(-prefetch_batches // num_buffers)
        fitting = (STRETCH_TOKENS if num_buffers == 1 else STRETCH_TOKENS_AHEAD) // self.own_tokens
        return min(max(fitting, 1), MOST_BATCHES_IN_A_STRETCH)

    def new_buffer(self, num_batches: int, allocate: Allocate) -> StretchBuffer:
        """Memory for a stretch."""
        return self._filler.new_buffer(num_batches=num_batches, batch_rows=self.own_rows, allocate=allocate)

    def lay_out(self, position: int, count: int) -> _LaidOut:
        """Works out `count` batches from a position on."""
        rows, passes = (
            values.reshape(count, self.batch_rows)[:, self._share]
            for values in self._filler.at(position, count * self.batch_rows)
        )
        return _LaidOut(position=position, passes=passes, layout=self._filler.lay_out(rows))

    def fill(self, stretch: _Stretch, buffer: StretchBuffer) -> tuple[list[Batch], BaseException | None]:
        """The batches of a stretch; fewer, and the error, where one can't be filled."""
        position, count = stretch.position, stretch.count
        if stretch.failure is not None and _is_of_all(stretch.failure):
            return [], stretch.failure
        try:
            return self._filled(stretch, buffer), None
        except Exception as error:  # noqa: BLE001  handed to the caller, who raises it where it belongs
            if count == 1 or _is_of_all(error):
                return [], error
        # The batches before the bad one are good: find it one by one.
        good = 0
        while good < count:
            batches, failure = self.fill(_Stretch(position=position + good * self.batch_rows, count=1), buffer)
            if not batches:
                return self._filled(_Stretch(position=position, count=good), buffer) if good else [], failure
            good += 1
        return self._filled(_Stretch(position=position, count=count), buffer), None

    def _filled(self, stretch: _Stretch, buffer: StretchBuffer) -> list[Batch]:
        laid_out = stretch.laid_out or self.lay_out(stretch.position, stretch.count)
        first = (stretch.position - laid_out.position) // self.batch_rows
        passes = laid_out.passes[first : first + stretch.count]
        return self._filler.fill_from(
            laid_out.layout, passes, buffer, first=first, position=stretch.position, step=self.batch_rows
        )


def _is_of_all(error: BaseException) -> bool:
    """Whether an error is no single batch's: a server that doesn't answer, a full disk. Each further try takes as long
    as the first, minutes perhaps."""
    return isinstance(error, StoreError | DiskError | Cancelled) and not isinstance(error, DamagedStoreError)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LaidOut:
    """Batches worked out, from a position on."""

    position: int
    passes: npt.NDArray[np.int64]
    layout: Layout


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stretch:
    """Some batches from a position on; None where they aren't worked out yet, or couldn't be."""

    position: int
    count: int
    laid_out: _LaidOut | None = None
    failure: Exception | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Run:
    """Batches that are worked out at once, to be filled a stretch of so many at a time."""

    position: int
    count: int
    stretch: int
    laid_out: _LaidOut | None = None
    failure: Exception | None = None


class _Stretches:
    """What is filled next. The first stretch is one batch, so that it comes at once; each later one is longer, up to a
    buffer's size, and then several of them are worked out at once: a run."""

    def __init__(self, filler: _Batches, position: int, longest: int) -> None:
        self._filler, self._longest = filler, longest
        self._run = _Run(position=position, count=0, stretch=1)
        self._next: _Run | None = None
        self._taken = 0
        self._working = threading.Lock()

    def take(self) -> _Stretch:
        """The next stretch. One thread at a time."""
        if self._taken == self._run.count:
            with self._working:  # whoever works it out already
                self._run, self._next, self._taken = self._next or self._following(), None, 0
        run, first = self._run, self._taken
        self._taken += run.stretch
        position = run.position + first * self._filler.batch_rows
        return _Stretch(position=position, count=run.stretch, laid_out=run.laid_out, failure=run.failure)

    def work_ahead(self) -> None:
        """Works out the next run where it is time to, unless another thread is at it."""
        run = self._run
        is_nearly_over = run.count - self._taken <= STRETCHES_LEFT * run.stretch
        # Fetching takes longer than anything else: it has all of this run's time.
        if not (is_nearly_over or self._filler.sweeper) or not self._working.acquire(blocking=False):
            return
        try:
            if self._next is None and run is self._run:
                self._next = self._following()
        finally:
            self._working.release()

    def _following(self) -> _Run:
        run, filler = self._run, self._filler
        position = run.position + run.count * filler.batch_rows
        stretch = min(4 * run.stretch, self._longest) if run.count else 1
        count = stretch
        if stretch == self._longest:
            fitting = min(LAID_OUT_ROWS // filler.own_rows, LAID_OUT_TOKENS // filler.own_tokens)
            count *= max(1, fitting // stretch)
        following = _Run(position=position, count=count, stretch=stretch)
        try:
            return replace(following, laid_out=filler.lay_out(position, count))
        except Exception as error:  # noqa: BLE001  told where the batch in question is filled
            return replace(following, failure=error)


class _Producer:
    """Threads that fill stretches ahead of the consumer. An error in one is raised where the batch is asked for.

    Buffers go back and forth: while the consumer uses one, each thread fills another. A hand-over costs two thread
    switches, some 50 µs, more than filling a batch; a stretch shares one. Stretch k goes to the k-th place of a ring
    that has one for each buffer, so whichever is ready first, they are taken in order, and no two ever meet there.
    """

    def __init__(self, filler: _Batches, buffers: list[StretchBuffer], position: int) -> None:
        self._work = _Work(filler, buffers, position)
        self._sweeper = filler.sweeper
        self._taken = 0
        self._batches: Iterator[Batch] = iter(())
        self._batch: Batch | None = None
        self._lent: StretchBuffer | None = None
        self._failure: BaseException | None = None
        # The threads know the work and the filler, not the loader: a loader nobody holds can be collected.
        self._threads = [
            threading.Thread(target=self._work.run, name=f"penstock-load-{number}", daemon=True)
            # While one of them fetches, the others fill.
            for number in range(len(buffers) - 1 + (self._sweeper is not None))
        ]
        for thread in self._threads:
            thread.start()

    def next_batch(self) -> Batch:
        """The next batch; asking for it gives up the one before."""
        while True:
            self.wait()
            if self._batch is not None:
                batch, self._batch = self._batch, None
                return batch
            if self._failure is not None:  # behind the batches that came with it
                raise self._failure

    def wait(self, seconds: float | None = None) -> bool:
        """Whether by then the next batch is there, or the failure in its place."""
        if self._batch is None:
            self._batch = next(self._batches, None)
        while self._batch is None and self._failure is None:
            if self._lent is not None:
                self._work.free.put(self._lent)
                self._lent = None  # given back once, though the wait be interrupted
            try:
                filled = self._work.ready[self._taken % len(self._work.ready)].get(timeout=seconds)
            except queue.Empty:
                return False
            self._batches, self._failure, self._lent = iter(filled.batches), filled.failure, filled.buffer
            self._taken += 1
            self._batch = next(self._batches, None)
        return True

    def stop(self) -> None:
        """Ends the threads and waits for them, not for all that they were going to fetch."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._work.free.get_nowait()
        self._work.free.put(None)
        if self._sweeper is not None:
            self._sweeper.interrupted.set()
        for thread in self._threads:
            if thread is not threading.current_thread():  # a loader may be collected in any thread
                thread.join()
        if self._sweeper is not None:
            self._sweeper.interrupted.clear()


@dataclass(frozen=True, slots=True)
class _Filled:
    batches: list[Batch]
    failure: BaseException | None
    buffer: StretchBuffer


class _Work:
    """What the threads of a producer share: which stretch is next, the free buffers, the ring of filled ones."""

    def __init__(self, filler: _Batches, buffers: list[StretchBuffer], position: int) -> None:
        self.free: queue.SimpleQueue[StretchBuffer | None] = queue.SimpleQueue()
        self.ready: list[queue.SimpleQueue[_Filled]] = [queue.SimpleQueue() for _ in buffers]
        # The first batch comes sooner if no thread beside it wants the segments opened and Python's lock.
        self.free.put(buffers[0])
        self._later = buffers[1:]
        self._filler = filler
        self._ahead = _Stretches(filler, position, len(buffers[0].loss_mask))
        self._taking = threading.Lock()
        self._number = 0

    def run(self) -> None:
        """Fills one stretch after another until None comes in place of a buffer, or a stretch can't be filled."""
        failure = None
        while failure is None and (buffer := self.free.get()) is not None:
            with self._taking:
                number, stretch = self._number, self._ahead.take()
                self._number += 1
            batches, failure = self._filler.fill(stretch, buffer)
            self.ready[number % len(self.ready)].put(_Filled(batches, failure, buffer))
            if number == 0:
                for other in self._later:
                    self.free.put(other)
            self._ahead.work_ahead()
        self.free.put(None)  # the next thread ends too
