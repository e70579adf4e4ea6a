"""A row of a table to the parts of a document.

Tables (JSONL, CSV, Parquet, Arrow) yield rows as mappings; a renderer says which columns it needs and makes parts of
them: one column of text, or a record for fine-tuning through a template.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import InputError, nearest_first
from penstock.sources.document import Part, printable

__all__ = ["BadRowError", "RowRenderer", "TextColumn", "refuse_missing"]

TEXT_COLUMNS = ("text", "content", "contents", "body", "code", "document", "raw_content", "markdown", "story")
# Columns by which a table of records for fine-tuning is known; see `records.forms`.
RECORD_COLUMNS = {"messages", "conversations", "instruction", "prompt", "question"}
COLUMNS_SHOWN = 20


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


@dataclass(frozen=True, kw_only=True)
class TextColumn:
    """The content is one column of text, named or found by its name.

    Attributes:
        text_field: the column; None: the first of `TEXT_COLUMNS` that the table has, in any case of letters, else the
            only column.
    """

    text_field: str | None = None

    @property
    def framed(self) -> bool:
        """Text spells neither a beginning nor an end."""
        return False

    def columns(self, available: Sequence[str] | None) -> tuple[str, ...]:
        """The one column."""
        if available is None:
            return (self.text_field or TEXT_COLUMNS[0],)
        return (self.column(available, texts=available),)

    def column(
        self, available: Sequence[str], *, texts: Sequence[str], binaries: Sequence[str] = (), only: bool = True
    ) -> str:
        """The column of text.

        Args:
            available: all columns, for the message.
            texts: those that hold text.
            binaries: those whose bytes may be text, if the user says so.
            only: whether the only column of text will do whatever its name.
        """
        if self.text_field is not None:
            if self.text_field in texts:
                return self.text_field
            known = "isn't text" if self.text_field in available else "isn't there"
            nearest = nearest_first(self.text_field, texts[:COLUMNS_SHOWN])
            raise InputError(
                f"the column {self.text_field!r} {known}; columns: {_shown(available)}",
                hint=f"name a column of text with --text-field: {nearest or 'there is none'}",
            )
        for name in TEXT_COLUMNS:
            same = [column for column in texts if column.lower() == name]
            if same:
                return name if name in same else same[0]
        if only and len(texts) == 1:
            return texts[0]
        raise _no_text_column(available, texts=texts, binaries=binaries)

    def parts(self, row: Mapping[str, Any]) -> tuple[Part, ...]:
        """The text as one part."""
        return (Part(data=self.text(row)),)

    def text(self, row: Mapping[str, Any]) -> bytes:
        """The text alone."""
        name = self.text_field if self.text_field is not None else self.column(list(row), texts=list(row))
        value = row.get(name)
        if type(value) is str:
            try:
                return value.encode()
            except UnicodeEncodeError:
                raise BadRowError("not-utf8", f"column {name!r} holds half a surrogate pair") from None
        if type(value) is bytes:
            return value
        met = (
            "is missing" if name not in row else f"holds {'null' if value is None else type(value).__name__}, not text"
        )
        raise BadRowError("no-text", f"column {name!r} {met}")

    def options(self) -> dict[str, Any]:
        """The name asked for; the one found follows from the table."""
        return {"kind": "text", "text_field": self.text_field}


def _no_text_column(available: Sequence[str], *, texts: Sequence[str], binaries: Sequence[str]) -> InputError:
    """What to say where no column is found by itself, in the order of what helps most."""
    met = "no column has a name that text has" if texts else "no column of strings"
    others = [
        column for column in available if column.lower() in TEXT_COLUMNS and column in binaries and column not in texts
    ]
    hint = "name it with --text-field; found by themselves are " + ", ".join(TEXT_COLUMNS)
    if others:
        hint = f"{others[0]!r} isn't one of strings; if its bytes are UTF-8: --text-field {others[0]}"
    elif RECORD_COLUMNS & set(available):
        hint = (
            "records for fine-tuning take a template, for instance --template chatml (docs/records.md); or --text-field"
        )
    return InputError(f"{met}; columns: {_shown(available)}", hint=hint)


def refuse_missing(available: Sequence[str], *, needed: Sequence[str], named: Sequence[str]) -> None:
    """Raises `InputError` when a named column isn't there, or one that is read is there twice.

    Args:
        available: the table's columns.
        needed: what a renderer reads; it knows itself whether it can do without.
        named: those that the user named.
    """
    for name in dict.fromkeys([*needed, *named]):
        count = available.count(name)
        if count > 1 or (count == 0 and name in named):
            met = "is there twice" if count else "isn't there"
            raise InputError(
                f"the column {name!r} {met}; columns: {_shown(available)}",
                hint="rename one of the two in the table"
                if count > 1
                else f"name another one: {nearest_first(name, list(available)[:COLUMNS_SHOWN])}",
            )


def _shown(columns: Sequence[str]) -> str:
    """Column names for a message: a few, and nothing that moves a cursor."""
    more = f" and {len(columns) - COLUMNS_SHOWN} more" if len(columns) > COLUMNS_SHOWN else ""
    names = ", ".join(printable(name[:80].encode("utf-8", "backslashreplace")) for name in columns[:COLUMNS_SHOWN])
    return (names or "none") + more
