"""Files of text to records: the lines of JSONL, the rows of CSV.

In: an open file and where to begin. Out: (position, first byte, one past the last, the bytes) of each record, in order.
A plain file is entered anywhere: a record belongs to the byte range in which it begins. A compressed one can't be: it
is fed to its decompressor in chunks of 64 KiB, and a record belongs to the chunk whose decompression gave its first
byte, so that the file's size alone says how it is cut, and anyone who reads from the start agrees.

Memory: one block (1 MiB) and the record under way, which is let go once it passes `limit`.
"""

from __future__ import annotations

import os
import sys
import zlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import numpy as np

from penstock.errors import InputError
from penstock.sources.document import printable

__all__ = ["CHUNK_BYTES", "COMPRESSIONS", "Block", "Record", "RecordCursor", "StreamDamageError", "cut", "plain_blocks"]

CHUNK_BYTES = 2**16
BLOCK_BYTES = 2**20
# A search takes 0.1 µs, in which this many bytes are compared; so many lines may be shorter than that.
LONG_LINE_BYTES = 500
SHORT_LINES = 32
# What is kept of a record that is too long, to tell what it is; below every limit.
HEAD_BYTES = 2**16
# What one unit's chunks, a quarter of its size, may expand to; text expands 3 to 20 times.
MAX_EXPANDED_BYTES = 512 * 2**20

COMPRESSIONS = {b".gz": "gzip", b".zst": "zstd", b".bz2": "bzip2", b".xz": "xz"}
"""By the file's last ending."""


class Block(NamedTuple):
    """Some bytes of a file: the position that a record beginning in them has, the first one's offset, the bytes."""

    position: int
    offset: int
    data: bytes


class Record(NamedTuple):
    """A record without its line end.

    Attributes:
        position: of its first byte; see `Block`.
        start: its first byte.
        end: one past its last.
        data: the bytes; None where they are more than the limit.
        head: the first bytes, where there is no data.
        num_lines: how many it spans, where there is no data.
        is_closed: whether a quoted one ended before the file did.
    """

    position: int
    start: int
    end: int
    data: bytes | None
    head: bytes = b""
    num_lines: int = 1
    is_closed: bool = True


class _OpenRecord:
    """A record under way; what is longer than the limit is counted but not kept."""

    def __init__(self, position: int, start: int, limit: int) -> None:
        self._position, self._start, self._limit = position, start, limit
        self._parts: list[bytes] = []
        self._num_bytes = self._num_newlines = 0
        self._ends_line = False
        self._head = b""

    def add(self, data: bytes) -> None:
        was_short = self._num_bytes <= self._limit
        self._num_bytes += len(data)
        self._num_newlines += data.count(b"\n")
        self._ends_line = data.endswith(b"\n")
        if was_short:
            self._parts.append(data)
        if was_short and self._num_bytes > self._limit:
            self._head = b"".join(self._parts)[:HEAD_BYTES]
            self._parts = []

    def record(self, *, is_closed: bool = True) -> Record:
        end = self._start + self._num_bytes
        if self._num_bytes <= self._limit:
            return Record(self._position, self._start, end, b"".join(self._parts), is_closed=is_closed)
        num_lines = self._num_newlines + (not self._ends_line)
        return Record(self._position, self._start, end, None, self._head, num_lines, is_closed)


class StreamDamageError(Exception):
    """A compressed stream that can't be read on; never leaves the sources.

    Args:
        reason: the name under which it is counted.
        position: the chunk in which it showed.
        offset: how many bytes were whole.
        detail: what the decompressor said.
    """

    def __init__(self, reason: str, *, position: int, offset: int, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        self.position = position
        self.offset = offset
        self.detail = detail


def cut(
    blocks: Iterator[Block],
    *,
    limit: int,
    quoted: bool = False,
    odd_quotes: bool = False,
    inside: bool = False,
    stop: int | None = None,
) -> Iterator[Record]:
    """Cuts blocks into records at newlines.

    Args:
        blocks: the bytes, without gaps.
        limit: longer records are passed over, their bytes not kept.
        quoted: whether a newline inside quotes is none. A newline is inside when the number of quotes before it, from
            the start of the file, is odd: doubled quotes count twice and change nothing.
        odd_quotes: whether that number is odd at the first block.
        inside: whether the first block begins inside a record, which is somebody else's.
        stop: no record that begins at this offset or later is wanted.
    """
    begun: _OpenRecord | None = None
    for position, base, data in blocks:
        ends, odd_quotes = _row_ends(data, odd_quotes) if quoted else (_line_ends(data), False)
        begin = 0
        for end in ends:
            if inside:
                inside = False
            elif begun is None and end - begin <= limit:
                yield Record(position, base + begin, base + end, data[begin:end])
            else:
                begun = begun or _OpenRecord(position, base + begin, limit)
                begun.add(data[begin:end])
                yield begun.record()
                begun = None
            begin = end + 1
            if stop is not None and base + begin >= stop:
                return
        if inside:
            if stop is not None and base + len(data) >= stop:
                return
        elif begin < len(data):
            begun = begun or _OpenRecord(position, base + begin, limit)
            begun.add(data[begin:])
    if begun is not None:
        yield begun.record(is_closed=not odd_quotes)


def _line_ends(data: bytes) -> list[int]:
    """Where newlines are: of long lines by a search for each, 0.1 ns a byte; else all at once, 0.4 ns a byte."""
    ends: list[int] = []
    end = -1
    while (end := data.find(b"\n", end + 1)) >= 0:
        ends.append(end)
        if len(ends) * LONG_LINE_BYTES > end + LONG_LINE_BYTES * SHORT_LINES:
            return np.flatnonzero(np.frombuffer(data, np.uint8) == 10).tolist()
    return ends


def _row_ends(data: bytes, odd_quotes: bool) -> tuple[list[int], bool]:
    """Newlines outside quotes, and whether the number of quotes is odd after this block."""
    values = np.frombuffer(data, np.uint8)
    newlines = np.flatnonzero(values == 10)
    quotes = np.flatnonzero(values == 34)
    before = np.searchsorted(quotes, newlines) + odd_quotes
    ends: list[int] = newlines[before % 2 == 0].tolist()
    return ends, bool((len(quotes) + odd_quotes) % 2)


def plain_blocks(descriptor: int, start: int, stop: int | None = None) -> Iterator[Block]:
    """The file from `start` to its end; reads no further than `stop` before it has to."""
    offset = start
    while True:
        wanted = BLOCK_BYTES
        if stop is not None:
            wanted = min(BLOCK_BYTES, stop - offset) if offset < stop else CHUNK_BYTES
        data = os.pread(descriptor, wanted, offset)
        if not data:
            return
        yield Block(offset, offset, data)
        offset += len(data)


class _Decompressor(Protocol):
    """What bz2, lzma and zstd have in common."""

    @property
    def eof(self) -> bool: ...
    @property
    def needs_input(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int = -1) -> bytes: ...


class _Gunzip:
    """zlib's decompressor with the interface of the others, and with what a damaged stream held before the damage."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(wbits=31)
        self._damage: zlib.error | None = None
        self.needs_input = True

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data

    def decompress(self, data: bytes, max_length: int = -1) -> bytes:
        """As much as there is; an error once nothing whole is left before it."""
        if self._damage is not None:
            raise self._damage
        before = self._stream.copy()  # 1 µs: an error keeps what was decompressed in the same call to itself
        data = self._stream.unconsumed_tail + data
        try:
            result = self._stream.decompress(data, max_length)
        except zlib.error as error:
            self._damage, self.needs_input = error, False
            return _whole_part(before, data)
        # A full output may hide more of it, even where all input was consumed.
        self.needs_input = len(result) < max_length and not self._stream.unconsumed_tail
        return result


def _whole_part(stream: Any, data: bytes) -> bytes:
    """What comes out before the error that `data` leads to; no more than the call that met it was allowed to return."""
    whole = []
    try:
        for place in range(len(data)):
            whole.append(stream.decompress(data[place : place + 1]))
    except zlib.error:
        return b"".join(whole)
    raise AssertionError("a stream is damaged or not however it is fed")


def _decompressor(compression: str) -> tuple[Callable[[], _Decompressor], tuple[type[Exception], ...]]:
    """What makes a decompressor of one member or frame, and the errors it has for damaged input."""
    if compression == "gzip":
        return _Gunzip, (zlib.error,)
    if compression == "bzip2":
        import bz2

        return bz2.BZ2Decompressor, (OSError, ValueError)
    if compression == "xz":
        import lzma

        # 256 MiB is what the largest preset needs, thrice over; a header can ask for 4 GiB.
        return lambda: lzma.LZMADecompressor(memlimit=256 * 2**20), (lzma.LZMAError,)
    zstd = _zstd()
    return zstd.ZstdDecompressor, (zstd.ZstdError,)


def _zstd() -> Any:
    """Python's own module where it has one (3.14), else the same from PyPI."""
    import importlib

    return importlib.import_module("compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd")


def decompressed_blocks(descriptor: int, compression: str, *, cell_chunks: int, name: bytes) -> Iterator[Block]:
    """The decompressed bytes, all members or frames after one another.

    Raises:
        StreamDamageError: the stream is cut off, or isn't what it should be.
        InputError: `cell_chunks` chunks expand to more than a unit may.
    """
    make, errors = _decompressor(compression)
    decompressor: _Decompressor | None = None
    offset = expanded = number = 0
    while data := os.pread(descriptor, CHUNK_BYTES, number * CHUNK_BYTES):
        expanded = expanded if number % cell_chunks else 0
        while True:
            if decompressor is None:
                data = data.lstrip(b"\0") if number or offset else data  # padding between members, as tapes have it
                if not data:
                    break
                decompressor = make()
            try:
                result = decompressor.decompress(data, BLOCK_BYTES)
            except errors as error:
                _refuse_large_window(name, error)
                raise StreamDamageError("damaged-stream", position=number, offset=offset, detail=str(error)) from None
            if result:
                yield Block(number, offset, result)
                offset += len(result)
                expanded += len(result)
                _refuse_bomb(name, expanded, cell_chunks)
            data = b""
            if decompressor.eof:
                data, decompressor = decompressor.unused_data, None
            elif decompressor.needs_input:
                break
        number += 1
    if decompressor is not None:
        detail = f"the {compression} stream ends too early, after {offset} bytes of text"
        raise StreamDamageError("truncated", position=max(number - 1, 0), offset=offset, detail=detail)


def _refuse_bomb(name: bytes, expanded: int, cell_chunks: int) -> None:
    if expanded > MAX_EXPANDED_BYTES:
        raise InputError(
            f"{printable(name)}: {cell_chunks * CHUNK_BYTES} compressed bytes expand to more than "
            f"{MAX_EXPANDED_BYTES // 2**20} MiB",
            hint="leave the file out, decompress it first, or make units smaller with --unit-bytes",
        )


def _refuse_large_window(name: bytes, error: Exception) -> None:
    """A frame made with `zstd --long` isn't damaged, it only needs more memory than a stranger's file is given."""
    if "too much memory" in str(error) or "memory usage limit" in str(error).lower():
        raise InputError(
            f"{printable(name)}: {error}: its window is larger than 128 MiB",
            hint="decompress it first: zstd -d --long=31 FILE",
        ) from None


class RecordCursor:
    """The records of a compressed file from its start on; goes forward only, from one range of chunks to the next."""

    def __init__(
        self, descriptor: int, compression: str, *, cell_chunks: int, name: bytes, limit: int, quoted: bool
    ) -> None:
        self._descriptor = descriptor
        blocks = decompressed_blocks(descriptor, compression, cell_chunks=cell_chunks, name=name)
        self._records = cut(blocks, limit=limit, quoted=quoted)
        self._pending: Record | None = None
        self._damage: StreamDamageError | None = None
        self.passed = 0

    def take(self, start: int, end: int) -> Iterator[Record]:
        """The records of the chunks from `start` to `end`; `start` may not be below `passed`.

        Raises:
            StreamDamageError: after the last whole record, when the stream breaks in this range.
        """
        while (record := self._pending or self._next()) is not None:
            self._pending = None
            if record.position >= end:
                self._pending = record
                break
            if record.position >= start:
                yield record
        self.passed = end
        if self._pending is None and self._damage is not None and start <= self._damage.position < end:
            raise self._damage

    def close(self) -> None:
        """Closes the file."""
        self._records.close()  # type: ignore[attr-defined]
        os.close(self._descriptor)

    def _next(self) -> Record | None:
        if self._damage is not None:
            return None
        try:
            return next(self._records, None)
        except StreamDamageError as damage:
            self._damage = damage
            return None
