"""`chunks`: files of fixed-length rows with a `metadata.json`, to be loaded at once or mapped.

    DIR/train/chunk_000000.safetensors   …   DIR/train/metadata.json       (DIR itself with `--split`)

A file holds many rows: `input_ids` [rows, T], uint16 or, for vocabularies above 65,536, int32 (what PyTorch takes);
`document_starts`, flat positions over rows x T at which documents begin; and `loss_mask` [rows, T], only where some
place carries no loss: padding, what overlaps the row before, prompts. Rows are filled up with the end token; with
`concat` only the last one needs it. Files: safetensors (the default), npy (the arrays as `chunk_…`,
`document_starts_…`, `loss_mask_….npy`), or pt, a dictionary of plain tensors that `torch.load(weights_only=True)`
reads. Memory: twice one file.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import MissingExtraError
from penstock.export.rows import RowBlock, Rows
from penstock.export.split import SplitJob

__all__ = ["write_split"]

Arrays = dict[str, npt.NDArray[Any]]


def write_split(job: SplitJob) -> dict[str, Any]:
    """Writes the chunk files and `metadata.json` of one split."""
    rows = job.rows()
    assert rows is not None, "options give chunks a row length"
    write = _WRITERS[job.options.chunk_format]
    dtype = np.dtype("<u2") if job.stream.dtype.itemsize == 2 else np.dtype("<i4")
    row_bytes = rows.seq_len * dtype.itemsize
    rows_per_file = max(1, (job.options.shard_bytes or 1) // row_bytes)
    files = []
    for number, first in enumerate(range(0, rows.num_rows, rows_per_file)):
        last = min(first + rows_per_file, rows.num_rows)
        arrays = _file_arrays(rows, first, last, dtype)
        tokens = rows.new_tokens(first, last)
        files.append({**write(job, number, arrays), "rows": last - first, "tokens": tokens})
        job.advance(tokens)
    _write_metadata(job, rows, dtype, files)
    return {"rows": rows.num_rows, "files": [file["name"] for file in files]}


def _write_metadata(job: SplitJob, rows: Rows, dtype: np.dtype[Any], files: list[dict[str, Any]]) -> None:
    content = {
        "split": job.split,
        "chunk_size": rows.seq_len,
        "pack": job.options.pack,
        "overlap": rows.overlap,
        "num_chunks": rows.num_rows,
        "total_tokens": job.stream.num_tokens,
        "padding_tokens": rows.padding,
        "num_documents": job.stream.num_documents,
        "dtype": dtype.name,
        "pad_id": job.stream.end_id,
        "chunk_format": job.options.chunk_format,
        "tokenizer": job.tokenizer_facts(),
        "store": {"digest": job.stream.store.digest, "version": job.stream.store.version},
        "files": files,
    }
    job.folder.write_json(f"{job.prefix}metadata.json", content)


def _file_arrays(rows: Rows, first: int, last: int, dtype: np.dtype[Any]) -> Arrays:
    shape = (last - first, rows.seq_len)
    tokens, carries = np.empty(shape, dtype), np.empty(shape, np.bool_)
    starts = []
    for block in rows.blocks(first, last):
        place = block.first_row - first
        _fill(block, tokens[place : place + len(block.tokens)], carries[place : place + len(block.tokens)])
        starts.append(block.document_starts + place * rows.seq_len)
    arrays: Arrays = {"input_ids": tokens, "document_starts": np.concatenate(starts).astype("<i8")}
    return arrays if carries.all() else {**arrays, "loss_mask": carries}


def _fill(block: RowBlock, tokens: npt.NDArray[Any], carries: npt.NDArray[np.bool_]) -> None:
    tokens[:] = block.tokens  # ids were checked against the vocabulary: none is too large for int32
    carries[:] = block.carries_loss


def _write_safetensors(job: SplitJob, number: int, arrays: Arrays) -> dict[str, Any]:
    from safetensors.numpy import save

    name = f"chunk_{number:06d}.safetensors"
    # One entry of metadata, no more: the library's own order of several changes from run to run.
    data = save(arrays, metadata={"format": "pt"})
    with job.folder.file(job.prefix + name) as file:
        file.write(data)
    return {"name": name, "tensors": list(arrays)}


def _write_npy(job: SplitJob, number: int, arrays: Arrays) -> dict[str, Any]:
    prefixes = {"input_ids": "chunk", "document_starts": "document_starts", "loss_mask": "loss_mask"}
    names = {array: f"{prefixes[array]}_{number:06d}.npy" for array in arrays}
    for array, name in names.items():
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(arrays[array]))
        with job.folder.file(job.prefix + name) as file:
            file.write(header.getvalue())
            file.write(arrays[array])
    return {"name": names.pop("input_ids"), **names}


def _write_pt(job: SplitJob, number: int, arrays: Arrays) -> dict[str, Any]:
    try:
        import torch
    except ImportError:
        raise MissingExtraError("torch", extra="torch", wanted_for="writing .pt files") from None
    name = f"chunk_{number:06d}.pt"
    buffer = io.BytesIO()
    # Written for readers that want it; penstock never reads one. Plain tensors in a dict: weights_only=True takes them.
    torch.save({key: torch.from_numpy(array) for key, array in arrays.items()}, buffer)
    with job.folder.file(job.prefix + name) as file:
        file.write(buffer.getbuffer())
    return {"name": name, "tensors": list(arrays)}


_WRITERS: dict[str, Callable[[SplitJob, int, Arrays], dict[str, Any]]] = {
    "safetensors": _write_safetensors,
    "npy": _write_npy,
    "pt": _write_pt,
}
