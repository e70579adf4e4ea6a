"""Tables: JSONL, CSV, Parquet, Arrow. One document per row.

In: files and their names. Out: documents with the key NAME/PATH#TAG, the tag being the value of the id column or, zero
padded, the byte (text formats, after decompression) or row number (Parquet, Arrow) where the row begins. So units are
read in parallel, and their size never shows in the documents. What a file can be: see text_tables and column_tables;
what a row must be: see table_rows.

Equal ids in one file give equal keys, which the index refuses: to count repeats would take every id in memory.
Memory: the unit's documents, plus what one open reader needs (a block, a row under way, a batch).
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import fs
from penstock.errors import InputError
from penstock.hashing import digest_of
from penstock.sources.document import SkipTally, printable
from penstock.sources.rows import RowRenderer, TextColumn
from penstock.sources.source import Unit, UnitText
from penstock.sources.tables.columns import BatchCursor, add_column_rows, column_pieces, open_batches
from penstock.sources.tables.documents import RowDocuments
from penstock.sources.tables.files import (
    TEXT_FORMATS,
    Piece,
    TableFile,
    chunks_per_unit,
    open_file,
    table_format,
)
from penstock.sources.tables.streams import RecordCursor
from penstock.sources.tables.text import add_text_rows, described, line_limit, open_cursor, plain_records, text_pieces

__all__ = ["TableOptions", "TablesSource"]

RULES_VERSION = 2
DEFAULT_MAX_DOCUMENT_BYTES = 16 * 2**20
# Streams kept open between units, per process: one per reader that is at work, and a file's end is met only by one.
MAX_OPEN_CURSORS = 4


@dataclass(frozen=True, kw_only=True)
class TableOptions:
    """How rows become documents.

    Attributes:
        text_field: the column of text; found by its name when None.
        id_field: the column whose value names a row in its document's key; the row's place when None.
        group_field: the column whose value the split hashes; the id, or else the content, when None.
        strict: whether a broken row ends the run instead of being counted.
    """

    text_field: str | None = None
    id_field: str | None = None
    group_field: str | None = None
    strict: bool = False


class TablesSource:
    """The rows of some files.

    Args:
        name: first part of the documents' keys.
        location: where the files lie, for people.
        files: (relative path, part of the keys, empty for a source of one file; absolute path, itself no link).
        options: columns, and whether a broken row is an error.
        renderer: makes documents of rows; None: the column of text.
        max_document_bytes: larger documents are left out.
        skips: what whoever found the files left out.
        facts: by relative path: what holds for every row of that file, such as the split it is in.
    """

    def __init__(
        self,
        *,
        name: str,
        location: str,
        files: Sequence[tuple[bytes, str]],
        options: TableOptions | None = None,
        renderer: RowRenderer | None = None,
        max_document_bytes: int = DEFAULT_MAX_DOCUMENT_BYTES,
        skips: SkipTally | None = None,
        facts: Mapping[bytes, Mapping[str, Any]] | None = None,
    ) -> None:
        self.name = name
        self._location = location
        self._files = sorted(files, key=lambda file: file[0] + b"#")  # as the keys sort
        self._options = options or TableOptions()
        self._renderer: RowRenderer = renderer or TextColumn(text_field=self._options.text_field)
        self._max_bytes = max_document_bytes
        self._skips = skips or SkipTally()
        self._facts = dict(facts or {})
        self._cursors = _Cursors()

    @property
    def location(self) -> str:
        """Where the files lie."""
        return self._location

    def options(self) -> dict[str, Any]:
        """What decides which documents come out."""
        return {
            "kind": "tables",
            "name": self.name,
            "rules": RULES_VERSION,
            "id_field": self._options.id_field,
            "group_field": self._options.group_field,
            "renderer": self._renderer.options(),
            "max_document_bytes": self._max_bytes,
        }

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        """Runs of pieces of at least `unit_bytes` together, the last one perhaps less."""
        builder = _UnitBuilder(self.name, strict=self._options.strict)
        builder.skips.merge([self._skips])
        for path, absolute in self._files:
            key = self._file_key(path)
            for piece in self._pieces(path, absolute, unit_bytes):
                if isinstance(piece, str):
                    builder.skip(piece, key)
                    continue
                builder.add(piece)
                if builder.input_bytes >= unit_bytes:
                    yield builder.finish()
                    builder = _UnitBuilder(self.name, strict=self._options.strict)
        if builder.pieces or builder.skips.counts:
            yield builder.finish()

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        """The rows of the unit's pieces."""
        text = UnitText(documents=[], skips=SkipTally())
        for piece in unit.items:
            self._read_piece(piece, text, wanted)
        return text

    def close(self) -> None:
        """Closes the streams that were kept open."""
        self._cursors.close()

    def __getstate__(self) -> dict[str, Any]:
        """Streams stay with the process that opened them."""
        return {**self.__dict__, "_cursors": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._cursors = _Cursors()

    def _file_key(self, path: bytes) -> bytes:
        name = self.name.encode()
        return name + b"/" + path if path else name

    def _pieces(self, path: bytes, absolute: str, unit_bytes: int) -> Iterator[Piece | str]:
        """The pieces of a file, or the reason to leave it out."""
        try:
            descriptor, facts = open_file(absolute)
        except OSError as error:
            fs.raise_if_exhausted(error)
            yield self._problem(absolute)
            return
        try:
            kind = table_format(path or os.fsencode(absolute)) or table_format(os.fsencode(absolute))
            if kind is None:
                yield "not-a-table"
                return
            if facts[0] == 0:
                yield "empty"
                return
            file = TableFile(
                path=path,
                absolute=absolute,
                format=kind[0],
                compression=kind[1],
                facts=facts,
                cell_chunks=chunks_per_unit(unit_bytes),
            )
            yield from self._cut(file, descriptor, unit_bytes)
        finally:
            os.close(descriptor)

    def _cut(self, file: TableFile, descriptor: int, unit_bytes: int) -> Iterator[Piece]:
        named = [name for name in (self._options.id_field, self._options.group_field) if name is not None]
        if file.format not in TEXT_FORMATS:
            yield from column_pieces(file, descriptor, self._renderer, named, unit_bytes)
            return
        try:
            file = described(file, descriptor, self._renderer, named, limit=line_limit(self._max_bytes))
        except InputError as error:
            raise InputError(f"{self._shown(file)}: {error.message}", hint=error.hint) from None
        yield from text_pieces(file, descriptor, unit_bytes)

    @staticmethod
    def _problem(absolute: str) -> str:
        """Why a file couldn't be opened."""
        try:
            mode = os.lstat(absolute).st_mode
        except OSError:
            return "unreadable"
        if stat.S_ISLNK(mode):
            return "symlink"
        return "unreadable" if stat.S_ISREG(mode) else "special"

    def _shown(self, file: TableFile) -> str:
        return printable(os.fsencode(file.absolute))

    def _read_piece(self, piece: Piece, text: UnitText, wanted: Callable[[bytes], bool] | None) -> None:
        file = piece.file
        renderer = self._renderer
        if isinstance(renderer, TextColumn):
            renderer = TextColumn(text_field=file.columns[0])
        rows = RowDocuments(
            text,
            key=self._file_key(file.path),
            path=file.path,
            place="byte" if file.format in TEXT_FORMATS else "row",
            renderer=renderer,
            columns=file.columns,
            id_field=self._options.id_field,
            group_field=self._options.group_field,
            facts=self._facts.get(file.path, {}),
            max_document_bytes=self._max_bytes,
            strict=self._options.strict,
            wanted=wanted,
        )
        limit = line_limit(self._max_bytes)
        if file.format in TEXT_FORMATS and not file.compression:
            descriptor = self._open(file)
            try:
                add_text_rows(file, plain_records(piece, descriptor, limit=limit), rows)
            finally:
                os.close(descriptor)
            return
        cursor = self._cursors.take(piece) or self._open_cursor(piece, limit)
        try:
            if isinstance(cursor, RecordCursor):
                add_text_rows(file, cursor.take(piece.start, piece.end), rows)
            else:
                add_column_rows(file, cursor.take(piece.start, piece.end), rows, renderer=renderer)
        except BaseException:
            cursor.close()
            raise
        self._cursors.keep(piece, cursor)

    def _open_cursor(self, piece: Piece, limit: int) -> RecordCursor | BatchCursor:
        descriptor = self._open(piece.file)
        if piece.file.format in TEXT_FORMATS:
            return open_cursor(piece.file, descriptor, limit=limit)
        return open_batches(piece, descriptor)

    def _open(self, file: TableFile) -> int:
        try:
            return open_file(file.absolute, expected=file.facts)[0]
        except OSError as error:
            raise InputError(
                f"{self._shown(file)} can't be read any more: {error.strerror or error}",
                hint="put the file back and run the command again",
            ) from None


class _Cursors:
    """Streams kept from unit to unit; a thread that takes one has it for itself."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: list[tuple[object, RecordCursor | BatchCursor]] = []
        self._process = os.getpid()

    def take(self, piece: Piece) -> RecordCursor | BatchCursor | None:
        """The stream that is nearest before the piece, if there is one."""
        wanted = _stream_of(piece)
        if self._process != os.getpid():  # forked: a file's place is shared with the parent, who may still be reading
            self.close()
            self._process = os.getpid()
        with self._lock:
            usable = [entry for entry in self._kept if entry[0] == wanted and entry[1].passed <= piece.start]
            if not usable:
                return None
            best = max(usable, key=lambda entry: entry[1].passed)
            self._kept.remove(best)
            return best[1]

    def keep(self, piece: Piece, cursor: RecordCursor | BatchCursor) -> None:
        """Keeps a stream for the next piece; the one kept longest goes."""
        with self._lock:
            self._kept.append((_stream_of(piece), cursor))
            old = self._kept.pop(0) if len(self._kept) > MAX_OPEN_CURSORS else None
        if old is not None:
            old[1].close()

    def close(self) -> None:
        """Closes them all."""
        with self._lock:
            kept, self._kept = self._kept, []
        for _, cursor in kept:
            cursor.close()


def _stream_of(piece: Piece) -> tuple[TableFile, int]:
    return piece.file, piece.group


class _UnitBuilder:
    """Collects pieces until a unit is full."""

    def __init__(self, source: str, *, strict: bool) -> None:
        self._source = source
        self.pieces: list[Piece] = []
        self.skips = SkipTally()
        self.input_bytes = 0
        # A unit that counted a broken row must not stand in for one that refuses it.
        self._facts: list[Any] = [strict]

    def add(self, piece: Piece) -> None:
        """Adds a piece with the facts that tell whether its file changed."""
        self.pieces.append(piece)
        self.input_bytes += piece.input_bytes
        file = piece.file
        self._facts.append(
            [os.fsdecode(file.path), *file.facts, file.columns, file.header, piece.start, piece.end, piece.group]
        )

    def skip(self, reason: str, key: bytes) -> None:
        """Counts a file left out."""
        self.skips.add(reason, key)
        self._facts.append([reason, os.fsdecode(key)])

    def finish(self) -> Unit:
        """The finished unit."""
        return Unit(
            source=self._source,
            items=tuple(self.pieces),
            input_bytes=self.input_bytes,
            skips=self.skips,
            fingerprint=digest_of([*self._facts, sorted(self.skips.counts.items())]),
            newest_change_ns=max((max(piece.file.facts[1:3]) for piece in self.pieces), default=0),
        )
