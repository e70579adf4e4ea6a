"""A row of a table to the parts of a document.

Tables (JSONL, CSV, Parquet, Arrow) yield rows as mappings; a renderer says which columns it needs and makes parts of
them: one column of text, or a record for fine-tuning through a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from penstock.sources.document import Part

__all__ = ["BadRowError", "RowRenderer"]


class BadRowError(Exception):
    """A row that can't become a document; never leaves the sources.

    Args:
        reason: the name under which it is counted, such as `no-text`.
        detail: what is wrong with this one, for `--strict`.
    """

    def __init__(self, reason: str, detail: str = "") -> None:
        super().__init__(detail or reason)
        self.reason = reason
        self.detail = detail


class RowRenderer(Protocol):
    """Makes documents of rows. Data, like a source: can be pickled, holds nothing open."""

    @property
    def framed(self) -> bool:
        """See `Document.framed`."""

    def columns(self, available: Sequence[str] | None) -> tuple[str, ...]:
        """The columns that `parts` reads.

        Args:
            available: the table's columns; None where only the rows tell (JSONL).

        Raises:
            InputError: the table has none that would do; the hint lists what it has.
        """

    def parts(self, row: Mapping[str, Any]) -> tuple[Part, ...]:
        """The content of a row.

        Raises:
            BadRowError: this row has none.
        """

    def options(self) -> dict[str, Any]:
        """What decides the content; part of the store digest."""
