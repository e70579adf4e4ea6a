"""Runs units on this machine's cores, in threads.

Three stages per unit: read (one thread, so that the disk sees one reader), encode (as many threads as workers; native
code with the GIL released) and write (one thread, so that waiting for the disk never stops an encoder). At most
`workers + 3` units are in flight, which bounds memory. Threads, not processes: nothing to orphan, nothing to pickle,
and two encoders in two threads reach twice the rate of one (docs/log.md).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

__all__ = ["run_units"]

Unit = TypeVar("Unit")
Text = TypeVar("Text")
Tokens = TypeVar("Tokens")
Result = TypeVar("Result")

UNITS_WAITING = 3


def run_units(
    units: Iterable[Unit],
    *,
    read: Callable[[Unit], Text],
    encode: Callable[[Unit, Text], Tokens],
    write: Callable[[Unit, Tokens], Result],
    workers: int,
) -> Iterator[tuple[Unit, Result]]:
    """Yields each unit with its result, in the order of the units. The first error stops the rest and is raised."""
    readers = ThreadPoolExecutor(1, "penstock-read")
    encoders = ThreadPoolExecutor(workers, "penstock-encode")
    writers = ThreadPoolExecutor(1, "penstock-write")
    in_flight: deque[tuple[Unit, Future[Result]]] = deque()

    def submit(unit: Unit) -> Future[Result]:
        text = readers.submit(read, unit)
        tokens = encoders.submit(lambda: encode(unit, text.result()))
        return writers.submit(lambda: write(unit, tokens.result()))

    try:
        for unit in units:
            in_flight.append((unit, submit(unit)))
            if len(in_flight) >= workers + UNITS_WAITING:
                done, future = in_flight.popleft()
                yield done, future.result()
        while in_flight:
            done, future = in_flight.popleft()
            yield done, future.result()
    finally:
        for pool in (readers, encoders, writers):
            pool.shutdown(wait=True, cancel_futures=True)
