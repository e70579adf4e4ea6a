"""A table's file: what it is, and the pieces it is cut into. Files are opened here and nowhere else."""

from __future__ import annotations

import dataclasses
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import InputError
from penstock.sources.document import printable
from penstock.sources.tables.streams import CHUNK_BYTES, COMPRESSIONS

__all__ = ["FORMATS", "Piece", "TableFile", "cut_evenly", "open_file", "table_format"]

FORMATS = {
    b".jsonl": "jsonl",
    b".ndjson": "jsonl",
    b".csv": "csv",
    b".tsv": "tsv",
    b".parquet": "parquet",
    b".arrow": "arrow",
    b".feather": "arrow",
}
"""By ending; the first four may have one of `COMPRESSIONS` behind it."""

TEXT_FORMATS = frozenset(["jsonl", "csv", "tsv"])
# Never follows a link, never waits for a FIFO's other end.
FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC

Facts = tuple[int, int, int, int]
"""Size, time of change, time of status change, inode: what tells that a file is still the same."""


def table_format(path: bytes) -> tuple[str, str] | None:
    """(format, compression or the empty string) by the endings of a file's name; None: no table."""
    stem, dot, ending = path.rpartition(b"/")[2].lower().rpartition(b".")
    if dot + ending in FORMATS:
        return FORMATS[dot + ending], ""
    _, inner_dot, inner_ending = stem.rpartition(b".")
    inner = FORMATS.get(inner_dot + inner_ending)
    compression = COMPRESSIONS.get(dot + ending)
    return (inner, compression) if inner in TEXT_FORMATS and compression else None


@dataclass(frozen=True, kw_only=True, slots=True)
class TableFile:
    """A file of a table and all that reading a piece of it needs.

    Attributes:
        path: relative to the source; empty where the source is one file.
        absolute: where it lies.
        format: a value of `FORMATS`.
        compression: a value of `COMPRESSIONS`, or empty.
        facts: of the file when it was cut.
        cell_chunks: compressed: how many chunks make a unit.
        columns: what the renderer reads.
        header: CSV: all columns. Parquet and Arrow: the columns to read.
        header_end: CSV: where the header ends.
    """

    path: bytes
    absolute: str
    format: str
    compression: str
    facts: Facts
    cell_chunks: int
    columns: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    header_end: int = 0

    @property
    def size(self) -> int:
        """In bytes, on disk."""
        return self.facts[0]

    def with_columns(self, columns: tuple[str, ...], *, header: tuple[str, ...] = (), header_end: int = 0) -> TableFile:
        """The same file, its columns known."""
        return dataclasses.replace(self, columns=columns, header=header, header_end=header_end)


@dataclass(frozen=True, slots=True)
class Piece:
    """A range of a file: bytes, compressed chunks or rows.

    Attributes:
        file: where it lies.
        start: first byte, chunk or row.
        end: one past the last.
        input_bytes: its size.
        odd_quotes: plain CSV: whether the number of quotes before the byte before `start` is odd.
        group: Parquet: number of the row group.
        group_row: Parquet: the first row of the row group.
    """

    file: TableFile
    start: int
    end: int
    input_bytes: int
    odd_quotes: bool = False
    group: int = 0
    group_row: int = 0


def cut_evenly(total: int, size: int) -> Iterator[tuple[int, int]]:
    """Ranges of `size`, the last one perhaps shorter."""
    for start in range(0, total, size):
        yield start, min(start + size, total)


def open_file(absolute: str, *, expected: Facts | None = None) -> tuple[int, Facts]:
    """A descriptor of a regular file, and its facts.

    Raises:
        OSError: it can't be opened, or is a link.
        IsADirectoryError: it is no regular file.
        InputError: it isn't the file it was.
    """
    descriptor = os.open(absolute, FILE_FLAGS)
    try:
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode):
            raise IsADirectoryError(f"{absolute} is no regular file")
        facts = (found.st_size, found.st_mtime_ns, found.st_ctime_ns, found.st_ino)
        if expected is not None and facts != expected:
            raise InputError(
                f"{printable(os.fsencode(absolute))} changed while it was being read",
                hint="run the command again when nothing writes to the file any more",
            )
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, facts


def chunks_per_unit(unit_bytes: int) -> int:
    """Compressed chunks of a unit: text is taken to expand four times."""
    return max(1, unit_bytes // 4 // CHUNK_BYTES)
