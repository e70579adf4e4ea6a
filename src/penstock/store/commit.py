"""The last step of every change of a store: index files, then the manifest, which is the commit."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.errors import StoreError
from penstock.hashing import strong_hash
from penstock.store.index import VersionIndex
from penstock.store.layout import (
    INDEX,
    MANIFESTS,
    TOKENIZERS,
    FileEntry,
    Manifest,
    encode_manifest,
    file_entry,
    manifest_name,
)

__all__ = ["commit_version", "write_tokenizer"]


def write_tokenizer(store: Path, source_json: bytes) -> FileEntry:
    """The copy of a tokenizer that versions name.

    Its folder is named by its bytes: files that differ in spelling only have one digest, and an older version may name
    the other.
    """
    folder = f"{TOKENIZERS}/{strong_hash(source_json).hex()[:32]}"
    name = f"{folder}/tokenizer.json"
    if not (store / name).is_file() or (store / name).read_bytes() != source_json:
        fs.make_folder(store / folder)
        fs.write_atomic(store / name, source_json)
    return file_entry(name, source_json)


def commit_version(
    store: Path,
    index: VersionIndex,
    *,
    version: int,
    dtype: str,
    tokenizer: dict[str, Any],
    tokenizer_file: FileEntry,
    sources: Sequence[Mapping[str, Any]],
    splits: Sequence[str],
    skipped_examples: dict[str, list[str]],
) -> Manifest:
    """Writes the index, then the manifest: from there on the version exists.

    Raises:
        StoreError: another process committed a version of that number meanwhile.
    """
    folder = f"{INDEX}/{version:06d}-{index.digest[:12]}"
    files = index.files()
    fs.write_folder(store / folder, files)
    entries = [file_entry(f"{folder}/{name}", data) for name, data in files.items()]
    manifest = Manifest(
        version=version,
        digest=index.digest,
        created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        dtype=dtype,
        tokenizer=tokenizer,
        tokenizer_file=tokenizer_file,
        options=index.options,
        sources=[dict(source) for source in sources],
        splits=list(splits),
        counts=index.counts,
        segments=index.segments,
        index=entries,
        num_documents=index.provenance.num_rows,
        skipped_examples=skipped_examples,
    )
    if not fs.create_if_absent(store / MANIFESTS / manifest_name(version), encode_manifest(manifest)):
        raise StoreError(
            f"version {version} of {store} was committed by another process meanwhile",
            hint="run the command again; it builds on that version",
        )
    return manifest
