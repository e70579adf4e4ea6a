"""Parquet and Arrow: how they are cut, and their rows.

Parquet is cut at row groups; one larger than two units is cut into runs of rows, read one after another from the same
open reader, because a row group can't be entered in the middle. Arrow files and streams (Feather 2, what `datasets`
writes) are memory-mapped and cut into runs of rows, by what each row takes. Only the columns that the content is made
of, the named ones and short scalar ones are read.

Memory: a batch (about 1 MiB of a row group's columns by its own average, at least one row) beside the unit's documents,
and of Parquet a page and a dictionary, which its writer made as large as it liked: both are unpacked whole.
A damaged row group or batch: the rows before it are kept, the damage is counted once as `damaged`. A file that can't
be opened at all is an error. More than 600 lines, because both formats give the same batches, which the same functions
check and read.
"""

from __future__ import annotations

import itertools
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import numpy as np

from penstock.errors import InputError
from penstock.sources.document import printable
from penstock.sources.rows import RowRenderer, TextColumn, refuse_missing
from penstock.sources.tables.documents import MAX_FACT_CHARACTERS, RowDocuments
from penstock.sources.tables.files import Piece, TableFile

__all__ = ["BatchCursor", "add_column_rows", "column_pieces", "open_batches"]

# Larger ones come out of fresh memory each time, which takes longer than unpacking them.
BATCH_BYTES = 2**20
MAX_BATCH_ROWS = 4096
# What Arrow knows a string by; a unit of rows that hold next to nothing would be millions of documents else.
ROW_BYTES = 8
# A group is read whole up to this many units, so that its neighbours can be read by others.
WHOLE_GROUP_UNITS = 2
PARQUET_BUFFER_BYTES = 2**20


class DamagedBatchError(Exception):
    """Rows that can't be read; never leaves the sources."""

    def __init__(self, row: int, detail: str) -> None:
        super().__init__(detail)
        self.row = row
        self.detail = detail


def column_pieces(
    file: TableFile, descriptor: int, renderer: RowRenderer, named: Sequence[str], unit_bytes: int
) -> Iterator[Piece]:
    """The pieces of a file, in order.

    Args:
        file: its columns not known yet.
        descriptor: open; stays the caller's.
        renderer: says which columns it needs.
        named: columns that are needed for ids and groups.
        unit_bytes: size of a unit.

    Raises:
        InputError: it isn't such a file, or a column is missing.
    """
    try:
        if file.format == "parquet":
            return iter(list(_parquet_pieces(file, descriptor, renderer, named, unit_bytes)))
        return iter(list(_arrow_pieces(file, descriptor, renderer, named, unit_bytes)))
    except _arrow_errors() as error:
        kind = "Parquet" if file.format == "parquet" else "Arrow"
        raise InputError(
            f"{printable(os.fsencode(file.absolute))} can't be read as {kind}: {_first_line(error)}",
            hint="the file is damaged, cut short or of another kind: get it anew, or leave it out",
        ) from None


def _arrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow as pa

    return (pa.ArrowException, OSError, ValueError)


def _first_line(error: Exception) -> str:
    return printable(str(error).split("\n")[0][:300].encode("utf-8", "backslashreplace"))


def _parquet_pieces(
    file: TableFile, descriptor: int, renderer: RowRenderer, named: Sequence[str], unit_bytes: int
) -> Iterator[Piece]:
    with closing(_OpenParquet(descriptor)) as opened:
        metadata = opened.parquet.metadata
        heavy = _heavy_columns(opened)
        file = _with_columns(file, opened.parquet.schema_arrow, renderer, named, heavy)
        row = 0
        for group in range(metadata.num_row_groups):
            facts = metadata.row_group(group)
            try:
                size = sum(size for _, size in opened.leaf_bytes(group, names=set(file.header)))
            except _arrow_errors():
                size = facts.total_byte_size  # whoever reads the group meets the damage again, and counts it
            parts = 1 if size <= WHOLE_GROUP_UNITS * unit_bytes else max(1, min(size // unit_bytes, facts.num_rows))
            borders = [row + facts.num_rows * part // parts for part in range(parts + 1)]
            for start, end in itertools.pairwise(borders):
                if start < end:
                    share = size * (end - start) // facts.num_rows
                    yield Piece(file, start, end, input_bytes=share, group=group, group_row=row)
            row += facts.num_rows


def _heavy_columns(opened: _OpenParquet) -> set[str]:
    """Top-level columns whose values are too long for facts, by their average where the footer is whole."""
    metadata = opened.parquet.metadata
    sizes: dict[str, int] = {}
    for group in range(metadata.num_row_groups):
        try:
            leaves = opened.leaf_bytes(group)
        except _arrow_errors():
            continue  # counted as damage by whoever reads a column of it
        for path, size in leaves:
            name = path.split(".")[0]
            sizes[name] = sizes.get(name, 0) + size
    return {name for name, total in sizes.items() if total > MAX_FACT_CHARACTERS * max(metadata.num_rows, 1)}


def _arrow_pieces(
    file: TableFile, descriptor: int, renderer: RowRenderer, named: Sequence[str], unit_bytes: int
) -> Iterator[Piece]:
    """Cut by what each row takes, not by their number: a few rows may hold most of a file."""
    start, row = 0, 0
    begun = 0  # where the piece begins, in bytes from the start of the batch; before it: negative
    try:
        with _MappedArrow(descriptor) as arrow:
            file = _with_columns(file, arrow.schema, renderer, named, set())
            for batch in arrow.batches():
                ends = np.cumsum(_row_bytes(batch.select(list(file.header))))
                num_bytes = int(ends[-1]) if len(ends) else 0
                while num_bytes >= begun + unit_bytes:
                    last = int(np.searchsorted(ends, begun + unit_bytes))  # as little as makes a unit by itself
                    yield Piece(file, start, row + last + 1, input_bytes=int(ends[last]) - begun)
                    start, begun = row + last + 1, int(ends[last])
                row += batch.num_rows
                begun -= num_bytes
    except DamagedBatchError:
        row += 1  # a piece must hold the place of the damage, so that someone counts it
    if start < row:
        yield Piece(file, start, row, input_bytes=-begun)


def _row_bytes(batch: Any) -> np.ndarray[Any, Any]:
    """[rows], bytes of the columns and of the row itself; of a column that isn't of strings its mean."""
    sizes = np.full(batch.num_rows, ROW_BYTES, np.int64)
    for column in batch.columns:
        sizes += _lengths(column) if _is_text(column.type, binary=True) else column.nbytes // max(len(column), 1)
    return sizes


def _storage(array: Any) -> Any:
    """What an extension type is kept as; any other array as it is."""
    import pyarrow as pa

    return array.storage if isinstance(array, pa.ExtensionArray) else array


def _lengths(array: Any) -> np.ndarray[Any, Any]:
    """Bytes of each value of a column of strings; of damaged ones anything that isn't negative."""
    import pyarrow.types as types

    array = _storage(array)
    lengths: np.ndarray[Any, Any] = np.zeros(len(array), np.int64)
    if types.is_dictionary(array.type):
        of_values, indices = _lengths(array.dictionary), array.indices.fill_null(0).to_numpy()
        return of_values.take(indices, mode="clip") if len(of_values) else lengths
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        views = np.frombuffer(array.buffers()[1] or b"", np.int32)[::4]
        return np.maximum(views[array.offset : array.offset + len(array)].astype(np.int64), 0)
    offsets, data = _offsets_of(array)
    if offsets is None or len(offsets) != len(array) + 1:
        return lengths
    return np.diff(offsets.astype(np.int64)).clip(0, data.size if data is not None else 0)


def _with_columns(
    file: TableFile, schema: Any, renderer: RowRenderer, named: Sequence[str], heavy: set[str]
) -> TableFile:
    """The file with the columns of the content, and all that are read."""
    names = list(schema.names)
    where = printable(os.fsencode(file.absolute))
    try:
        if isinstance(renderer, TextColumn):
            is_named = renderer.text_field is not None
            texts = [field.name for field in schema if _is_text(field.type, binary=is_named)]
            binaries = [field.name for field in schema if _is_text(field.type, binary=True)]
            columns: tuple[str, ...] = (renderer.column(names, texts=texts, binaries=binaries),)
        else:
            columns = renderer.columns(names)
        refuse_missing(names, needed=columns, named=named)
    except InputError as error:
        raise InputError(f"{where}: {error.message}", hint=error.hint) from None
    needed = dict.fromkeys([*columns, *named])
    scalars = [field.name for field in schema if _is_fact(field.type) and names.count(field.name) == 1]
    read = dict.fromkeys([*needed, *(name for name in scalars if name not in heavy)])
    return file.with_columns(columns, header=tuple(name for name in read if name in names))


def _is_text(kind: Any, *, binary: bool = False) -> bool:
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type  # JSON, say, over strings
    if types.is_dictionary(kind):
        kind = kind.value_type
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return True
    return binary and (types.is_binary(kind) or types.is_large_binary(kind) or types.is_binary_view(kind))


def _is_fact(kind: Any) -> bool:
    import pyarrow.types as types

    return (
        _is_text(kind)
        or types.is_integer(kind)
        or types.is_floating(kind)
        or types.is_boolean(kind)
        or types.is_timestamp(kind)
        or types.is_date(kind)
        or types.is_decimal(kind)
    )


class _OpenParquet:
    """A file as Parquet; closing it leaves the descriptor open."""

    def __init__(self, descriptor: int) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        # Read, not mapped: a map of a file of many gigabytes would count as this process's memory.
        self._file = os.fdopen(os.dup(descriptor), "rb", buffering=0)
        self._file.seek(0)  # a duplicate shares the place with the descriptor
        try:
            self.parquet: Any = pq.ParquetFile(
                pa.PythonFile(self._file, mode="r"), buffer_size=PARQUET_BUFFER_BYTES, page_checksum_verification=True
            )
        except BaseException:
            self._file.close()
            raise
        schema = self.parquet.metadata.schema
        self._leaf_paths = [schema.column(number).path for number in range(len(schema))]

    def leaf_bytes(self, group: int, *, names: set[str] | None = None) -> list[tuple[str, int]]:
        """(path, bytes) of a row group's columns, encoded but not compressed; of all, or of those with these names.

        Raises:
            OSError: what the footer says about one of them is damaged.
        """
        leaves = {
            number: path
            for number, path in enumerate(self._leaf_paths)
            if names is None or path in names or path.split(".")[0] in names
        }
        if not leaves:
            return []
        # Damage that `column` below would end the process for is an error to a reader. A batch of no rows opens one for
        # each column and reads nothing, 4 µs each; `ParquetFile.iter_batches` itself refuses that size.
        next(self.parquet.reader.iter_batches(0, [group], list(leaves), use_threads=False), None)
        facts = self.parquet.metadata.row_group(group)
        return [(path, facts.column(number).total_uncompressed_size) for number, path in leaves.items()]

    def close(self) -> None:
        """Closes the duplicate."""
        self.parquet.close(force=True)
        self._file.close()


class _MappedArrow:
    """An Arrow file or stream in a map of its own."""

    def __init__(self, descriptor: int) -> None:
        import pyarrow as pa

        self._map = mmap.mmap(descriptor, 0, prot=mmap.PROT_READ)
        self._source = pa.BufferReader(pa.py_buffer(self._map))
        if self._map[:6] == b"ARROW1":
            self._reader: Any = pa.ipc.open_file(self._source)
            self._is_file = True
        else:
            self._reader = pa.ipc.open_stream(self._source)
            self._is_file = False
        self.schema = self._reader.schema

    def batches(self) -> Iterator[Any]:
        """All batches, in order; nothing is copied unless it is compressed."""
        import pyarrow as pa

        row = 0
        numbers: Iterator[int] = iter(range(self._reader.num_record_batches)) if self._is_file else itertools.count()
        for number in numbers:
            try:
                batch = self._reader.get_batch(number) if self._is_file else self._reader.read_next_batch()
                batch.validate()
            except StopIteration:
                return
            except (pa.ArrowException, OSError) as error:
                raise DamagedBatchError(row, _first_line(error)) from None
            yield batch
            row += batch.num_rows

    def let_go(self) -> None:
        """Gives the pages that were read back to the system; they stay in its cache."""
        self._map.madvise(mmap.MADV_DONTNEED)

    def __enter__(self) -> _MappedArrow:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()  # unmapped when the last batch is gone


class BatchCursor:
    """The batches of a row group or an Arrow file from its start on; goes forward only."""

    def __init__(self, descriptor: int, piece: Piece) -> None:
        self._descriptor = descriptor
        self._first_row = piece.group_row
        self._arrow: _MappedArrow | None = None
        self._parquet: _OpenParquet | None = None
        columns = list(piece.file.header)
        if piece.file.format == "parquet":
            self._parquet = _OpenParquet(descriptor)
            self._batches = self._parquet_batches(self._parquet, piece.group, columns)
        else:
            self._arrow = _MappedArrow(descriptor)
            self._batches = (batch.select(columns) for batch in self._arrow.batches())
        self._pending: tuple[int, Any] | None = None
        self._next_row = piece.group_row
        self._damage: DamagedBatchError | None = None
        self.passed = piece.group_row

    def take(self, start: int, end: int) -> Iterator[tuple[int, Any]]:
        """(first row, batch) for the rows from `start` to `end`.

        Raises:
            DamagedBatchError: after the last whole batch, when the first row that can't be read is in this range.
        """
        while (found := self._pending or self._next()) is not None:
            self._pending = None
            row, batch = found
            first, last = max(start, row), min(end, row + batch.num_rows)
            if first < last:
                yield first, batch.slice(first - row, last - first)
            if row + batch.num_rows > end:
                self._pending = found
                break
        self.passed = end
        if self._arrow is not None:
            self._arrow.let_go()
        if self._pending is None and self._damage is not None and start <= self._damage.row < end:
            raise self._damage

    def close(self) -> None:
        """Closes the file."""
        if self._parquet is not None:
            self._parquet.close()
        os.close(self._descriptor)

    def _next(self) -> tuple[int, Any] | None:
        if self._damage is not None:
            return None
        try:
            batch = next(self._batches, None)
        except DamagedBatchError as damage:
            self._damage = damage
            return None
        if batch is None:
            return None
        row = self._next_row
        try:
            # Of the whole batch and whoever passes it, not of the slice that a unit takes: where damage shows, and what
            # is left out with it, must not depend on units.
            for column in batch.columns:
                _check_borders(column)
        except _ArrayDamageError as error:
            self._damage = DamagedBatchError(row, str(error))
            return None
        self._next_row += batch.num_rows
        return row, batch

    def _parquet_batches(self, opened: _OpenParquet, group: int, columns: list[str]) -> Iterator[Any]:
        num_rows = opened.parquet.metadata.row_group(group).num_rows
        row = self._first_row
        errors = _arrow_errors()
        try:
            num_bytes = sum(size for _, size in opened.leaf_bytes(group, names=set(columns)))
        except errors as error:
            raise DamagedBatchError(row, _first_line(error)) from None
        # By the group's own average, never by the unit's size: where damage shows must not depend on units.
        rows = max(1, min(MAX_BATCH_ROWS, BATCH_BYTES // max(num_bytes // max(num_rows, 1), 1)))
        batches = opened.parquet.iter_batches(rows, row_groups=[group], columns=columns, use_threads=False)
        while True:
            try:
                batch = next(batches, None)
            except errors as error:
                raise DamagedBatchError(row, _first_line(error)) from None
            if batch is None:
                break
            yield batch
            row += batch.num_rows
        if row < self._first_row + num_rows:
            raise DamagedBatchError(row, f"{num_rows} rows were announced, {row - self._first_row} are there")


def open_batches(piece: Piece, descriptor: int) -> BatchCursor:
    """A cursor at the start of the piece's row group or file; the descriptor becomes the cursor's."""
    try:
        return BatchCursor(descriptor, piece)
    except _arrow_errors() as error:
        os.close(descriptor)
        raise InputError(
            f"{printable(os.fsencode(piece.file.absolute))} can't be read any more: {_first_line(error)}",
            hint="run the command again when nothing writes to the file any more",
        ) from None


def add_column_rows(
    file: TableFile, batches: Iterator[tuple[int, Any]], rows: RowDocuments, *, renderer: RowRenderer
) -> None:
    """Makes documents of batches, or counts their rows."""
    is_text = isinstance(renderer, TextColumn)
    try:
        for first, batch in batches:
            if is_text:
                _add_texts(first, batch, rows, file.columns[0])
            else:
                _add_records(first, batch, rows, file.columns)
    except DamagedBatchError as damage:
        rows.skip("damaged", damage.row, damage.detail)


def _add_texts(first: int, batch: Any, rows: RowDocuments, column: str) -> None:
    """One column of text: its bytes go from Arrow's buffer to the document without becoming a string."""
    texts, is_utf8 = _bytes_of(batch.column(column)), _is_utf8(batch.column(column))
    others = [name for name in batch.schema.names if name != column]
    values = [_values_of(batch.column(name)) for name in others]
    records = (dict(zip(others, record, strict=True)) for record in zip(*values, strict=True))
    for number, (text, record) in enumerate(zip(texts, records if others else itertools.repeat({})), first):  # noqa: B905
        if text is None:
            rows.skip("no-text", number, f"column {column!r} holds null, not text")
        elif not rows.is_unwanted(number):
            rows.add(number, number + 1, text, record, row_number=number, is_utf8=is_utf8)


def _is_utf8(array: Any) -> bool:
    """Whether all values of a column are found to be UTF-8 by Arrow, several times as fast as one by one."""
    import pyarrow as pa
    import pyarrow.types as types

    array = _storage(array)
    if not (types.is_string(array.type) or types.is_large_string(array.type)):
        return False
    try:
        array.validate(full=True)
    except pa.ArrowInvalid:
        return False  # some aren't; which ones is found row by row
    return True


def _add_records(first: int, batch: Any, rows: RowDocuments, columns: tuple[str, ...]) -> None:
    """Whole rows for a renderer; the columns it doesn't read are facts."""
    others = [name for name in batch.schema.names if name not in columns]
    values = [_values_of(batch.column(name)) for name in others]
    content = [name for name in batch.schema.names if name in columns]
    for place in range(batch.num_rows):
        number = first + place
        if rows.is_unwanted(number):
            continue
        try:
            row = {name: batch.column(name)[place].as_py() for name in content}
        except UnicodeDecodeError as error:
            rows.skip("not-utf8", number, str(error))
            continue
        row.update((name, column[place]) for name, column in zip(others, values, strict=True))
        rows.add_row(number, number + 1, row, row_number=number)


class _ArrayDamageError(Exception):
    """An array whose offsets lead out of it."""


def _check_borders(array: Any) -> None:
    """Whether what a column's offsets, views or indices point at is there; the values themselves aren't looked at."""
    import pyarrow as pa
    import pyarrow.types as types

    if isinstance(array, pa.ExtensionArray):
        _check_borders(array.storage)
    elif types.is_dictionary(array.type) or types.is_string_view(array.type) or types.is_binary_view(array.type):
        _check(array)
    elif _is_text(array.type, binary=True):
        offsets, data = _offsets_of(array)
        size = data.size if data is not None else 0
        if offsets is not None and (
            len(offsets) != len(array) + 1 or offsets[0] < 0 or offsets[-1] > size or _go_back(offsets)
        ):
            raise _ArrayDamageError("offsets of a column of strings lead out of it")
    else:
        is_list = types.is_list(array.type) or types.is_large_list(array.type)
        is_seen_through = is_list or types.is_struct(array.type)
        try:
            array.validate(full=types.is_nested(array.type) and not is_seen_through)
        except pa.ArrowException as error:
            raise _ArrayDamageError(_first_line(error)) from None
        if is_list and _go_back(array.offsets.to_numpy()):
            raise _ArrayDamageError("offsets of a column of lists go back")
        if is_seen_through:
            for child in [array.values] if is_list else map(array.field, range(array.type.num_fields)):
                _check_borders(child)


def _go_back(offsets: np.ndarray[Any, Any]) -> bool:
    return bool((offsets[1:] < offsets[:-1]).any())  # a difference may wrap around


def _offsets_of(array: Any) -> tuple[np.ndarray[Any, Any] | None, Any]:
    """Offsets of a column of strings, None where there are none, and the buffer that they lead into."""
    import pyarrow.types as types

    wide = types.is_large_string(array.type) or types.is_large_binary(array.type)
    _, offset_buffer, data = array.buffers()
    if len(array) == 0 or offset_buffer is None:
        return None, data
    offsets = np.frombuffer(offset_buffer, np.int64 if wide else np.int32)
    return offsets[array.offset : array.offset + len(array) + 1], data


def _bytes_of(array: Any) -> list[bytes | None]:
    """Values of a column of strings, of any of Arrow's layouts, whose borders were checked."""
    import pyarrow as pa
    import pyarrow.types as types

    array = _storage(array)
    if types.is_dictionary(array.type):
        array = array.dictionary_decode()
    if types.is_string_view(array.type) or types.is_binary_view(array.type):
        array = array.cast(pa.large_binary() if types.is_binary_view(array.type) else pa.large_string())
    offsets, data = _offsets_of(array)
    if offsets is None:
        return [b"" if valid else None for valid in array.is_valid().to_pylist()]
    view = memoryview(data if data is not None else b"")
    borders = offsets.tolist()
    values: list[bytes | None] = [bytes(view[start:end]) for start, end in itertools.pairwise(borders)]
    if array.null_count:
        for place in np.flatnonzero(~np.array(array.is_valid())).tolist():
            values[place] = None
    return values


def _check(array: Any) -> None:
    """Indices into a dictionary or a view's buffers; UTF-8 isn't meant to be checked here."""
    import pyarrow as pa
    import pyarrow.types as types

    if types.is_string_view(array.type):
        array = array.view(pa.binary_view())
    try:
        (array.indices if types.is_dictionary(array.type) else array).validate(full=True)
        if types.is_dictionary(array.type) and len(array.indices):
            _check_borders(array.dictionary)
            indices = array.indices.drop_null()
            if len(indices) and not 0 <= int(np.min(np.array(indices))) <= int(np.max(np.array(indices))) < len(
                array.dictionary
            ):
                raise _ArrayDamageError("indices of a column lead out of its dictionary")
    except pa.ArrowException as error:
        raise _ArrayDamageError(_first_line(error)) from None


def _values_of(array: Any) -> list[Any]:
    """Values of a scalar column as JSON has them: times as ISO text, bytes that aren't UTF-8 escaped."""
    import pyarrow as pa
    import pyarrow.types as types

    if _is_text(array.type):
        return [value.decode("utf-8", "backslashreplace") if value is not None else None for value in _bytes_of(array)]
    if types.is_timestamp(array.type):
        mark = "Z" if array.type.tz else ""
        # The value is UTC whatever the zone; seen without the zone, no table of zones is needed.
        texts = _written(array.view(pa.timestamp(array.type.unit)))
        return [text.replace(" ", "T") + mark if text is not None else None for text in texts]
    if types.is_date(array.type) or types.is_decimal(array.type):
        return _written(array)
    return array.to_pylist()  # type: ignore[no-any-return]


def _written(array: Any) -> list[str | None]:
    """Values as text; None for a time beyond the years that can be written, of which Arrow says so in its place."""
    import pyarrow as pa

    texts = array.cast(pa.string()).to_pylist()
    return [None if text is None or text.startswith("<") else text for text in texts]
