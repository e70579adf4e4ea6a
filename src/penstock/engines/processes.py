"""Runs units in forked worker processes, each with a GIL of its own.

Threads share one GIL, and what Python does for each document (open, hash, note down) adds up: 16 KB files cap at about
300 MB/s however many cores there are. A worker process reads and encodes a unit in one thread, without contention, and
writes the one before in another, so that waiting for the disk stops nobody. The parent draws units, hands them out and
yields results in order; a long walk can be drawn in yet another process. Only a number, the unit and a small result
cross a pipe. Where there are more cores than workers, a worker can have threads that read and encode ahead.

A worker dies with its parent, whatever kills that. A worker that is killed (out of memory, say) ends the run with an
error that says so; what it had finished is on the disk. Memory per worker: the unit being encoded and the one being
written.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import multiprocessing
import multiprocessing.connection
import os
import queue
import signal
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from penstock.errors import WorkerDiedError

__all__ = ["can_fork", "die_with", "drawn_beside", "run_side_by_side", "run_units_in_processes", "settled_objects"]

Unit = TypeVar("Unit")
Text = TypeVar("Text")
Tokens = TypeVar("Tokens")
Result = TypeVar("Result")

# One being worked on, one waiting: a worker never waits for the parent.
UNITS_PER_WORKER = 2
_PARENTS_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_PR_SET_PDEATHSIG = 1
# mallopt(3) of glibc: what is freed stays with the process, and large blocks come from there too.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_TOP_PAD = -1, -3, -2
_KEPT_BYTES = 2**30

_NO_MORE = -1  # instead of a number: everything was sent
# Of a thread that reads ahead: how many parts, and how long it may keep the GIL from the one that encodes.
_PARTS_AHEAD = 3
_SWITCH_SECONDS = 0.0005
_Message = tuple[int, Any, BaseException | None, str]
"""Number, result, and if there is an error instead, that and its trace."""

_Connection = Any  # multiprocessing's connections are generic in some versions of Python only


def can_fork() -> bool:
    """Whether worker processes can be forked here safely: Linux, and no thread that might hold a lock meanwhile."""
    return sys.platform == "linux" and threading.active_count() == 1


@contextlib.contextmanager
def settled_objects() -> Iterator[None]:
    """Takes what is there now for permanent while processes are forked and work.

    To look for garbage among it writes to every page of it, and each of these the children share: 50 ms, 6,000 pages.
    """
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@dataclass
class _Worker:
    """A worker process as the parent sees it."""

    process: Any
    connection: _Connection
    in_hand: set[int] = field(default_factory=set)

    @property
    def is_free(self) -> bool:
        return len(self.in_hand) < UNITS_PER_WORKER


def run_units_in_processes(
    units: Iterable[Unit],
    *,
    read: Callable[[Unit], Text],
    encode: Callable[[Unit, Text], Tokens],
    write: Callable[[Unit, Tokens], Result],
    workers: int,
    ahead: Callable[[Any], Any] | None = None,
) -> Iterator[tuple[Unit, Result]]:
    """Yields each unit with its result, in the order of the units. The first error stops the rest and is raised.

    The functions are inherited by the fork, so they may be closures; units and results are pickled. With `ahead` what
    `read` gives is the parts of a unit, one after the other: a thread of the worker draws them, another applies `ahead`
    to each, and `encode` takes what came of it. For machines with more cores than workers, and an `ahead` that releases
    the GIL.
    """
    crew: list[_Worker] = []
    supply = _Supply(units)
    in_work: dict[int, Unit] = {}
    finished: dict[int, Result] = {}
    next_number, succeeded = 0, False
    _give_back_freed_memory()
    try:
        for _ in range(workers):
            crew.append(_fork(_work, crew, read, encode, write, ahead))
        while True:
            # To the one with the least to do: behind another's unit it would wait while this one idles.
            while (worker := min(crew, key=_number_in_hand)).is_free and (numbered := supply.take()):
                number, in_work[number] = numbered
                _hand_out(worker, *numbered)
            if not in_work:
                break
            # All hands are busy: walk on, and wait for news only when the walk is over.
            news = _with_news(crew, wait=supply.is_over)
            for worker in news:
                number, finished[number] = _receive(worker)
            while next_number in finished:
                yield in_work.pop(next_number), finished.pop(next_number)
                next_number += 1
            if not news:
                supply.draw()
        succeeded = True
    finally:
        _dismiss(crew, kill=not succeeded)


def run_side_by_side(units: Sequence[Unit], work: Callable[[Unit], Result]) -> list[Result]:
    """What `work` makes of each unit, in order: of the first one here, of each other in a process forked for it.

    For a few units of about the same size. The first error, here or there, ends the rest and is raised.
    """
    crew: list[_Worker] = []
    succeeded = False
    try:
        for number, unit in enumerate(units[1:]):
            crew.append(_fork(_work, crew, work, _second, _second, None))
            _hand_out(crew[-1], number, unit)
        results = [work(unit) for unit in units[:1]]
        results += [_receive(worker)[1] for worker in crew]
        succeeded = True
        return results
    finally:
        _dismiss(crew, kill=not succeeded)


@contextlib.contextmanager
def drawn_beside(items: Iterable[Unit]) -> Iterator[Iterator[Unit]]:
    """The same items, drawn in a process forked for it while this one does something else.

    It draws on whether or not anybody takes them, and keeps what isn't taken yet. Items are pickled. An error of theirs
    is raised where it would have been; the end of the block ends the process.
    """
    drawer = _fork(_draw, [], items)

    def received() -> Iterator[Unit]:
        number, item = _receive(drawer)
        while number != _NO_MORE:
            yield item
            number, item = _receive(drawer)

    try:
        yield received()
    finally:
        _dismiss([drawer], kill=True)  # nobody wants what it may still have


def _second(_: Any, result: Result) -> Result:
    return result


class _Supply(Generic[Unit]):
    """Numbered units, drawn from the walk when there is time, taken when a worker is free."""

    def __init__(self, units: Iterable[Unit]) -> None:
        self._walk = enumerate(units)
        self._drawn: deque[tuple[int, Unit]] = deque()
        self.is_over = False

    def draw(self) -> None:
        """Walks one unit further."""
        numbered = next(self._walk, None)
        if numbered is None:
            self.is_over = True
        else:
            self._drawn.append(numbered)

    def take(self) -> tuple[int, Unit] | None:
        """The next unit with its number; None when there are no more."""
        if not self._drawn and not self.is_over:
            self.draw()
        return self._drawn.popleft() if self._drawn else None


def _number_in_hand(worker: _Worker) -> int:
    return len(worker.in_hand)


def _hand_out(worker: _Worker, number: int, unit: Any) -> None:
    try:
        worker.connection.send((number, unit))
    except BrokenPipeError:
        raise _died(worker) from None
    worker.in_hand.add(number)


def _with_news(crew: list[_Worker], *, wait: bool) -> list[_Worker]:
    """The workers whose connection has something to read, or has ended."""
    ready = multiprocessing.connection.wait([worker.connection for worker in crew], timeout=None if wait else 0)
    return [worker for worker in crew if worker.connection in ready]


def _receive(worker: _Worker) -> tuple[int, Any]:
    try:
        number, result, error, trace = worker.connection.recv()
    except (EOFError, ConnectionResetError):
        raise _died(worker) from None
    worker.in_hand.discard(number)
    if error is not None:
        error.add_note(f"in a worker process:\n{trace}")
        raise error
    return number, result


def _died(worker: _Worker) -> WorkerDiedError:
    worker.process.join(timeout=5)
    code = worker.process.exitcode
    how = f"was killed by signal {-code}" if code is not None and code < 0 else f"ended with status {code}"
    return WorkerDiedError(
        f"a worker process {how}",
        hint="if memory ran out, use fewer --workers or a smaller --unit-bytes; the same command goes on where it was",
    )


def _dismiss(crew: list[_Worker], *, kill: bool) -> None:
    """Ends the workers: at the end of their pipe, or at once. Nothing they write is lost or half there by that."""
    for worker in crew:
        if kill:
            worker.process.kill()  # before its pipe ends, or it would complain of that
        worker.connection.close()
    for worker in crew:
        worker.process.join()
        worker.process.close()


def _fork(life: Callable[..., None], crew: list[_Worker], *arguments: Any) -> _Worker:
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    not_for_the_child = [ours, *(worker.connection for worker in crew)]
    process = context.Process(
        target=life, args=(theirs, not_for_the_child, os.getpid(), *arguments), name="penstock-worker", daemon=True
    )
    with warnings.catch_warnings():
        # Python warns of native threads too; those of Arrow and BLAS idle, and mind forks.
        warnings.simplefilter("ignore", DeprecationWarning)
        # A signal between the fork and the first line of `life` would meet the parent's handlers in the child.
        held_back = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS_SIGNALS)
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, held_back)
    theirs.close()
    return _Worker(process, ours)


def _work(
    connection: _Connection,
    not_ours: list[_Connection],
    parent: int,
    read: Callable[[Any], Any],
    encode: Callable[[Any, Any], Any],
    write: Callable[[Any, Any], Any],
    ahead: Callable[[Any], Any] | None,
) -> None:
    """The life of a worker process."""
    _begin(not_ours, parent)
    _keep_freed_memory()
    room_for_writing = threading.Semaphore(1)

    def report(number: int, make: Callable[[], Any]) -> None:
        message: _Message
        try:
            message = (number, make(), None, "")
        except BaseException as error:  # noqa: BLE001  the parent raises it
            message = (number, None, error, traceback.format_exc())
        finally:
            room_for_writing.release()
        _send(connection, message)

    def attempt(unit: Any, parts: Callable[[], Any]) -> Callable[[], Any]:
        try:
            tokens = encode(unit, parts())
        except BaseException as error:  # noqa: BLE001  likewise
            return _raiser(error)
        return lambda: write(unit, tokens)

    units = _received(connection)
    work: _Work
    if ahead is None:
        work = ((number, unit, partial(read, unit)) for number, unit in units)
    else:
        work = _drawn_ahead(units, read, ahead)
    with ThreadPoolExecutor(1, "penstock-write") as writer:
        for number, unit, parts in work:
            make = attempt(unit, parts)
            room_for_writing.acquire()
            writer.submit(report, number, make)
            del make  # or the unit's tokens would live until the next one is encoded


def _received(connection: _Connection) -> Iterator[tuple[int, Any]]:
    """Numbered units, until the parent closes the pipe."""
    while True:
        try:
            yield connection.recv()
        except (EOFError, ConnectionResetError):
            return


_Work = Iterator[tuple[int, Any, Callable[[], Any]]]


def _drawn_ahead(
    units: Iterator[tuple[int, Any]], read: Callable[[Any], Iterable[Any]], ahead: Callable[[Any], Any]
) -> _Work:
    """The units, and of each something that gives its parts, which two threads draw before they are asked for."""
    sys.setswitchinterval(_SWITCH_SECONDS)
    drawn: queue.Queue[Any] = queue.Queue(_PARTS_AHEAD)
    ready: queue.Queue[Any] = queue.Queue(_PARTS_AHEAD)

    def draw() -> None:
        for numbered in units:
            drawn.put((numbered, None))
            try:
                for part in read(numbered[1]):
                    drawn.put((part, None))
            except BaseException as error:  # noqa: BLE001  raised where the parts are taken
                drawn.put((None, error))
            drawn.put(None)
        drawn.put(None)

    def apply() -> None:
        while (numbered := drawn.get()) is not None:
            ready.put(numbered)
            while (given := drawn.get()) is not None:
                part, error = given
                try:
                    ready.put((ahead(part) if error is None else None, error))
                except BaseException as failure:  # noqa: BLE001  likewise
                    ready.put((None, failure))
            ready.put(None)
        ready.put(None)

    for life, name in ((draw, "penstock-read"), (apply, "penstock-encode")):
        threading.Thread(target=life, name=name, daemon=True).start()
    while (numbered := ready.get()) is not None:
        parts = _PartsOfUnit(ready)
        yield *numbered[0], parts.__iter__
        parts.pass_over()  # whoever took them may have failed before the last


class _PartsOfUnit:
    """What a queue holds up to the next None: parts, each with an error that is raised in its place, or None."""

    def __init__(self, waiting: queue.Queue[Any]) -> None:
        self._waiting = waiting
        self._is_over = False

    def __iter__(self) -> Iterator[Any]:
        while (given := self._next()) is not None:
            part, error = given
            if error is not None:
                raise error
            yield part

    def pass_over(self) -> None:
        """Takes the rest."""
        while self._next() is not None:
            pass

    def _next(self) -> Any:
        given = None if self._is_over else self._waiting.get()
        self._is_over = given is None
        return given


def _draw(connection: _Connection, not_ours: list[_Connection], parent: int, items: Iterable[Any]) -> None:
    """The life of a process that draws items. A thread sends them, so that a full pipe doesn't stop the drawing."""
    _begin(not_ours, parent)
    last: _Message = (_NO_MORE, None, None, "")
    with ThreadPoolExecutor(1, "penstock-send") as sender:
        try:
            for number, item in enumerate(items):
                sender.submit(_send, connection, (number, item, None, ""))
        except BaseException as error:  # noqa: BLE001  the parent raises it
            last = (_NO_MORE, None, error, traceback.format_exc())
        sender.submit(_send, connection, last)


def _begin(not_ours: list[_Connection], parent: int) -> None:
    """What a forked process does first."""
    # Ctrl-C, and a batch system's end, reach the whole group. The parent decides what they mean; we end with it.
    for number in _PARENTS_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS_SIGNALS)
    die_with(parent)
    gc.disable()  # documents are no cycles, and looking for some in thousands of them costs a twentieth
    for other in not_ours:  # a pipe ends only when nobody holds its other end
        other.close()


def _send(connection: _Connection, message: _Message) -> None:
    try:
        connection.send(message)
    except Exception as error:  # noqa: BLE001  something that can't travel; it may say so in any way
        number, result, failure, trace = message
        connection.send((number, None, RuntimeError(f"{failure or result!r} ({error})"), trace))


def _raiser(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


def _give_back_freed_memory() -> None:
    """Has the allocator return what is free before a fork: a child that uses such a page again would copy it first."""
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if malloc_trim is not None:
        malloc_trim(0)


def _keep_freed_memory() -> None:
    """Has the allocator keep what is freed: each unit would otherwise fault the same pages in anew."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)  # glibc has it; elsewhere it only costs time
    if mallopt is not None:
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)
        mallopt(_M_MMAP_THRESHOLD, 2**25)  # the largest it takes
        mallopt(_M_TOP_PAD, 2**26)


def die_with(parent: int) -> None:
    """Has the kernel kill this process when its parent dies."""
    if sys.platform != "linux":
        return  # elsewhere nobody can be asked for it
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")
    if os.getppid() != parent:  # it died before we asked
        os._exit(1)
