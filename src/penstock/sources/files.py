"""Folders and files of text and code.

In: a root path. Out: one document per file, in the byte order of the relative paths, whatever order the file system
lists them in. Every entry that isn't a folder is a document or is counted under a reason:

    symlink · special (FIFO, socket, device) · hidden · vendored · not-included · excluded · too-large     (unread)
    unreadable · empty · binary · not-utf8                                                               (after reading)

Symbolic links are never followed, at no level; a file that turned into a FIFO since the walk isn't read. Names are
bytes throughout. The walk is lazy: memory holds one unit's names and the open folders' listings.
"""

from __future__ import annotations

import operator
import os
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from penstock import fs
from penstock.hashing import strong_hash
from penstock.sources.document import Document, Part, SkipTally
from penstock.sources.hygiene import RULES_VERSION, VENDORED_FOLDERS, PathRules, content_problem, language_of
from penstock.sources.source import Unit, UnitText

__all__ = ["FileItem", "FileMemory", "FileOptions", "FilesSource"]

DEFAULT_MAX_FILE_BYTES = 16 * 2**20

READ_BYTES = 2**16
FILE_NAME_ENCODING, FILE_NAME_ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

_Entry = tuple[bytes, "os.stat_result | None", str | None]
"""Relative path, of a folder with a slash behind it; of a file, its facts or the reason to leave it out."""
_PATH = operator.itemgetter(0)


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Which files become documents."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    hidden: bool = False
    vendored: bool = False


class FileItem(NamedTuple):
    """One file of a unit: relative path and the size at walk time. A tuple, because thousands cross a pipe."""

    path: bytes
    size: int


class FileMemory(Protocol):
    """What is known of the files of an earlier walk."""

    def recognises(self, path: bytes, facts: os.stat_result) -> bool:
        """Whether this file is the one of that walk, so that what became of it then holds; called in order of path."""


class FilesSource:
    """The files below a folder, or one file.

    Attributes:
        memory: asked about each file by `units`, which leaves out those that it recognises. None: all are taken.

    Args:
        name: first part of the documents' keys.
        root: folder or file.
        options: filters.
        outside: folder names that are no part of this source at all: neither read nor counted.
    """

    def __init__(
        self, *, name: str, root: str, options: FileOptions | None = None, outside: frozenset[bytes] = frozenset()
    ) -> None:
        self.name = name
        self._root = os.fsencode(root)
        self._options = options or FileOptions()
        self._outside = outside
        self._key_prefix = name.encode() + b"/"
        self.memory: FileMemory | None = None
        self._rules = PathRules(include=self._options.include, exclude=self._options.exclude)
        self._has_rules = bool(self._options.include or self._options.exclude)

    @property
    def location(self) -> str:
        """Absolute path of the root."""
        return os.fsdecode(os.path.abspath(self._root))

    def options(self) -> dict[str, Any]:
        """What decides which documents come out."""
        chosen = self._options
        return {
            "kind": "files",
            "name": self.name,
            "rules": RULES_VERSION,
            "include": list(chosen.include),
            "exclude": list(chosen.exclude),
            "max_file_bytes": chosen.max_file_bytes,
            "hidden": chosen.hidden,
            "vendored": chosen.vendored,
        }

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        """Runs of files of at least `unit_bytes` together, the last one perhaps less."""
        builder = _UnitBuilder(self.name)
        recognises = self.memory.recognises if self.memory is not None else None
        for path, entry_stat, reason in self._walk():
            if entry_stat is None or reason is not None:
                builder.skip(reason or "unreadable", path, self._key(path))
                continue
            if recognises is not None and recognises(path, entry_stat):
                continue
            builder.add(path, entry_stat)
            if builder.input_bytes >= unit_bytes:
                yield builder.finish()
                builder = _UnitBuilder(self.name)
        if builder.items or builder.skips.counts:
            yield builder.finish()

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        """Reads each file once; what was read is what is hashed and encoded, even if the file changes meanwhile."""
        text = UnitText(documents=[], skips=SkipTally(each=[]))
        with closing(_OpenFolder(self._root)) as folder:
            for item in unit.items:
                key = self._key(item.path)
                if wanted is None or wanted(key):
                    self._add_file(text, key, item.path, self._read_file(folder, item))
        return text

    def close(self) -> None:
        """Nothing stays open between units."""

    def _add_file(self, text: UnitText, key: bytes, path: bytes, data: bytes | None) -> None:
        """Adds a file as a document, or to the tally."""
        if data is None:
            text.skips.add("unreadable", key)
        elif len(data) > self._options.max_file_bytes:
            text.skips.add("too-large", key)  # it grew since the walk
        elif reason := content_problem(data):
            text.skips.add(reason, key)
        else:
            document = Document(
                key=key,
                group=key,
                path=path,
                byte_start=0,
                byte_end=len(data),
                parts=(Part(data=data),),
                language=language_of(path or self._root),
            )
            text.documents.append(document)

    def _key(self, path: bytes) -> bytes:
        return self._key_prefix + path if path else self._key_prefix[:-1]

    def _absolute(self, path: bytes) -> bytes:
        return os.path.join(self._root, path) if path else self._root

    def _read_file(self, folder: _OpenFolder, item: FileItem) -> bytes | None:
        """The file's bytes, at most one more than allowed; None when it can't be read as a regular file."""
        try:
            descriptor = folder.open_file(item.path)
        except OSError as error:
            fs.raise_if_exhausted(error)
            return None
        try:
            # Read to the end, not to the size: a file that grows, or one of /proc (size 0), must not be cut short.
            limit = self._options.max_file_bytes + 1
            wanted = min(item.size + 1, limit)
            data = os.read(descriptor, wanted)
            if len(data) == item.size and data:
                return data  # as the walk saw it
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return None  # a FIFO or device took its place
            # Fewer bytes than asked for means the end of a regular file.
            while len(data) >= wanted and len(data) < limit and (more := os.read(descriptor, READ_BYTES)):
                data = (data + more)[:limit]
            return data
        except OSError:
            return None
        finally:
            os.close(descriptor)

    def _walk(self) -> Iterator[tuple[bytes, os.stat_result | None, str | None]]:
        """(relative path, facts, reason to leave it out) of everything that isn't a folder, by byte order of path.

        There are facts or a reason, never both: what is left out needn't be asked about.
        """
        root_stat = os.lstat(self._root)
        if not stat.S_ISDIR(root_stat.st_mode):
            yield self._single_file(root_stat)
            return
        # Each level: an iterator over a sorted listing and the reason inherited from the folder.
        levels: list[tuple[Iterator[_Entry], str | None]] = [(iter(self._listing(b"", None)), None)]
        while levels:
            listing, inherited = levels[-1]
            for path, facts, reason in listing:
                if facts is not None or reason is not None:
                    yield path, facts, reason
                    continue
                path = path[:-1]
                inherited = inherited or self._folder_problem(path.rpartition(b"/")[2])
                try:
                    levels.append((iter(self._listing(path, inherited)), inherited))
                except OSError as error:
                    fs.raise_if_exhausted(error)
                    yield path + b"/", None, "unreadable"
                    continue
                break
            else:
                levels.pop()

    def _single_file(self, facts: os.stat_result) -> tuple[bytes, os.stat_result | None, str | None]:
        """The root itself, when it is no folder. It was named by the user, so neither hidden nor vendored."""
        if not stat.S_ISREG(facts.st_mode):
            return b"", None, "symlink" if stat.S_ISLNK(facts.st_mode) else "special"
        reason = self._rules.problem(os.path.basename(self._root)) or self._size_problem(facts)
        return (b"", None, reason) if reason else (b"", facts, None)

    def _listing(self, folder: bytes, inherited: str | None) -> list[_Entry]:
        """Entries so sorted that whole paths come in byte order: a folder sorts as if its name ended in a slash."""
        # Through a descriptor, because scandir by name would follow a link that took the folder's place.
        descriptor = os.open(self._absolute(folder), FOLDER_FLAGS | (os.O_NOFOLLOW if folder else 0))
        prefix = folder + b"/" if folder else b""
        entries: list[_Entry] = []
        try:
            with os.scandir(descriptor) as scan:
                for entry in scan:
                    name = entry.name.encode(FILE_NAME_ENCODING, FILE_NAME_ERRORS)  # os.fsencode, at half its cost
                    if name in self._outside:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        entries.append((prefix + name + b"/", None, None))
                        continue
                    path = prefix + name
                    reason = inherited or self._name_problem(entry, name, path)
                    entries.append((path, None, reason) if reason else (path, *self._facts(entry)))
        finally:
            os.close(descriptor)
        entries.sort(key=_PATH)
        return entries

    def _folder_problem(self, name: bytes) -> str | None:
        if not self._options.hidden and name.startswith(b"."):
            return "hidden"
        if not self._options.vendored and name in VENDORED_FOLDERS:
            return "vendored"
        return None

    def _name_problem(self, entry: os.DirEntry[str], name: bytes, path: bytes) -> str | None:
        """The reason to leave a file out that its folder's listing tells already, without a system call."""
        if not entry.is_file(follow_symlinks=False):
            return "symlink" if entry.is_symlink() else "special"
        if not self._options.hidden and name.startswith(b"."):
            return "hidden"
        return self._rules.problem(path) if self._has_rules else None

    def _facts(self, entry: os.DirEntry[str]) -> tuple[os.stat_result | None, str | None]:
        """A file's facts, asked while its folder is open: half of what they cost by whole path."""
        try:
            facts = entry.stat(follow_symlinks=False)
        except OSError:
            return None, "unreadable"  # it vanished since it was listed
        return (facts, None) if facts.st_size <= self._options.max_file_bytes else (None, "too-large")

    def _size_problem(self, facts: os.stat_result) -> str | None:
        return "too-large" if facts.st_size > self._options.max_file_bytes else None


class _OpenFolder:
    """Opens files below a root without following a link at any level; keeps the folder of the last one open.

    A path given as a whole is only protected at its last name: a folder that became a link since the walk would lead
    out of the source. Files come in order of path, so the folder rarely changes.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._path: bytes | None = None
        self._descriptor = -1

    def open_file(self, path: bytes) -> int:
        """A descriptor of the file at a relative path (empty: the root itself is the file)."""
        if not path:
            return os.open(self._root, FILE_FLAGS)
        folder, _, name = path.rpartition(b"/")
        if folder != self._path:
            self.close()
            self._descriptor = os.open(self._root, FOLDER_FLAGS)
            for step in folder.split(b"/") if folder else ():
                above = self._descriptor
                try:
                    self._descriptor = os.open(step, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=above)
                finally:
                    os.close(above)
            self._path = folder
        return os.open(name, FILE_FLAGS, dir_fd=self._descriptor)

    def close(self) -> None:
        """Closes the folder that is open."""
        if self._path is not None:
            os.close(self._descriptor)
        self._path = None


class _UnitBuilder:
    """Collects files until a unit is full."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.items: list[FileItem] = []
        self.skips = SkipTally()
        self.input_bytes = 0
        self._newest_change_ns = 0
        self._facts: list[bytes] = []
        self._numbers: list[int] = []

    def add(self, path: bytes, facts: os.stat_result) -> None:
        """Adds a file with the facts that tell whether it changed."""
        self.items.append(FileItem(path, facts.st_size))
        self.input_bytes += facts.st_size
        self._newest_change_ns = max(self._newest_change_ns, facts.st_mtime_ns, facts.st_ctime_ns)
        self._facts.append(path)
        self._numbers += (facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)

    def skip(self, reason: str, path: bytes, key: bytes) -> None:
        """Counts an entry left out; the counts are part of what a finished unit stood for."""
        self.skips.add(reason, key)
        self._facts.append(path + b"\0" + reason.encode())  # no path holds a NUL: never mistaken for a file taken

    def finish(self) -> Unit:
        """The finished unit."""
        return Unit(
            source=self._source,
            items=tuple(self.items),
            input_bytes=self.input_bytes,
            skips=self.skips,
            fingerprint=self._fingerprint(),
            newest_change_ns=self._newest_change_ns,
        )

    def _fingerprint(self) -> str:
        """Paths and facts in order, lengths included, so that no two lists run together."""
        parts = [repr(self._numbers).encode(), repr([len(path) for path in self._facts]).encode(), *self._facts]
        return strong_hash(b"\0".join(parts)).hex()
