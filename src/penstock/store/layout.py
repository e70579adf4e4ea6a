"""The bytes of a store: the only module that knows them. docs/format.md is the same in prose.

STORE/manifests/000001.json          the commit of version 1, with a checksum of itself
STORE/segments/NAME.tokens           flat little-endian tokens, nothing else
STORE/segments/NAME.blocks           one 64-bit checksum per 64 KiB of NAME.tokens
STORE/index/000001-DIGEST/*.array    flat arrays over the documents in canonical order
STORE/index/000001-DIGEST/documents.parquet     provenance, same order
STORE/tokenizers/DIGEST/tokenizer.json
STORE/work/                          records of finished units of an unfinished prepare; no reader looks there
STORE/lock                           while a writer runs
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DamagedStoreError
from penstock.hashing import canonical_json, checksum, checksum_hex, strong_hash

__all__ = [
    "BLOCK_BYTES",
    "FORMAT",
    "FORMAT_VERSION",
    "INDEX_ARRAYS",
    "REASONS",
    "FileEntry",
    "Manifest",
    "SegmentEntry",
    "block_checksums",
    "decode_manifest",
    "encode_manifest",
    "manifest_name",
    "store_digest",
]

FORMAT = "penstock-store"
FORMAT_VERSION = 1
BLOCK_BYTES = 64 * 1024

MANIFESTS = "manifests"
SEGMENTS = "segments"
INDEX = "index"
TOKENIZERS = "tokenizers"
WORK = "work"
LOCK = "lock"
DOCUMENTS_TABLE = "documents.parquet"

REASONS = ("kept", "duplicate", "copy-across-splits")
"""What the `reason` array's numbers mean; 0 is in the data, the rest are exclusions decided over the whole."""

INDEX_ARRAYS: dict[str, str] = {
    "segment": "<u4",
    "offset": "<u8",
    "length": "<u4",
    "split": "|u1",
    "source": "<u2",
    "reason": "|u1",
    "loss_documents": "<u8",
    "loss_starts": "<u8",
    "loss_runs": "<u4",
}
"""Name and type of each index array. `loss_*` list, for the documents that don't carry loss throughout, their runs:
document `loss_documents[i]` has the pairs (first token, count) number `loss_starts[i]` to `loss_starts[i + 1]`."""

_CHECKSUM_FIELD = b'  "checksum": "'
_CHECKSUM_TAIL = b'"\n}\n'
_HASH_DIGITS = 64
_SAFE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(/[A-Za-z0-9][A-Za-z0-9._-]*)*")


@dataclass(frozen=True, kw_only=True)
class SegmentEntry:
    """A segment as the manifest names it; `checksum` is over its .blocks file, which covers its tokens."""

    name: str
    tokens: int
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """A file of the index, or the tokenizer, as the manifest names it."""

    name: str
    bytes: int
    checksum: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything a version is, apart from the bytes it names.

    `options` and the tokenizer's digest are part of the store digest; `created`, `sources` (with their locations) and
    everything about layout are not.
    """

    version: int
    digest: str
    created: str
    dtype: str
    tokenizer: dict[str, Any]
    tokenizer_file: FileEntry
    options: dict[str, Any]
    sources: list[dict[str, Any]]
    splits: list[str]
    counts: dict[str, Any]
    segments: list[SegmentEntry]
    index: list[FileEntry]
    num_documents: int
    skipped_examples: dict[str, list[str]] = field(default_factory=dict)
    format: str = FORMAT
    format_version: int = FORMAT_VERSION
    block_bytes: int = BLOCK_BYTES
    reasons: list[str] = field(default_factory=lambda: list(REASONS))


def manifest_name(version: int) -> str:
    """File name of a version's manifest."""
    return f"{version:06d}.json"


def encode_manifest(manifest: Manifest) -> bytes:
    """Indented JSON whose last field is the hash of the file with that hash's digits set to zero."""
    content = {**asdict(manifest), "checksum": "0" * _HASH_DIGITS}
    data = json.dumps(content, indent=2, ensure_ascii=True).encode() + b"\n"
    cut = len(data) - len(_CHECKSUM_TAIL) - _HASH_DIGITS
    return data[:cut] + strong_hash(data).hex().encode() + _CHECKSUM_TAIL


def decode_manifest(data: bytes, *, path: Path) -> Manifest:
    """Checks every byte, then the shape.

    Raises:
        DamagedStoreError: the file isn't what was committed, or names files outside the store.
    """
    cut = len(data) - len(_CHECKSUM_TAIL) - _HASH_DIGITS
    zeroed = data[: max(cut, 0)] + b"0" * _HASH_DIGITS + _CHECKSUM_TAIL
    if strong_hash(zeroed).hex().encode() + _CHECKSUM_TAIL != data[max(cut, 0) :]:
        raise _damaged(path, "its checksum doesn't fit its content")
    content = json.loads(data)
    del content["checksum"]
    if content.get("format") != FORMAT or content.get("format_version") != FORMAT_VERSION:
        found = f"{content.get('format')!r} version {content.get('format_version')!r}"
        raise DamagedStoreError(
            f"{path} is of format {found}; this program reads {FORMAT!r} version {FORMAT_VERSION}",
            hint="use the version of penstock that wrote it, or prepare the data again",
        )
    try:
        manifest = Manifest(
            **{
                **content,
                "segments": [SegmentEntry(**entry) for entry in content["segments"]],
                "index": [FileEntry(**entry) for entry in content["index"]],
                "tokenizer_file": FileEntry(**content["tokenizer_file"]),
            }
        )
    except (TypeError, KeyError) as error:
        raise _damaged(path, f"fields are missing or unknown ({error})") from None
    for name in _names(manifest):
        if not _SAFE_NAME.fullmatch(name):
            raise _damaged(path, f"it names a file outside the store: {name!r}")
    return manifest


def _names(manifest: Manifest) -> list[str]:
    entries: Sequence[SegmentEntry | FileEntry] = [*manifest.segments, *manifest.index, manifest.tokenizer_file]
    return [entry.name for entry in entries]


def _damaged(path: Path, problem: str) -> DamagedStoreError:
    return DamagedStoreError(f"{path} is damaged: {problem}", hint="restore it, or open an older version: STORE@N")


def block_checksums(payload: Any) -> npt.NDArray[np.uint64]:
    """One checksum per 64 KiB of a segment's tokens, the last block perhaps shorter. Runs at 12 GB/s."""
    view = memoryview(payload).cast("B")
    return np.fromiter(
        (checksum(view[start : start + BLOCK_BYTES]) for start in range(0, len(view), BLOCK_BYTES)),
        dtype="<u8",
        count=-(-len(view) // BLOCK_BYTES),
    )


def file_entry(name: str, data: Any) -> FileEntry:
    """The manifest's entry for a file of this content."""
    return FileEntry(name=name, bytes=memoryview(data).nbytes, checksum=checksum_hex(data))


def store_digest(*, tokenizer_digest: str, options: Mapping[str, Any], columns: Mapping[str, bytes]) -> str:
    """The identity of a version: what is in it, not how or where it is laid out.

    Args:
        tokenizer_digest: identity of the tokenizer.
        options: everything that decided which documents are in and in which split.
        columns: per name, the canonical sequence of documents as bytes (see `index.digest_columns`).
    """
    content = {
        "format": [FORMAT, FORMAT_VERSION],
        "tokenizer": tokenizer_digest,
        "options": dict(options),
        "columns": {name: strong_hash(data).hex() for name, data in columns.items()},
    }
    return strong_hash(canonical_json(content)).hex()
