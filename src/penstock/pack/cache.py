"""Listed spans and ranks of rows kept in the user's cache folder, so that those of millions of documents are made once.

    plans/<digest of what decides the spans>.spans
    plans/<digest of what decides the ranks>.ranks
        a line of JSON (array name -> length, checksum), then the arrays, little-endian, end to end

What decides the spans: store digest, split, row length, stride and whether parts share rows; not the layout of the
store, because spans name documents, not places in segments. Ranks are one number per row of a plan, for the orders
that go by length or by some other figure; the plan's identity and the figure decide them. A file that is damaged, or
fits another store, is made again; one that can't be written is done without. The folder is held under `MOST_BYTES`,
the oldest going first.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.errors import StoreBusyError
from penstock.hashing import checksum_hex, digest_of
from penstock.pack.spans import SPAN_TYPES, SpanArrays, SpanPlan, span_problem
from penstock.store import Store
from penstock.tokenize.cache import cache_folder

__all__ = ["cached_ranks", "cached_spans", "keep_ranks", "keep_spans"]

FORMAT = 1
LONGEST_HEADER = 4096
LOCK_NAME = "lock"
SUFFIXES = (".spans", ".ranks")
MOST_BYTES = 4 * 2**30


def _path(key: dict[str, Any], suffix: str) -> Path | None:
    folder = cache_folder()
    return folder / "plans" / f"{digest_of({'format': FORMAT, **key})}{suffix}" if folder else None


def cached_spans(key: dict[str, Any], store: Store) -> SpanArrays | None:
    """The spans kept for a key, or None for whatever reason they can't be had."""
    arrays = _arrays(_path(key, ".spans"), SPAN_TYPES)
    return None if arrays is None or span_problem(arrays, store, seq_len=key["seq_len"]) else arrays


def cached_ranks(key: dict[str, Any], *, num_rows: int, kind: str) -> npt.NDArray[Any] | None:
    """The ranks kept for a key, `num_rows` finite numbers of a little-endian type, or None."""
    arrays = _arrays(_path(key, ".ranks"), {"ranks": kind}) or {}
    ranks: npt.NDArray[Any] | None = arrays.get("ranks")
    return ranks if ranks is not None and len(ranks) == num_rows and np.isfinite(ranks).all() else None


def _arrays(path: Path | None, kinds: Mapping[str, str]) -> dict[str, Any] | None:
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            header = json.loads(file.readline(LONGEST_HEADER))
            return {name: _read(file, header[name], kind) for name, kind in kinds.items()}
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _read(file: Any, entry: dict[str, Any], kind: str) -> Any:
    size = os.fstat(file.fileno()).st_size
    count = int(entry["length"])
    if not 0 <= count <= size:  # before anything of that size is asked for
        raise ValueError("longer than the file")
    array = np.fromfile(file, kind, count)
    if len(array) != count or checksum_hex(array) != entry["checksum"]:
        raise ValueError("not what was kept")
    return array


def keep_spans(key: dict[str, Any], plan: SpanPlan) -> None:
    """Keeps a plan's spans; where the disk refuses, nothing is kept and nobody has to know."""
    _keep(_path(key, ".spans"), {name: np.asarray(getattr(plan, name), kind) for name, kind in SPAN_TYPES.items()})


def keep_ranks(key: dict[str, Any], ranks: npt.NDArray[Any], *, kind: str) -> None:
    """Keeps the ranks of rows, likewise."""
    _keep(_path(key, ".ranks"), {"ranks": np.asarray(ranks, kind)})


def _keep(path: Path | None, given: Mapping[str, npt.NDArray[Any]]) -> None:
    if path is None:
        return
    arrays = {name: np.ascontiguousarray(array) for name, array in given.items()}
    header = {name: {"length": len(array), "checksum": checksum_hex(array)} for name, array in arrays.items()}
    with contextlib.suppress(OSError, StoreBusyError):  # another process keeps a plan just now: this one isn't kept
        fs.make_folder(path.parent)
        with fs.FolderLock(path.parent / LOCK_NAME):
            fs.remove_leftovers(path.parent)
            with fs.atomic_file(path) as file:
                file.write(json.dumps(header).encode() + b"\n")
                for array in arrays.values():
                    file.write(array)
            _hold_under(path.parent, MOST_BYTES, newest=path)


def _hold_under(folder: Path, limit: int, *, newest: Path) -> None:
    kept = [(entry.stat(), entry) for entry in folder.iterdir() if entry.suffix in SUFFIXES]
    found = sorted(kept, key=lambda pair: -pair[0].st_mtime_ns)
    total = 0
    for status, path in found:
        total += status.st_size
        if total > limit and path != newest:
            fs.remove_file(path)
