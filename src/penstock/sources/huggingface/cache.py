"""The two caches of Hugging Face: where they are, what they hold, and how far it can be looked at.

processed   what the `datasets` library wrote, see huggingface_processed.py
hub         raw files as they lie on the hub, see huggingface_repository.py

Both are read without either library and without running anything. Nothing here trusts a name found in a file: what a
cache says is compared with what its folders list, and a link counts only if it ends in a regular file of the folders
it may lead to. `Scan` bounds the work and counts what couldn't be read. Memory: the names of one data set's files.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.sources.document import SkipTally

__all__ = [
    "CacheFolders",
    "CachedConfig",
    "CachedDataSet",
    "CachedFile",
    "CachedSplit",
    "Scan",
    "Usage",
    "cache_folders",
    "cached_names",
    "count_or_none",
    "first_names",
    "is_folder",
    "real_file",
]

MAX_ENTRIES = 1_000_000
MAX_JSON_BYTES = 64 * 2**20
MAX_REPOSITORY_DEPTH = 16
HUB_PREFIX = "datasets--"
# Reasons after which a list of files may lack some.
UNSEEN = ("beyond-limit", "unreadable", "too-deep")
# Folders of the processed cache that are no data sets.
NOT_DATA_SETS = frozenset(["downloads", "extracted", "modules", "hub"])


@dataclass(frozen=True, kw_only=True)
class CacheFolders:
    """Where the two caches are; the folders needn't exist."""

    processed: str
    hub: str


@dataclass(frozen=True, kw_only=True)
class CachedFile:
    """A table.

    Attributes:
        name: its path inside the data set, the same on every machine.
        location: where it really lies.
        num_bytes: its size.
        last_used_ns: when it was last read or written, by its own time stamps.
    """

    name: bytes
    location: str
    num_bytes: int
    last_used_ns: int


@dataclass(frozen=True, kw_only=True)
class CachedSplit:
    """One split.

    Attributes:
        files: the tables that are here.
        rows: as the cache states them; None where it doesn't.
        problem: what is missing, with the numbers; empty when nothing is known to be.
        is_certain: whether the cache says how many files there must be.
    """

    files: tuple[CachedFile, ...]
    rows: int | None = None
    problem: str = ""
    is_certain: bool = True


@dataclass(frozen=True, kw_only=True)
class CachedConfig:
    """One config.

    Attributes:
        name: of the config.
        folder: that holds its files.
        splits: in the order people expect.
        is_partial_load: whether it was made with options of its own, from some of the files perhaps.
        problem: why none of it can be used; empty when some can.
    """

    name: str
    folder: str
    splits: Mapping[str, CachedSplit] = field(default_factory=dict)
    is_partial_load: bool = False
    problem: str = ""


@dataclass(frozen=True, kw_only=True)
class CachedDataSet:
    """A data set in one of the caches.

    Attributes:
        name: `ORG/NAME`, or `NAME`. The processed cache keeps it in snake case only.
        cache: `processed` or `hub`.
        folder: its folder.
        configs: by name.
        default: the config meant when none is named.
        problem: why it can't be used at all; empty when it can.
        inodes: bytes of all its files by (device, inode): what has several links counts once.
    """

    name: str
    cache: str
    folder: str
    configs: Mapping[str, CachedConfig] = field(default_factory=dict)
    default: str | None = None
    problem: str = ""
    inodes: Mapping[tuple[int, int], int] = field(default_factory=dict)

    def config(self, name: str | None) -> CachedConfig | None:
        """A config by its name, or the default one; None when there is none."""
        return self.configs.get(name or self.default or "")


def cache_folders(environment: Mapping[str, str] | None = None) -> CacheFolders:
    """The caches as both libraries find them: their own variables, then HF_HOME, XDG_CACHE_HOME, ~/.cache."""
    environment = os.environ if environment is None else environment
    home = environment.get("HF_HOME") or os.path.join(environment.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = environment.get("HF_HUB_CACHE") or environment.get("HUGGINGFACE_HUB_CACHE") or os.path.join(home, "hub")
    processed = environment.get("HF_DATASETS_CACHE") or os.path.join(home, "datasets")
    return CacheFolders(processed=_full(processed), hub=_full(hub))


def _full(path: str) -> str:
    return os.path.abspath(os.path.expandvars(os.path.expanduser(path)))


class Scan:
    """Looks into folders: at most so many entries, and what can't be read is counted, never raised."""

    def __init__(self, *, max_entries: int = MAX_ENTRIES) -> None:
        self._entries_left = max_entries
        self.skips = SkipTally()

    @property
    def is_cut_short(self) -> bool:
        """Whether there was more than the limit."""
        return "beyond-limit" in self.skips.counts

    @property
    def unseen(self) -> str:
        """A folder in which there may be files that weren't seen, and why; empty when there is none."""
        reasons = [reason for reason in UNSEEN if reason in self.skips.counts]
        return f"{self.skips.examples[reasons[0]][0]} ({reasons[0]})" if reasons else ""

    def entries(self, folder: str) -> list[os.DirEntry[str]]:
        """What a folder holds, in the byte order of the names."""
        found = []
        try:
            with os.scandir(folder) as listing:
                for entry in listing:
                    if self._entries_left <= 0:
                        self.skips.add("beyond-limit", os.fsencode(folder))
                        break
                    self._entries_left -= 1
                    found.append(entry)
        except FileNotFoundError:
            return []
        except OSError:
            self.skips.add("unreadable", os.fsencode(folder))
        return sorted(found, key=lambda entry: os.fsencode(entry.name))

    def folders(self, folder: str) -> list[os.DirEntry[str]]:
        """The real folders in a folder; links are not followed."""
        return [entry for entry in self.entries(folder) if is_folder(entry)]

    def text(self, path: str, *, max_bytes: int) -> str | None:
        """A small file's text; None when it isn't there, isn't a file, is too large or unreadable (counted)."""
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        try:
            if not stat.S_ISREG(os.lstat(path).st_mode):
                self.skips.add("not-a-file", os.fsencode(path))
                return None
            with open(path, "rb", opener=lambda name, _: os.open(name, flags)) as file:
                data = file.read(max_bytes + 1)
        except FileNotFoundError:
            return None
        except OSError:
            self.skips.add("unreadable", os.fsencode(path))
            return None
        if len(data) > max_bytes:
            self.skips.add("too-large", os.fsencode(path))
            return None
        return data.decode("utf-8", "replace")

    def json_object(self, path: str, *, max_bytes: int = MAX_JSON_BYTES) -> dict[str, Any] | None:
        """A JSON file's object; None when it isn't there or isn't one (counted)."""
        text = self.text(path, max_bytes=max_bytes)
        if text is None:
            return None
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict):
            self.skips.add("broken-json", os.fsencode(path))
            return None
        return value


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Whether it is a real folder, not a link to one."""
    try:
        return entry.is_dir(follow_symlinks=False)
    except OSError:
        return False


def cached_names(folders: CacheFolders, scan: Scan) -> list[tuple[str, str]]:
    """(cache, name) of every data set that has a folder in a cache; nothing below is looked at."""
    names = [
        ("processed", entry.name.replace("___", "/", 1))
        for entry in scan.folders(folders.processed)
        if entry.name not in NOT_DATA_SETS and not entry.name.startswith((".", "_", HUB_PREFIX, "models--", "spaces--"))
    ]
    return names + [
        ("hub", entry.name.removeprefix(HUB_PREFIX).replace("--", "/", 1))
        for entry in scan.folders(folders.hub)
        if entry.name.startswith(HUB_PREFIX)
    ]


def count_or_none(value: Any) -> int | None:
    """A number of rows or bytes found in a JSON file, if it is one."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def first_names(names: Sequence[str], *, shown: int = 3) -> str:
    """The first of these names and how many more there are."""
    more = f" and {len(names) - shown:,} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more


def real_file(path: str, name: bytes, inside: Sequence[str]) -> CachedFile | None:
    """The regular file at a path, if it really lies inside one of these folders, which have no links in their paths."""
    try:
        real = os.path.realpath(path, strict=True)
        facts = os.lstat(real)
    except (OSError, ValueError):
        return None
    if not stat.S_ISREG(facts.st_mode):
        return None
    if not any(real.startswith(folder + os.sep) for folder in inside):
        return None
    last_used_ns = max(facts.st_atime_ns, facts.st_mtime_ns)
    return CachedFile(name=name, location=real, num_bytes=facts.st_size, last_used_ns=last_used_ns)


class Usage:
    """Bytes on the disk, each file once however many links lead to it."""

    def __init__(self) -> None:
        self.inodes: dict[tuple[int, int], int] = {}

    def add_tree(self, folder: str, scan: Scan, *, shared: str = "", depth: int = MAX_REPOSITORY_DEPTH) -> None:
        """Adds the files below a folder; of links only those into `shared`."""
        for entry in scan.entries(folder):
            try:
                if entry.is_dir(follow_symlinks=False):
                    if depth:
                        self.add_tree(entry.path, scan, depth=depth - 1)
                elif entry.is_file(follow_symlinks=False):
                    self._add(entry.stat(follow_symlinks=False))
                elif shared and (file := real_file(entry.path, b"", (shared,))):
                    self._add(os.stat(file.location, follow_symlinks=False))
            except OSError:
                scan.skips.add("unreadable", os.fsencode(entry.path))

    def _add(self, facts: os.stat_result) -> None:
        self.inodes[facts.st_dev, facts.st_ino] = facts.st_size
