"""Ways to damage a store, and to ask who notices.

Each way changes one file in place and changes it back. `found_by_verify` asks the code that `penstock verify` runs, but
for that file only, so that a hundred thousand flips take minutes; a sample goes through the commands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DamagedStoreError
from penstock.sources import Part
from penstock.store import Store, open_store
from penstock.store.layout import BLOCK_BYTES, FileEntry, Manifest, SegmentEntry
from penstock.store.reader import read_manifest
from penstock.store.verification import cache_problems, examine_entry

from .samples import MemorySource, build, contents, document, forged_manifest

MANIFEST = "manifests/000001.json"


def write_tiny_store(out: Path) -> Path:
    """Three documents of a few bytes, one of them without loss on a part, so that no file is empty."""
    asked = document("c", Part(data=b"ask", loss=False), b"tell")
    build(out, MemorySource([document("a", b"one"), document("b", b"two"), asked]), unit_bytes=1)
    return out


def write_large_store(out: Path, *, units: int = 4) -> Path:
    """Segments of two blocks and a piece: documents within a block, across blocks, and longer than a block."""
    chance = np.random.default_rng(5)
    sizes = [size for _ in range(units) for size in (20_000, 3 * BLOCK_BYTES // 4)]  # tokens, of two bytes each
    texts = [chance.integers(97, 123, size, np.uint8).tobytes() for size in sizes]
    build(out, MemorySource([document(f"{number:03d}", text) for number, text in enumerate(texts)]))
    return out


def read_everything(store: Path) -> None:
    """What a reader may touch of the latest version."""
    with open_store(store) as opened:
        for number in range(opened.num_documents):
            opened.document_tokens(number)
        opened.provenance()
        opened.tokenizer()


class Committed:
    """A store that was whole when this was made, and its files by name."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest: Manifest = read_manifest(path, 1)
        self.files = sorted(contents(path))

    def entry(self, name: str) -> FileEntry | SegmentEntry | None:
        """What the manifest says of a file; None for the manifest itself."""
        for file in [*self.manifest.index, self.manifest.tokenizer_file]:
            if file.name == name:
                return file
        for segment in self.manifest.segments:
            if name.startswith(f"segments/{segment.name}."):
                return segment
        return None

    def found_by_verify(self, name: str) -> bool:
        """Whether `verify` names this file."""
        if name.startswith("cache/"):
            return name in {problem.file for problem in cache_problems(self.path)}
        entry = self.entry(name)
        if entry is not None:
            return name in {problem.file for problem in examine_entry(self.path, entry)}
        try:
            read_manifest(self.path, 1)
        except DamagedStoreError:
            return True
        return False

    def found_by_reader(self, name: str) -> bool:
        """Whether a reader that touches this file, and little else, refuses it. None looks into the cache."""
        if name.startswith("cache/"):
            return True
        try:
            with open_store(self.path) as opened:
                self._touch(opened, name)
        except DamagedStoreError:
            return True
        return False

    def _touch(self, opened: Store, name: str) -> None:
        entry = self.entry(name)
        if isinstance(entry, SegmentEntry):
            opened.read(self.manifest.segments.index(entry), 0, entry.tokens)
        elif name.endswith("/documents.parquet"):
            opened.provenance()
        elif name.startswith("tokenizers/"):
            opened.tokenizer()


@contextmanager
def flipped(path: Path, position: int, bit: int) -> Iterator[None]:
    """A file with one bit changed."""
    descriptor = os.open(path, os.O_RDWR)
    try:
        whole = os.pread(descriptor, 1, position)
        os.pwrite(descriptor, bytes([whole[0] ^ (1 << bit)]), position)
        try:
            yield
        finally:
            os.pwrite(descriptor, whole, position)
    finally:
        os.close(descriptor)


@contextmanager
def replaced(path: Path, content: bytes) -> Iterator[None]:
    """A file with other content."""
    whole = path.read_bytes()
    path.write_bytes(content)
    try:
        yield
    finally:
        path.write_bytes(whole)


def lengths_to_cut(size: int, *, every_below: int = 8192, step: int = 512) -> list[int]:
    """Every length of a small file; of a larger one every 512 bytes and one more and less."""
    if size <= every_below:
        return list(range(size))
    steps = range(0, size, step)
    return sorted({length for at in steps for length in (at - 1, at, at + 1) if 0 <= length < size} | {size - 1})


def forged_counts(store: Path) -> None:
    """Makes the counts of documents and tokens fit what the index says."""
    with Store(store, 1) as opened:
        arrays, splits = opened.arrays, opened.manifest.splits
    kept = [
        (splits[split], int(length))
        for split, length, reason in zip(arrays["split"], arrays["length"], arrays["reason"], strict=True)
        if reason == 0
    ]

    def change(content: dict[str, Any]) -> None:
        counts = content["counts"]
        counts.update(documents=len(kept), tokens=sum(length for _, length in kept))
        for split in splits:
            lengths = [length for name, length in kept if name == split]
            counts["splits"][split].update(documents=len(lengths), tokens=sum(lengths))

    forged_manifest(store, change)
