"""The load benchmark's peers: litdata and Hugging Face datasets, from the same tokens, in their own formats.

Writing the format isn't timed. Rows are T + 1 tokens wide and don't overlap. Each hands out torch batches; what isn't
int64 already is widened, the way our own loader does it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from penstock.bench.loading import timed_passes

__all__ = ["load_datasets", "load_litdata", "write_datasets", "write_litdata"]

ROWS_PER_PIECE = 4096


def _piece(bounds: tuple[int, int], *, stream: str, dtype: str, wanted: str) -> Iterator[Any]:
    """One stretch of the stream as a tensor; at module level, because litdata's workers import it."""
    import torch

    begin, end = bounds
    yield torch.from_numpy(np.memmap(stream, dtype, "r")[begin:end].astype(wanted))


def write_litdata(*, stream: str, dtype: str, seq_len: int, wanted: str, out: str) -> dict[str, Any]:
    """`litdata.optimize` with a TokensLoader: chunks of 64 MB of `wanted` integers."""
    import litdata

    width = seq_len + 1
    num_tokens = Path(stream).stat().st_size // np.dtype(dtype).itemsize
    step = ROWS_PER_PIECE * width
    litdata.optimize(
        functools.partial(_piece, stream=stream, dtype=dtype, wanted=wanted),
        inputs=[(begin, min(begin + step, num_tokens)) for begin in range(0, num_tokens, step)],
        output_dir=out,
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=litdata.TokensLoader(block_size=width),
        verbose=False,
    )
    return {}


def load_litdata(
    *, folder: str, seq_len: int, batch_size: int, num_batches: int, passes: int, num_workers: int
) -> dict[str, Any]:
    """StreamingDataset with a TokensLoader in a StreamingDataLoader, shuffled."""
    import litdata

    dataset = litdata.StreamingDataset(
        folder, item_loader=litdata.TokensLoader(block_size=seq_len + 1), shuffle=True, drop_last=True
    )
    loader = litdata.StreamingDataLoader(dataset, batch_size=batch_size, num_workers=num_workers, drop_last=True)
    return timed_passes(
        lambda: (_widened(batch) for batch in loader),
        passes=passes,
        num_batches=num_batches,
        batch_tokens=batch_size * seq_len,
    )


def write_datasets(*, stream: str, dtype: str, seq_len: int, wanted: str, out: str) -> dict[str, Any]:
    """A saved Dataset with one column of rows of fixed length."""
    import pyarrow as pa
    from datasets import Dataset

    width = seq_len + 1
    stored = np.memmap(stream, dtype, "r")
    tokens = stored[: len(stored) // width * width]
    chunks = [
        pa.FixedSizeListArray.from_arrays(
            pa.array(np.asarray(tokens[begin : begin + ROWS_PER_PIECE * width], wanted)), width
        )
        for begin in range(0, len(tokens), ROWS_PER_PIECE * width)
    ]
    Dataset(pa.table({"input_ids": pa.chunked_array(chunks)})).save_to_disk(out)
    return {}


def load_datasets(
    *, folder: str, seq_len: int, batch_size: int, num_batches: int, passes: int, row_format: str
) -> dict[str, Any]:
    """A Dataset in a torch DataLoader that asks it for whole shuffled batches, twice as fast as asking for rows."""
    from datasets import load_from_disk
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    dataset: Any = load_from_disk(folder).with_format(row_format)
    order = BatchSampler(RandomSampler(dataset), batch_size, drop_last=True)
    loader: Any = DataLoader(dataset, sampler=order, batch_size=None)
    return timed_passes(
        lambda: (_widened(batch["input_ids"]) for batch in loader),
        passes=passes,
        num_batches=num_batches,
        batch_tokens=batch_size * seq_len,
    )


def _widened(batch: Any) -> Any:
    import torch

    return batch if batch.dtype == torch.int64 else torch.from_numpy(batch.numpy().astype(np.int64))
