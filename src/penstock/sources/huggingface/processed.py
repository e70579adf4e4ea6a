"""What the `datasets` library has processed.

In: its cache folder and a data set's name. Out: configs, splits and Arrow files of

    ORG___NAME/CONFIG/VERSION/HASH/NAME-SPLIT-00000-of-00004.arrow     NAME in snake case, rows in dataset_info.json

A folder HASH.incomplete is a build that was broken off. dataset_info.json, written last, says how many files and rows
each split has.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.sources.huggingface.cache import (
    CachedConfig,
    CachedDataSet,
    CachedFile,
    CachedSplit,
    Scan,
    Usage,
    count_or_none,
    first_names,
    real_file,
)
from penstock.sources.huggingface.files import SPLIT_NAME, missing_shards, split_names

__all__ = ["find_processed", "snake_case_name"]

_ARROW = re.compile(r"(?P<stem>.+?)(?:-\d{5,6}-of-\d{5,6})?\.arrow")
# What `map` and `filter` leave beside the data set's own files.
_DERIVED = re.compile(r"cache-[0-9a-f]+(?:_\d+_of_\d+)?\.arrow")


def _snake_case(name: str) -> str:
    """As the `datasets` library names its folders: TinyStories is tiny_stories."""
    name = re.sub(r"([A-Z]+)([A-Z][a-z])", r"\1_\2", name)
    return re.sub(r"([a-z\d])([A-Z])", r"\1_\2", name).lower()


def snake_case_name(name: str) -> str:
    """ORG/NAME as this cache keeps it: the owner as it is, the last part in snake case."""
    owner, slash, last = name.rpartition("/")
    return owner + slash + _snake_case(last)


def find_processed(root: str, name: str, scan: Scan) -> CachedDataSet | None:
    """The data set that the `datasets` library has processed under this name, or None."""
    folder = os.path.join(root, snake_case_name(name).replace("/", "___"))
    if not os.path.isdir(folder) or os.path.islink(folder):
        return None
    usage = Usage()
    found: dict[str, list[tuple[tuple[Any, ...], CachedConfig]]] = {}
    for build in _builds(folder, scan):
        usage.add_tree(build.path, scan)
        found.setdefault(build.config, []).append((_freshness(build), _processed_config(build, scan)))
    configs = {config: max(builds, key=lambda pair: pair[0])[1] for config, builds in sorted(found.items())}
    if not configs:
        return None
    whole = [config.name for config in configs.values() if not config.is_partial_load]
    return CachedDataSet(
        name=name,
        cache="processed",
        folder=folder,
        configs=configs,
        default=whole[0] if len(whole) == 1 else "default" if "default" in whole else None,
        inodes=usage.inodes,
    )


@dataclass(frozen=True, kw_only=True)
class _Build:
    """A folder CONFIG/VERSION/HASH, or CONFIG/VERSION as early versions of the library wrote it."""

    path: str
    config: str
    version: str

    @property
    def is_broken_off(self) -> bool:
        return self.path.endswith(".incomplete")


def _builds(folder: str, scan: Scan) -> Iterator[_Build]:
    for config in scan.folders(folder):
        for version in scan.folders(config.path):
            if os.path.lexists(os.path.join(version.path, "dataset_info.json")):
                yield _Build(path=version.path, config=config.name, version=version.name)
            for entry in scan.folders(version.path):
                if _looks_like_a_build(entry, scan):
                    yield _Build(path=entry.path, config=config.name, version=version.name)


def _looks_like_a_build(folder: os.DirEntry[str], scan: Scan) -> bool:
    """Other folders of this depth are none of the library's, and no data set that lacks something."""
    names = [entry.name for entry in scan.entries(folder.path)]
    return folder.name.endswith(".incomplete") or any(
        name == "dataset_info.json" or name.endswith(".arrow") for name in names
    )


def _freshness(build: _Build) -> tuple[Any, ...]:
    """Of several builds of one config the `datasets` library takes the one made last; so do we."""
    try:
        made = os.stat(build.path).st_mtime_ns
    except OSError:
        made = 0
    return (
        not build.is_broken_off,
        made,
        [int(part) if part.isdecimal() else 0 for part in build.version.split(".")],
        build.path,
    )


def _processed_config(build: _Build, scan: Scan) -> CachedConfig:
    files = _arrow_files(build.path, scan)
    if build.is_broken_off:
        size = sum(file.num_bytes for file in files)
        problem = f"its processing was broken off ({size:,} bytes in {os.path.basename(build.path)})"
        return CachedConfig(name=build.config, folder=build.path, problem=problem)
    info = scan.json_object(os.path.join(build.path, "dataset_info.json"))
    by_split: dict[str, list[CachedFile]] = {}
    for file in files:
        found = _ARROW.fullmatch(os.fsdecode(file.name))
        split = found["stem"].rpartition("-")[2] if found else ""
        if SPLIT_NAME.fullmatch(split):
            by_split.setdefault(split, []).append(file)
    stated = _objects_by_name(info.get("splits") if info else None)
    names = split_names({*by_split, *stated})
    splits = {name: _processed_split(tuple(by_split.get(name, ())), stated.get(name), info) for name in names}
    # A config loaded with options of its own (some files, some columns) has their hash behind its name.
    own_name = info.get("config_name") if info else None
    partial = isinstance(own_name, str) and own_name != build.config and build.config.startswith(f"{own_name}-")
    return CachedConfig(name=build.config, folder=build.path, splits=splits, is_partial_load=partial)


def _arrow_files(folder: str, scan: Scan) -> list[CachedFile]:
    found = []
    for entry in scan.entries(folder):
        if entry.name.endswith(".arrow") and not _DERIVED.fullmatch(entry.name):
            file = real_file(entry.path, os.fsencode(entry.name), (os.path.realpath(folder),))
            if file:
                found.append(file)
            else:
                scan.skips.add("unsafe-link", os.fsencode(entry.path))
    return found


def _objects_by_name(value: Any) -> dict[str, dict[str, Any]]:
    pairs = value.items() if isinstance(value, dict) else ()
    return {name: facts for name, facts in pairs if isinstance(facts, dict)}


def _processed_split(files: tuple[CachedFile, ...], stated: dict[str, Any] | None, info: Any) -> CachedSplit:
    rows = count_or_none((stated or {}).get("num_examples"))
    lengths = (stated or {}).get("shard_lengths")
    expected = len(lengths) if isinstance(lengths, list) and lengths else 1
    missing = missing_shards(os.fsdecode(file.name) for file in files)
    problem = ""
    if info is None:
        problem = "dataset_info.json, which is written last, is missing or broken"
    elif missing:
        problem = f"{len(files):,} of {len(files) + len(missing):,} files are here; missing: {first_names(missing)}"
    elif stated and len(files) != expected and not (rows == 0 and not files):
        problem = f"{len(files):,} of {expected:,} files are here"
    return CachedSplit(files=files, rows=rows, problem=problem)
