"""`jsonl`: one JSON object per document, or per row where a row length is given; `DIR/train.jsonl[.gz|.zst]`.

    {"tokens": [464, 2068, …], "metadata": {"key": …, "source": …, "path": …, "split": …, "num_tokens": …, …}}

`loss_runs`, pairs (first token, count), is there where not every token carries loss; `text` on request. A row's
metadata lists its documents and where they lie in it; rows that aren't full are shorter, not padded.

Digits are looked up for a stretch of tokens at once and cut into lines by offsets (Arrow's `take`: 45 M tokens/s on one
core, 15 times `json.dumps`); there is no Python object per token. Memory: one stretch, however long a document is,
except that `text` holds one document at a time.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.export.folder import ExportFolder
from penstock.export.origins import document_keys, document_metadata, parsed_facts
from penstock.export.rows import RowBlock, Rows
from penstock.export.split import SplitJob
from penstock.export.stream import STRETCH_TOKENS, TokenStream

__all__ = ["write_split"]

DOCUMENTS_AT_ONCE = 4096
Decode = Callable[[npt.NDArray[Any]], str]


def write_split(job: SplitJob) -> dict[str, Any]:
    """Writes one file."""
    ending = f".{job.options.compress}" if job.options.compress else ""
    name = f"{job.split}.jsonl{ending}"
    digits = _Digits(job.stream)
    decode = _decoder(job.stream) if job.options.text else None
    rows = job.rows()
    with _line_file(job.folder, name, job.options.compress) as file:
        lines = _document_lines(job, digits, decode) if rows is None else _row_lines(job, rows, digits, decode)
        for data in lines:
            file.write(data)
    return {"file": name} if rows is None else {"file": name, "rows": rows.num_rows}


@contextmanager
def _line_file(folder: ExportFolder, name: str, compress: str | None) -> Iterator[Any]:
    with folder.file(name) as writer:
        if compress is None:
            yield writer
            return
        import pyarrow as pa

        # Neither format's header gets a time or a name here: equal exports are equal bytes.
        codec = {"gz": "gzip", "zst": "zstd"}[compress]
        with pa.CompressedOutputStream(pa.PythonFile(writer, mode="w"), codec) as compressed:
            yield compressed


class _Digits:
    """Ids to their decimal digits, each followed by a comma, by one look-up for all of them."""

    def __init__(self, stream: TokenStream) -> None:
        import pyarrow as pa

        self._table = pa.array([f"{token}," for token in range(stream.vocab_size)], pa.large_string())

    def __call__(self, tokens: npt.NDArray[Any]) -> tuple[memoryview, npt.NDArray[np.int64]]:
        """The digits, and where each token's begin in them; one entry more than tokens."""
        import pyarrow as pa

        if not len(tokens):
            return memoryview(b""), np.zeros(1, np.int64)
        spelt = self._table.take(pa.array(tokens))
        _, offsets, data = spelt.buffers()
        return memoryview(data), np.frombuffer(offsets, np.int64)[: len(tokens) + 1]


def _decoder(stream: TokenStream) -> Decode:
    tokenizer = stream.store.tokenizer()
    if tokenizer.spec.is_byte_level:
        return tokenizer.decode
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_str(tokenizer.spec.source_json.decode())  # once: `Tokenizer.decode` does it each time

    def decode(tokens: npt.NDArray[Any]) -> str:
        text: str = reference.decode(tokens.tolist(), skip_special_tokens=False)
        return text

    return decode


def _json(value: Any) -> bytes:
    # A name may hold what UTF-8 can't spell; it is written as JSON's own escape.
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "backslashreplace")


def _line_end(fields: dict[str, Any]) -> bytes:
    """What follows the tokens of a record."""
    return b"]," + _json(fields)[1:] + b"\n"


def _document_lines(job: SplitJob, digits: _Digits, decode: Decode | None) -> Iterator[bytes]:
    stream = job.stream
    for first, last in stream.batches(0, stream.num_documents, most=DOCUMENTS_AT_ONCE):
        metadata = document_metadata(stream, first, last)
        ends = [
            _line_end(_document_fields(stream, first + number, facts, decode)) for number, facts in enumerate(metadata)
        ]
        begin, end = int(stream.starts[first]), int(stream.starts[last])
        if end - begin > STRETCH_TOKENS:  # one long document
            yield from _long_line(job, begin, end, digits, ends[0])
            continue
        data, offsets = digits(stream.tokens(begin, end))
        cuts = offsets[stream.starts[first : last + 1] - begin].tolist()
        pieces: list[bytes | memoryview] = []
        for number, line_end in enumerate(ends):
            pieces += [b'{"tokens":[', data[cuts[number] : max(cuts[number + 1] - 1, cuts[number])], line_end]
        yield b"".join(pieces)
        job.advance(end - begin)


def _long_line(job: SplitJob, begin: int, end: int, digits: _Digits, line_end: bytes) -> Iterator[bytes]:
    yield b'{"tokens":['
    for start in range(begin, end, STRETCH_TOKENS):
        stop = min(start + STRETCH_TOKENS, end)
        data, offsets = digits(job.stream.tokens(start, stop))
        yield bytes(data[: int(offsets[-1]) - (stop == end)])
        job.advance(stop - start)
    yield line_end


def _document_fields(
    stream: TokenStream, place: int, metadata: dict[str, Any], decode: Decode | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    if (runs := stream.loss_runs(place)) is not None:
        fields["loss_runs"] = runs
    if decode is not None:
        tokens = stream.tokens(int(stream.starts[place]), int(stream.starts[place + 1]))
        fields["text"] = decode(_content(stream, tokens))
    return {**fields, "metadata": parsed_facts(metadata, stream)}


def _content(stream: TokenStream, tokens: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A document's tokens without the begin and end tokens around it."""
    begin_ids = stream.store.manifest.tokenizer.get("begin_ids") or []
    start = len(begin_ids) if tokens[: len(begin_ids)].tolist() == list(begin_ids) else 0
    return tokens[start:-1] if len(tokens) and int(tokens[-1]) == stream.end_id else tokens[start:]


def _row_lines(job: SplitJob, rows: Rows, digits: _Digits, decode: Decode | None) -> Iterator[bytes]:
    for block in rows.blocks():
        sizes = block.spans.row_ends().tolist()
        flat = np.ascontiguousarray(block.tokens).reshape(-1)
        data, offsets = digits(flat)
        keys = document_keys(job.stream, block.spans.document)
        pieces: list[bytes | memoryview] = []
        for number, size in enumerate(sizes):
            start = number * rows.seq_len
            line_end = _line_end(_row_fields(job, block, number, size, keys, decode))
            pieces += [b'{"tokens":[', data[int(offsets[start]) : int(offsets[start + size]) - 1], line_end]
        yield b"".join(pieces)
        job.advance(rows.new_tokens(block.first_row, block.first_row + len(sizes)))


def _row_fields(
    job: SplitJob, block: RowBlock, number: int, size: int, keys: dict[int, str], decode: Decode | None
) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    carries = block.carries_loss[number, :size]
    if not carries.all():
        fields["loss_runs"] = _runs(carries)
    if decode is not None:
        fields["text"] = decode(block.tokens[number, :size])
    spans = block.spans
    own = slice(int(spans.starts[number]), int(spans.starts[number + 1]))
    columns = (spans.document[own], spans.place[own], spans.first[own], spans.length[own])
    documents = [
        {
            "key": keys[document],
            "document": document,
            "start": place,
            "end": place + length,
            "document_start": first,
        }
        for document, place, first, length in zip(*(column.tolist() for column in columns), strict=True)
    ]
    metadata = {
        "row": block.first_row + number,
        "split": job.split,
        "num_tokens": size,
        "documents": documents,
    }
    return {**fields, "metadata": metadata}


def _runs(flags: npt.NDArray[np.bool_]) -> list[list[int]]:
    """Pairs (first, count) of the stretches that are True."""
    edges = np.diff(np.concatenate([[False], flags, [False]]).astype(np.int8))
    starts, ends = np.flatnonzero(edges == 1), np.flatnonzero(edges == -1)
    return [[first, last - first] for first, last in zip(starts.tolist(), ends.tolist(), strict=True)]
