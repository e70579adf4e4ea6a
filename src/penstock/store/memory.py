"""What became of each input of the latest version, so that what didn't change isn't even read again.

STORE/cache/NAME.arrow, one file per source, is a cache: no version names it, and losing it costs a reading of the
input. It is believed only when it was written for the version that is the latest, for the same tokenizer and options.
Of a source of files it remembers each file's facts (size, times, inode); of other sources each unit's fingerprint. A
file whose times are so young that it could have changed again within the clock's grain is not remembered, and a file
whose facts differ in any way is read: the facts are never trusted over the content when in doubt.

    walk -> recognised files and units -> rows of the latest version, as they are
         -> the rest                   -> read, cleaned, encoded if the content is new

Memory: 60 bytes and the name per file.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from penstock import fs
from penstock.hashing import strong_hash
from penstock.sources import SkipTally, Unit
from penstock.store.layout import CACHE
from penstock.store.reader import Store
from penstock.store.writer import arrow_array, decode_table, encode_table

__all__ = ["RACY_NANOSECONDS", "SourceMemory"]

# A file whose time stamp is this close to the moment it was read may have changed again within the clock's grain.
RACY_NANOSECONDS = 2 * 10**9

DOCUMENT = ""
"""The outcome of a file that became a document; other outcomes are reasons to leave it out."""

_PACKED = struct.Struct("<4q")  # size, modified and changed in ns, inode
_NEVER = b"\xff" * _PACKED.size  # no file has a negative size: an entry that is never recognised
_BATCH_ROWS = 2**14

_Numbers = npt.NDArray[np.int64]


class SourceMemory:
    """The memory of one source: asked during the walk, written after the commit.

    Args:
        store: the store's folder.
        name: of the source.
        task: everything besides the input that decides what becomes of it.
        previous: the latest version; None for a new store.
        believe: False: everything is read again, whatever is remembered.
    """

    def __init__(self, store: Path, name: str, *, task: str, previous: Store | None, believe: bool) -> None:
        self._path = store / CACHE / f"{strong_hash(name.encode()).hex()[:32]}.arrow"
        self._name = name
        self._key_prefix = name.encode() + b"/"
        self._task = task
        self._rows = _rows_of(previous, name)
        self._files: Iterator[tuple[bytes, bytes, str]] = iter(())
        self._units: dict[str, tuple[_Numbers, SkipTally]] = {}
        self._read_before_ns = 0
        self.num_remembered = 0
        if believe and previous is not None:
            self._load(previous.digest)
        self._next_file = next(self._files, None)
        self._file_rows = iter(self._rows.tolist())
        # What this run sees.
        self._seen_paths: list[bytes] = []
        self._seen_facts: list[bytes] = []
        self._seen_outcomes: list[Any] = []  # None: not known before the file is read
        self._recognised_rows = array("q")
        self._seen_units: list[tuple[str, Sequence[bytes] | None, SkipTally]] = []
        self.recognised_skips = SkipTally()

    def recognises(self, path: bytes, facts: os.stat_result) -> bool:
        """Whether this file is the one that was read for the latest version; called in order of path."""
        while self._next_file is not None and self._next_file[0] < path:
            self._forget()
        packed = _PACKED.pack(facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns, facts.st_ino)
        self._seen_paths.append(path)
        self._seen_facts.append(packed)
        known = self._next_file
        if known is None or known[0] != path:
            self._seen_outcomes.append(None)
            return False
        if known[1] != packed:
            self._forget()
            self._seen_outcomes.append(None)
            return False
        self._next_file = next(self._files, None)
        self._seen_outcomes.append(known[2])
        if known[2] == DOCUMENT:
            self._recognised_rows.append(next(self._file_rows))
        else:
            self.recognised_skips.add(known[2], self._key(path))
        return True

    def recognises_unit(self, unit: Unit) -> bool:
        """Whether this unit is one that was read for the latest version."""
        known = self._units.get(unit.fingerprint)
        if known is None or unit.newest_change_ns > self._read_before_ns - RACY_NANOSECONDS:
            return False
        rows, skips = known
        self._recognised_rows.extend(rows.tolist())
        self.recognised_skips.merge([skips])
        self._seen_units.append((unit.fingerprint, None, skips))
        return True

    def saw_unit(self, unit: Unit, keys: Sequence[bytes], skips: SkipTally) -> None:
        """Notes what became of a unit that was read."""
        self._seen_units.append((unit.fingerprint, keys, skips))

    @property
    def recognised_rows(self) -> _Numbers:
        """The documents of the latest version that are taken over, by number."""
        return np.array(self._recognised_rows, np.int64)

    @property
    def is_unchanged(self) -> bool:
        """Whether the source is what it was: everything recognised, nothing missing."""
        seen = len(self._seen_paths) + len(self._seen_units)
        return len(self._recognised_rows) == len(self._rows) and seen == self.num_remembered > 0

    def save(
        self, *, started_ns: int, digest: str, keys: pa.ChunkedArray, left_out: dict[bytes, str], latest: Store | None
    ) -> None:
        """Writes what this run saw, for the version of this digest.

        Args:
            started_ns: wall clock before the walk.
            digest: of the version that is the latest now.
            keys: of that version's documents of this source, in canonical order.
            left_out: reason by key, of the files that were read and left out.
            latest: the version that `recognised_rows` count in.
        """
        facts = {"task": self._task, "digest": digest, "started_ns": started_ns, "name": self._name}
        files = bool(self._seen_paths)
        table = self._files_table(started_ns, keys, left_out) if files else self._units_table(keys, latest)
        if table is None:
            fs.remove_file(self._path)
        else:
            fs.write_atomic(self._path, encode_table(table, facts))

    def _key(self, path: bytes) -> bytes:
        return self._key_prefix + path if path else self._key_prefix[:-1]

    def _forget(self) -> None:
        """Goes past a file that is gone or changed; its row of the latest version goes with it."""
        if self._next_file is not None and self._next_file[2] == DOCUMENT:
            next(self._file_rows)
        self._next_file = next(self._files, None)

    def _load(self, digest: str) -> None:
        loaded = decode_table(self._path)
        if loaded is None:
            return
        table, facts = loaded
        if (facts.get("task"), facts.get("digest"), facts.get("name")) != (self._task, digest, self._name):
            return
        self._read_before_ns = facts["started_ns"]
        self.num_remembered = table.num_rows
        if "path" in table.column_names:
            self._files = _remembered_files(table)
        else:
            rows, ends = _flat_rows(table["rows"])
            starts = np.concatenate([[0], ends[:-1]])
            self._units = {
                fingerprint: (self._rows[rows[start:end]], SkipTally(*json.loads(skips)))
                for fingerprint, skips, start, end in zip(
                    table["fingerprint"].to_pylist(), table["skips"].to_pylist(), starts, ends, strict=True
                )
            }

    def _files_table(self, started_ns: int, keys: pa.ChunkedArray, left_out: dict[bytes, str]) -> pa.Table | None:
        paths = self._seen_paths
        outcomes = self._seen_outcomes
        for place in [place for place, outcome in enumerate(outcomes) if outcome is None]:
            outcomes[place] = left_out.get(self._key(paths[place]), DOCUMENT)
        names = sorted(set(outcomes) | {DOCUMENT})
        codes = np.fromiter(map({name: code for code, name in enumerate(names)}.__getitem__, outcomes), np.int32)
        path_column = arrow_array(paths, pa.binary())
        if not self._are_documents(path_column, codes == names.index(DOCUMENT), keys):
            return None  # rows are found by counting; where that doesn't hold, nothing may be remembered
        numbers = np.frombuffer(b"".join(self._seen_facts), "<i8").reshape(len(paths), -1)
        for place in np.flatnonzero(numbers[:, 1:3].max(axis=1) > started_ns - RACY_NANOSECONDS).tolist():
            self._seen_facts[place] = _NEVER
        return pa.table(
            {
                "path": path_column,
                "facts": arrow_array(self._seen_facts, pa.binary(_PACKED.size)),
                "outcome": pa.DictionaryArray.from_arrays(
                    arrow_array(codes, pa.int32()), arrow_array(names, pa.string())
                ),
            }
        )

    def _are_documents(self, paths: pa.Array, chosen: npt.NDArray[np.bool_], keys: pa.ChunkedArray) -> bool:
        """Whether the files chosen are the documents of these keys, in this order."""
        rows = arrow_array(np.flatnonzero(chosen), pa.int64())
        if len(rows) != len(keys):
            return False
        if len(self._seen_paths) == 1 and not self._seen_paths[0]:  # the source is one file
            return list(keys.to_pylist()) == [self._key(b"")] * len(keys)
        prefix = pa.scalar(self._key_prefix, pa.binary())
        found = pyarrow.compute.binary_join_element_wise(prefix, paths.take(rows), pa.scalar(b"", pa.binary()))
        same: bool = pyarrow.compute.all(pyarrow.compute.equal(found, keys.combine_chunks())).as_py()
        return same

    def _units_table(self, keys: pa.ChunkedArray, latest: Store | None) -> pa.Table | None:
        """Rows of units count within the source, so that they hold whatever other sources do."""
        positions = {key: place for place, key in enumerate(keys.to_pylist())}
        old_keys = iter(())
        if latest is not None and len(self._recognised_rows):
            rows = arrow_array(self.recognised_rows, pa.int64())
            old_keys = iter(latest.provenance()["key"].take(rows).to_pylist())
        lists = []
        for fingerprint, unit_keys, _ in self._seen_units:
            if unit_keys is None:
                unit_keys = [next(old_keys) for _ in range(len(self._units[fingerprint][0]))]
            lists.append([positions[key] for key in unit_keys if key in positions])
        return pa.table(
            {
                "fingerprint": arrow_array([fingerprint for fingerprint, _, _ in self._seen_units], pa.string()),
                "rows": _lists(lists),
                "skips": arrow_array(
                    [json.dumps([skips.counts, skips.examples]) for *_, skips in self._seen_units], pa.string()
                ),
            }
        )


def _rows_of(store: Store | None, name: str) -> _Numbers:
    """The numbers of a source's documents."""
    names = [source["name"] for source in store.manifest.sources] if store is not None else []
    if store is None or name not in names:
        return np.empty(0, np.int64)
    return np.flatnonzero(store.arrays["source"] == names.index(name))


def _remembered_files(table: pa.Table) -> Iterator[tuple[bytes, bytes, str]]:
    """(path, facts, outcome) in order of path, a batch of them in memory at a time."""
    for batch in table.to_batches(_BATCH_ROWS):
        outcomes = batch["outcome"].dictionary.to_pylist()
        codes = batch["outcome"].indices.to_pylist()
        named = (outcomes[code] for code in codes)
        yield from zip(batch["path"].to_pylist(), batch["facts"].to_pylist(), named, strict=True)


def _lists(lists: Sequence[Sequence[int]]) -> pa.Array:
    ends = np.concatenate([[0], np.cumsum([len(one) for one in lists], dtype=np.int64)])
    values = [value for one in lists for value in one]
    return pa.ListArray.from_arrays(arrow_array(ends, pa.int32()), arrow_array(values, pa.uint32()))


def _flat_rows(column: pa.ChunkedArray) -> tuple[_Numbers, _Numbers]:
    """The joined lists and where each ends."""
    lists = column.to_pylist()
    ends = np.cumsum([len(one) for one in lists], dtype=np.int64)
    return np.array([row for one in lists for row in one], np.int64), ends
