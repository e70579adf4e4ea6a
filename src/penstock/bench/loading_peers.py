"""The load benchmark's peers: litdata, MosaicML streaming, Hugging Face datasets, Grain, tf.data.

All of them get our own concat rows, T + 1 tokens each, from one flat file in store width, in their own formats; writing
the format isn't timed. Each gives shuffled torch batches [B, T + 1], widened to int64 where it isn't that already: no
labels, no positions, no borders. What a model takes besides is then made of the tokens (`arrival.completed`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from penstock.bench.arrival import sent
from penstock.bench.loading import Timing, stored_rows

__all__ = [
    "TENSORFLOW_SHUFFLE_ROWS",
    "RowsOnDisk",
    "datasets_batches",
    "grain_batches",
    "litdata_batches",
    "load_datasets",
    "load_grain",
    "load_litdata",
    "load_mosaic",
    "load_tensorflow",
    "mosaic_batches",
    "tensorflow_batches",
    "write_datasets",
    "write_litdata",
    "write_mosaic",
]

ROWS_PER_PIECE = 4096
# tf.data shuffles in a window of so many elements; its guide takes 10,000.
TENSORFLOW_SHUFFLE_ROWS = 10_000

Batches = Callable[[], Iterator[Any]]


def _measured(timing: Timing, batches: Batches, end_id: int) -> dict[str, Any]:
    return timing.measured_both(lambda: (sent(batch, timing.device) for batch in batches()), end_id=end_id)


def _piece(bounds: tuple[int, int], *, rows: str, dtype: str, seq_len: int, wanted: str) -> Iterator[Any]:
    """Some rows as one tensor; at module level, because litdata's workers import it."""
    import torch

    begin, end = bounds
    yield torch.from_numpy(stored_rows(rows, dtype, seq_len)[begin:end].astype(wanted).reshape(-1))


def write_litdata(*, rows: str, dtype: str, seq_len: int, wanted: str, out: str) -> dict[str, Any]:
    """`litdata.optimize` with a TokensLoader: chunks of 64 MB of `wanted` integers, whole rows in each."""
    import litdata

    num_rows = len(stored_rows(rows, dtype, seq_len))
    litdata.optimize(
        functools.partial(_piece, rows=rows, dtype=dtype, seq_len=seq_len, wanted=wanted),
        inputs=[(begin, min(begin + ROWS_PER_PIECE, num_rows)) for begin in range(0, num_rows, ROWS_PER_PIECE)],
        output_dir=out,
        chunk_bytes="64MB",
        num_workers=1,
        item_loader=litdata.TokensLoader(block_size=seq_len + 1),
        verbose=False,
    )
    return {}


def litdata_batches(folder: str, timing: Timing, *, num_workers: int = 0) -> Batches:
    """StreamingDataset with a TokensLoader in a StreamingDataLoader, shuffled."""
    import litdata

    dataset = litdata.StreamingDataset(
        folder, item_loader=litdata.TokensLoader(block_size=timing.seq_len + 1), shuffle=True, drop_last=True
    )
    loader = litdata.StreamingDataLoader(
        dataset,
        batch_size=timing.batch_size,
        num_workers=num_workers,
        drop_last=True,
        pin_memory=timing.device != "cpu",
    )
    return lambda: iter(loader)


def load_litdata(*, timing: dict[str, Any], folder: str, end_id: int, num_workers: int) -> dict[str, Any]:
    """See `litdata_batches`."""
    wanted = Timing(**timing)
    return _measured(wanted, litdata_batches(folder, wanted, num_workers=num_workers), end_id)


def write_mosaic(*, rows: str, dtype: str, seq_len: int, out: str) -> dict[str, Any]:
    """MDS shards of 64 MB with one column, arrays of fixed type and shape: the encoding that needs no header."""
    from streaming import MDSWriter

    with MDSWriter(out=out, columns={"tokens": f"ndarray:{dtype}:{seq_len + 1}"}) as writer:
        for row in stored_rows(rows, dtype, seq_len):
            writer.write({"tokens": np.asarray(row)})
    return {}


def mosaic_batches(folder: str, timing: Timing) -> Batches:
    """A local StreamingDataset, shuffled by its default algorithm, in a DataLoader without workers."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory
    from torch.utils.data import DataLoader

    clean_stale_shared_memory()  # of an earlier process that was killed: it would refuse to start
    dataset = StreamingDataset(local=folder, shuffle=True, batch_size=timing.batch_size)
    loader: Any = DataLoader(dataset, batch_size=timing.batch_size, drop_last=True, pin_memory=timing.device != "cpu")
    return lambda: (batch["tokens"] for batch in loader)


def load_mosaic(*, timing: dict[str, Any], folder: str, end_id: int) -> dict[str, Any]:
    """See `mosaic_batches`."""
    wanted = Timing(**timing)
    return _measured(wanted, mosaic_batches(folder, wanted), end_id)


def write_datasets(*, rows: str, dtype: str, seq_len: int, out: str) -> dict[str, Any]:
    """A saved Dataset with one column of int64 rows of fixed length."""
    import pyarrow as pa
    from datasets import Dataset

    stored = stored_rows(rows, dtype, seq_len)
    chunks = [
        pa.FixedSizeListArray.from_arrays(
            pa.array(stored[begin : begin + ROWS_PER_PIECE].astype(np.int64).reshape(-1)), seq_len + 1
        )
        for begin in range(0, len(stored), ROWS_PER_PIECE)
    ]
    Dataset(pa.table({"input_ids": pa.chunked_array(chunks)})).save_to_disk(out)
    return {}


def datasets_batches(folder: str, timing: Timing, *, row_format: str) -> Batches:
    """A Dataset in a torch DataLoader that asks it for whole shuffled batches, twice as fast as asking for rows."""
    import torch
    from datasets import load_from_disk
    from torch.utils.data import BatchSampler, DataLoader, RandomSampler

    dataset: Any = load_from_disk(folder).with_format(row_format)
    order = BatchSampler(RandomSampler(dataset), timing.batch_size, drop_last=True)
    loader: Any = DataLoader(dataset, sampler=order, batch_size=None, pin_memory=timing.device != "cpu")
    return lambda: (torch.as_tensor(batch["input_ids"]) for batch in loader)


def load_datasets(*, timing: dict[str, Any], folder: str, end_id: int, row_format: str) -> dict[str, Any]:
    """See `datasets_batches`."""
    wanted = Timing(**timing)
    return _measured(wanted, datasets_batches(folder, wanted, row_format=row_format), end_id)


class RowsOnDisk:
    """A Grain data source: rows of a memory map, each in memory of its own."""

    def __init__(self, rows: str, dtype: str, seq_len: int) -> None:
        self._address = (rows, dtype, seq_len)
        self._rows = stored_rows(*self._address)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, number: int) -> np.ndarray[Any, Any]:
        return np.array(self._rows[int(number)])

    def __repr__(self) -> str:
        return f"RowsOnDisk({len(self)})"


def grain_batches(rows: str, dtype: str, timing: Timing) -> Batches:
    """`MapDataset` over a memory map, shuffled, batched; read ahead by Grain's own threads, as many as it likes."""
    import grain
    import torch

    dataset = grain.MapDataset.source(RowsOnDisk(rows, dtype, timing.seq_len)).shuffle(seed=0)
    batched = dataset.batch(timing.batch_size, drop_remainder=True).to_iter_dataset()
    return lambda: (torch.from_numpy(batch) for batch in batched)


def load_grain(*, timing: dict[str, Any], rows: str, dtype: str, end_id: int) -> dict[str, Any]:
    """See `grain_batches`."""
    wanted = Timing(**timing)
    return _measured(wanted, grain_batches(rows, dtype, wanted), end_id)


def tensorflow_batches(rows: str, dtype: str, timing: Timing) -> Batches:
    """`FixedLengthRecordDataset` over the flat file, shuffled in a window, batched, decoded in TensorFlow's threads."""
    import tensorflow as tf
    import torch

    kind = np.dtype(dtype)
    records = tf.data.FixedLengthRecordDataset(rows, (timing.seq_len + 1) * kind.itemsize)
    dataset = (
        records.shuffle(TENSORFLOW_SHUFFLE_ROWS, seed=0)
        .batch(timing.batch_size, drop_remainder=True)
        .map(lambda batch: tf.cast(tf.io.decode_raw(batch, kind), tf.int64), num_parallel_calls=tf.data.AUTOTUNE)
        .prefetch(tf.data.AUTOTUNE)
    )
    return lambda: (torch.utils.dlpack.from_dlpack(tf.experimental.dlpack.to_dlpack(batch)) for batch in dataset)


def load_tensorflow(*, timing: dict[str, Any], rows: str, dtype: str, end_id: int) -> dict[str, Any]:
    """See `tensorflow_batches`."""
    wanted = Timing(**timing)
    return _measured(wanted, tensorflow_batches(rows, dtype, wanted), end_id)
