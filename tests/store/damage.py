"""Ways to damage a store, and to ask who notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.store import Store

from .samples import forged_manifest


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
