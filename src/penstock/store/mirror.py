"""The local copy of a remote store, made file by file as they are asked for.

In: an address and the checksums of a manifest. Out: files under `PENSTOCK_CACHE/remote/DIGEST`, laid out as in the
store itself, each checked while it arrived and there whole or not at all. Segments share a bound on their size over all
mirrors: the least recently used go first, never one that a reader has open. Several processes share a mirror: a kernel
lock per file, exclusive while it is fetched or removed, shared while it is read. While a segment is on its way, the
file of its lock is as long as the segment: that much room is taken. Some keep a segment, others *visit* it: who comes
for a visit waits for the room of other visits, which end soon, and so there may be many. Memory: one chunk a transfer.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.errors import ConfigError, DamagedStoreError, DiskError
from penstock.hashing import RunningChecksum, strong_hash
from penstock.store.layout import (
    BLOCK_BYTES,
    MANIFESTS,
    SEGMENTS,
    FileEntry,
    SegmentEntry,
    block_checksums,
    decode_manifest,
    manifest_name,
)
from penstock.store.objects import ObjectFolder
from penstock.store.reader import LARGEST_MANIFEST_BYTES, version_numbers
from penstock.tokenize.cache import cache_folder

__all__ = ["Cancelled", "Check", "Mirror", "blocks_entry", "checked_blocks", "checked_chunks", "tokens_name", "unlock"]

REMOTE = "remote"
LOCKS = "locks"
VISIT = "visit"
BYTES_SETTING = "PENSTOCK_REMOTE_CACHE_BYTES"
DEFAULT_CACHE_BYTES = 50 * 10**9
ARRIVALS = 3
"""How often an object is fetched until it arrives as committed."""
SECONDS_BETWEEN_LOOKS = 0.05
"""Whoever waits for room looks for it so often."""

Check = Callable[[], bool]


def blocks_entry(entry: SegmentEntry) -> FileEntry:
    """The file of a segment's block checksums, as if the manifest named it."""
    num_bytes = 8 * -(-entry.bytes // BLOCK_BYTES)
    return FileEntry(name=f"{SEGMENTS}/{entry.name}.blocks", bytes=num_bytes, checksum=entry.checksum)


def tokens_name(entry: SegmentEntry) -> str:
    """Name of a segment's tokens within a store."""
    return f"{SEGMENTS}/{entry.name}.tokens"


class Mirror:
    """The local copy of the store at a URL.

    Args:
        url: the store's address, without version.
        cache_bytes: bound on the segments of all mirrors; default: `PENSTOCK_REMOTE_CACHE_BYTES`, else 50 GB or half of
            what the disk has left for it, whichever is less.

    Raises:
        ConfigError: there is no cache folder, or the address is of no known kind.
    """

    def __init__(self, url: str, *, cache_bytes: int | None = None) -> None:
        self.remote = ObjectFolder(url)
        root = cache_folder()
        if root is None:
            raise ConfigError(
                f"{self.remote.url} needs a cache folder, and PENSTOCK_CACHE is off",
                hint="set PENSTOCK_CACHE to a folder on a local disk",
            )
        self._root = (root / REMOTE).absolute()
        self.path = self._root / strong_hash(self.remote.url.encode()).hex()[:32]
        with fs.fail_as_disk_error("making the cache of a remote store"):
            for folder in (self.path / MANIFESTS, self.path / SEGMENTS, self.path / LOCKS):
                fs.make_folder(folder)
        self._remove_own_leftovers()
        self.cache_bytes = cache_bytes if cache_bytes is not None else self._default_bytes()

    def versions(self) -> list[int]:
        """The versions that are committed there now."""
        return version_numbers(self.remote.sizes(MANIFESTS))

    def fetch_manifest(self, version: int) -> None:
        """Fetches a version's manifest. It carries its own checksum; versions never change, so once is enough."""
        name = f"{MANIFESTS}/{manifest_name(version)}"
        with self._locked(name):
            path = self.path / name
            if path.is_file() and _is_whole_manifest(path):
                return
            for attempt in range(ARRIVALS):
                data = self.remote.read(name, most=LARGEST_MANIFEST_BYTES)
                try:
                    decode_manifest(data, path=path)
                except DamagedStoreError as error:
                    if attempt == ARRIVALS - 1:
                        raise self.remote.damaged(name, error.message.partition("is damaged: ")[2]) from None
                    continue
                with fs.fail_as_disk_error("keeping a remote manifest"):
                    fs.write_atomic(path, data)
                return

    def fetch_file(self, entry: FileEntry) -> None:
        """Fetches a file of the index, the tokenizer or a segment's checksums unless a whole copy is here."""
        with self._locked(entry.name):
            self._fetch_file(entry)

    def _fetch_file(self, entry: FileEntry) -> None:
        path = self.path / entry.name
        if _local_size(path) == entry.bytes and _file_checksum(path) == entry.checksum:
            return
        with fs.fail_as_disk_error("making the cache of a remote store"):
            fs.make_folder(path.parent)
        self._arrive(entry.name, lambda: checked_chunks(self.remote, entry))

    def fetch_segment(
        self, entry: SegmentEntry, *, release: Check, is_visit: bool = False, is_cancelled: Check = lambda: False
    ) -> int:
        """Fetches a segment unless it is here; returns a lock that keeps it here until `unlock`.

        Args:
            entry: the segment.
            release: asked to let go of one more segment where there is no room; False if there is none to let go.
            is_visit: whether the lock is held only while the segment is read once.
            is_cancelled: asked between chunks, and while a visit waits for room.
        """
        name = tokens_name(entry)
        path = self.path / name
        with self._locked(name) as lock:
            is_here = _local_size(path) == entry.bytes
            if not is_here:
                # Of another size it is damaged. It goes first: nobody else can remove it, we hold its lock.
                with fs.fail_as_disk_error("removing from the cache of a remote store"):
                    fs.remove_file(path)
                self._make_room(entry.bytes, lock, release, is_visit=is_visit, is_cancelled=is_cancelled)
            # Before it comes: a visit is one as long as it takes room. Whoever removes a file takes `lock` first.
            reading = _shared_lock(_visit_lock_of(path) if is_visit else _use_lock_of(path))
            try:
                if is_here:
                    self._fetch_file(blocks_entry(entry))
                else:
                    self._fetch_segment(entry, lock, is_cancelled)
                with contextlib.suppress(FileNotFoundError):
                    os.utime(path)  # the order in which segments go
            except BaseException:
                unlock(reading)
                raise
            return reading

    def prefetch_segment(self, entry: SegmentEntry, *, is_cancelled: Check) -> bool:
        """Fetches a segment unless it is here or would drive out another of this store; False if it would."""
        name = tokens_name(entry)
        with self._locked(name) as lock:
            if _local_size(self.path / name) != entry.bytes:
                if self._take_room(entry.bytes, lock, spare=self.path) is not _Room.TAKEN:
                    return False
                self._fetch_segment(entry, lock, is_cancelled)
        return True

    def _fetch_segment(self, entry: SegmentEntry, lock: int, is_cancelled: Check) -> None:
        blocks = blocks_entry(entry)
        try:
            self._fetch_file(blocks)
            with fs.fail_as_disk_error("reading the cache of a remote store"):
                checksums = np.frombuffer((self.path / blocks.name).read_bytes(), "<u8")
            self._arrive(tokens_name(entry), lambda: checked_blocks(self.remote, entry, checksums), is_cancelled)
        finally:
            os.ftruncate(lock, 0)

    def forget(self, entry: SegmentEntry) -> None:
        """Removes a local copy that turned out damaged."""
        with fs.fail_as_disk_error("removing from the cache of a remote store"):
            fs.remove_file(self.path / tokens_name(entry))
            fs.remove_file(self.path / blocks_entry(entry).name)

    def _arrive(self, name: str, chunks: Callable[[], Iterator[bytes]], is_cancelled: Check = lambda: False) -> None:
        for attempt in range(ARRIVALS):
            try:
                with fs.atomic_file(self.path / name) as file:
                    for chunk in chunks():
                        if is_cancelled():
                            raise Cancelled
                        file.write(chunk)
                return
            except DamagedStoreError:
                if attempt == ARRIVALS - 1:
                    raise
            except OSError as error:
                raise DiskError.from_os_error(error, doing=f"keeping a copy of {self.remote.url}/{name}") from error

    # Room

    def _make_room(self, num_bytes: int, lock: int, release: Check, *, is_visit: bool, is_cancelled: Check) -> None:
        """Takes room for a segment, also where others keep too much of it. A visit waits for room that others give back
        soon; who waits is alone in that, or those who need little would never let in one who needs much."""
        with _flock(self._root / "waiting") if is_visit else contextlib.nullcontext():
            while (found := self._take_room(num_bytes, lock)) is not _Room.TAKEN:
                if release():
                    continue
                if not is_visit or found is _Room.KEPT:
                    os.ftruncate(lock, num_bytes)  # what others make meanwhile has to count with it
                    return
                if is_cancelled():
                    raise Cancelled
                time.sleep(SECONDS_BETWEEN_LOOKS)

    def _default_bytes(self) -> int:
        named = os.environ.get(BYTES_SETTING)
        if named:
            if not named.isascii() or not named.isdigit():
                raise ConfigError(f"{BYTES_SETTING} is {named!r}", hint="give a number of bytes, as in 50000000000")
            return int(named)
        cached = sum(segment.bytes for segment in self._cached())
        return min(DEFAULT_CACHE_BYTES, (shutil.disk_usage(self._root).free + cached) // 2)

    def _take_room(self, num_bytes: int, lock: int, *, spare: Path | None = None) -> _Room:
        """Removes the least recently used segments that nobody reads until there is room, and takes it.

        One process at a time, so that two don't remove more than they need, nor find the same room. `lock` is that of
        the segment to come, whose length takes the room; `spare` names a mirror from which nothing is to go.
        """
        with _flock(self._root / "lock"), fs.fail_as_disk_error("removing from the cache of a remote store"):
            _remove_leftovers(self._root.glob(f"*/{SEGMENTS}/*{fs.TEMPORARY_MARK}*"))
            arriving = dict(self._arriving())  # first: what has arrived by the next line is among those
            cached = sorted(self._cached(), key=lambda segment: segment.used)
            sizes = arriving | {segment.path: segment.bytes for segment in cached}
            excess = sum(sizes.values()) + num_bytes - self.cache_bytes
            is_passing = bool(arriving)
            for segment in cached:
                if excess <= 0:
                    break
                if segment.path.parents[1] != spare:
                    in_the_way = _remove_if_unused(segment.path)
                    excess -= segment.bytes if in_the_way is None else 0
                    is_passing |= in_the_way is _Room.PASSING
            if excess <= 0:
                os.ftruncate(lock, num_bytes)
                return _Room.TAKEN
        return _Room.PASSING if is_passing else _Room.KEPT

    def _arriving(self) -> Iterator[tuple[Path, int]]:
        """The segments that are on their way, with the room they take; a killed process takes none any more."""
        for path in self._root.glob(f"*/{LOCKS}/{SEGMENTS}:*"):
            if num_bytes := path.stat().st_size:
                with _flock_if_free(path) as descriptor:
                    if descriptor is None:
                        yield path.parents[1] / path.name.replace(":", "/", 1), num_bytes
                    else:
                        os.ftruncate(descriptor, 0)

    def _cached(self) -> Iterator[_CachedSegment]:
        for path in self._root.glob(f"*/{SEGMENTS}/*.tokens"):
            with contextlib.suppress(FileNotFoundError):  # another process is making room
                found = path.stat(follow_symlinks=False)
                yield _CachedSegment(path=path, bytes=found.st_size, used=found.st_mtime_ns)

    def _remove_own_leftovers(self) -> None:
        """Removes what killed fetches of any file of this store left, also of small ones, for which no room is made."""
        with fs.fail_as_disk_error("removing from the cache of a remote store"):
            if found := list(self.path.rglob(f"*{fs.TEMPORARY_MARK}*")):
                # As who takes room: whoever looks for it meanwhile would take the locks tried here for fetches.
                with _flock(self._root / "lock"):
                    _remove_leftovers(found)

    @contextlib.contextmanager
    def _locked(self, name: str) -> Iterator[int]:
        with _flock(_lock_of(self.path / name)) as descriptor:
            os.ftruncate(descriptor, 0)  # the room of a fetch that was killed
            yield descriptor


class Cancelled(Exception):  # noqa: N818  nothing went wrong
    """Nobody wants the object any more."""


class _Room(Enum):
    """Whether there is room: taken; or not, because of what others fetch or visit, or only of what they keep."""

    TAKEN = auto()
    PASSING = auto()
    KEPT = auto()


@dataclass(frozen=True, kw_only=True)
class _CachedSegment:
    path: Path
    bytes: int
    used: int


def _lock_of(path: Path) -> Path:
    """The lock of a file in a mirror; a segment's two files have one."""
    mirror = next(folder for folder in path.parents if folder.parent.name == REMOTE)
    name = path.with_suffix(".tokens") if path.suffix == ".blocks" else path
    return mirror / LOCKS / str(name.relative_to(mirror)).replace("/", ":")


def _use_lock_of(path: Path) -> Path:
    """The lock that readers of a segment share; apart from the other, which a second reader needs for a moment."""
    return _lock_of(path).with_name(f"use:{path.name}")


def _visit_lock_of(path: Path) -> Path:
    """The same of those who visit it."""
    return _lock_of(path).with_name(f"{VISIT}:{path.name}")


def _remove_if_unused(path: Path) -> _Room | None:
    """Removes a segment; what is in the way where somebody reads or fetches it."""
    with (
        _flock_if_free(_lock_of(path)) as fetching,
        _flock_if_free(_use_lock_of(path)) as keeping,
        _flock_if_free(_visit_lock_of(path)) as visiting,
    ):
        if keeping is None:
            return _Room.KEPT
        if fetching is None or visiting is None:
            return _Room.PASSING
        fs.remove_file(path)
        fs.remove_file(path.with_suffix(".blocks"))
        return None


def _remove_leftovers(paths: Iterable[Path]) -> None:
    """Removes those temporary files that a killed process left; a living one holds the lock of what it is fetching."""
    for path in paths:
        if fs.is_temporary(path):
            final = path.with_name(path.name.rpartition(fs.TEMPORARY_MARK)[0])
            with _flock_if_free(_lock_of(final)) as descriptor:
                if descriptor is not None:
                    fs.remove_file(path)


def _shared_lock(path: Path) -> int:
    with fs.fail_as_disk_error("locking"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


@contextlib.contextmanager
def _flock(path: Path) -> Iterator[int]:
    """A kernel lock, freed by the close or by our death.

    Its file stays: whoever removed it could remove it under someone who has just opened it.
    """
    with _lock_file(path) as descriptor:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield descriptor


@contextlib.contextmanager
def _flock_if_free(path: Path) -> Iterator[int | None]:
    """The same, or None if it is another's."""
    with _lock_file(path) as descriptor:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_ours = True
        except BlockingIOError:
            is_ours = False
        yield descriptor if is_ours else None


@contextlib.contextmanager
def _lock_file(path: Path) -> Iterator[int]:
    with fs.fail_as_disk_error("locking"):
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        yield descriptor
    finally:
        unlock(descriptor)


def unlock(lock: int) -> None:
    """Gives a lock back. A process forked meanwhile has the descriptor too: closing ours alone would leave the lock
    with it, who would then wait for itself, or keep others waiting."""
    fcntl.flock(lock, fcntl.LOCK_UN)
    os.close(lock)


# Checking


def checked_chunks(remote: ObjectFolder, entry: FileEntry) -> Iterator[bytes]:
    """The chunks of an object that the manifest names.

    Raises:
        DamagedStoreError: it isn't what was committed; known after the last chunk.
    """
    running = RunningChecksum()
    for chunk in remote.chunks(entry.name, entry.bytes):
        running.update(chunk)
        yield chunk
    if running.hex() != entry.checksum:
        raise remote.damaged(entry.name, "its checksum isn't the manifest's")


def checked_blocks(remote: ObjectFolder, entry: SegmentEntry, checksums: npt.NDArray[Any]) -> Iterator[bytes]:
    """The same of a segment's tokens; known with the chunk in which it differs."""
    name, first = tokens_name(entry), 0
    for chunk in remote.chunks(name, entry.bytes):
        found = block_checksums(chunk)
        wrong = np.flatnonzero(found != checksums[first : first + len(found)])
        if len(wrong):
            at = (first + int(wrong[0])) * BLOCK_BYTES
            raise remote.damaged(name, f"the 64 KiB block at byte {at} isn't what was committed")
        first += len(found)
        yield chunk


def _is_whole_manifest(path: Path) -> bool:
    try:
        decode_manifest(path.read_bytes(), path=path)
    except DamagedStoreError:
        return False
    return True


def _local_size(path: Path) -> int | None:
    try:
        return path.stat(follow_symlinks=False).st_size
    except FileNotFoundError:
        return None


def _file_checksum(path: Path) -> str:
    running = RunningChecksum()
    with path.open("rb") as file:
        while chunk := file.read(2**20):
            running.update(chunk)
    return running.hex()
