"""Whether a store is what was committed, and keeps its promises.

Every byte of every file that any version names is compared with its checksum; the digest is computed again from the
index; each document's tokens are hashed again; no document lies outside its segment; no content is in two splits.
Unlike a reader, it goes on after a problem, so that one run lists them all. One pass at memory speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import DamagedStoreError, NotAStoreError
from penstock.hashing import checksum_hex, token_hash
from penstock.store.index import KEPT, digest_columns
from penstock.store.layout import (
    BLOCK_BYTES,
    MANIFESTS,
    SEGMENTS,
    FileEntry,
    Manifest,
    SegmentEntry,
    block_checksums,
    decode_manifest,
    manifest_name,
    store_digest,
)
from penstock.store.reader import Store, list_versions

__all__ = ["Problem", "verify"]


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that isn't as committed."""

    file: str
    kind: str
    detail: str


def verify(path: Path) -> list[Problem]:
    """All problems of all versions of a store; an empty list means whole.

    Raises:
        NotAStoreError: there is no store at `path`.
    """
    versions = list_versions(path)
    if not versions:
        raise NotAStoreError(f"{str(path)!r} holds no store", hint=f"penstock prepare INPUT --out {path}")
    problems: list[Problem] = []
    checked: set[str] = set()
    for version in versions:
        manifest = _manifest(path, version, problems)
        if manifest is None:
            continue
        before = len(problems)
        for entry in [*manifest.index, manifest.tokenizer_file]:
            if entry.name not in checked:
                problems += _file_problems(path, entry)
                checked.add(entry.name)
        for segment in manifest.segments:
            if segment.name not in checked:
                problems += _segment_problems(path, segment)
                checked.add(segment.name)
        if len(problems) == before:
            problems += _meaning_problems(path, version)
    return problems


def _manifest(path: Path, version: int, problems: list[Problem]) -> Manifest | None:
    file = path / MANIFESTS / manifest_name(version)
    try:
        manifest = decode_manifest(file.read_bytes(), path=file)
    except DamagedStoreError as error:
        problems.append(Problem(file=str(file.relative_to(path)), kind="manifest", detail=error.message))
        return None
    if manifest.version != version:
        detail = f"it is the manifest of version {manifest.version}"
        problems.append(Problem(file=str(file.relative_to(path)), kind="manifest", detail=detail))
        return None
    return manifest


def _file_problems(path: Path, entry: FileEntry) -> list[Problem]:
    data = _content(path / entry.name)
    if data is None:
        return [Problem(file=entry.name, kind="missing", detail="the manifest names it")]
    if len(data) != entry.bytes:
        return [Problem(file=entry.name, kind="size", detail=f"{len(data)} bytes, committed were {entry.bytes}")]
    if checksum_hex(data) != entry.checksum:
        return [Problem(file=entry.name, kind="checksum", detail="content differs from what was committed")]
    return []


def _segment_problems(path: Path, entry: SegmentEntry) -> list[Problem]:
    tokens_name, blocks_name = f"{SEGMENTS}/{entry.name}.tokens", f"{SEGMENTS}/{entry.name}.blocks"
    blocks_bytes = 8 * -(-entry.bytes // BLOCK_BYTES)
    problems = _file_problems(path, FileEntry(name=blocks_name, bytes=blocks_bytes, checksum=entry.checksum))
    payload = _content(path / tokens_name)
    if payload is None:
        return [*problems, Problem(file=tokens_name, kind="missing", detail="the manifest names it")]
    if len(payload) != entry.bytes:
        detail = f"{len(payload)} bytes, committed were {entry.bytes}"
        return [*problems, Problem(file=tokens_name, kind="size", detail=detail)]
    if problems:
        return problems  # with the checksums in doubt the tokens can't be judged
    expected = np.frombuffer((path / blocks_name).read_bytes(), "<u8")
    for block in np.flatnonzero(block_checksums(payload) != expected):
        detail = f"the block at byte {int(block) * BLOCK_BYTES} differs from what was committed"
        problems.append(Problem(file=tokens_name, kind="checksum", detail=detail))
    return problems


def _content(path: Path) -> bytes | None:
    if path.is_symlink() or not path.is_file():
        return None
    return path.read_bytes()


def _meaning_problems(path: Path, version: int) -> list[Problem]:
    """Problems of a version all of whose files are as committed: the promises themselves."""
    name = f"{MANIFESTS}/{manifest_name(version)}"
    with Store(path, version) as store:
        outside = _documents_outside(store)
        if outside:
            return [Problem(file=name, kind="range", detail=f"document {outside[0]} lies outside its segment")]
        problems = [
            Problem(
                file=name, kind="tokens", detail=f"the tokens of document {number} aren't those it was committed with"
            )
            for number in _wrong_tokens(store)
        ]
        digest = store_digest(
            tokenizer_digest=store.tokenizer().digest,
            options=store.manifest.options,
            columns=digest_columns(store.provenance(), store.arrays),
        )
        if digest != store.digest:
            problems.append(
                Problem(file=name, kind="digest", detail=f"the content gives {digest}, it says {store.digest}")
            )
        problems += [Problem(file=name, kind="leak", detail=detail) for detail in _leaks(store)]
        return problems


def _documents_outside(store: Store) -> list[int]:
    sizes = np.array([entry.tokens for entry in store.manifest.segments], np.uint64)
    segment = store.arrays["segment"]
    if len(sizes) == 0 or int(segment.max(initial=0)) >= len(sizes):
        return [int(np.argmax(segment))] if store.num_documents else []
    ends = store.arrays["offset"] + store.arrays["length"]
    return [int(number) for number in np.flatnonzero(ends > sizes[segment])]


def _wrong_tokens(store: Store) -> list[int]:
    committed = store.provenance()["token_hash"].to_pylist()
    return [
        number for number, expected in enumerate(committed) if token_hash(store.document_tokens(number)) != expected
    ]


def _leaks(store: Store) -> list[str]:
    """Contents that stand in more than one split."""
    kept = np.flatnonzero(store.arrays["reason"] == KEPT)
    contents = store.provenance()["content_hash"].take(kept).to_pylist()
    splits = store.arrays["split"][kept].tolist()
    first: dict[bytes, tuple[int, int]] = {}
    leaks = []
    for number, content, split in zip(kept.tolist(), contents, splits, strict=True):
        other, other_split = first.setdefault(content, (number, split))
        if other_split != split:
            names = store.manifest.splits
            leaks.append(f"documents {other} and {number} are equal, in {names[other_split]} and {names[split]}")
    return leaks
