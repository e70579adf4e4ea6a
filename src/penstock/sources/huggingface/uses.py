"""Which training manifests name which data sets.

In: a folder with manifests (JSON; `training.dataset` as in schemas 1.0 and 2.0). Out: for each manifest the data sets
and paths that it names. Files are looked for to a bounded depth and number; one that is no manifest is passed over,
one that can't be read is counted. Links are not followed. Memory: one manifest.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from penstock.errors import InputError
from penstock.sources.huggingface.cache import CachedDataSet, Scan, is_folder
from penstock.sources.huggingface.processed import snake_case_name
from penstock.sources.huggingface.words import PRESETS, SCHEME, readings_of

__all__ = ["Manifest", "manifests_below", "uses"]

MAX_DEPTH = 6
MAX_FILES = 5000
MAX_MANIFEST_BYTES = 2**20
MAX_NESTING = 12
PATH_KEYS = ("path", "validation_path", "test_path", "name")
TASK_KEYS = ("train", "valid", "validation", "test")
# Where no one keeps manifests, and where there are many files.
PASSED_OVER = frozenset(["node_modules", "site-packages", "__pycache__"])


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A training manifest and what its `training.dataset` names: data sets of the hub, or paths."""

    path: str
    names: frozenset[str]


def manifests_below(folder: str, scan: Scan) -> list[Manifest]:
    """The training manifests in a folder and below, in the order of their paths."""
    found = []
    for number, path in enumerate(_json_files(folder, scan, MAX_DEPTH)):
        if number == MAX_FILES:
            scan.skips.add("beyond-limit", os.fsencode(path))
            break
        value = scan.json_object(path, max_bytes=MAX_MANIFEST_BYTES)
        names = frozenset(name for dataset in _datasets(value, MAX_NESTING) for name in _names(dataset))
        if names:
            found.append(Manifest(path=path, names=names))
    return found


def uses(manifest: Manifest, data_set: CachedDataSet) -> bool:
    """Whether a manifest names this data set, by its name, as an `hf:` word, by a preset, or by a path into it."""
    return any(_is_meant(name, data_set, os.path.dirname(manifest.path)) for name in manifest.names)


def _json_files(folder: str, scan: Scan, depth: int) -> Iterator[str]:
    for entry in scan.entries(folder):
        if entry.name.startswith(".") or entry.name in PASSED_OVER:
            continue
        if is_folder(entry):
            if depth:
                yield from _json_files(entry.path, scan, depth - 1)
        elif entry.name.endswith(".json"):
            yield entry.path


def _datasets(value: Any, nesting: int) -> Iterator[dict[str, Any]]:
    """Every `training.dataset`: at the root, of a base model, of an adapter. Keys with `_` in front are comments."""
    if nesting == 0:
        return
    if isinstance(value, list):
        for item in value:
            yield from _datasets(item, nesting - 1)
    elif isinstance(value, dict):
        for key, item in value.items():
            if key == "training" and isinstance(item, dict) and isinstance(item.get("dataset"), dict):
                yield item["dataset"]
            elif isinstance(item, dict | list) and not key.startswith("_"):
                yield from _datasets(item, nesting - 1)


def _names(dataset: dict[str, Any]) -> Iterator[str]:
    tasks = dataset.get("tasks")
    for task in tasks.values() if isinstance(tasks, dict) else ():
        if isinstance(task, dict):
            yield from (task[key] for key in TASK_KEYS if isinstance(task.get(key), str))
    yield from (dataset[key] for key in PATH_KEYS if isinstance(dataset.get(key), str))


def _is_meant(name: str, data_set: CachedDataSet, folder: str) -> bool:
    path = os.path.normpath(os.path.join(folder, os.path.expanduser(name)))
    if path == data_set.folder or path.startswith(data_set.folder + os.sep):
        return True
    if os.path.lexists(path):  # a name or a path: decided by looking
        return False
    try:
        readings = readings_of(name)
    except InputError:  # a path, or nothing that could be a name
        return False
    if not name.startswith(SCHEME) and name.lower() not in PRESETS:
        readings = readings[:1]  # `data/train` in a manifest is a folder, not the config of a data set
    own = snake_case_name(data_set.name)  # all that the processed cache keeps of a name
    return any(snake_case_name(meant) == own for reading in readings for meant in reading.names)
