"""The only place that writes files.

A file appears under its final name whole or not at all: it is written beside it under a temporary name, flushed to the
disk, renamed, and the folder flushed too. `create_if_absent` is the commit: of two writers one wins, and the loser
learns it. `FolderLock` is a kernel lock, so a dead holder's lock is free at once, whatever its file says.

Every operation that changes the disk passes `_operation`, which tests use to kill the process or to answer with an
error at the k-th one (`before_operation`). Cost: one fsync per file and one per rename; callers write large files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import DiskError, StoreBusyError

__all__ = [
    "AppendOnlyFile",
    "FolderLock",
    "atomic_file",
    "create_if_absent",
    "fail_as_disk_error",
    "make_folder",
    "remove_file",
    "remove_leftovers",
    "remove_tree",
    "replace_tree",
    "write_atomic",
]

TEMPORARY_MARK = ".tmp-"

before_operation: Callable[[str, str], None] | None = None
"""Called with (operation, path) before each change of the disk. Only fault-injection tests set it."""


def _operation(name: str, path: Path | str) -> None:
    if before_operation is not None:
        before_operation(name, os.fspath(path))


@contextmanager
def fail_as_disk_error(doing: str) -> Iterator[None]:
    """Turns the system's refusals into a `DiskError` that says what was being done to which file."""
    try:
        yield
    except OSError as error:
        raise DiskError.from_os_error(error, doing=doing) from error


class _Writer:
    """The handle `atomic_file` yields: `write` and nothing else, so that nobody seeks behind our back."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self.bytes_written = 0

    def write(self, data: Any) -> None:
        """Writes all of a bytes-like object."""
        view = memoryview(data).cast("B")
        while len(view):
            _operation("write", self._path)
            try:
                written = os.write(self._descriptor, view)
            except OSError as error:
                error.filename = str(self._path)
                raise
            self.bytes_written += written
            view = view[written:]


@contextmanager
def atomic_file(path: Path) -> Iterator[_Writer]:
    """Opens a new file that appears as `path`, replacing what was there, only if the block ends without an error."""
    with _temporary_file(path) as (temporary, writer):
        yield writer
    try:
        _operation("rename", path)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


def write_atomic(path: Path, data: bytes) -> None:
    """Makes `data` the content of `path`; a reader sees the old content or the new, never a mix."""
    with atomic_file(path) as file:
        file.write(data)


def create_if_absent(path: Path, data: bytes) -> bool:
    """Makes `data` the content of `path` unless it exists. Returns whether this call created it."""
    with _temporary_file(path) as (temporary, writer):
        writer.write(data)
    try:
        _operation("link", path)
        os.link(temporary, path)
    except FileExistsError:
        return False
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)
    return True


@contextmanager
def _temporary_file(path: Path) -> Iterator[tuple[Path, _Writer]]:
    """A flushed temporary file beside `path`; discarded on any error, a failed fsync included."""
    temporary = path.with_name(f"{path.name}{TEMPORARY_MARK}{os.getpid()}-{secrets.token_hex(4)}")
    _operation("create", temporary)
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        yield temporary, _Writer(descriptor, path)
        _operation("fsync", temporary)
        os.fsync(descriptor)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    _operation("fsync-folder", folder)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> None:
    """Creates a folder and its parents; the new names are durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        _operation("mkdir", folder)
        folder.mkdir(exist_ok=True)
        _sync_folder(folder.parent)


def remove_file(path: Path) -> None:
    """Removes a file if it is there."""
    _operation("unlink", path)
    path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Removes a folder with all that is in it, if it is there."""
    _operation("remove-tree", path)
    if path.exists():
        shutil.rmtree(path)


def replace_tree(temporary: Path, path: Path) -> None:
    """Gives a finished folder its final name, which must be free; files in it are already durable."""
    _sync_folder(temporary)
    _operation("rename", path)
    os.rename(temporary, path)
    _sync_folder(path.parent)


def remove_leftovers(folder: Path) -> int:
    """Removes temporary files that a killed process left below `folder`; returns how many. Call it under the lock."""
    count = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            if TEMPORARY_MARK in name:
                remove_file(Path(parent, name))
                count += 1
    return count


class AppendOnlyFile:
    """A file that grows by whole lines. A torn last line, left by a kill, is cut off at open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        _operation("create", path)
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        content = path.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole != len(content):
            os.ftruncate(self._descriptor, whole)

    def write(self, line: bytes) -> None:
        """Appends one line in one system call."""
        _operation("write", self._path)
        os.write(self._descriptor, line)

    def sync(self) -> None:
        """Waits until the lines are on the disk."""
        _operation("fsync", self._path)
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Flushes and closes; closing twice is fine."""
        if self._descriptor >= 0:
            with contextlib.suppress(OSError):
                os.fsync(self._descriptor)
            os.close(self._descriptor)
            self._descriptor = -1


def _this_process() -> dict[str, Any]:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": boot_id.read_text().strip() if boot_id.exists() else "",
        "started": _process_start_ticks(),
    }


def _process_start_ticks() -> int:
    """Kernel ticks at which this process started: tells a reused pid from the old one (0 where unknown)."""
    try:
        return int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class FolderLock:
    """The right to write into a folder, held by one process at a time.

    The lock is the kernel's (flock), so the death of its holder frees it. The file says who holds it, for messages,
    and is removed at release. What a dead holder left is taken over when it was of this host; a file of another host
    is refused, because not every network file system carries kernel locks between hosts.
    """

    def __init__(self, path: Path, *, break_lock: bool = False) -> None:
        self._path = path
        self._break_lock = break_lock
        self._descriptor = -1
        self.taken_over_from: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Takes the lock or raises `StoreBusyError` naming the holder."""
        while True:
            _operation("create", self._path)
            descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = self._holder(descriptor)
                os.close(descriptor)
                if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                    raise
                raise self._busy(holder, hint="wait for it to end, or stop it, and run the command again") from None
            if self._is_current(descriptor):
                break
            os.close(descriptor)  # the holder released and removed the file between our open and our lock
        holder = self._holder(descriptor)
        if holder and holder.get("host") != socket.gethostname() and not self._break_lock:
            os.close(descriptor)
            raise self._busy(holder, hint="if that process is dead, run the command again with --break-lock")
        self.taken_over_from = holder or None
        _operation("write", self._path)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        self._descriptor = descriptor

    def release(self) -> None:
        """Removes the lock file and frees the lock; in this order, so that nobody locks a file about to vanish."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
            os.close(self._descriptor)
            self._descriptor = -1

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    @staticmethod
    def _holder(descriptor: int) -> dict[str, Any]:
        try:
            value = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        except ValueError:
            return {}
        return value if isinstance(value, dict) else {}

    def _busy(self, holder: dict[str, Any], *, hint: str) -> StoreBusyError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'this machine')}"
        return StoreBusyError(f"{self._path.parent} is being written by {who}", hint=hint)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.release()
