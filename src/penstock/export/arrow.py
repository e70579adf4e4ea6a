"""`arrow`: a folder that `datasets.load_from_disk` opens, written without that library.

    DIR/dataset_dict.json   DIR/train/state.json   DIR/train/dataset_info.json   DIR/train/data-00000-of-00002.arrow

With `--split` the split's own files lie in DIR (a `Dataset`, no `DatasetDict`). Documents: `input_ids`, the metadata,
and in every split `labels` if some token of the store carries no loss. Rows: `input_ids`, `attention_mask` (0 on
padding) and `labels` as Hugging Face's models take them (they shift; -100 doesn't count). Ids and labels are int32, the
type that `datasets` itself gives `input_ids`: PyTorch can't index with unsigned ones. Memory: a record batch of about
two million tokens, or one document.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.export.folder import ExportFolder
from penstock.export.origins import COLUMNS, document_metadata
from penstock.export.rows import Rows
from penstock.export.split import SplitJob
from penstock.export.stream import TokenStream
from penstock.hashing import digest_of

__all__ = ["write_split", "write_summary"]

# As many rows as `datasets` puts into a record batch: its look-up of single rows is made for that.
RECORDS_AT_ONCE = 1000
BUFFER_BYTES = 2**20
LISTS = {"input_ids": "int32", "attention_mask": "int8", "labels": "int32"}


def write_split(job: SplitJob) -> dict[str, Any]:
    """Writes the data files, `state.json` and `dataset_info.json` of one split."""
    rows = job.rows()
    if rows is None:
        job.stream.refuse_documents_over(2**31 - 1, reader="an Arrow list")
        columns = ["input_ids", *(["labels"] if job.stream.store_has_loss_runs else []), *COLUMNS]
    else:
        columns = list(LISTS)
    shards = _document_shards(job) if rows is None else _row_shards(job, rows)
    names = [f"data-{number:05d}-of-{len(shards):05d}.arrow" for number in range(len(shards))]
    for name, (first, last) in zip(names, shards, strict=True):
        batches = _document_batches(job, first, last) if rows is None else _row_batches(job, rows, first, last)
        _write_table(job, name, columns, batches)
    _write_descriptions(job, names, columns)
    return {"files": names} if rows is None else {"files": names, "rows": rows.num_rows}


def write_summary(folder: ExportFolder, splits: dict[str, dict[str, Any]]) -> None:
    """Writes the list of splits that makes the folder a `DatasetDict`."""
    folder.write_json("dataset_dict.json", {"splits": list(splits)})


def _write_table(job: SplitJob, name: str, columns: list[str], batches: Iterator[dict[str, Any]]) -> None:
    import pyarrow as pa

    types = {name: pa.list_(pa.type_for_alias(kind)) for name, kind in LISTS.items()}
    types |= {name: pa.type_for_alias(kind) for name, kind in COLUMNS.items()}
    schema = pa.schema([(column, types[column]) for column in columns])
    with (
        job.folder.file(job.prefix + name) as file,
        # Arrow writes every buffer and its padding by itself.
        pa.BufferedOutputStream(pa.PythonFile(file, mode="w"), BUFFER_BYTES) as buffered,
        pa.ipc.new_stream(buffered, schema) as stream,
    ):
        for batch in batches:
            stream.write_batch(pa.record_batch([batch[column] for column in columns], schema=schema))


def _write_descriptions(job: SplitJob, names: list[str], columns: list[str]) -> None:
    features: dict[str, Any] = {}
    for column in columns:
        if column in LISTS:
            # `Sequence` is what every release reads; `List`, its later name, is unknown to those before 4.
            value = {"dtype": LISTS[column], "_type": "Value"}
            features[column] = {"feature": value, "_type": "Sequence"}
        else:
            features[column] = {"dtype": COLUMNS[column], "_type": "Value"}
    options = job.options
    packed = [] if options.pack == "concat" else [options.pack]
    identity = [job.stream.store.digest, job.split, options.seq_len, options.overlap, options.boundaries, *packed]
    state: dict[str, Any] = {
        "_data_files": [{"filename": name} for name in names],
        "_fingerprint": digest_of(identity)[:16],
        "_format_columns": None,
        "_format_kwargs": {},
        "_format_type": None,
        "_output_all_columns": False,
        "_split": job.split,
    }
    about = {"citation": "", "description": "", "features": features, "homepage": "", "license": ""}
    job.folder.write_json(f"{job.prefix}dataset_info.json", about)
    job.folder.write_json(f"{job.prefix}state.json", state)


def _document_shards(job: SplitJob) -> list[tuple[int, int]]:
    """Ranges of documents of about the size asked for; one, perhaps empty, at least."""
    starts = job.stream.starts
    shard = starts[:-1] * np.dtype(np.int32).itemsize // (job.options.shard_bytes or 1)
    cuts = [0, *(np.flatnonzero(np.diff(shard)) + 1).tolist(), job.stream.num_documents]
    return list(itertools.pairwise(cuts))


def _row_shards(job: SplitJob, rows: Rows) -> list[tuple[int, int]]:
    row_bytes = rows.seq_len * sum(np.dtype(kind).itemsize for kind in LISTS.values())
    at_once = max(1, (job.options.shard_bytes or 1) // row_bytes)
    return [(first, min(first + at_once, rows.num_rows)) for first in range(0, max(rows.num_rows, 1), at_once)]


def _document_batches(job: SplitJob, first: int, last: int) -> Iterator[dict[str, Any]]:
    import pyarrow as pa

    stream = job.stream
    for low, high in stream.batches(first, last, most=RECORDS_AT_ONCE):
        begin, end = int(stream.starts[low]), int(stream.starts[high])
        offsets = (stream.starts[low : high + 1] - begin).astype(np.int32)
        tokens = stream.signed_tokens(begin, end)
        batch = {"input_ids": _lists(offsets, tokens)}
        if stream.store_has_loss_runs:
            batch["labels"] = _lists(offsets, _labels(stream, begin, end, tokens))
        metadata = document_metadata(stream, low, high)
        for name, kind in COLUMNS.items():
            batch[name] = pa.array([facts[name] for facts in metadata], pa.type_for_alias(kind))
        yield batch
        job.advance(end - begin)


def _labels(stream: TokenStream, begin: int, end: int, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    return np.where(stream.carries_loss(begin, end), tokens, np.int32(-100))


def _row_batches(job: SplitJob, rows: Rows, first: int, last: int) -> Iterator[dict[str, Any]]:
    for block in rows.blocks(first, last):
        height = len(block.tokens)
        offsets = np.arange(height + 1, dtype=np.int32) * rows.seq_len
        yield {
            "input_ids": _lists(offsets, block.tokens.astype(np.int32)),
            "attention_mask": _lists(offsets, block.is_token.astype(np.int8)),
            "labels": _lists(offsets, block.labels(boundaries=job.options.boundaries)),
        }
        job.advance(rows.new_tokens(block.first_row, block.first_row + height))


def _lists(offsets: npt.NDArray[np.int32], values: npt.NDArray[Any]) -> Any:
    import pyarrow as pa

    return pa.ListArray.from_arrays(pa.array(offsets), pa.array(np.ascontiguousarray(values).reshape(-1)))
