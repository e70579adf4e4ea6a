"""Whether a store is what was committed, and keeps its promises.

Every byte of every file that any version names is compared with its checksum; the digest is computed again from the
index; each document's tokens are hashed again; every number of the index points into the store; no content is in two
splits. Unlike a reader, it goes on after a problem, so that one run lists them all. One pass
at memory speed.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.errors import DamagedStoreError, NotAStoreError, PenstockError
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
    # Versions share files: each is read once, and its damage forbids judging the meaning of all versions that name it.
    found: dict[FileEntry | SegmentEntry, list[Problem]] = {}
    for version in versions:
        manifest = _manifest(path, version, problems)
        if manifest is None:
            continue
        entries: list[FileEntry | SegmentEntry] = [*manifest.index, manifest.tokenizer_file, *manifest.segments]
        for entry in entries:
            if entry not in found:
                found[entry] = _entry_problems(path, entry)
                problems += found[entry]
        if not any(found[entry] for entry in entries):
            problems += _meaning_problems(path, version)
    return problems


def _entry_problems(path: Path, entry: FileEntry | SegmentEntry) -> list[Problem]:
    return _segment_problems(path, entry) if isinstance(entry, SegmentEntry) else _file_problems(path, entry)


def _manifest(path: Path, version: int, problems: list[Problem]) -> Manifest | None:
    file = path / MANIFESTS / manifest_name(version)
    try:
        manifest = decode_manifest(file.read_bytes(), path=file)
    except (DamagedStoreError, OSError) as error:
        problems.append(Problem(file=str(file.relative_to(path)), kind="manifest", detail=str(error)))
        return None
    if manifest.version != version:
        detail = f"it is the manifest of version {manifest.version}"
        problems.append(Problem(file=str(file.relative_to(path)), kind="manifest", detail=detail))
        return None
    return manifest


def _file_problems(path: Path, entry: FileEntry) -> list[Problem]:
    data = _content(path, entry.name)
    if isinstance(data, Problem):
        return [data]
    if len(data) != entry.bytes:
        return [Problem(file=entry.name, kind="size", detail=f"{len(data)} bytes, committed were {entry.bytes}")]
    if checksum_hex(data) != entry.checksum:
        return [Problem(file=entry.name, kind="checksum", detail="content differs from what was committed")]
    return []


def _segment_problems(path: Path, entry: SegmentEntry) -> list[Problem]:
    tokens_name, blocks_name = f"{SEGMENTS}/{entry.name}.tokens", f"{SEGMENTS}/{entry.name}.blocks"
    blocks_bytes = 8 * -(-entry.bytes // BLOCK_BYTES)
    problems = _file_problems(path, FileEntry(name=blocks_name, bytes=blocks_bytes, checksum=entry.checksum))
    payload = _content(path, tokens_name)
    if isinstance(payload, Problem):
        return [*problems, payload]
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


def _content(path: Path, name: str) -> bytes | Problem:
    file = path / name
    if file.is_symlink() or not file.is_file():
        return Problem(file=name, kind="missing", detail="the manifest names it")
    try:
        return file.read_bytes()
    except OSError as error:  # a bad sector, say: the other files are still worth reading
        return Problem(file=name, kind="unreadable", detail=error.strerror or str(error))


def _meaning_problems(path: Path, version: int) -> list[Problem]:
    """Problems of a version all of whose files are as committed: the promises themselves."""
    name = f"{MANIFESTS}/{manifest_name(version)}"
    try:
        return _broken_promises(path, version, name)
    except (PenstockError, RecursionError, ValueError) as error:  # checksums fit, but nobody of ours wrote this
        return [Problem(file=name, kind="meaning", detail=str(error))]


def _broken_promises(path: Path, version: int, name: str) -> list[Problem]:
    with Store(path, version) as store:
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
        if _split_names(store.manifest.options.get("split")) != store.manifest.splits:
            problems.append(Problem(file=name, kind="splits", detail="their names aren't those of the options"))
        problems += [Problem(file=name, kind="leak", detail=detail) for detail in _leaks(store)]
        return problems


def _split_names(pairs: object) -> list[object]:
    """The names in the options' list of (name, share), which is part of the digest."""
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair] if isinstance(pairs, list) else []


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
