"""What became of each input of the latest version, so that what didn't change isn't even read again.

STORE/cache/NAME.arrow, one file per source, is a cache: no version names it, and losing it costs a reading of the
input. It is believed only when it was written for the version that is the latest, for the same tokenizer and options.
Of a source of files it remembers each file's facts (size, times, inode); of other sources each unit's fingerprint. A
file whose times are so young that it could have changed again within the clock's grain is not remembered, and a file
whose facts differ in any way is read: the facts are never trusted over the content when in doubt.

    walk -> recognised files and units -> rows of the latest version, as they are
         -> the rest                   -> read, cleaned, encoded if the content is new

Memory: 60 bytes and the name per file, four times that while it is walked.
"""

from __future__ import annotations

import itertools
import json
import operator
from array import array
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from penstock import fs
from penstock.hashing import strong_hash
from penstock.sources import SkipTally, Unit, printable
from penstock.sources.document import EXAMPLES_PER_REASON
from penstock.sources.files import PACKED_FACTS, FileEntry, Stretch
from penstock.store.index import joined_values, numbers_of
from penstock.store.layout import CACHE
from penstock.store.reader import Store
from penstock.store.writer import arrow_array, decode_table, encode_table

__all__ = ["RACY_NANOSECONDS", "SourceMemory"]

# A file whose time stamp is this close to the moment it was read may have changed again within the clock's grain.
RACY_NANOSECONDS = 2 * 10**9

DOCUMENT = ""
"""The outcome of a file that became a document; other outcomes are reasons to leave it out."""

NEVER = -1  # no file has a negative size: facts that are never met

# For fewer, another process to walk them takes longer than it helps.
LEAST_FILES_PER_STRETCH = 2**12

FACTS_PER_FILE = PACKED_FACTS.size // 8

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
        # Of the files remembered, in order of path: the outcome is a position in `_names`.
        self._paths = arrow_array([], pa.binary())
        self._facts = np.empty((0, FACTS_PER_FILE), np.int64)
        self._outcomes = np.empty(0, np.int32)
        self._names = [DOCUMENT]
        self._units: dict[str, tuple[_Numbers, SkipTally]] = {}
        self._read_before_ns = 0
        self.num_remembered = 0
        if believe and previous is not None:
            self._load(previous.digest)
        # What this run sees.
        self._is_recognised = np.zeros(len(self._paths), np.bool_)
        self._seen_paths: list[bytes] = []
        self._seen_facts: list[bytes] = []
        self._recognised_rows = array("q")
        self._seen_units: list[tuple[str, Sequence[bytes] | None, SkipTally]] = []
        self._skips_of_units = SkipTally()

    @property
    def num_files(self) -> int:
        """How many files are remembered."""
        return len(self._paths)

    def stretches(self, most: int) -> list[range]:
        """The files remembered, by number, cut into at most so many runs of about one length."""
        count = max(1, min(most, self.num_files // LEAST_FILES_PER_STRETCH))
        borders = [self.num_files * number // count for number in range(count + 1)]
        return [range(first, end) for first, end in itertools.pairwise(borders)]

    def stretch(self, numbers: range) -> Stretch:
        """The part of the walk in which these files lie, and they themselves."""
        paths = self._paths.slice(numbers.start, len(numbers)).to_pylist()
        packed = self._facts[numbers.start : numbers.stop].tobytes()
        size = PACKED_FACTS.size
        keys = map(operator.add, paths, [packed[at : at + size] for at in range(0, len(packed), size)])
        return Stretch(
            first=None if numbers.start == 0 else paths[0],
            end=None if numbers.stop == self.num_files else self._paths[numbers.stop].as_py(),
            known=dict(zip(keys, numbers, strict=True)),
        )

    def saw_files(self, unit: Unit) -> None:
        """Notes the files of a unit, none of which is recognised; called in order of path."""
        self._seen_paths += [path for path, _ in unit.items]
        self._seen_facts.append(unit.facts)

    def saw_stretch(self, recognised: npt.NDArray[np.int64], changes: Sequence[FileEntry]) -> None:
        """Notes a part of the walk: the numbers of the files recognised, and the rest of what was found."""
        self._is_recognised[recognised] = True
        files = [(path, facts) for path, facts, _ in changes if facts is not None]
        self._seen_paths += [path for path, _ in files]
        self._seen_facts += [facts for _, facts in files]

    def recognises_unit(self, unit: Unit) -> bool:
        """Whether this unit is one that was read for the latest version."""
        known = self._units.get(unit.fingerprint)
        if known is None or unit.newest_change_ns > self._read_before_ns - RACY_NANOSECONDS:
            return False
        rows, skips = known
        self._recognised_rows.extend(rows.tolist())
        self._skips_of_units.merge([skips])
        self._seen_units.append((unit.fingerprint, None, skips))
        return True

    def saw_unit(self, unit: Unit, keys: Sequence[bytes], skips: SkipTally) -> None:
        """Notes what became of a unit that was read."""
        self._seen_units.append((unit.fingerprint, keys, skips))

    @property
    def recognised_rows(self) -> _Numbers:
        """The documents of the latest version that are taken over, by number."""
        is_document = self._outcomes == self._names.index(DOCUMENT)
        of_files = self._rows[np.flatnonzero(self._is_recognised[is_document])] if self.num_files else self._rows[:0]
        return np.concatenate([of_files, np.array(self._recognised_rows, np.int64)])

    @property
    def recognised_skips(self) -> SkipTally:
        """What was left out of the inputs that are recognised."""
        tally = SkipTally()
        for code, name in enumerate(self._names):
            numbers = np.flatnonzero(self._is_recognised & (self._outcomes == code)) if name != DOCUMENT else ()
            if len(numbers):
                examples = [self._key(self._paths[int(number)].as_py()) for number in numbers[:EXAMPLES_PER_REASON]]
                tally.merge([SkipTally({name: len(numbers)}, {name: [printable(key) for key in examples]})])
        tally.merge([self._skips_of_units])
        return tally

    @property
    def is_unchanged(self) -> bool:
        """Whether the source is what it was: everything recognised, nothing missing."""
        recognised = int(self._is_recognised.sum()) + len(self._seen_units)
        return not self._seen_paths and recognised == self.num_remembered > 0 and self._has_all_rows

    @property
    def _has_all_rows(self) -> bool:
        return len(self.recognised_rows) == len(self._rows)

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
        files = bool(self._seen_paths) or bool(self._is_recognised.any())
        table = self._files_table(started_ns, keys, left_out) if files else self._units_table(keys, latest)
        if table is None:
            fs.remove_file(self._path)
        else:
            fs.write_atomic(self._path, encode_table(table, facts))

    def _key(self, path: bytes) -> bytes:
        return self._key_prefix + path if path else self._key_prefix[:-1]

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
            self._load_files(table)
        else:
            rows, ends = _flat_rows(table["rows"])
            starts = np.concatenate([[0], ends[:-1]])
            self._units = {
                fingerprint: (self._rows[rows[start:end]], SkipTally(*json.loads(skips)))
                for fingerprint, skips, start, end in zip(
                    table["fingerprint"].to_pylist(), table["skips"].to_pylist(), starts, ends, strict=True
                )
            }

    def _load_files(self, table: pa.Table) -> None:
        outcomes = table["outcome"].combine_chunks()
        names = outcomes.dictionary.to_pylist()
        if DOCUMENT not in names or (numbers_of(outcomes.indices) == names.index(DOCUMENT)).sum() != len(self._rows):
            self.num_remembered = 0  # rows are found by counting
            return
        self._paths = table["path"].combine_chunks()
        self._facts = np.frombuffer(joined_values(table["facts"]), np.int64).reshape(-1, FACTS_PER_FILE)
        self._outcomes, self._names = numbers_of(outcomes.indices), names

    def _files_table(self, started_ns: int, keys: pa.ChunkedArray, left_out: dict[bytes, str]) -> pa.Table | None:
        kept = np.flatnonzero(self._is_recognised)
        seen = [left_out.get(self._key(path), DOCUMENT) for path in self._seen_paths]
        names = [*self._names, *sorted(set(seen) - set(self._names))]
        code = {name: number for number, name in enumerate(names)}
        codes = np.concatenate([self._outcomes[kept], np.array([code[name] for name in seen], np.int32)])
        paths = pa.concat_arrays(
            [self._paths.take(arrow_array(kept, pa.int64())), arrow_array(self._seen_paths, pa.binary())]
        )
        facts = np.frombuffer(b"".join(self._seen_facts), np.int64).reshape(-1, FACTS_PER_FILE)
        facts = np.concatenate([self._facts[kept], facts])
        if len(kept) and seen:  # else they are in order
            order = pyarrow.compute.sort_indices(paths)
            paths, codes, facts = paths.take(order), codes[numbers_of(order)], facts[numbers_of(order)]
        if not self._are_documents(paths, codes == code[DOCUMENT], keys):
            return None  # rows are found by counting; where that doesn't hold, nothing may be remembered
        facts[facts[:, 1:3].max(axis=1) > started_ns - RACY_NANOSECONDS] = NEVER
        return _table(
            {
                "path": paths,
                "facts": pa.Array.from_buffers(
                    pa.binary(PACKED_FACTS.size), len(facts), [None, pa.py_buffer(np.ascontiguousarray(facts))]
                ),
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
        if len(paths) == 1 and not paths[0].as_py():  # the source is one file
            return list(keys.to_pylist()) == [self._key(b"")] * len(keys)
        prefix, nothing = arrow_array([self._key_prefix, b""], pa.binary())  # `pa.scalar` imports pandas, too
        found = pyarrow.compute.binary_join_element_wise(prefix, paths.take(rows), nothing)
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
        return _table(
            {
                "fingerprint": arrow_array([fingerprint for fingerprint, _, _ in self._seen_units], pa.string()),
                "rows": _lists(lists),
                "skips": arrow_array(
                    [json.dumps([skips.counts, skips.examples]) for *_, skips in self._seen_units], pa.string()
                ),
            }
        )


def _table(columns: dict[str, pa.Array]) -> pa.Table:
    """`pa.table`, which imports pandas where that is installed, to ask whether the columns are a pandas object."""
    return pa.Table.from_arrays(list(columns.values()), names=list(columns))


def _rows_of(store: Store | None, name: str) -> _Numbers:
    """The numbers of a source's documents."""
    names = [source["name"] for source in store.manifest.sources] if store is not None else []
    if store is None or name not in names:
        return np.empty(0, np.int64)
    return np.flatnonzero(store.arrays["source"] == names.index(name))


def _lists(lists: Sequence[Sequence[int]]) -> pa.Array:
    ends = np.concatenate([[0], np.cumsum([len(one) for one in lists], dtype=np.int64)])
    values = [value for one in lists for value in one]
    return pa.ListArray.from_arrays(arrow_array(ends, pa.int32()), arrow_array(values, pa.uint32()))


def _flat_rows(column: pa.ChunkedArray) -> tuple[_Numbers, _Numbers]:
    """The joined lists and where each ends."""
    lists = column.to_pylist()
    ends = np.cumsum([len(one) for one in lists], dtype=np.int64)
    return np.array([row for one in lists for row in one], np.int64), ends
