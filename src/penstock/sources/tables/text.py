"""JSONL, CSV and TSV, plain or compressed: how they are cut, and their rows.

Plain files are cut into byte ranges; compressed ones into ranges of chunks (see streams). Of a CSV file each range also
needs to know whether it begins inside quotes, so `pieces` counts quotes through the whole file, at memory speed.

JSONL: a line is an object. A byte order mark, CRLF and blank lines are fine. Reasons: `broken-json`, `not-an-object`,
`not-utf8` (bytes that aren't, or half of a surrogate pair), `too-large`. Python's NaN and Infinity are taken.
CSV: RFC 4180 with a header; a row must have as many fields as the header. Reasons: `broken-row`, `binary`, `not-utf8`,
`too-large`. A loose quote pairs with the next one, and all between them would be one row; where its quotes make no row,
each of its lines is taken by itself. One longer than a row may be isn't kept: its lines are counted.
Compressed: `truncated`, `damaged-stream`, once, after the last whole row.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import orjson

from penstock.errors import InputError
from penstock.sources.rows import RowRenderer, TextColumn, refuse_missing
from penstock.sources.tables.documents import RowDocuments
from penstock.sources.tables.files import Piece, TableFile, cut_evenly
from penstock.sources.tables.streams import (
    BLOCK_BYTES,
    CHUNK_BYTES,
    Record,
    RecordCursor,
    StreamDamageError,
    cut,
    plain_blocks,
)

__all__ = ["add_text_rows", "described", "line_limit", "open_cursor", "plain_records", "text_pieces"]

BYTE_ORDER_MARK = b"\xef\xbb\xbf"
DELIMITERS = {"csv": ",", "tsv": "\t"}
COMMON_DELIMITERS = {",", "\t", ";", "|"}
# Cutting finer than this costs more than it balances.
SMALLEST_PIECE = 64

UNCLOSED = "a quote that isn't closed"
CARRIAGE_RETURN = "a carriage return that ends no row; rows end with LF or CR LF"

_Parser = Callable[[bytes], tuple[dict[str, Any] | None, str]]
"""A row, or the reason why there is none and, after a colon, what is wrong."""


def line_limit(max_document_bytes: int) -> int:
    """The longest row read: escapes may take several times the room of what they stand for."""
    return 4 * max_document_bytes + 2**16


def described(
    file: TableFile, descriptor: int, renderer: RowRenderer, named: Sequence[str], *, limit: int
) -> TableFile:
    """The file with its columns: a CSV's from the header, a JSONL's from its first row that can be parsed.

    Raises:
        InputError: no column will do, or there is no header of columns parted by the format's delimiter.
    """
    if file.format == "jsonl":
        if not isinstance(renderer, TextColumn):
            return file.with_columns(renderer.columns(None))
        if renderer.text_field is not None:
            return file.with_columns((renderer.text_field,))
        names = _first_row(file, descriptor, limit=limit)
        # Without any row to go by the column is anyone's guess; each line is counted under its own reason anyway.
        return file.with_columns((renderer.column(names, texts=names, only=False),) if names else ("text",))
    header, header_end = _header(file, descriptor, limit=limit)
    if isinstance(renderer, TextColumn) and renderer.text_field is None:
        _refuse_other_delimiters(header, DELIMITERS[file.format])
    columns = renderer.columns(header)
    refuse_missing(header, needed=columns, named=named)
    return file.with_columns(columns, header=header, header_end=header_end)


def _records_from_start(file: TableFile, descriptor: int, *, limit: int) -> Iterator[Record]:
    """All records; what is wrong with a stream is for those to tell who read all of it."""
    quoted = file.format != "jsonl"
    if not file.compression:
        yield from cut(plain_blocks(descriptor, 0), limit=limit, quoted=quoted)
        return
    cursor = open_cursor(file, os.dup(descriptor), limit=limit)
    try:
        yield from cursor.take(0, 2**63)
    except StreamDamageError:
        return
    finally:
        cursor.close()


def _first_row(file: TableFile, descriptor: int, *, limit: int) -> list[str]:
    for record in _records_from_start(file, descriptor, limit=limit):
        try:
            row = orjson.loads(_without_mark(record)[1]) if record.data else None
        except orjson.JSONDecodeError:
            continue
        if isinstance(row, dict) and row:
            return list(row)
    return []


def _header(file: TableFile, descriptor: int, *, limit: int) -> tuple[tuple[str, ...], int]:
    """The names of the columns and the offset where the header ends."""
    for record in _records_from_start(file, descriptor, limit=limit):
        if record.data is not None and not record.data.strip():
            continue
        problem = f"it is longer than {limit} bytes"
        if record.data is not None:
            fields, problem = _fields(_without_mark(record)[1], DELIMITERS[file.format])
            if fields is not None:
                return tuple(name.strip() for name in fields), record.end
        raise _no_header(problem)
    raise _no_header(f"the {file.compression} stream is damaged or empty" if file.compression else "all is blank")


def _no_header(problem: str) -> InputError:
    return InputError(
        f"the header can't be read: {problem}",
        hint="a CSV file begins with a row of column names, in UTF-8, separated by commas (.tsv: by tabs)",
    )


def _refuse_other_delimiters(header: Sequence[str], delimiter: str) -> None:
    """Refuses a header that other programs would part: its only column would be taken, and whole rows be the text."""
    if len(header) == 1 and any(other in header[0] for other in COMMON_DELIMITERS - {delimiter}):
        raise InputError(
            f"the header has one column, {header[0]!r}, which looks like several",
            hint="columns are separated by commas (.tsv: by tabs); if it is one, name it with --text-field",
        )


def text_pieces(file: TableFile, descriptor: int, unit_bytes: int) -> Iterator[Piece]:
    """The ranges of a file, in order."""
    if file.compression:
        chunks = -(-file.size // CHUNK_BYTES)
        for start in range(0, chunks, file.cell_chunks):
            end = min(start + file.cell_chunks, chunks)
            yield Piece(file, start, end, input_bytes=4 * (min(end * CHUNK_BYTES, file.size) - start * CHUNK_BYTES))
        return
    ranges = cut_evenly(file.size, max(unit_bytes, SMALLEST_PIECE))
    if file.format == "jsonl":
        for start, end in ranges:
            yield Piece(file, start, end, input_bytes=end - start)
        return
    odd, counted = False, 0
    for start, end in ranges:
        begin = max(start - 1, 0)
        odd ^= _has_odd_quotes(descriptor, counted, begin)
        counted = begin
        yield Piece(file, start, end, input_bytes=end - start, odd_quotes=odd)


def _has_odd_quotes(descriptor: int, start: int, end: int) -> bool:
    total = 0
    while start < end and (data := os.pread(descriptor, min(BLOCK_BYTES, end - start), start)):
        total += data.count(b'"')
        start += len(data)
    return total % 2 == 1


def open_cursor(file: TableFile, descriptor: int, *, limit: int) -> RecordCursor:
    """A compressed file's records; the descriptor becomes the cursor's."""
    return RecordCursor(
        descriptor,
        file.compression,
        cell_chunks=file.cell_chunks,
        name=os.fsencode(file.absolute),
        limit=limit,
        quoted=file.format != "jsonl",
    )


def plain_records(piece: Piece, descriptor: int, *, limit: int) -> Iterator[Record]:
    """The records that begin in a plain file's range."""
    begin = max(piece.start - 1, 0)  # the byte before tells whether a record begins at `start` itself
    return cut(
        plain_blocks(descriptor, begin, piece.end),
        limit=limit,
        quoted=piece.file.format != "jsonl",
        odd_quotes=piece.odd_quotes,
        inside=piece.start > 0,
        stop=piece.end,
    )


def add_text_rows(file: TableFile, records: Iterator[Record], rows: RowDocuments) -> None:
    """Makes documents of records, or counts them."""
    parse = _json_row if file.format == "jsonl" else _csv_parser(file)
    try:
        for record in records:
            _add_record(file, record, rows, parse)
    except StreamDamageError as damage:
        rows.skip(damage.reason, damage.offset, damage.detail)


def _add_record(file: TableFile, record: Record, rows: RowDocuments, parse: _Parser) -> None:
    start, line = _without_mark(record) if record.start == 0 else (record.start, record.data)
    if start < file.header_end:
        return
    if line is None:
        _skip_long(file, record, rows)
        return
    may_hold_rows = b"\n" in line  # they have keys of their own
    if not line or line.isspace() or (not may_hold_rows and rows.is_unwanted(start)):
        return
    row, detail = parse(line)
    if row is None and may_hold_rows and _loose_quote(line, DELIMITERS[file.format]):
        for part in _lines(record, line):
            _add_record(file, part, rows, parse)
    elif may_hold_rows and rows.is_unwanted(start):
        return
    elif row is None:
        reason, _, detail = detail.partition(": ")
        rows.skip(reason, start, detail)
    else:
        rows.add_row(start, record.end - (line[-1] == 13), row)


def _skip_long(file: TableFile, record: Record, rows: RowDocuments) -> None:
    """Counts a record that was not kept: one row, or, where a loose quote made one of them, as many as it has lines."""
    loose = ""
    if record.num_lines > 1:
        loose = _loose_quote(record.head, DELIMITERS[file.format], is_whole=False)
        loose = loose or ("" if record.is_closed else UNCLOSED)
    if loose:
        rows.skip("broken-row", record.start, f"{loose}; {record.num_lines} lines", count=record.num_lines)
    else:
        rows.skip("too-large", record.start)


def _lines(record: Record, data: bytes) -> Iterator[Record]:
    """Its lines as records: between its first line and its last each has an even number of quotes, like a row."""
    start = record.start
    for line in data.split(b"\n"):
        yield Record(record.position, start, start + len(line), line)
        start += len(line) + 1


def _without_mark(record: Record) -> tuple[int, Any]:
    """Where the record begins after a byte order mark, and its bytes from there on."""
    if record.start == 0 and record.data is not None and record.data.startswith(BYTE_ORDER_MARK):
        return len(BYTE_ORDER_MARK), record.data[len(BYTE_ORDER_MARK) :]
    return record.start, record.data


def _json_row(line: bytes) -> tuple[dict[str, Any] | None, str]:
    """The object on a line, or the reason why there is none and, after a colon, what is wrong."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        row, problem = _slow_json(line, str(error))
        if problem:
            return None, problem
    if type(row) is not dict:
        return None, f"not-an-object: it is {'null' if row is None else type(row).__name__}"
    return row, ""


def _slow_json(line: bytes, problem: str) -> tuple[Any, str]:
    """What the fast parser refuses: NaN is taken, all else gets its name."""
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return None, f"not-utf8: {error}"
    try:
        row = json.loads(text)
        json.dumps(row, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return None, "not-utf8: half a surrogate pair"
    except (ValueError, RecursionError):
        return None, f"broken-json: {problem}"
    return row, ""


def _csv_parser(file: TableFile) -> _Parser:
    header, delimiter = file.header, DELIMITERS[file.format]

    def parse(line: bytes) -> tuple[dict[str, Any] | None, str]:
        if b"\0" in line:
            return None, "binary: a NUL byte"
        fields, problem = _fields(line, delimiter)
        if fields is None:
            return None, problem
        if len(fields) != len(header):
            return None, f"broken-row: {len(fields)} fields, the header has {len(header)}"
        return dict(zip(header, fields, strict=True)), ""

    return parse


def _fields(line: bytes, delimiter: str) -> tuple[list[str] | None, str]:
    """The fields of a row, or the reason why there are none and, after a colon, what is wrong."""
    if b"\0" in line:
        return None, "binary: a NUL byte"
    try:
        text = line.decode()
    except UnicodeDecodeError as error:
        return None, f"not-utf8: {error}"
    try:
        return _parted(text, delimiter), ""
    except csv.Error as error:
        return None, f"broken-row: {_quote_problem(error) or CARRIAGE_RETURN}"


def _parted(text: str, delimiter: str) -> list[str]:
    # The limit is the interpreter's, not the reader's, and only ever raised: another thread may be at work.
    if csv.field_size_limit() < len(text):
        csv.field_size_limit(max(len(text), 2**27))
    return next(csv.reader((text,), delimiter=delimiter, strict=True))


def _quote_problem(error: csv.Error) -> str:
    """What is wrong with a quote; the module's own words are about how its users opened the file."""
    if "unexpected end" in str(error):
        return UNCLOSED
    return "" if "new-line character" in str(error) else str(error)


def _loose_quote(data: bytes, delimiter: str, *, is_whole: bool = True) -> str:
    """What is wrong with the quotes of several lines that would be one row, whatever else is; empty: nothing.

    Args:
        data: the lines.
        delimiter: between fields.
        is_whole: whether all of the row is there.
    """
    # Bytes as characters, and neither NUL nor a carriage return in a line: only delimiters, quotes and newlines count.
    text = data.removesuffix(b"\r").decode("latin-1").replace("\r\n", "\n").translate({0: " ", 13: " "})
    try:
        _parted(text, delimiter)
    except csv.Error as error:
        problem = _quote_problem(error) or "a quote in a field that doesn't begin with one"
        return "" if problem == UNCLOSED and not is_whole else problem
    return ""
