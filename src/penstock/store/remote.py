"""Reads a store behind a URL through a local copy of what is used.

In: an address. Out: a `Store` like any other. At open: the manifest and the index arrays are fetched, and the sizes of
the rest compared with the remote listing. A segment comes whole on first use, checked block by block while it arrives,
and is then mapped from the local copy. `expect` fetches ahead in the background; `visit` fetches for a moment. See
`mirror.py` for the copy itself.

A segment that is open here is never removed while somebody needs it: `segment` keeps it until this store needs its
room, `visit` until it has been read.

Versions never change and appear by their manifest alone, so nothing is asked twice; a damaged local copy
is fetched anew.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import os
import queue
import threading
import time
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.errors import DamagedStoreError, NotAStoreError, PenstockError, StoreError
from penstock.store.layout import SEGMENTS, FileEntry, Manifest, SegmentEntry
from penstock.store.mirror import Cancelled, Mirror, blocks_entry, unlock
from penstock.store.payload import Ranges, SegmentFindings
from penstock.store.reader import SIGNATURES, Segment, Store
from penstock.store.urls import split_url
from penstock.store.verification import Entry, Examination, Problem, Verification

__all__ = ["RemoteStore", "examine_remote", "open_remote"]

PREFETCH_THREADS = 4
SECONDS_AT_EXIT = 5.0


def open_remote(url: str, *, version: int | None = None, cache_bytes: int | None = None) -> RemoteStore:
    """Opens a store behind a URL; `URL@3` or `version=3` opens an older version.

    Args:
        url: where the store was pushed.
        version: which version; default: the newest.
        cache_bytes: bound on the local copies of segments, of all remote stores together (see `Mirror`).

    Raises:
        NotAStoreError: there is no store.
        StoreError: it has no such version, or can't be reached.
        DamagedStoreError: what is there isn't what was committed.
    """
    url, version = split_url(url, version)
    mirror = Mirror(url, cache_bytes=cache_bytes)
    versions = mirror.versions()
    if not versions:
        raise NotAStoreError(f"{url} holds no committed version", hint=f"put a store there: penstock push STORE {url}")
    if version is not None and version not in versions:
        raise StoreError(
            f"{url} has no version {version}", hint=f"versions: {', '.join(map(str, versions))} (write {url}@N)"
        )
    return RemoteStore(mirror, version if version is not None else versions[-1])


class RemoteStore(Store):
    """A committed version of a store behind a URL. Get one from `open_store` or `open_remote`."""

    def __init__(self, mirror: Mirror, version: int) -> None:
        self._mirror = mirror
        self._kept: dict[int, _KeptLock] = {}  # of each open segment; least recently opened first
        self._locks: dict[int, threading.RLock] = {}
        self._prefetch: _Prefetch | None = None
        mirror.fetch_manifest(version)
        super().__init__(mirror.path, version)

    @property
    def location(self) -> str:
        """The URL, without the version."""
        return self._mirror.remote.url

    @property
    def cache_bytes(self) -> int | None:
        """Bound on the local copies of segments, of all remote stores together."""
        return self._mirror.cache_bytes

    @property
    def _opening(self) -> threading.RLock:
        """Of this process: one that is forked may have been so while a thread that didn't come along held the lock."""
        return self._locks.setdefault(os.getpid(), threading.RLock())

    def segment(self, number: int) -> Segment:
        """A segment, fetched and opened on first use; one that was let go of meanwhile is fetched again."""
        segment = self._segments[number]
        if segment is not None:
            return segment
        with self._opening:
            return self._segments[number] or self._open_segment(number)

    def present(self, numbers: Container[int]) -> list[int]:
        """See `Store`: those in the local copy."""
        known = self._numbers_by_file
        again = "open the store again, and what is missing is fetched"
        with fs.fail_as_disk_error("reading the cache of a remote store", again=again):
            names = [entry.name for entry in (self.path / SEGMENTS).iterdir()]
        return [known[name] for name in names if known.get(name) in numbers]

    @cached_property
    def _numbers_by_file(self) -> dict[str, int]:
        return {f"{entry.name}.tokens": number for number, entry in enumerate(self.manifest.segments)}

    def visit(self, number: int, read: Callable[[Segment], None], *, is_cancelled: Callable[[], bool]) -> None:
        """See `Store`: fetched unless it is here, and kept here until it is read; a damaged copy is replaced once."""
        entry = self.manifest.segments[number]
        for may_be_damaged in (True, False):
            # A lock and a map of its own: what this store has open may be let go of by any thread that needs its room.
            lock = self._mirror.fetch_segment(
                entry, release=self._release_one, is_visit=True, is_cancelled=is_cancelled
            )
            try:
                with closing(self._mapped_segment(number)) as segment:
                    read(segment)
                return
            except DamagedStoreError:
                if not may_be_damaged:
                    raise
            finally:
                unlock(lock)
            with self._opening:
                self._let_go(number)
                self._mirror.forget(entry)

    def read(self, segment: int, offset: int, length: int) -> npt.NDArray[Any]:
        """Checked tokens of a span, as a read-only view; where the local copy is damaged, of a fresh one."""
        try:
            return super().read(segment, offset, length)
        except DamagedStoreError:
            with self._opening:
                self._let_go(segment)
                self._mirror.forget(self.manifest.segments[segment])
            return super().read(segment, offset, length)

    def expect(self, documents: npt.NDArray[np.int64]) -> None:
        """Begins to fetch the segments of some documents, in order of first use, as far as the bound allows."""
        numbers, first = np.unique(self.arrays["segment"][documents], return_index=True)
        wanted = [int(number) for number in numbers[np.argsort(first)] if self._segments[int(number)] is None]
        self._stop_prefetch()
        if wanted:
            self._prefetch = _Prefetch(self._mirror, [self.manifest.segments[number] for number in wanted])

    def provenance_batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """See `Store`."""
        self._mirror.fetch_file(self._documents_entry())
        yield from super().provenance_batches(columns)

    def signatures(self) -> npt.NDArray[np.uint16] | None:
        """See `Store`."""
        for entry in self.manifest.index:
            if entry.name.endswith(f"/{SIGNATURES}"):
                self._mirror.fetch_file(entry)
        return super().signatures()

    def close(self) -> None:
        """Stops fetching ahead, unmaps the segments and lets go of their files."""
        self._stop_prefetch()
        super().close()
        for lock in self._kept.values():
            lock.give_back()
        self._kept.clear()

    def _checked_bytes(self, entry: FileEntry) -> bytes:
        self._mirror.fetch_file(entry)
        return super()._checked_bytes(entry)

    def _check_sizes(self) -> None:
        """Sizes as the server lists them: what is here was checked when it came and is checked when it is read."""
        self._listed = {
            f"{folder}/{name}": size
            for folder in sorted({SEGMENTS, *(_folder(entry) for entry in self._small_files())})
            for name, size in self._mirror.remote.sizes(folder).items()
        }
        super()._check_sizes()

    def _check_size(self, name: str, expected: int) -> None:
        if name not in self._listed:
            raise self._mirror.remote.damaged(name, "it is missing")
        found = self._listed[name]
        if found is not None and found != expected:
            raise self._mirror.remote.damaged(name, f"it has {found} bytes, committed were {expected}")

    def _small_files(self) -> list[FileEntry]:
        return [*self.manifest.index, self.manifest.tokenizer_file]

    def _open_segment(self, number: int) -> Segment:
        """Fetches and maps; a local copy whose checksums turn out damaged is replaced once."""
        entry = self.manifest.segments[number]
        lock = self._mirror.fetch_segment(entry, release=self._release_one)
        try:
            segment = super().segment(number)
        except BaseException:
            unlock(lock)
            raise
        self._kept[number] = _KeptLock(lock)
        return segment

    def _release_one(self) -> bool:
        """Lets go of the segment that has been open longest."""
        # Not under `_opening`: who visits a segment holds the lock of its file, which who opens it is waiting for.
        kept = list(self._kept)
        if kept:
            self._let_go(kept[0])
        return bool(kept)

    def _let_go(self, number: int) -> None:
        # Not closed: another thread may be reading. The map lives as long as somebody holds it, also without its file.
        lock = self._kept.pop(number, None)  # first: as long as the segment stands there nobody opens it anew
        if lock is None:
            return  # another thread lets go of it, and it may be open anew by now
        self._segments[number] = None
        lock.give_back()

    def _stop_prefetch(self) -> None:
        if self._prefetch is not None:
            self._prefetch.stop()
            self._prefetch = None


def _folder(entry: FileEntry) -> str:
    return entry.name.rpartition("/")[0]


class _KeptLock:
    """A lock that keeps a segment's file, and the process that took it: one forked from it has the lock as well."""

    def __init__(self, lock: int) -> None:
        self._lock = lock
        self._process = os.getpid()

    def give_back(self) -> None:
        """Gives it back; in a forked process only our part of it, for the one that took it still needs it."""
        if self._process == os.getpid():
            unlock(self._lock)
        else:
            os.close(self._lock)


class _Prefetch:
    """Threads that fetch segments in order until all are there or the cache is full."""

    def __init__(self, mirror: Mirror, wanted: Sequence[Any]) -> None:
        self._stopped = threading.Event()
        self._is_full = threading.Event()  # what is on its way still comes
        self._wanted: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for entry in wanted:
            self._wanted.put(entry)
        # Daemons: a program that ends waits only for the chunks on their way. A thread that comes back from obstore
        # while Python is ending would abort the process.
        self._threads = [
            threading.Thread(target=self._run, args=(mirror,), name=f"penstock-fetch-{number}", daemon=True)
            for number in range(min(PREFETCH_THREADS, len(wanted)))
        ]
        atexit.register(self.stop, SECONDS_AT_EXIT)
        for thread in self._threads:
            thread.start()

    def _run(self, mirror: Mirror) -> None:
        # An error ends the thread and is told by the read that needs the segment: it asks for it again itself.
        with contextlib.suppress(queue.Empty, Cancelled, PenstockError):
            while not self._stopped.is_set() and not self._is_full.is_set():
                if not mirror.prefetch_segment(self._wanted.get_nowait(), is_cancelled=self._stopped.is_set):
                    self._is_full.set()

    def stop(self, seconds: float | None = None) -> None:
        """Ends the threads at their next chunk, and waits for that; at most so long for each."""
        atexit.unregister(self.stop)
        self._stopped.set()
        for thread in self._threads:
            thread.join(seconds)

    def wait(self) -> None:
        """Waits until what there is room for has come."""
        for thread in self._threads:
            thread.join()


def examine_remote(
    url: str,
    *,
    quick: bool = False,
    cache_bytes: int | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Verification:
    """Looks at everything that the versions behind a URL name, as `examine` does, fetching what isn't here yet.

    All of it passes through the local copy, within its bound; `quick` leaves out the tokens, whose sizes the server
    lists. In this process alone: connections don't survive a fork.
    """
    mirror = Mirror(split_url(url)[0], cache_bytes=cache_bytes)
    started = time.perf_counter()
    versions = mirror.versions()
    if not versions:
        raise NotAStoreError(f"{url} holds no committed version", hint=f"put a store there: penstock push STORE {url}")
    run = _RemoteExamination(mirror, quick=quick, on_progress=on_progress)
    run.versions(versions)
    return Verification(
        problems=run.problems,
        versions=versions,
        bytes=run.bytes_done,
        seconds=time.perf_counter() - started,
        quick=quick,
    )


class _RemoteExamination(Examination):
    """Fetches what is looked at; what doesn't arrive as committed is a problem of the remote store."""

    def __init__(self, mirror: Mirror, *, quick: bool, on_progress: Callable[[int, int], None] | None) -> None:
        super().__init__(mirror.path, quick=quick, workers=1, on_progress=on_progress)
        self._mirror = mirror
        self._sizes = mirror.remote.sizes(SEGMENTS)

    def manifest(self, version: int) -> Manifest:
        """See `Examination`."""
        self._mirror.fetch_manifest(version)
        return super().manifest(version)

    def store(self, version: int) -> Store:
        """See `Examination`."""
        return RemoteStore(self._mirror, version)

    def entry_problems(self, entry: Entry) -> list[Problem]:
        """Of a file all there is; of a segment its checksums' file, and its size as the server lists it."""
        if not isinstance(entry, SegmentEntry):
            return self._arrival_problems(entry) or super().entry_problems(entry)
        name = f"{entry.name}.tokens"
        if name not in self._sizes:
            return [Problem(file=f"{SEGMENTS}/{name}", kind="missing", detail="the manifest names it")]
        found = self._sizes[name]
        if found is not None and found != entry.bytes:
            detail = f"{found} bytes, committed were {entry.bytes}"
            return [Problem(file=f"{SEGMENTS}/{name}", kind="size", detail=detail)]
        return self._arrival_problems(blocks_entry(entry))

    def _arrival_problems(self, entry: FileEntry) -> list[Problem]:
        try:
            self._mirror.fetch_file(entry)
        except DamagedStoreError as error:
            return [Problem(file=entry.name, kind="checksum", detail=error.message)]
        return []

    def examined(self, entry: SegmentEntry, dtype: np.dtype[Any], ranges: Ranges) -> SegmentFindings:
        """See `Examination`; fetched first, and kept here while it is read. Damage to the copy alone is mended."""
        found = self._examined(entry, dtype, ranges)
        if found.bad_blocks:
            self._mirror.forget(entry)
            found = self._examined(entry, dtype, ranges)
        return found

    def _examined(self, entry: SegmentEntry, dtype: np.dtype[Any], ranges: Ranges) -> SegmentFindings:
        try:
            lock = self._mirror.fetch_segment(entry, release=lambda: False)
        except DamagedStoreError as error:
            raise OSError(errno.EIO, error.message) from error  # a file that can't be read: the others still can
        try:
            return super().examined(entry, dtype, ranges)
        finally:
            unlock(lock)
