"""The only place that writes files.

A file appears under its final name whole or not at all: it is written beside it under a temporary name, flushed to the
disk, renamed, and the folder flushed too; only what can be made again may do without the flushes. `create_if_absent` is
the commit: of two writers one wins, and the loser learns it. `FolderLock` is a kernel lock, so a dead holder's lock is
free at once, whatever its file says.

An error before the rename (or link) leaves the old content and no temporary file; the one step after it, flushing the
folder, can only fail with the new content in place. Every error names the file that was asked for. Every operation that
changes the disk passes `_operation`, which tests use to kill the process or to answer with an error at the k-th one
(`before_operation`). Cost: one fsync per file and one per rename; callers write large files.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.errors import RUN_AGAIN, DiskError, StoreBusyError

__all__ = [
    "DIRECT_ALIGNMENT",
    "AppendOnlyFile",
    "FolderLock",
    "atomic_file",
    "create_if_absent",
    "fail_as_disk_error",
    "is_temporary",
    "make_folder",
    "raise_if_exhausted",
    "remove_file",
    "remove_leftovers",
    "remove_tree",
    "replace_tree",
    "temporary_path",
    "write_atomic",
    "write_folder",
]

# Where memory must begin, and of what its length must be a multiple, to go past the page cache on any common disk.
DIRECT_ALIGNMENT = 4096

TEMPORARY_MARK = ".tmp-"
# The whole ending, so that a user's own `notes.tmp-old` beside our files is never taken for a leftover.
_TEMPORARY_NAME = re.compile(re.escape(TEMPORARY_MARK) + r"\d+-[0-9a-f]{8}$")

# What link(2) answers where hard links don't exist: FAT and exFAT EPERM, some network and FUSE mounts the others.
_NO_HARD_LINKS = (errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)
# What fsync(2) answers where folders can't be flushed (some FUSE and SMB mounts): there is nothing to wait for.
_NO_FOLDER_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)
# What any file is answered with when this process or the system has run out of something.
_EXHAUSTED = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)
_FULL = (errno.ENOSPC, errno.EDQUOT)

before_operation: Callable[[str, str], None] | None = None
"""Called with (operation, path) before each change of the disk. Only fault-injection tests set it."""


@contextmanager
def _operation(name: str, path: Path, *, asked_for: Path | None = None) -> Iterator[None]:
    """Wraps one change of the disk; an error names `asked_for`, the file the user knows of (default: `path`)."""
    try:
        if before_operation is not None:
            before_operation(name, os.fspath(path))
        yield
    except OSError as error:
        error.filename = os.fspath(asked_for or path)
        del error.filename2  # rename and link set it: "temporary -> final" says nothing to the user
        raise


@contextmanager
def fail_as_disk_error(doing: str, *, again: str | None = None) -> Iterator[None]:
    """Turns the system's refusals into a `DiskError` that says what was being done to which file.

    Where `again` says how the work goes on, the hint does too, also that of a `DiskError` from further in.
    """
    try:
        yield
    except OSError as error:
        raise DiskError.from_os_error(error, doing=doing, again=again or RUN_AGAIN) from error
    except DiskError as error:
        if again is not None:
            error.go_on_by(again)
        raise


def raise_if_exhausted(error: OSError) -> None:
    """Raises an error again that says nothing about the file: it must not be counted as unreadable for it."""
    if error.errno in _EXHAUSTED:
        raise error


class _Writer:
    """The handle `atomic_file` yields: `write` and nothing else, so that nobody seeks behind our back."""

    def __init__(self, descriptor: int, path: Path) -> None:
        self._descriptor = descriptor
        self._path = path
        self.bytes_written = 0

    def write(self, data: Any) -> None:
        """Writes all of a bytes-like object."""
        view = memoryview(data)
        if view.nbytes == 0:  # an empty array of two dimensions can't be cast
            return
        view = view.cast("B")
        while len(view):
            with _operation("write", self._path):
                written = os.write(self._descriptor, view)
            self.bytes_written += written
            view = view[written:]

    def write_past_cache(self, data: Any) -> None:
        """Writes all of a large array straight from memory to the disk, where the system can; else like `write`.

        Through the page cache each byte is copied once more, into fresh pages: 0.6 to 3.6 s of CPU per GB where this
        takes 0.04 (docs/log.md). For data that nobody reads at once. The array should begin on a border of
        `DIRECT_ALIGNMENT`; one that doesn't goes through the cache.
        """
        view = memoryview(data).cast("B")
        aligned = len(view) - len(view) % DIRECT_ALIGNMENT
        if self.bytes_written == 0 and aligned and _set_direct(self._descriptor, True):
            try:
                while self.bytes_written < aligned:
                    with _operation("write", self._path):
                        self.bytes_written += os.write(self._descriptor, view[self.bytes_written : aligned])
            except OSError as error:
                if error.errno != errno.EINVAL:  # alignment of memory, or of what a short write left
                    raise
            finally:
                _set_direct(self._descriptor, False)
        self.write(view[self.bytes_written :])


def _set_direct(descriptor: int, wanted: bool) -> bool:
    """Turns writing past the page cache on or off; False where there is no such thing."""
    if not hasattr(os, "O_DIRECT"):
        return False
    flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
    try:
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT if wanted else flags & ~os.O_DIRECT)
    except OSError:
        return False
    return True


@contextmanager
def atomic_file(path: Path, *, flushed: bool = True) -> Iterator[_Writer]:
    """Opens a new file that appears as `path`, replacing what was there, only if the block ends without an error.

    One that isn't `flushed` may be torn or gone when the system dies, not when the process does: for what carries a
    checksum and can be made again. It costs no wait for the disk, and no block of it if it is removed within seconds.
    """
    with _temporary_file(path, flushed=flushed) as (temporary, writer):
        yield writer
    try:
        with _operation("rename", path):
            os.replace(temporary, path)
    except BaseException:
        _discard(temporary)
        raise
    if flushed:
        _sync_folder(path.parent)


def write_atomic(path: Path, data: bytes, *, flushed: bool = True) -> None:
    """Makes `data` the content of `path`; a reader sees the old content or the new, never a mix. See `atomic_file`."""
    with atomic_file(path, flushed=flushed) as file:
        file.write(data)


def create_if_absent(path: Path, data: bytes) -> bool:
    """Makes `data` the content of `path` unless it exists. Returns whether this call created it.

    An error in the last step, flushing the folder, is raised with the file already there: the caller's rerun finds it.
    """
    with _temporary_file(path) as (temporary, writer):
        writer.write(data)
    try:
        try:
            with _operation("link", path):
                os.link(temporary, path)
            created = True
        except FileExistsError:
            # A network server that lost its first answer says "exists" about our own link.
            created = _is_same_file(temporary, path)
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            created = _rename_if_absent(temporary, path)
    finally:
        _discard(temporary)
    if created:
        _sync_folder(path.parent)
    return created


def _rename_if_absent(temporary: Path, path: Path) -> bool:
    """The commit on file systems without hard links: look and rename while holding the folder's kernel lock."""
    with _open_folder(path.parent) as descriptor:
        with _operation("lock", path):
            fcntl.flock(descriptor, fcntl.LOCK_EX)  # freed by the close, or by our death
        if os.path.lexists(path):
            return False
        with _operation("rename", path):
            os.rename(temporary, path)
        return True


def is_temporary(path: Path) -> bool:
    """Whether a name is one of those that `temporary_path` gives."""
    return _TEMPORARY_NAME.search(path.name) is not None


def temporary_path(path: Path) -> Path:
    """A name beside `path` that nobody uses and `remove_leftovers` knows."""
    return path.with_name(f"{path.name}{TEMPORARY_MARK}{os.getpid()}-{secrets.token_hex(4)}")


@contextmanager
def _temporary_file(path: Path, *, flushed: bool = True) -> Iterator[tuple[Path, _Writer]]:
    """A temporary file beside `path`; discarded on any error, a failed fsync or close included."""
    temporary = temporary_path(path)
    with _operation("create", temporary, asked_for=path):
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        try:
            yield temporary, _Writer(descriptor, path)
            if flushed:
                with _operation("fsync", temporary, asked_for=path):
                    os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except BaseException:
        _discard(temporary)
        raise


def _discard(temporary: Path) -> None:
    """Removes a temporary file. If even that fails the first error is the one to tell; the next start cleans up."""
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)


def _is_same_file(one: Path, other: Path) -> bool:
    try:
        return os.path.samefile(one, other)
    except FileNotFoundError:
        return False


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path, *, asked_for: Path | None = None) -> None:
    with _operation("fsync-folder", folder, asked_for=asked_for), _open_folder(folder) as descriptor:
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in _NO_FOLDER_SYNC:
                raise


def make_folder(path: Path) -> None:
    """Creates a folder and its parents unless they are there; the new names are durable."""
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    for folder in reversed(missing):
        with _operation("mkdir", folder):
            folder.mkdir(exist_ok=True)  # another process may have been first; a file of that name is an error
        _sync_folder(folder.parent)


def remove_file(path: Path) -> None:
    """Removes a file if it is there."""
    with _operation("unlink", path):
        path.unlink(missing_ok=True)


def remove_tree(path: Path) -> None:
    """Removes a folder with all that is in it, if it is there. It vanishes at once: a kill leaves no half of it."""
    if not os.path.lexists(path):
        return
    if path.is_symlink() or not path.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), os.fspath(path))
    doomed = path if is_temporary(path) else temporary_path(path)
    if doomed != path:
        with _operation("rename", path):
            os.rename(path, doomed)
    with _operation("remove-tree", doomed, asked_for=path):
        while os.path.lexists(doomed):
            with contextlib.suppress(FileNotFoundError):  # whoever takes it for an interrupted removal is ending it too
                shutil.rmtree(doomed)


def replace_tree(temporary: Path, path: Path) -> None:
    """Gives a finished folder its final name, which must be free; files in it are already durable.

    Name the folder with `temporary_path`, so that `remove_leftovers` finds it after a kill.
    """
    _sync_folder(temporary, asked_for=path)
    with _operation("rename", path):
        os.rename(temporary, path)
    _sync_folder(path.parent)


def write_folder(path: Path, files: Mapping[str, bytes]) -> None:
    """Makes a folder of these files, which appears whole or not at all; one that was there under that name goes first.

    For files that belong together: one flush of the folder instead of one for each file.
    """
    temporary = temporary_path(path)
    with _operation("mkdir", temporary, asked_for=path):
        temporary.mkdir()
    try:
        for name, data in files.items():
            with _operation("create", temporary / name, asked_for=path / name):
                descriptor = os.open(temporary / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            try:
                _Writer(descriptor, path / name).write(data)
                with _operation("fsync", temporary / name, asked_for=path / name):
                    os.fsync(descriptor)
            finally:
                os.close(descriptor)
        remove_tree(path)
        replace_tree(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):  # the first error is the one to tell; the next start cleans up
            shutil.rmtree(temporary)
        raise


def remove_leftovers(folder: Path) -> int:
    """Removes the temporary files and folders that a killed process left below `folder`; returns how many.

    Call it under the lock: a live writer's temporary files look the same.
    """
    count = 0
    for parent, folders, files in os.walk(folder, onerror=_raise_unless_absent):
        for name in [name for name in folders if _TEMPORARY_NAME.search(name)]:
            folders.remove(name)
            leftover = Path(parent, name)
            (remove_file if leftover.is_symlink() else remove_tree)(leftover)
            count += 1
        for name in files:
            if _TEMPORARY_NAME.search(name):
                remove_file(Path(parent, name))
                count += 1
    return count


def _raise_unless_absent(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


class AppendOnlyFile:
    """A file that grows by whole lines, from one process and any of its threads.

    A torn last line, left by a kill, is cut off at open; one left by a failed write (disk full) at once, or before the
    next line if that fails too, so that no later line is glued to it. Opening reads the file's last block only.
    """

    _TAIL_BYTES = 1 << 16

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        is_new = not path.exists()
        with _operation("create", path):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o666)
        try:
            self._torn = (self._end_of_last_line(), os.fstat(self._descriptor).st_size)
            self._cut_torn_line()
            if is_new:
                _sync_folder(path.parent)
        except BaseException:
            os.close(self._descriptor)
            raise

    def write(self, line: bytes) -> None:
        """Appends one line, newline included: all of it or, with an error, nothing."""
        with self._lock:
            self._cut_torn_line()
            written = 0
            try:
                while written < len(line):  # one call, except when the disk fills up in the middle
                    with _operation("write", self._path):
                        written += os.write(self._descriptor, memoryview(line)[written:])
            except BaseException:
                end = os.lseek(self._descriptor, 0, os.SEEK_CUR)
                self._torn = (end - written, end)
                with contextlib.suppress(OSError):  # the first error is the one to tell; the next write cuts again
                    self._cut_torn_line()
                raise

    def sync(self) -> None:
        """Waits until the lines are on the disk."""
        with _operation("fsync", self._path):
            os.fsync(self._descriptor)

    def close(self) -> None:
        """Flushes and closes; closing twice is fine."""
        if self._descriptor >= 0:
            try:
                self.sync()
            finally:
                os.close(self._descriptor)
                self._descriptor = -1

    def _end_of_last_line(self) -> int:
        end = os.fstat(self._descriptor).st_size
        while end > 0:
            start = max(0, end - self._TAIL_BYTES)
            newline = os.pread(self._descriptor, end - start, start).rfind(b"\n")
            if newline >= 0:
                return start + newline + 1
            end = start
        return 0

    def _cut_torn_line(self) -> None:
        start, end = self._torn
        # The size is looked at again so that a line which another handle has appended since is never cut.
        if start < end == os.fstat(self._descriptor).st_size:
            with _operation("truncate", self._path):
                os.ftruncate(self._descriptor, start)
        self._torn = (0, 0)


def _this_process() -> dict[str, Any]:
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "boot_id": boot_id.read_text().strip() if boot_id.exists() else "",
        "started": _process_start_ticks(),
    }


def _process_start_ticks(pid: int | None = None) -> int:
    """Kernel ticks at which a process (this one) started: tells a reused pid from the old one (0 where unknown)."""
    try:
        return int(Path(f"/proc/{pid or 'self'}/stat").read_text().rpartition(")")[2].split()[19])
    except OSError:
        return 0


class FolderLock:
    """The right to write into a folder, held by one process at a time.

    The lock is the kernel's (flock), so the death of its holder frees it. The file says who holds it, for messages,
    and is removed at release. What a dead holder left is taken over when it ran under this kernel (a container started
    anew has another host name but the same boot id) or on this host; a file of another host is refused, because not
    every network file system carries kernel locks between hosts. A forked worker shares the lock and dies with its
    holder, a moment later: whoever finds the lock held by a dead process waits for that moment.

    Whoever `frees_space` also gets the lock on a full disk, without a name in the file.
    """

    _ORPHANS_SECONDS = 5.0

    def __init__(self, path: Path, *, break_lock: bool = False, frees_space: bool = False) -> None:
        self._path = path
        self._break_lock = break_lock
        self._frees_space = frees_space
        self._descriptor = -1
        self.taken_over_from: dict[str, Any] | None = None

    def acquire(self) -> None:
        """Takes the lock or raises `StoreBusyError` naming the holder."""
        descriptor = self._locked_descriptor()
        try:
            holder = self._holder(descriptor)
            if holder and not self._break_lock and not _ran_here(holder):
                raise self._busy(holder, hint="if that process is dead, run the command again with --break-lock")
            self._write_holder(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        self.taken_over_from = holder or None
        self._descriptor = descriptor

    def release(self) -> None:
        """Removes the lock file and frees the lock; in this order, so that nobody locks a file about to vanish."""
        if self._descriptor < 0:
            return
        try:
            if self._is_current(self._descriptor):  # not a successor's, should someone have removed ours by hand
                remove_file(self._path)
        finally:
            os.close(self._descriptor)
            self._descriptor = -1

    def _locked_descriptor(self) -> int:
        while True:
            with _operation("create", self._path):
                descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
            try:
                self._lock(descriptor, patience=self._ORPHANS_SECONDS)
                if self._is_current(descriptor):
                    return descriptor
            except BaseException:
                os.close(descriptor)
                raise
            os.close(descriptor)  # the holder released and removed the file between our open and our lock

    def _lock(self, descriptor: int, *, patience: float) -> None:
        deadline = time.monotonic() + patience
        while True:
            try:
                with _operation("lock", self._path):
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):  # which of them depends on the system
                holder = self._holder(descriptor)
                if _is_dead(holder) and time.monotonic() < deadline:
                    time.sleep(0.01)
                    continue
                raise self._busy(holder, hint="wait for it to end, or stop it, and run the command again") from None
            return

    def _write_holder(self, descriptor: int) -> None:
        try:
            with _operation("write", self._path):
                os.ftruncate(descriptor, 0)
                os.pwrite(descriptor, json.dumps(_this_process()).encode(), 0)
        except BaseException as error:
            if self._frees_space and isinstance(error, OSError) and error.errno in _FULL:
                os.ftruncate(descriptor, 0)
                return
            _discard(self._path)  # ours, and half written
            raise

    def _is_current(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self._path))
        except FileNotFoundError:
            return False

    @staticmethod
    def _holder(descriptor: int) -> dict[str, Any]:
        try:
            value = json.loads(os.pread(descriptor, 4096, 0) or b"{}")
        except (ValueError, RecursionError):
            return {}
        return value if isinstance(value, dict) else {}

    def _busy(self, holder: dict[str, Any], *, hint: str) -> StoreBusyError:
        who = f"process {holder.get('pid', '?')} on {holder.get('host', 'this machine')}"
        return StoreBusyError(f"{self._path.parent} is being written by {who}", hint=hint)

    def __enter__(self) -> FolderLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _is_dead(holder: dict[str, Any]) -> bool:
    """Whether `holder` ran under this kernel and is gone; another process may have its number by now."""
    here, pid = _this_process(), holder.get("pid")
    if not isinstance(pid, int) or not here["boot_id"] or holder.get("boot_id") != here["boot_id"]:
        return False
    return _process_start_ticks(pid) != holder.get("started")


def _ran_here(holder: dict[str, Any]) -> bool:
    """Whether this kernel would still hold the lock if `holder` were alive."""
    here = _this_process()
    same_kernel = here["boot_id"] != "" and holder.get("boot_id") == here["boot_id"]
    return bool(same_kernel or holder.get("host") == here["host"])
