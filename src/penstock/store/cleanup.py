"""Removes what no version of a store refers to: leftovers of killed, superseded or pruned runs."""

from __future__ import annotations

import re
from pathlib import Path

from penstock import fs
from penstock.errors import DamagedStoreError
from penstock.store.layout import INDEX, SEGMENTS, TOKENIZERS, WORK
from penstock.store.reader import list_versions, read_manifest

__all__ = ["remove_strangers"]


def remove_strangers(store: Path) -> None:
    """Call it under the store's lock. Only names that we give are touched; whatever else is there is someone's own.

    While a manifest is damaged what it names isn't known, and stays: the manifest may be restored, or pruned.
    """
    segments: set[str] = set()
    folders: set[str] = set()
    for path in _named_by_us(store / WORK, r"[0-9a-f]{32}\.arrow"):
        fs.remove_file(path)
    for version in list_versions(store):
        try:
            manifest = read_manifest(store, version)
        except DamagedStoreError:
            return
        segments |= {entry.name for entry in manifest.segments}
        folders |= {entry.name.rpartition("/")[0] for entry in [*manifest.index, manifest.tokenizer_file]}
    for path in _named_by_us(store / SEGMENTS, r"[0-9a-f]{32}\.(tokens|blocks)"):
        if path.stem not in segments:
            fs.remove_file(path)
    for kind, pattern in ((INDEX, r"[0-9]{6,}-[0-9a-f]{12}"), (TOKENIZERS, r"[0-9a-f]{32}")):
        for path in _named_by_us(store / kind, pattern):
            if f"{kind}/{path.name}" not in folders:
                fs.remove_tree(path)


def _named_by_us(folder: Path, pattern: str) -> list[Path]:
    return [path for path in folder.iterdir() if re.fullmatch(pattern, path.name)]
