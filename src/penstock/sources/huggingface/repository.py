"""Raw files of a data set in the hub cache, as `huggingface_hub` lays them out.

In: the cache folder and a data set's name. Out: configs, splits and tables of the revision that refs/main names.

    datasets--ORG--NAME/snapshots/REVISION/PATH     links into blobs/, or into the blobs/ that all repositories share
    datasets--ORG--NAME/trees/REVISION.json         sizes of all files of the revision, downloaded or not
    datasets--ORG--NAME/blobs/*.incomplete          downloads that were broken off

With a tree listing it is known exactly what is missing; without one, by the files' own numbering.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.sources.huggingface.cache import (
    HUB_PREFIX,
    MAX_REPOSITORY_DEPTH,
    CachedConfig,
    CachedDataSet,
    CachedFile,
    CachedSplit,
    Scan,
    Usage,
    count_or_none,
    first_names,
    is_folder,
    real_file,
)
from penstock.sources.huggingface.files import (
    Card,
    is_numbered,
    missing_shards,
    parse_card,
    split_names,
    splits_of,
    tables_among,
)

__all__ = ["HubDataSet", "Repository", "find_hub", "script_of"]

MAX_README_BYTES = 2 * 2**20
_REVISION = re.compile(r"[0-9A-Za-z][0-9A-Za-z._-]{0,127}")


@dataclass(frozen=True, kw_only=True)
class Repository:
    """The files of one revision of a repository.

    Attributes:
        snapshot: folder of the revision.
        inside: folders in which its files may really lie.
        present: paths of the files in the snapshot.
        listing: sizes of all files of the revision, where the cache has its list.
        card: of its README.
        broken_off: number and bytes of downloads that were broken off.
    """

    snapshot: str
    inside: tuple[str, ...]
    present: frozenset[str]
    listing: Mapping[str, int] | None
    card: Card
    broken_off: tuple[int, int]

    @cached_property
    def _tables(self) -> list[str]:
        return tables_among(self.present if self.listing is None else self.listing)

    def config(self, name: str | None) -> CachedConfig | None:
        """A config and what is here of it; None when the repository has no such config."""
        chosen = splits_of(self._tables, self.card, name)
        if not chosen:
            return None
        own_name = name or self.card.default or "default"
        rows = self.card.rows.get(own_name, {})
        splits = {split: self._split(chosen[split], rows.get(split)) for split in split_names(chosen)}
        return CachedConfig(name=own_name, folder=self.snapshot, splits=splits)

    def _split(self, paths: Sequence[str], rows: int | None) -> CachedSplit:
        places = {path: os.path.join(self.snapshot, path) for path in paths if path in self.present}
        files = {path: real_file(place, os.fsencode(path), self.inside) for path, place in places.items()}
        found = [file for file in files.values() if file is not None]
        missing = [path for path in paths if path not in places] + missing_shards(paths)
        unsafe = [path for path, file in files.items() if file is None and os.path.exists(places[path])]
        missing += [path for path, file in files.items() if file is None and path not in unsafe]
        is_certain = self.listing is not None or all(map(is_numbered, paths))
        problem = (
            f"{first_names(unsafe)}: no file of the cache's own"
            if unsafe
            else self._missing(found, missing, is_certain)
        )
        return CachedSplit(files=tuple(found), rows=rows, is_certain=is_certain, problem=problem)

    def _missing(self, found: Sequence[CachedFile], missing: Sequence[str], is_certain: bool) -> str:
        if missing:
            return f"{len(found):,} of {len(found) + len(missing):,} files are here; missing: {first_names(missing)}"
        for file in found:
            wanted = (self.listing or {}).get(os.fsdecode(file.name), file.num_bytes)
            if wanted != file.num_bytes:
                return f"{os.fsdecode(file.name)} has {file.num_bytes:,} bytes, the hub's has {wanted:,}"
        if self.broken_off[0] and not is_certain:
            number, size = self.broken_off
            return f"{number:,} downloads were broken off ({size:,} bytes in blobs/*.incomplete)"
        return ""


@dataclass(frozen=True, kw_only=True)
class HubDataSet(CachedDataSet):
    """A data set in the hub cache, with the files of its revision."""

    repository: Repository | None = None

    def config(self, name: str | None) -> CachedConfig | None:
        """A config by its name, listed in the README or not; None when there is none."""
        return self.repository.config(name) if self.repository else None


def find_hub(root: str, name: str, scan: Scan) -> CachedDataSet | None:
    """The raw files of the data set in the hub cache, or None."""
    folder = os.path.join(root, HUB_PREFIX + name.replace("/", "--"))
    if not os.path.isdir(folder) or os.path.islink(folder):
        return None
    usage = Usage()
    usage.add_tree(os.path.join(folder, "blobs"), scan, shared=os.path.realpath(os.path.join(root, "blobs")))
    usage.add_tree(os.path.join(folder, "snapshots"), scan)
    revision, problem = _revision(folder, scan)
    repository = _repository(folder, root, revision, scan) if revision else None
    if repository and (script := script_of(name, repository.listing or repository.present, repository.card)):
        problem = f"it is made by a program, {script}, which penstock never runs"
    configs = _configs_here(repository) if repository and not problem else {}
    return HubDataSet(
        name=name,
        cache="hub",
        folder=folder,
        configs=configs,
        default=repository.card.default if repository and repository.card.configs else "default",
        problem=problem,
        inodes=usage.inodes,
        repository=repository,
    )


def script_of(name: str, paths: Container[str], card: Card) -> str | None:
    """The program that makes a data set of these files, or None; files that a README names need none."""
    script = f"{name.rpartition('/')[2]}.py"
    return script if script in paths and not card.configs else None


def _revision(folder: str, scan: Scan) -> tuple[str, str]:
    """The revision that refs/main names, or the only one; else why there is none."""
    snapshots = [entry.name for entry in scan.folders(os.path.join(folder, "snapshots"))]
    wanted = (scan.text(os.path.join(folder, "refs", "main"), max_bytes=1024) or "").strip()
    if wanted in snapshots and _REVISION.fullmatch(wanted):
        return wanted, ""
    if not wanted and len(snapshots) == 1:
        return snapshots[0], ""
    if not snapshots:
        return "", "its download was broken off: it has no snapshot"
    if wanted:
        return "", f"refs/main names revision {wanted[:40]!r}, of which no file is here"
    return "", f"it has {len(snapshots)} revisions and no refs/main that chooses one: {first_names(snapshots)}"


def _repository(folder: str, root: str, revision: str, scan: Scan) -> Repository:
    snapshot = os.path.join(folder, "snapshots", revision)
    inside = tuple(map(os.path.realpath, (os.path.join(folder, "blobs"), snapshot, os.path.join(root, "blobs"))))
    present = frozenset(_paths(snapshot, "", scan, MAX_REPOSITORY_DEPTH))
    readme = real_file(os.path.join(snapshot, "README.md"), b"README.md", inside) if "README.md" in present else None
    card_text = scan.text(readme.location, max_bytes=MAX_README_BYTES) if readme else None
    partial = [entry for entry in scan.entries(os.path.join(folder, "blobs")) if entry.name.endswith(".incomplete")]
    return Repository(
        snapshot=snapshot,
        inside=inside,
        present=present,
        listing=_listing(scan.json_object(os.path.join(folder, "trees", f"{revision}.json"))),
        card=parse_card(card_text or ""),
        broken_off=(len(partial), sum(_size(entry) for entry in partial)),
    )


def _size(entry: os.DirEntry[str]) -> int:
    try:
        return entry.stat(follow_symlinks=False).st_size
    except OSError:
        return 0


def _listing(tree: dict[str, Any] | None) -> dict[str, int] | None:
    """Paths and sizes of trees/REVISION.json; None for a form that isn't known."""
    if not tree or tree.get("format_version") != 1 or not isinstance(tree.get("files"), dict):
        return None
    listing: dict[str, int] = {}
    for path, facts in tree["files"].items():
        size = (facts.get("lfs_size") or facts.get("size")) if isinstance(facts, dict) else None
        if count_or_none(size) is None or any(part in ("", ".", "..") for part in path.split("/")) or "\0" in path:
            return None
        listing[path] = int(size or 0)
    return listing


def _paths(folder: str, prefix: str, scan: Scan, depth: int) -> Iterator[str]:
    for entry in scan.entries(folder):
        if not is_folder(entry):
            yield prefix + entry.name
        elif depth:
            yield from _paths(entry.path, f"{prefix}{entry.name}/", scan, depth - 1)
        else:
            scan.skips.add("too-deep", os.fsencode(entry.path))


def _configs_here(repository: Repository) -> dict[str, CachedConfig]:
    """The configs of which at least one file is here."""
    configs = {name: repository.config(name) for name in repository.card.configs or ["default"]}
    return {
        name: config
        for name, config in configs.items()
        if config and any(split.files for split in config.splits.values())
    }
