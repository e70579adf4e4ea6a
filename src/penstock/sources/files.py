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
import struct
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.hashing import strong_hash
from penstock.sources.document import Document, Part, SkipTally
from penstock.sources.hygiene import RULES_VERSION, VENDORED_FOLDERS, PathRules, content_problem, language_of
from penstock.sources.source import Source, Unit, UnitText

__all__ = ["PACKED_FACTS", "FileEntry", "FileItem", "FileOptions", "FilesSource", "Stretch", "leave_alone"]

DEFAULT_MAX_FILE_BYTES = 16 * 2**20

READ_BYTES = 2**16
FILE_NAME_ENCODING, FILE_NAME_ERRORS = sys.getfilesystemencoding(), sys.getfilesystemencodeerrors()
FOLDER_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
KEPT_OPEN_LEVELS = 8  # of folders above each other: descriptors are few on some systems, and trees may be deep
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

PACKED_FACTS = struct.Struct("<4q")
"""Size, modified and changed in ns, inode: what tells whether a file changed."""

FileEntry = tuple[bytes, bytes | None, str | None]
"""Relative path, of a folder with a slash behind it; of a file, its packed facts or the reason to leave it out."""
FileItem = tuple[bytes, int]
"""One file of a unit: relative path and the size at walk time. Thousands cross a pipe: a bare tuple takes a seventh."""
_PATH = operator.itemgetter(0)
DOT = ord(".")


@dataclass(frozen=True, kw_only=True)
class FileOptions:
    """Which files become documents."""

    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    max_file_bytes: int = DEFAULT_MAX_FILE_BYTES
    hidden: bool = False
    vendored: bool = False


@dataclass(kw_only=True)
class Stretch:
    """A part of a walk, and what is known of it from an earlier one.

    Attributes:
        first: where it begins; None: at the beginning.
        end: the path before which it ends; None: at the end.
        known: number by path and packed facts, joined, of the files of the earlier walk.
        recognised: the numbers of those that are what they were, as the walk finds them.
    """

    first: bytes | None = None
    end: bytes | None = None
    known: Mapping[bytes, int] = field(default_factory=dict)
    recognised: list[int] = field(default_factory=list)

    def holds(self, path: bytes) -> bool:
        """Whether a path lies in it."""
        return (self.first is None or self.first <= path) and (self.end is None or path < self.end)

    def touches(self, folder: bytes) -> bool:
        """Whether anything below a folder (given with its slash) may lie in it."""
        return (self.first is None or self.first < _after(folder)) and (self.end is None or folder < self.end)

    def covers(self, folder: bytes) -> bool:
        """Whether everything below a folder (given with its slash; empty: the root) lies in it."""
        begins_before = self.first is None or (bool(folder) and self.first <= folder)
        return begins_before and (self.end is None or (bool(folder) and _after(folder) <= self.end))


def _after(folder: bytes) -> bytes:
    """What sorts right behind everything below a folder that is given with its slash."""
    return folder[:-1] + b"0"  # the character behind the slash


class FilesSource:
    """The files below a folder, or one file.

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
        self._left_alone: set[bytes] = set()  # relative paths of folders
        self._key_prefix = name.encode() + b"/"
        self._rules = PathRules(include=self._options.include, exclude=self._options.exclude)
        self._has_rules = bool(self._options.include or self._options.exclude)

    @property
    def location(self) -> str:
        """Absolute path of the root."""
        return os.fsdecode(os.path.abspath(self._root))

    def leave_alone(self, folder: Path) -> None:
        """Takes a folder for no part of this source, neither read nor counted."""
        relative = os.path.relpath(os.path.realpath(os.fsencode(folder)), os.path.realpath(self._root))
        self._left_alone.add(relative)  # one that begins with .. is met nowhere

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
        return self.units_of(self._walk(Stretch()), unit_bytes)

    def changes(self, stretch: Stretch) -> list[FileEntry]:
        """Everything in a stretch of the walk that isn't recognised, in order of path."""
        return list(self._walk(stretch))

    def units_of(self, entries: Iterable[FileEntry], unit_bytes: int) -> Iterator[Unit]:
        """The units that these entries make, cut like those of `units`."""
        builder = _UnitBuilder(self.name)
        for path, facts, reason in entries:
            if facts is None:
                builder.skip(reason or "unreadable", path, self._key(path))
                continue
            builder.add(path, facts)
            if builder.input_bytes >= unit_bytes:
                yield builder.finish()
                builder = _UnitBuilder(self.name)
        if builder.items or builder.skips.counts:
            yield builder.finish()

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        """Reads each file once; what was read is what is hashed and encoded, even if the file changes meanwhile."""
        text = UnitText(documents=[], skips=SkipTally(each=[]))
        documents, skips = text.documents, text.skips
        with closing(_OpenFolder(self._root)) as folder:
            for path, size in unit.items:
                key = self._key(path)
                if wanted is not None and not wanted(key):
                    continue
                data = self._read_file(folder, path, size)
                if data is None:
                    skips.add("unreadable", key)
                elif len(data) > self._options.max_file_bytes:
                    skips.add("too-large", key)  # it grew since the walk
                elif reason := content_problem(data):
                    skips.add(reason, key)
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
                    documents.append(document)
        return text

    def close(self) -> None:
        """Nothing stays open between units."""

    def _key(self, path: bytes) -> bytes:
        return self._key_prefix + path if path else self._key_prefix[:-1]

    def _absolute(self, path: bytes) -> bytes:
        return os.path.join(self._root, path) if path else self._root

    def _read_file(self, folder: _OpenFolder, path: bytes, size: int) -> bytes | None:
        """The file's bytes, at most one more than allowed; None when it can't be read as a regular file."""
        try:
            descriptor = folder.open_file(path)
        except OSError as error:
            fs.raise_if_exhausted(error)
            return None
        try:
            # Read to the end, not to the size: a file that grows, or one of /proc (size 0), must not be cut short.
            limit = self._options.max_file_bytes + 1
            wanted = min(size + 1, limit)
            data = os.read(descriptor, wanted)
            if len(data) == size and data:
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

    def _walk(self, stretch: Stretch) -> Iterator[FileEntry]:
        """Everything that isn't a folder and isn't recognised, by byte order of path.

        There are facts or a reason to leave it out, never both: what is left out needn't be asked about.
        """
        root_stat = os.lstat(self._root)
        if not stat.S_ISDIR(root_stat.st_mode):
            if (entry := self._single_file(root_stat, stretch)) is not None:
                yield entry
            return
        # Each level: an iterator over a sorted listing and the reason inherited from the folder.
        levels: list[tuple[Iterator[FileEntry], str | None]] = [(iter(self._listing(b"", None, stretch)), None)]
        while levels:
            listing, inherited = levels[-1]
            for path, facts, reason in listing:
                if facts is not None or reason is not None:
                    yield path, facts, reason
                    continue
                folder = path[:-1]
                if folder in self._left_alone:
                    continue
                below = inherited or self._folder_problem(folder.rpartition(b"/")[2])
                try:
                    levels.append((iter(self._listing(folder, below, stretch)), below))
                except OSError as error:
                    fs.raise_if_exhausted(error)
                    if stretch.holds(path):  # of two stretches that share a folder, one tells of it
                        yield path, None, "unreadable"
                    continue
                break
            else:
                levels.pop()

    def _single_file(self, facts: os.stat_result, stretch: Stretch) -> FileEntry | None:
        """The root itself, when it is no folder. It was named by the user, so neither hidden nor vendored."""
        if not stretch.holds(b""):
            return None
        if not stat.S_ISREG(facts.st_mode):
            return b"", None, "symlink" if stat.S_ISLNK(facts.st_mode) else "special"
        if reason := self._rules.problem(os.path.basename(self._root)) or self._size_problem(facts):
            return b"", None, reason
        packed = _packed(facts)
        if (number := stretch.known.get(packed)) is not None:
            stretch.recognised.append(number)
            return None
        return b"", packed, None

    def _listing(self, folder: bytes, inherited: str | None, stretch: Stretch) -> list[FileEntry]:
        """Entries so sorted that whole paths come in byte order: a folder sorts as if its name ended in a slash."""
        # Through a descriptor, because scandir by name would follow a link that took the folder's place.
        descriptor = os.open(self._absolute(folder), FOLDER_FLAGS | (os.O_NOFOLLOW if folder else 0))
        prefix = folder + b"/" if folder else b""
        entries: list[FileEntry] = []
        # This loop is most of a rerun in which little changed: what it needs is at hand, and calls are few.
        is_whole, number_of, recognise = stretch.covers(prefix), stretch.known.get, stretch.recognised.append
        outside, has_rules, largest, pack = (
            self._outside,
            self._has_rules,
            self._options.max_file_bytes,
            PACKED_FACTS.pack,
        )
        try:
            with os.scandir(descriptor) as scan:
                for entry in scan:
                    name = entry.name.encode(FILE_NAME_ENCODING, FILE_NAME_ERRORS)  # os.fsencode, at half its cost
                    if name in outside:
                        continue
                    path = prefix + name
                    is_file = entry.is_file(follow_symlinks=False)
                    if not is_file and entry.is_dir(follow_symlinks=False):
                        if is_whole or stretch.touches(path + b"/"):
                            entries.append((path + b"/", None, None))
                        continue
                    if not is_whole and not stretch.holds(path):
                        continue
                    reason = inherited
                    if reason is None and (not is_file or has_rules or name[0] == DOT):
                        reason = self._name_problem(entry, name, path)
                    if reason is not None:
                        entries.append((path, None, reason))
                        continue
                    try:  # asked while the folder is open: half of what it costs by whole path
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:
                        entries.append((path, None, "unreadable"))  # it vanished since it was listed
                        continue
                    size = facts.st_size
                    if size > largest:
                        entries.append((path, None, "too-large"))
                        continue
                    packed = pack(size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
                    number = number_of(path + packed)
                    if number is None:
                        entries.append((path, packed, None))
                    else:
                        recognise(number)
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

    def _size_problem(self, facts: os.stat_result) -> str | None:
        return "too-large" if facts.st_size > self._options.max_file_bytes else None


def _packed(facts: os.stat_result) -> bytes:
    return PACKED_FACTS.pack(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)


def leave_alone(sources: Iterable[Source], folder: Path) -> None:
    """Has a folder that is made of the sources be no part of them, should it lie inside one.

    The next walk would meet it, and no rerun would find its input unchanged.
    """
    for source in sources:
        if isinstance(source, FilesSource):
            source.leave_alone(folder)


class _OpenFolder:
    """Opens files below a root without following a link at any level; keeps the folder of the last one open.

    A path given as a whole is only protected at its last name: a folder that became a link since the walk would lead
    out of the source. Files come in order of path, so the next one is in the same folder or near by: the folders on the
    way to it stay open, too, where the tree isn't too deep for that.
    """

    def __init__(self, root: bytes) -> None:
        self._root = root
        self._path: bytes | None = None
        # The names on the way from the root to the folder, and the descriptors of the root and of these folders: of
        # the first ones, each; below `KEPT_OPEN_LEVELS`, only of the last.
        self._steps: list[bytes] = []
        self._descriptors: list[int] = []

    def open_file(self, path: bytes) -> int:
        """A descriptor of the file at a relative path (empty: the root itself is the file)."""
        if not path:
            return os.open(self._root, FILE_FLAGS)
        folder, _, name = path.rpartition(b"/")
        if folder != self._path:
            self._enter(folder)
        return os.open(name, FILE_FLAGS, dir_fd=self._descriptors[-1])

    def close(self) -> None:
        """Closes all folders that are open."""
        self._close_below(0)

    def _enter(self, folder: bytes) -> None:
        steps = folder.split(b"/") if folder else []
        shared = 0
        for ours, theirs in zip(steps, self._steps[:KEPT_OPEN_LEVELS], strict=False):
            if ours != theirs:
                break
            shared += 1
        self._close_below(shared + 1)
        if not self._descriptors:
            self._descriptors.append(os.open(self._root, FOLDER_FLAGS))
        for step in steps[shared:]:
            below = os.open(step, FOLDER_FLAGS | os.O_NOFOLLOW, dir_fd=self._descriptors[-1])
            if len(self._descriptors) > KEPT_OPEN_LEVELS + 1:
                os.close(self._descriptors.pop())
            self._descriptors.append(below)
            self._steps.append(step)
        self._path = folder

    def _close_below(self, level: int) -> None:
        """Closes the folders from this level on, of which the root is the first."""
        self._path = None
        for descriptor in self._descriptors[level:]:
            os.close(descriptor)
        del self._descriptors[level:]
        del self._steps[max(level - 1, 0) :]


class _UnitBuilder:
    """Collects files until a unit is full."""

    def __init__(self, source: str) -> None:
        self._source = source
        self.items: list[FileItem] = []
        self.skips = SkipTally()
        self.input_bytes = 0
        self._newest_change_ns = 0
        self._facts: list[bytes] = []
        self._entries: list[bytes] = []
        self._numbers: list[int] = []

    def add(self, path: bytes, facts: bytes) -> None:
        """Adds a file with the facts that tell whether it changed."""
        numbers = PACKED_FACTS.unpack(facts)
        size, modified_ns, changed_ns, _ = numbers
        self.items.append((path, size))
        self.input_bytes += size
        self._newest_change_ns = max(self._newest_change_ns, modified_ns, changed_ns)
        self._facts.append(facts)
        self._entries.append(path)
        self._numbers += numbers

    def skip(self, reason: str, path: bytes, key: bytes) -> None:
        """Counts an entry left out; the counts are part of what a finished unit stood for."""
        self.skips.add(reason, key)
        self._entries.append(path + b"\0" + reason.encode())  # no path holds a NUL: never mistaken for a file taken

    def finish(self) -> Unit:
        """The finished unit."""
        return Unit(
            source=self._source,
            items=tuple(self.items),
            input_bytes=self.input_bytes,
            skips=self.skips,
            fingerprint=self._fingerprint(),
            newest_change_ns=self._newest_change_ns,
            facts=b"".join(self._facts),
        )

    def _fingerprint(self) -> str:
        """Paths and facts in order, lengths included, so that no two lists run together."""
        lengths = [len(entry) for entry in self._entries]
        parts = [repr(self._numbers).encode(), repr(lengths).encode(), *self._entries]
        return strong_hash(b"\0".join(parts)).hex()
