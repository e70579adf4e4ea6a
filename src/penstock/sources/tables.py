"""Tables: JSONL, CSV, Parquet, Arrow. One document per row."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TableOptions"]


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How rows become documents.

    Attributes:
        text_field: the column of text; found by its name when None.
        id_field: the column whose value names a row in its document's key; the row's number when None.
        group_field: the column whose value the split hashes; the row's key when None.
        strict: whether a broken row ends the run instead of being counted.
    """

    text_field: str | None = None
    id_field: str | None = None
    group_field: str | None = None
    strict: bool = False
