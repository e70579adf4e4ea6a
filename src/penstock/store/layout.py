"""The bytes of a store: the only module that knows them. docs/format.md is the same in prose.

STORE/manifests/000001.json          the commit of version 1, with a checksum of itself
STORE/segments/NAME.tokens           flat little-endian tokens, nothing else
STORE/segments/NAME.blocks           one 64-bit checksum per 64 KiB of NAME.tokens
STORE/index/000001-DIGEST/*.array    flat arrays over the documents in canonical order
STORE/index/000001-DIGEST/documents.parquet     provenance, same order
STORE/tokenizers/HASH/tokenizer.json   named by the hash of its bytes
STORE/cache/                         what became of each input, for the next prepare; no reader looks there
STORE/work/                          records of finished units of an unfinished prepare; no reader looks there
STORE/lock                           while a writer runs
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
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
CACHE = "cache"
LOCK = "lock"
DOCUMENTS_TABLE = "documents.parquet"
SIGNATURES_ARRAY = "signatures.array"
DOCUMENTS_COLUMNS: dict[str, str] = {
    "key": "binary",
    "path": "binary",
    "byte_start": "uint64",
    "byte_end": "uint64",
    "text_bytes": "uint64",
    "exact": "uint8",
    "language": "string",
    "facts": "string",
    "content_hash": "fixed_size_binary[32]",
    "token_hash": "fixed_size_binary[16]",
    "group_hash": "uint64",
}
"""Name and Arrow type of each column of the table of documents; none is ever null."""

REASONS = ("kept", "duplicate", "copy-across-splits", "near-duplicate")
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
_PLAIN_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}"


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
    content = _parsed(data, path)
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
    problem = _type_problem(manifest) or _name_problem(manifest) or _value_problem(manifest)
    if problem is not None:
        raise _damaged(path, problem)
    return manifest


def _parsed(data: bytes, path: Path) -> dict[str, Any]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(dict(pairs)) != len(pairs):
            raise ValueError("a key stands there twice")
        return dict(pairs)

    try:
        content: dict[str, Any] = json.loads(data, object_pairs_hook=unique)
        del content["checksum"]
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise _damaged(path, f"it isn't a JSON object with a checksum ({error})") from None
    return content


def _type_problem(manifest: Manifest) -> str | None:
    """The checksum only finds accidents: whoever writes a manifest by hand can make it fit, so types are looked at."""
    records: list[Any] = [manifest, *manifest.segments, *manifest.index, manifest.tokenizer_file]
    for record in records:
        for declared in fields(record):
            value = getattr(record, declared.name)
            kind = type(value).__name__  # a bool is no int, and a count isn't negative
            if kind != str(declared.type).partition("[")[0] or (kind == "int" and value < 0):
                return f"{declared.name!r} is {_shortened(value)}, expected was {declared.type}"
    return None


def _name_problem(manifest: Manifest) -> str | None:
    expected = [(entry.name, _PLAIN_NAME) for entry in manifest.segments]
    expected += [(entry.name, f"{INDEX}/{_PLAIN_NAME}/{_PLAIN_NAME}") for entry in manifest.index]
    expected += [(manifest.tokenizer_file.name, f"{TOKENIZERS}/{_PLAIN_NAME}/{_PLAIN_NAME}")]
    for name, pattern in expected:
        if not re.fullmatch(pattern, name):
            return f"it names a file outside the store: {_shortened(name)}"
    return None


def _value_problem(manifest: Manifest) -> str | None:
    known_counts = ("found", "documents", "tokens", "bytes")
    checks = {
        "dtype": manifest.dtype in ("<u2", "<u4"),
        "block_bytes": manifest.block_bytes == BLOCK_BYTES,
        "reasons": len(manifest.reasons) >= 3 and manifest.reasons == list(REASONS[: len(manifest.reasons)]),
        "splits": bool(manifest.splits) and all(isinstance(name, str) for name in manifest.splits),
        "sources": all(
            isinstance(source, dict) and all(isinstance(source.get(key), str) for key in ("name", "location"))
            for source in manifest.sources
        ),
        "counts": all(type(manifest.counts.get(key)) is int for key in known_counts)
        and all(isinstance(manifest.counts.get(key), dict) for key in ("splits", "skipped")),
        "tokenizer": all(isinstance(manifest.tokenizer.get(key), str) for key in ("digest", "origin"))
        and type(manifest.tokenizer.get("end_id")) is int
        and isinstance(manifest.tokenizer.get("control_tokens"), dict),
    }
    for name, holds in checks.items():
        if not holds:
            return f"{name!r} is {_shortened(getattr(manifest, name))}"
    width = np.dtype(manifest.dtype).itemsize
    for entry in manifest.segments:
        if entry.bytes == 0 or entry.bytes != entry.tokens * width:
            return f"segment {entry.name} has {entry.tokens} tokens of {width} bytes in {entry.bytes} bytes"
    return None


def _shortened(value: Any) -> str:
    try:
        return repr(value)[:80]
    except RecursionError:  # nested just less deeply than the parser refuses
        return f"a {type(value).__name__}"


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
