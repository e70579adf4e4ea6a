"""Encoded units to disk: one segment and one record per unit.

In: a unit's documents and their ids. Out: `segments/NAME.tokens` + `.blocks`, named by content, and `work/UNIT.arrow`,
the record of the unit's documents, which whole means that the unit is done. The record is written last, so a kill
leaves either a finished unit or one that the next run does again. Memory: one unit (tokens in store width).
"""

from __future__ import annotations

import io
import json
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.ipc

from penstock import fs
from penstock.hashing import STRONG_HASH_BYTES, TOKEN_HASH_BYTES, checksum, checksum_hex, token_hash
from penstock.sources import SkipTally
from penstock.store.layout import SEGMENTS, SegmentEntry, block_checksums

__all__ = [
    "DOCUMENT_SCHEMA",
    "EncodedUnit",
    "UnitRecord",
    "arrow_array",
    "decode_table",
    "encode_table",
    "no_documents",
    "read_unit_record",
    "write_segment",
    "write_unit",
]

DOCUMENT_SCHEMA = pa.schema(
    [
        ("key", pa.binary()),
        ("group_hash", pa.uint64()),
        ("source", pa.string()),
        ("path", pa.binary()),
        ("byte_start", pa.uint64()),
        ("byte_end", pa.uint64()),
        ("text_bytes", pa.uint64()),
        ("exact", pa.uint8()),
        ("language", pa.string()),
        ("facts", pa.string()),
        ("content_hash", pa.binary(STRONG_HASH_BYTES)),
        ("token_hash", pa.binary(TOKEN_HASH_BYTES)),
        ("segment", pa.string()),
        ("offset", pa.uint64()),
        ("length", pa.uint32()),
        ("loss_runs", pa.list_(pa.uint32())),
        ("signature", pa.binary()),
    ]
)
"""One row per document. `loss_runs` is null where every token carries loss, else flat pairs (first token, count);
`signature` is empty where near copies aren't looked for."""


@dataclass(kw_only=True)
class EncodedUnit:
    """A unit between encoder and writer.

    Attributes:
        payload: the new tokens of the unit, in store width.
        columns: the document columns of `DOCUMENT_SCHEMA`; `segment` is None where the tokens are in `payload`.
        skips: what was left out, unread and read.
        left_out: (key, reason) of each file that was read and left out, from sources that tell.
        input_bytes: bytes of the input files.
        started_ns: wall clock before the first file was read.
    """

    payload: npt.NDArray[Any]
    columns: dict[str, list[Any]]
    skips: SkipTally
    left_out: Sequence[tuple[bytes, str]] = ()
    input_bytes: int
    started_ns: int


@dataclass(frozen=True, kw_only=True)
class UnitRecord:
    """A finished unit."""

    documents: pa.Table
    segments: list[SegmentEntry]
    skips: SkipTally = field(default_factory=SkipTally)
    left_out: Sequence[tuple[bytes, str]] = ()
    input_bytes: int = 0
    started_ns: int = 0


def write_unit(store: Path, record_path: Path, unit: EncodedUnit) -> UnitRecord:
    """Writes the unit's segment, then its record."""
    segments = [write_segment(store, unit.payload)] if unit.payload.size else []
    own_name = segments[0].name if segments else None
    columns = {**unit.columns, "segment": [name or own_name for name in unit.columns["segment"]]}
    arrays = [arrow_array(columns[column.name], column.type) for column in DOCUMENT_SCHEMA]
    record = UnitRecord(
        documents=pa.Table.from_arrays(arrays, schema=DOCUMENT_SCHEMA),
        segments=segments,
        skips=unit.skips,
        left_out=unit.left_out,
        input_bytes=unit.input_bytes,
        started_ns=unit.started_ns,
    )
    # Not flushed: at worst, after the system died, the unit is done again. All records are removed at the commit, and a
    # file that is on the disk already takes 2 ms to remove.
    fs.write_atomic(record_path, _encode_record(record), flushed=False)
    return record


def no_documents() -> pa.Table:
    """A table of no documents. `Schema.empty_table` imports pandas where that is installed (see `arrow_array`)."""
    return pa.Table.from_batches([], DOCUMENT_SCHEMA)


def arrow_array(values: Sequence[Any] | npt.NDArray[Any], kind: pa.DataType) -> pa.Array:
    """A column from Python values, by its buffers.

    `pa.array` of a list imports pandas where that is installed, to ask whether the list is a pandas object: half a
    second, with the GIL held.
    """
    if pa.types.is_list(kind):
        # Almost always all None; the rare column of loss runs may cost what it costs.
        return pa.nulls(len(values), kind) if not any(values) else pa.array(values, kind)
    if pa.types.is_integer(kind):
        numbers = np.ascontiguousarray(values, kind.to_pandas_dtype())
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(numbers)])
    if pa.types.is_string(kind):
        joined = "".join(values).encode()
        if not joined.isascii():  # characters aren't bytes
            values = [value.encode() for value in values]
    else:
        joined = b"".join(values)
    if pa.types.is_fixed_size_binary(kind):
        return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(joined)])
    borders = np.zeros(len(values) + 1, np.int32)
    np.cumsum(np.fromiter(map(len, values), np.int32, count=len(values)), out=borders[1:])
    return pa.Array.from_buffers(kind, len(values), [None, pa.py_buffer(borders), pa.py_buffer(joined)])


def write_segment(store: Path, payload: npt.NDArray[Any]) -> SegmentEntry:
    """Named by content, so that doing a unit again after a kill writes the same file."""
    name = token_hash(payload).hex()
    blocks = block_checksums(payload).tobytes()
    with fs.atomic_file(store / SEGMENTS / f"{name}.tokens") as file:
        file.write_past_cache(payload)
    fs.write_atomic(store / SEGMENTS / f"{name}.blocks", blocks)
    return SegmentEntry(name=name, tokens=payload.size, bytes=payload.nbytes, checksum=checksum_hex(blocks))


def _encode_record(record: UnitRecord) -> bytes:
    facts = {
        "segments": [vars(entry) for entry in record.segments],
        "skip_counts": record.skips.counts,
        "skip_examples": record.skips.examples,
        "left_out": [(os.fsdecode(key), reason) for key, reason in record.left_out],
        "input_bytes": record.input_bytes,
        "started_ns": record.started_ns,
    }
    return encode_table(record.documents, facts)


def read_unit_record(path: Path) -> UnitRecord | None:
    """The record of a unit that an earlier run finished; None when there is none or it is damaged."""
    decoded = decode_table(path)
    if decoded is None:
        return None
    table, facts = decoded
    if table.schema.names != DOCUMENT_SCHEMA.names:
        return None  # written by another version of this program
    return UnitRecord(
        documents=table,
        segments=[SegmentEntry(**entry) for entry in facts["segments"]],
        skips=SkipTally(facts["skip_counts"], facts["skip_examples"]),
        left_out=[(os.fsencode(key), reason) for key, reason in facts["left_out"]],
        input_bytes=facts["input_bytes"],
        started_ns=facts["started_ns"],
    )


def encode_table(table: pa.Table, facts: dict[str, Any]) -> bytes:
    """An Arrow file with facts beside the table, and a checksum at its end: for what only writers read."""
    sink = io.BytesIO()
    table = table.replace_schema_metadata({"penstock": json.dumps(facts)})
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    body = sink.getvalue()
    return body + checksum(body).to_bytes(8, "little")


def decode_table(path: Path) -> tuple[pa.Table, dict[str, Any]] | None:
    """What `encode_table` made; None where there is no such file or it is damaged. A link isn't followed: it could
    lead to a device that never ends."""
    try:
        if not stat.S_ISREG(path.lstat().st_mode):
            return None
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    body, tail = data[:-8], data[-8:]
    if len(tail) != 8 or checksum(body) != int.from_bytes(tail, "little"):
        return None
    table = pa.ipc.open_file(pa.BufferReader(body)).read_all()
    facts = json.loads(table.schema.metadata[b"penstock"])
    return table.replace_schema_metadata(None), facts
