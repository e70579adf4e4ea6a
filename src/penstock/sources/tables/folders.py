"""Which inputs are tables: a file by its ending, a folder by what is in it.

A folder is a table if `datasets` saved it there (`save_to_disk`: state.json and dataset_info.json; a dictionary of
splits: dataset_dict.json and a folder for each), or if every file in it that isn't hidden, filtered out or about the
data (README, LICENSE, *.md, *.json, _SUCCESS, *.crc) has a table's ending. Else it is a folder of files.

Links are never followed and what is no regular file is never opened; both are counted, as is all else that is left out.
"""

from __future__ import annotations

import itertools
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from penstock import fs
from penstock.errors import InputError
from penstock.sources.document import SkipTally, printable
from penstock.sources.files import FileOptions
from penstock.sources.hygiene import VENDORED_FOLDERS, PathRules
from penstock.sources.tables.files import open_file, table_format

__all__ = ["FoundTables", "found_tables", "unread_tables"]

BESIDE_DATA = re.compile(rb"(README|LICENSE)[^/]*|[^/]*\.(md|json|crc)|_SUCCESS", re.IGNORECASE)
MAX_STATE_BYTES = 64 * 2**20
# Of a folder of files, to see whether it was meant as one of tables.
FILES_LOOKED_AT = 1000


@dataclass(kw_only=True)
class FoundTables:
    """Arguments of a `TablesSource`: files, what was left out, and facts of files by relative path."""

    files: list[tuple[bytes, str]]
    skips: SkipTally = field(default_factory=SkipTally)
    facts: dict[bytes, dict[str, Any]] = field(default_factory=dict)


def found_tables(root: str, *, name: str, options: FileOptions) -> FoundTables | None:
    """The tables at a path, or None where it holds none.

    Args:
        root: a file or folder, not a link.
        name: of the source, for the keys of what is left out.
        options: which files are looked at.

    Raises:
        InputError: a folder that `datasets` saved isn't whole.
    """
    mode = os.lstat(root).st_mode
    if stat.S_ISREG(mode):
        is_table = table_format(os.fsencode(root)) is not None
        return FoundTables(files=[(b"", root)]) if is_table else None
    if not stat.S_ISDIR(mode):
        return None
    return _saved_dictionary(root) or _saved_dataset(root, b"") or _folder_of_tables(root, name, options)


def _saved_dictionary(root: str) -> FoundTables | None:
    """A `DatasetDict`: one saved data set for each split."""
    content = _json_object(root, "dataset_dict.json")
    if content is None or not isinstance(content.get("splits"), list):
        return None
    found = FoundTables(files=[])
    for split in content["splits"]:
        name = _checked_name(root, "dataset_dict.json", split)
        part = _saved_dataset(str(Path(root, name)), os.fsencode(name))
        if part is None:
            raise InputError(
                f"{printable(os.fsencode(root))}: dataset_dict.json names the split {name!r}, whose folder isn't whole",
                hint="save the data set again with save_to_disk",
            )
        found.files += part.files
        found.facts.update({path: {**facts, "split": name} for path, facts in part.facts.items()})
    return found


def _saved_dataset(folder: str, path: bytes) -> FoundTables | None:
    """A `Dataset`: the Arrow files that state.json lists."""
    if not stat.S_ISDIR(_mode(folder)) or not stat.S_ISREG(_mode(str(Path(folder, "dataset_info.json")))):
        return None
    state = _json_object(folder, "state.json")
    if state is None or not isinstance(state.get("_data_files"), list):
        return None
    split = state.get("_split")
    facts = {"split": split} if isinstance(split, str) and len(split) <= 256 else {}
    found = FoundTables(files=[])
    for entry in state["_data_files"]:
        name = _checked_name(folder, "state.json", entry.get("filename") if isinstance(entry, dict) else entry)
        if not stat.S_ISREG(_mode(str(Path(folder, name)))):
            raise InputError(
                f"{printable(os.fsencode(folder))}: state.json names the file {name!r}, which isn't there",
                hint="copy it there, or save the data set again with save_to_disk",
            )
        relative = path + b"/" + os.fsencode(name) if path else os.fsencode(name)
        found.files.append((relative, str(Path(folder, name))))
        found.facts[relative] = facts
    return found


def _checked_name(folder: str, where: str, name: Any) -> str:
    """A name in a folder; what a data set says may not lead out of it."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name or not name.isprintable():
        raise InputError(
            f"{printable(os.fsencode(folder))}: {where} names {str(name)[:80]!a}, expected a name in that folder",
            hint="save the data set again with save_to_disk",
        )
    return name


def _mode(path: str) -> int:
    try:
        return os.lstat(path).st_mode
    except OSError:
        return 0


def _json_object(folder: str, name: str) -> dict[str, Any] | None:
    """A small JSON file's object; None where there is no such file or it holds something else."""
    try:
        descriptor, _ = open_file(str(Path(folder, name)))
    except OSError as error:
        fs.raise_if_exhausted(error)
        return None
    with os.fdopen(descriptor, "rb") as file:
        try:
            content = orjson.loads(file.read(MAX_STATE_BYTES))
        except orjson.JSONDecodeError:
            return None
    return content if isinstance(content, dict) else None


def _folder_of_tables(root: str, name: str, options: FileOptions) -> FoundTables | None:
    """All tables below a folder in which nothing else is; stops at the first file that is something else."""
    rules = PathRules(include=options.include, exclude=options.exclude)
    found = FoundTables(files=[])
    prefix = name.encode() + b"/"
    for path, reason in _walk(os.fsencode(root), options, rules):
        is_table = table_format(path) is not None
        if reason is None and not is_table:
            if not _is_beside_data(path):
                return None
            reason = "not-a-table"
        if reason is None:
            found.files.append((path, os.fsdecode(os.path.join(os.fsencode(root), path))))
        else:
            found.skips.add(reason, prefix + path)
    return found if found.files else None


def unread_tables(root: str, *, options: FileOptions) -> tuple[bytes, bytes] | None:
    """Of a folder that is read as files though half of its files or more are tables: a table, and what isn't one.

    By its first files: nobody wants to wait for a walk over all of a large tree.
    """
    if not stat.S_ISDIR(os.lstat(root).st_mode):
        return None
    rules = PathRules(include=options.include, exclude=options.exclude)
    walk = _walk(os.fsencode(root), options, rules)
    files = [path for path, reason in itertools.islice(walk, FILES_LOOKED_AT) if reason is None]
    tables = [path for path in files if table_format(path) is not None]
    others = [path for path in files if table_format(path) is None and not _is_beside_data(path)]
    return (tables[0], others[0]) if tables and others and len(tables) >= len(others) else None


def _is_beside_data(path: bytes) -> bool:
    """Whether a file is about the tables it lies beside."""
    return BESIDE_DATA.fullmatch(path.rpartition(b"/")[2]) is not None


def _walk(root: bytes, options: FileOptions, rules: PathRules) -> Iterator[tuple[bytes, str | None]]:
    """(relative path, reason to leave it out) of everything that isn't a folder, by byte order of path."""
    waiting: list[tuple[bytes, bool, str | None]] = [(b"", True, None)]
    while waiting:
        path, is_folder, reason = waiting.pop()
        if not is_folder:
            yield path, reason
            continue
        try:
            entries = list(os.scandir(os.path.join(root, path) if path else root))
        except OSError as error:
            fs.raise_if_exhausted(error)
            yield path + b"/", "unreadable"
            continue
        listing = [_entry(entry, path, reason, options, rules) for entry in entries]
        # A folder sorts as if its name ended in a slash, so that whole paths come in byte order; the last is next.
        listing.sort(key=lambda item: item[0] + b"/" if item[1] else item[0], reverse=True)
        waiting += listing


def _entry(
    entry: os.DirEntry[bytes], folder: bytes, inherited: str | None, options: FileOptions, rules: PathRules
) -> tuple[bytes, bool, str | None]:
    path = folder + b"/" + entry.name if folder else entry.name
    is_folder = entry.is_dir(follow_symlinks=False)
    reason = inherited
    if not options.hidden and entry.name.startswith(b"."):
        reason = reason or "hidden"
    if is_folder:
        return path, True, reason or ("vendored" if entry.name in VENDORED_FOLDERS and not options.vendored else None)
    if entry.is_symlink():
        return path, False, "symlink"
    if not entry.is_file(follow_symlinks=False):
        return path, False, "special"
    return path, False, reason or rules.problem(path)
