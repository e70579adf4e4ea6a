"""A row's values to a document: key, group, facts, language, and the checks that text must pass.

Every row becomes a document or is counted under a reason:

    no-text · no-id · no-group       a named column is missing, null or of no use
    empty · binary · not-utf8 · too-large

`strict` turns all but `empty` and `too-large`, which are filters and no faults, into an error that ends the run.
A few microseconds per row; facts are bounded (64 columns of at most 1 KiB), because the index holds them all.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import orjson

from penstock.errors import InputError
from penstock.hashing import canonical_json, strong_hash
from penstock.sources.document import Document, Part, PartKind, SkipTally, printable
from penstock.sources.hygiene import content_problem, language_of
from penstock.sources.rows import BadRowError, RowRenderer, TextColumn
from penstock.sources.source import UnitText

__all__ = ["MAX_FACT_CHARACTERS", "RowDocuments"]

MAX_FACT_CHARACTERS = 1024
MAX_FACTS = 64
MAX_SHAPES = 256
MAX_ID_BYTES = 1024
MAX_NAME_CHARACTERS = 256
# Every float below it that is whole stands for one integer only.
EXACT_FLOAT = 2.0**53

LANGUAGE_COLUMNS = ("language", "lang")
PATH_COLUMNS = ("path", "file_path", "filepath", "file_name", "filename", "max_stars_repo_path")
NO_FAULTS = frozenset(["empty", "too-large"])

Content = bytes | tuple[Part, ...]
_NUMBERS = frozenset([int, float, bool])
_Shape = tuple[tuple[str, ...], str | None, str | None]
"""Names of the columns that may be facts, the column of the language, the column of a path."""


class RowDocuments:
    """Collects the documents of the rows of one file.

    Args:
        text: where documents and counts go.
        key: of the file; a row's key is this, `#`, and the row's tag.
        path: of the file, relative to the source.
        place: what a tag is, for messages: `byte` or `row`.
        renderer: makes the content of a row.
        columns: those that the renderer reads; no part of the facts.
        id_field: names rows.
        group_field: groups rows.
        facts: what holds for every row of the file.
        max_document_bytes: larger documents are left out.
        strict: whether a fault ends the run.
        wanted: by key; others are neither made nor counted.
    """

    def __init__(
        self,
        text: UnitText,
        *,
        key: bytes,
        path: bytes,
        place: str,
        renderer: RowRenderer,
        columns: tuple[str, ...],
        id_field: str | None,
        group_field: str | None,
        facts: Mapping[str, Any],
        max_document_bytes: int,
        strict: bool,
        wanted: Callable[[bytes], bool] | None,
    ) -> None:
        self._documents = text.documents
        self._skips: SkipTally = text.skips
        self._file_key = key
        self._key_prefix = key + b"#"
        self._path = path
        self._place = place
        self._renderer = renderer
        self._text_column = renderer.text_field if isinstance(renderer, TextColumn) else None
        self._framed = renderer.framed
        self._columns = frozenset(columns)
        self._id_field = id_field
        self._group_field = group_field
        self._facts = facts
        self._max_bytes = max_document_bytes
        self._strict = strict
        self._wanted = wanted
        self._shapes: dict[tuple[str, ...], _Shape] = {}

    def is_unwanted(self, number: int) -> bool:
        """Whether a row needn't even be parsed; where ids make the keys, only the row tells."""
        if self._wanted is None or self._id_field is not None:
            return False
        return not self._wanted(self._key_prefix + b"%015d" % number)

    def add_row(self, number: int, end: int, row: Mapping[str, Any], *, row_number: int | None = None) -> None:
        """A row whose content is in its columns; see `add`."""
        is_utf8 = False
        try:
            if self._text_column is not None:
                value = row.get(self._text_column)
                is_utf8 = type(value) is str
                content: Content = value.encode() if is_utf8 else self._renderer.text(row)  # type: ignore[attr-defined, union-attr]
            else:
                content = self._renderer.parts(row)
        except BadRowError as problem:
            self.skip(problem.reason, number, problem.detail)
            return
        except UnicodeEncodeError:
            self.skip("not-utf8", number, "half a surrogate pair")
            return
        self.add(number, end, content, row, row_number=row_number, is_utf8=is_utf8)

    def add(
        self,
        number: int,
        end: int,
        content: Content,
        columns: Mapping[str, Any],
        *,
        row_number: int | None = None,
        is_utf8: bool = False,
    ) -> None:
        """A row whose content is at hand.

        Args:
            number: first byte or row number; the row's tag unless ids make the keys.
            end: one past its last byte or row number.
            content: text, or parts.
            columns: its values.
            row_number: for the facts, where it is known.
            is_utf8: whether the content is text that is known to be UTF-8, so that it needn't be checked again.
        """
        data = content if type(content) is bytes else b"".join([part.data for part in content])  # type: ignore[union-attr]
        if len(data) > self._max_bytes:
            self.skip("too-large", number)
            return
        if not is_utf8 or not data or b"\0" in data:
            reason = content_problem(data if type(content) is bytes else _text_of(content))  # type: ignore[arg-type]
            if reason is not None:
                self.skip(reason, number, f"the text is {reason}")
                return
        try:
            key, group, text_hash = self._identity(number, data, columns)
        except BadRowError as problem:
            self.skip(problem.reason, number, problem.detail)
            return
        if self._wanted is not None and not self._wanted(key):
            return
        names, language_column, path_column = self._shape_of(columns)
        facts: dict[str, Any] = {
            name: value
            for name in names
            if type(value := columns[name]) in _NUMBERS or (type(value) is str and len(value) <= MAX_FACT_CHARACTERS)
        }
        if len(facts) > MAX_FACTS:
            facts = dict(itertools.islice(facts.items(), MAX_FACTS))
        if row_number is not None:
            facts.setdefault("row", row_number)
        if self._facts:
            facts.update(self._facts)
        language = ""
        if language_column is not None or path_column is not None:
            language = _language(columns, language_column, path_column)
        self._documents.append(
            Document(
                key=key,
                group=group,
                path=self._path,
                byte_start=number,
                byte_end=end,
                parts=(Part(data=data),) if type(content) is bytes else content,  # type: ignore[arg-type]
                language=language,
                facts=_facts_text(facts) if facts else "",
                exact=False,
                framed=self._framed,
                text_hash=text_hash if type(content) is bytes else b"",
            )
        )

    def skip(self, reason: str, number: int, detail: str = "", *, count: int = 1) -> None:
        """Counts a row, or several from this one on, or ends the run."""
        if self._strict and reason not in NO_FAULTS:
            raise InputError(
                f"{printable(self._file_key)}: {self._place} {number}: {reason}{': ' if detail else ''}{detail}",
                hint="mend the row, or leave out --strict: such rows are then counted and passed over",
            )
        self._skips.add(reason, self._key_prefix + b"%015d" % number, count=count)

    def _identity(self, number: int, data: bytes, columns: Mapping[str, Any]) -> tuple[bytes, bytes, bytes]:
        """Key, group and, where the group needed it, the hash of the content.

        Rows that nothing else groups are grouped by content: rows put in before them move them to no other split.
        """
        tag = b"%015d" % number
        if self._id_field is None and self._group_field is None:
            content = strong_hash(data)
            return self._key_prefix + tag, content, content
        group = b""
        if self._id_field is not None:
            group = tag = _name_of(columns.get(self._id_field), "no-id", self._id_field)
            if len(tag) > MAX_ID_BYTES:
                raise BadRowError("no-id", f"column {self._id_field!r} holds {len(tag)} bytes, at most {MAX_ID_BYTES}")
        if self._group_field is not None:
            group = _name_of(columns.get(self._group_field), "no-group", self._group_field)
        return self._key_prefix + tag, group, b""

    def _shape_of(self, columns: Mapping[str, Any]) -> _Shape:
        """What rows with these columns have in common; nearly all rows of a file have the same."""
        key = tuple(columns)
        shape = self._shapes.get(key)
        if shape is None:
            if len(self._shapes) >= MAX_SHAPES:
                self._shapes.clear()
            names = tuple(name for name in key if name not in self._columns and len(name) <= MAX_NAME_CHARACTERS)
            language = next((name for name in LANGUAGE_COLUMNS if name in columns), None)
            path = next((name for name in PATH_COLUMNS if name in columns), None)
            shape = self._shapes[key] = (names, language, path)
        return shape


def _text_of(parts: tuple[Part, ...]) -> bytes:
    """The text parts alone: a control part is a token's name."""
    return b"".join([part.data for part in parts if part.kind is PartKind.TEXT])


def _name_of(value: Any, reason: str, column: str) -> bytes:
    """A value as an identity; the same for a value read from text and from a typed column."""
    kind = type(value)
    if kind is str and value:
        return value.encode("utf-8", "surrogatepass")  # type: ignore[no-any-return]
    if kind is int or kind is bool:
        return str(value).encode()
    if kind is float and abs(value) < EXACT_FLOAT:
        return (str(int(value)) if value.is_integer() else repr(value)).encode()
    raise BadRowError(reason, f"column {column!r} holds {type(value).__name__}, expected text or a whole number")


def _language(columns: Mapping[str, Any], language_column: str | None, path_column: str | None) -> str:
    if language_column is not None:
        value = columns[language_column]
        if type(value) is str and len(value) <= 64 and value.isprintable():
            return value.lower()
    if path_column is not None:
        value = columns[path_column]
        if type(value) is str:
            return language_of(value.encode("utf-8", "replace"))
    return ""


def _facts_text(facts: dict[str, Any]) -> str:
    """One JSON object with sorted keys; NaN, infinities and half surrogate pairs, which JSON hasn't, are spelt out."""
    try:
        # `canonical_json` takes ten times as long; it writes the same, but for NaN, which becomes null here.
        return orjson.dumps(facts, option=orjson.OPT_SORT_KEYS).decode()
    except TypeError:  # an integer of more than 64 bits, or half a surrogate pair
        clean = {_clean(name): _clean(value) for name, value in facts.items()}
        return canonical_json(clean).decode()


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return None
    return value
