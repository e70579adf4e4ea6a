"""What the latest version knows already: documents by content, and whole rows of its index.

A document whose content and tokenizer are the same isn't encoded again: the new version points to its tokens. Rows of
inputs that didn't change at all are taken over as they are, without reading anything but the index. Memory: the
documents table of that version, and 100 bytes per document.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock.errors import DamagedStoreError
from penstock.hashing import STRONG_HASH_BYTES, token_hash
from penstock.store.layout import BLOCK_BYTES, DOCUMENTS_COLUMNS, SegmentEntry
from penstock.store.reader import Segment, Store
from penstock.store.writer import DOCUMENT_SCHEMA, arrow_array
from penstock.tokenize import Tokenizer

__all__ = ["KnownDocuments", "Place", "SegmentTokens", "document_rows"]

Place = tuple[str | None, int, int, bytes, list[int] | None]
"""Where a document's tokens are: (segment or None for the unit's own, offset, length, token hash, loss runs)."""


class KnownDocuments:
    """The documents of a version, by content, when its tokenizer is the same.

    Attributes:
        segments: the version's segments by name; empty when nothing of it can be used.
    """

    def __init__(self, store: Store | None, tokenizer: Tokenizer) -> None:
        self.segments: dict[str, SegmentEntry] = {}
        self._store: Store | None = None
        self._sorted: _SortedHashes | None = None
        if store is not None and store.manifest.tokenizer["digest"] == tokenizer.digest:
            self._store = store
            self.segments = {entry.name: entry for entry in store.manifest.segments}

    def load(self) -> None:
        """Reads what `find_all` needs; worker processes inherit it instead of reading it each."""
        if self._store is not None and self._sorted is None:
            contents = self._store.provenance()["content_hash"].combine_chunks()
            hashes = np.frombuffer(contents.buffers()[1], f"S{STRONG_HASH_BYTES}")[contents.offset :][: len(contents)]
            self._sorted = _SortedHashes(hashes)

    def find_all(self, contents: Sequence[bytes]) -> tuple[list[Place | None], int]:
        """Where each document was stored before, or None; and how many were, but aren't what was committed.

        These are to be encoded again, so that the damage ends with the version that has it.
        """
        if self._store is None:
            return [None] * len(contents), 0
        self.load()
        places: list[Place | None] = []
        damaged = 0
        for content in contents:
            try:
                places.append(self._find(content))
            except DamagedStoreError:
                places.append(None)
                damaged += 1
        return places, damaged

    def _find(self, content: bytes) -> Place | None:
        number = self._sorted.find(content) if self._sorted is not None else None
        if number is None or self._store is None:
            return None
        tokens = self._store.document_tokens(number)
        segment, offset, length = (int(self._store.arrays[name][number]) for name in ("segment", "offset", "length"))
        # The hash of a document of parts covers which of them carry loss, so equal hashes mean equal runs.
        (loss_runs,) = _loss_runs(self._store, np.array([number]))
        return self._store.manifest.segments[segment].name, offset, length, token_hash(tokens), loss_runs


class _SortedHashes:
    """Finds a document by its content hash: 16 bytes of memory each, where a dictionary takes 150 and half a second."""

    def __init__(self, hashes: npt.NDArray[np.bytes_]) -> None:
        self._hashes = hashes
        words = hashes.view("<u8").reshape(len(hashes), -1)[:, 0]
        self._numbers = np.argsort(words, kind="stable")
        self._words = words[self._numbers]

    def find(self, content: bytes) -> int | None:
        """The number of a document with this content, or None."""
        word = np.uint64(int.from_bytes(content[:8], "little"))
        place = int(np.searchsorted(self._words, word))
        while place < len(self._words) and self._words[place] == word:
            number = int(self._numbers[place])
            if self._hashes[number].ljust(STRONG_HASH_BYTES, b"\0") == content:  # numpy strips zeros at the end
                return number
            place += 1
        return None


class SegmentTokens:
    """Checked tokens by segment and place, whether a version names the segment yet or not."""

    def __init__(self, store: Path, dtype: np.dtype[Any]) -> None:
        self._store = store
        self._dtype = dtype
        self._open: dict[str, Segment] = {}

    def __call__(self, entry: SegmentEntry, offset: int, length: int) -> npt.NDArray[Any]:
        """The tokens, as a view that is valid as long as this object."""
        segment = self._open.get(entry.name)
        if segment is None:
            seen = np.zeros(-(-entry.bytes // BLOCK_BYTES), np.bool_)
            segment = self._open[entry.name] = Segment(self._store, entry, self._dtype, seen)
        first, last = offset * self._dtype.itemsize, (offset + length) * self._dtype.itemsize
        segment.check_blocks(range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)))
        return segment.tokens[offset : offset + length]


def document_rows(store: Store, numbers: npt.NDArray[np.int64]) -> pa.Table:
    """Documents of a version as the records of units have them, to stand in the index of another."""
    provenance = store.provenance().take(arrow_array(numbers.astype(np.int64), pa.int64()))
    columns = {name: provenance[name].combine_chunks() for name in DOCUMENTS_COLUMNS}
    segments = [entry.name for entry in store.manifest.segments]
    sources = [source["name"] for source in store.manifest.sources]
    columns["segment"] = _named(store.arrays["segment"][numbers], segments)
    columns["source"] = _named(store.arrays["source"][numbers], sources)
    for name in ("offset", "length"):
        columns[name] = arrow_array(store.arrays[name][numbers], DOCUMENT_SCHEMA.field(name).type)
    columns["loss_runs"] = arrow_array(_loss_runs(store, numbers), DOCUMENT_SCHEMA.field("loss_runs").type)
    columns["signature"] = arrow_array(_signatures(store, numbers), DOCUMENT_SCHEMA.field("signature").type)
    return pa.Table.from_arrays([columns[field.name] for field in DOCUMENT_SCHEMA], schema=DOCUMENT_SCHEMA)


def _named(positions: npt.NDArray[Any], names: Sequence[str]) -> pa.Array:
    values = arrow_array(list(names), pa.string())
    return values.take(arrow_array(positions.astype(np.int64), pa.int64()))


def _loss_runs(store: Store, numbers: npt.NDArray[np.int64]) -> list[list[int] | None]:
    with_runs, starts = store.arrays["loss_documents"], store.arrays["loss_starts"]
    if not len(with_runs):
        return [None] * len(numbers)
    entries = np.searchsorted(with_runs, numbers.astype(np.uint64))
    runs = store.arrays["loss_runs"]
    return [
        runs[2 * int(starts[entry]) : 2 * int(starts[entry + 1])].tolist()
        if entry < len(with_runs) and int(with_runs[entry]) == number
        else None
        for entry, number in zip(entries.tolist(), numbers.tolist(), strict=True)
    ]


def _signatures(store: Store, numbers: npt.NDArray[np.int64]) -> list[bytes]:
    signatures = store.signatures()
    return [b""] * len(numbers) if signatures is None else [row.tobytes() for row in signatures[numbers]]
