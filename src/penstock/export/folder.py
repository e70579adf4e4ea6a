"""The output folder: everything is written beside it under a temporary name and moved into place at once.

`export.json`, written last, lists every file with size and checksum and says what was exported. Whoever kills the
process, or fills the disk, finds the folder as it was before, or not at all; what is left under a temporary name is
removed by the next export to the same place. Nothing inside depends on time, host or path: the same store and options
give the same bytes.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from penstock import fs
from penstock.errors import DiskError, StoreBusyError, StoreError
from penstock.hashing import RunningChecksum
from penstock.store.layout import FileEntry

__all__ = ["MANIFEST", "ExportFolder", "ExportWriter", "open_export_folder"]

MANIFEST = "export.json"
FORMAT = "penstock-export"
FORMAT_VERSION = 1
_LARGEST_MANIFEST = 64 * 2**20


class _Sink(Protocol):
    def write(self, data: Any) -> None: ...


class ExportWriter:
    """A file of an export while it is written: counts and checks what passes. As much of a file as Arrow wants."""

    closed = False

    def __init__(self, sink: _Sink) -> None:
        self._sink = sink
        self._checksum = RunningChecksum()
        self.num_bytes = 0

    def write(self, data: Any) -> int:
        """Writes all of a bytes-like object; returns its size, as the file protocol wants."""
        size = memoryview(data).nbytes
        self._sink.write(data)
        self._checksum.update(data)
        self.num_bytes += size
        return size

    def flush(self) -> None:
        """Nothing is held back here."""

    def close(self) -> None:
        """Closing is the folder's business."""

    def entry(self, name: str) -> FileEntry:
        """The manifest's line for what was written."""
        return FileEntry(name=name, bytes=self.num_bytes, checksum=self._checksum.hex())


class ExportFolder:
    """Where a format writes its files. Names are relative, `/` between the parts."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.entries: list[FileEntry] = []

    @contextmanager
    def file(self, name: str) -> Iterator[ExportWriter]:
        """A new file; durable when the block ends."""
        path = self._path / name
        fs.make_folder(path.parent)
        with fs.atomic_file(path) as sink:
            writer = ExportWriter(sink)
            yield writer
        self.entries.append(writer.entry(name))

    def write_json(self, name: str, value: Any) -> None:
        """A small JSON file for people and programs."""
        with self.file(name) as writer:
            writer.write(json.dumps(value, indent=2, ensure_ascii=True).encode() + b"\n")

    def write_manifest(self, content: dict[str, Any]) -> None:
        """The last file."""
        files = [{"name": entry.name, "bytes": entry.bytes, "checksum": entry.checksum} for entry in self.entries]
        self.write_json(MANIFEST, {"format": FORMAT, "format_version": FORMAT_VERSION, **content, "files": files})


@contextmanager
def open_export_folder(out: Path, *, store: Path, force: bool) -> Iterator[ExportFolder]:
    """A folder that becomes `out` when the block ends without an error.

    Raises:
        StoreError: `out` holds something that isn't an earlier export, or is one and `force` isn't given.
        StoreBusyError: another export is writing there.
        DiskError: the disk refused; nothing is left.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100  not resolve: a link is refused, not followed
    _refuse(out, store=store, force=force)
    temporary = fs.temporary_path(out)
    try:
        fs.make_folder(out.parent)
        with _locked(out):
            _refuse(out, store=store, force=force)  # again: only now is it ours to look at
            _remove_leftovers(out)
            try:
                fs.make_folder(temporary)
                yield ExportFolder(temporary)
                _put_in_place(temporary, out)
            except BaseException:
                with contextlib.suppress(OSError):  # the first error is the one to tell; the next export cleans up
                    fs.remove_tree(temporary)
                raise
    except OSError as error:
        if error.filename:  # the user knows of `out`, not of its temporary name
            error.filename = os.fspath(error.filename).replace(os.fspath(temporary), os.fspath(out))
        raise DiskError.from_os_error(error, doing="exporting to") from error


def _refuse(out: Path, *, store: Path, force: bool) -> None:
    if out.is_relative_to(Path(os.path.abspath(store))):  # noqa: PTH100
        raise StoreError(f"{out} lies inside the store", hint="choose a folder outside the store")
    if not os.path.lexists(out) or (_is_plain_folder(out) and not any(out.iterdir())):
        return
    if not _is_export(out):
        raise StoreError(
            f"{out} is there and isn't an earlier export", hint="choose another --out, or remove it yourself"
        )
    if not force:
        raise StoreError(f"{out} holds an earlier export", hint="add --force to replace it, or choose another --out")


def _is_plain_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def _is_export(out: Path) -> bool:
    """Whether the folder has our manifest: only then may it be replaced."""
    path = out / MANIFEST
    if not _is_plain_folder(out) or path.is_symlink() or not path.is_file():
        return False
    if path.stat().st_size > _LARGEST_MANIFEST:
        return False
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        return False
    return isinstance(content, dict) and content.get("format") == FORMAT


@contextmanager
def _locked(out: Path) -> Iterator[None]:
    path = out.with_name(f"{out.name}.lock")
    lock = fs.FolderLock(path)
    try:
        lock.acquire()
    except StoreBusyError as error:
        raise StoreBusyError(
            f"another export to {out} is running: {error.message}",
            hint=f"wait for it to end; if it ran on another host and is dead, remove {path}",
        ) from None
    try:
        yield
    finally:
        lock.release()


def _remove_leftovers(out: Path) -> None:
    """What killed exports to the same place left; the lock is ours, so nobody writes there."""
    mark = re.compile(re.escape(out.name + fs.TEMPORARY_MARK) + r"\d+-[0-9a-f]{8}")
    for path in [path for path in out.parent.iterdir() if mark.fullmatch(path.name)]:
        if _is_plain_folder(path):
            fs.remove_tree(path)


def _put_in_place(temporary: Path, out: Path) -> None:
    if not (_is_plain_folder(out) and any(out.iterdir())):
        fs.replace_tree(temporary, out)  # renaming over an empty folder is one step too
        return
    old = fs.temporary_path(out)
    try:
        fs.replace_tree(out, old)
        fs.replace_tree(temporary, out)
    except OSError:
        if old.exists() and not out.exists():
            with contextlib.suppress(OSError):  # the first error is the one to tell
                fs.replace_tree(old, out)
        raise
    fs.remove_tree(old)
