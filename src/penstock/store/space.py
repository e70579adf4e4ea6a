"""How much a store will take on the disk, told before it is full.

Two askers. `estimate` walks the inputs and encodes a sample, before anything is written (`prepare --dry-run`). During a
run, `SpaceGuard` takes the rate of the units that are done and stops the run as soon as the walk is over and the rest
can't fit: what is done stays, and the same command goes on once there is room.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.errors import DiskError, InputError
from penstock.hashing import strong_hash
from penstock.sources import FilesSource, Source
from penstock.sources.hygiene import Cleaning
from penstock.store.blocklist import Blocklist
from penstock.store.encoding import Room, content_hash, encode_documents
from penstock.store.signatures import SIGNATURE_BINS
from penstock.tokenize import Tokenizer

__all__ = ["SIGNATURE_BYTES", "Estimate", "SpaceGuard", "estimate", "free_bytes"]

SAMPLE_BYTES = 48 * 2**20
# Of the index, per document: 20 bytes of arrays, 56 of hashes, 6 of numbers; names and facts take what zstd leaves.
INDEX_BYTES_PER_DOCUMENT = 82
SIGNATURE_BYTES = 2 * SIGNATURE_BINS
NAME_BYTES = 70  # of names and facts, as the guard takes it
REMEMBERED_BYTES = 48  # of a file, in the cache, besides its path


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a run would make of its inputs; an existing store is taken for empty."""

    input_bytes: int
    documents: int
    tokens: int
    store_bytes: int
    free_bytes: int

    @property
    def fits(self) -> bool:
        """Whether there is room for it."""
        return self.store_bytes <= self.free_bytes


def estimate(
    sources: Sequence[Source],
    out: Path,
    *,
    tokenizer: Tokenizer,
    cleaning: dict[str, Cleaning],
    blocklist: Blocklist,
    signed: bool,
    unit_bytes: int,
) -> Estimate:
    """Walks everything, reads and encodes a sample of documents, spread by hash.

    Args:
        sources: what would be read.
        out: where the store would be.
        tokenizer: of the store.
        cleaning: by source.
        blocklist: what would stay out.
        signed: whether documents would get signatures.
        unit_bytes: how the work would be cut.

    Raises:
        InputError: nothing in the inputs can become a document.
    """
    units = [(source, unit) for source in sources for unit in source.units(unit_bytes) if unit.items]
    total = sum(unit.input_bytes for _, unit in units)
    # By the key, not the unit: a few documents of every unit say more than all of a few units.
    limit = min(1.0, SAMPLE_BYTES / max(total, 1)) * 2**64
    documents, tokens, remembered_bytes = 0, 0, 0
    names: list[bytes] = []
    room = Room(tokenizer.dtype)
    for source, unit in units:
        wanted = _hashed_below(limit) if limit < 2**64 else None
        text = cleaning[source.name].clean(source.read(unit, wanted=wanted))
        if blocklist.rules:
            text, _ = blocklist.without_blocked(text, [content_hash(document) for document in text.documents])
        room.empty(capacity=unit.input_bytes)
        lengths, _ = encode_documents(tokenizer, text.documents, room=room)
        documents += len(text.documents)
        tokens += sum(lengths)
        names += [part for one in text.documents for part in (one.key, one.path, one.facts.encode())]
        if isinstance(source, FilesSource):
            remembered_bytes += sum(REMEMBERED_BYTES + len(document.path) for document in text.documents)
    if not documents:
        raise InputError(
            "no document in a sample of the inputs", hint="check the filters, or run without --dry-run to see counts"
        )
    share = min(1.0, SAMPLE_BYTES / max(total, 1))
    index_bytes = documents * (INDEX_BYTES_PER_DOCUMENT + signed * SIGNATURE_BYTES)
    index_bytes += len(pa.compress(b"".join(names), codec="zstd", asbytes=True))
    return Estimate(
        input_bytes=total,
        documents=round(documents / share),
        tokens=round(tokens / share),
        store_bytes=round((tokens * tokenizer.dtype.itemsize + index_bytes + remembered_bytes) / share)
        + len(tokenizer.spec.source_json),
        free_bytes=free_bytes(out),
    )


def _hashed_below(limit: float) -> Callable[[bytes], bool]:
    return lambda key: int.from_bytes(strong_hash(b"estimate " + key)[:8], "little") < limit


def free_bytes(path: Path) -> int:
    """What may still be written below a path, which needn't exist."""
    existing = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return shutil.disk_usage(existing).free


class SpaceGuard:
    """Compares what is left to do with what is left of the disk.

    Args:
        out: the store.
        free: asks for the free bytes; tests set it.
    """

    def __init__(self, out: Path, *, free: Callable[[Path], int] = free_bytes) -> None:
        self._out = out
        self._free = free
        self._input_bytes = 0
        self._written_bytes = 0
        self.expected_bytes: int | None = None

    def done(self, *, input_bytes: int, written_bytes: int, documents: int, left_bytes: int | None) -> None:
        """Counts a finished unit; `left_bytes` of input are left to do, None while the walk goes on.

        Raises:
            DiskError: the rest can't fit.
        """
        self._input_bytes += input_bytes
        self._written_bytes += written_bytes + documents * (INDEX_BYTES_PER_DOCUMENT + NAME_BYTES)
        if left_bytes is None or not self._input_bytes:
            return
        rest = round(self._written_bytes / self._input_bytes * left_bytes)
        if self.expected_bytes is None:
            self.expected_bytes = self._written_bytes + rest
        if rest > (free := self._free(self._out)):
            raise DiskError(
                f"the disk of {self._out} has {free:,} bytes left, about {rest:,} more are needed",
                hint="free some space or choose --out on another disk, then run the same command again; "
                "it goes on where it was",
            )
