"""How far neighbours in the store end up apart in the stream: ours, and the peers'.

A peer's own data set, shuffled by its own rules in its own format, is made to give the number of each row instead of
its tokens; a whole pass of numbers then takes seconds. The figure is `penstock.load.order.shuffle_quality`: the mean
distance in the stream of two rows that are neighbours in the store, as a share of the pass (1/3 where the order is
random), and the share of neighbours that meet in one batch.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.bench.loading_peers import TENSORFLOW_SHUFFLE_ROWS
from penstock.load.order import Shuffled, shuffle_quality

__all__ = [
    "order_of_datasets",
    "order_of_grain",
    "order_of_litdata",
    "order_of_mosaic",
    "order_of_ours",
    "order_of_tensorflow",
]


class _Given:
    """A pass that somebody else gave, as an order."""

    identity: dict[str, Any] = {"name": "given"}  # noqa: RUF012

    def __init__(self, numbers: npt.NDArray[np.int64]) -> None:
        self.num_rows = len(numbers)
        self._numbers = numbers

    def rows_at(self, start: int, count: int) -> npt.NDArray[np.int64]:
        return self._numbers[start : start + count]


def _quality(numbers: Iterable[Any], *, num_rows: int, batch_size: int) -> dict[str, Any]:
    given = np.fromiter((int(number) for number in numbers), np.int64)
    if not np.array_equal(np.sort(given), np.arange(num_rows)):
        raise RuntimeError(f"a pass gave {len(np.unique(given))} of {num_rows} rows, {len(given)} in all")
    return {**shuffle_quality(_Given(given), batch_rows=batch_size), "rows": num_rows}


def order_of_ours(*, num_rows: int, batch_size: int) -> dict[str, Any]:
    """The first pass of the default order."""
    return {**shuffle_quality(Shuffled(num_rows=num_rows, seed=0), batch_rows=batch_size), "rows": num_rows}


def order_of_litdata(*, folder: str, seq_len: int, num_rows: int, batch_size: int) -> dict[str, Any]:
    """`StreamingDataset(shuffle=True)`: chunks in random order, rows in random order inside a window of each."""
    import litdata

    # litdata looks at the name of the class to see whether it fits the format.
    class TokensLoader(litdata.TokensLoader):
        def load_item_from_chunk(self, index: int, *chunk: Any, **facts: Any) -> Any:
            return index

    dataset = litdata.StreamingDataset(folder, item_loader=TokensLoader(block_size=seq_len + 1), shuffle=True)
    return _quality(dataset, num_rows=num_rows, batch_size=batch_size)


def order_of_mosaic(*, folder: str, num_rows: int, batch_size: int) -> dict[str, Any]:
    """`StreamingDataset(shuffle=True)`, its default algorithm."""
    from streaming import StreamingDataset
    from streaming.base.util import clean_stale_shared_memory

    class Numbers(StreamingDataset):
        def __getitem__(self, at: int) -> Any:
            return at

    clean_stale_shared_memory()
    dataset = Numbers(local=folder, shuffle=True, batch_size=batch_size)
    return _quality(dataset, num_rows=num_rows, batch_size=batch_size)


def order_of_datasets(*, num_rows: int, batch_size: int) -> dict[str, Any]:
    """PyTorch's RandomSampler, which orders a Dataset in a DataLoader."""
    from torch.utils.data import RandomSampler

    return _quality(RandomSampler(range(num_rows)), num_rows=num_rows, batch_size=batch_size)


def order_of_grain(*, num_rows: int, batch_size: int) -> dict[str, Any]:
    """`MapDataset.shuffle`, asked element by element: iterating would start threads and take twenty times as long."""
    import grain

    shuffled = grain.MapDataset.range(num_rows).shuffle(seed=0)
    return _quality((shuffled[place] for place in range(num_rows)), num_rows=num_rows, batch_size=batch_size)


def order_of_tensorflow(*, num_rows: int, batch_size: int) -> dict[str, Any]:
    """`Dataset.shuffle` in its window."""
    import tensorflow as tf

    numbers = tf.data.Dataset.range(num_rows).shuffle(TENSORFLOW_SHUFFLE_ROWS, seed=0).batch(num_rows)
    return _quality(next(iter(numbers)).numpy(), num_rows=num_rows, batch_size=batch_size)
