"""The stream of `Loader` as a `tf.data.Dataset`, with the same state.

Batches are made by numpy in this process and handed to TensorFlow whole, one call per batch; `tf.data` prefetches and
places them from there on. Each element carries `position`, the rows consumed before it: `tf.data` reads ahead, so how
far the training got is told by the last element it used, not by how far the data set was read.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import MissingExtraError
from penstock.load.fields import DEFAULT_FIELDS, check_fields, fields_of
from penstock.load.loader import Loader
from penstock.load.mixed import filler_of, loader_of, restored_position, state_at
from penstock.pack import Plan
from penstock.pack.mixture import Mixture

try:
    import tensorflow as tf
except ImportError as error:
    raise MissingExtraError("tensorflow", extra="tf", wanted_for="the TensorFlow loader") from error

__all__ = ["TensorFlowLoader"]


class TensorFlowLoader:
    """Endless batches as dicts of tensors; iterate it, or give `dataset()` to a Keras model.

    Args:
        plan: the rows, of one plan or of a mixture.
        batch_rows: rows per global batch, over all ranks.
        fields: which of `input_ids`, `labels`, `position_ids`, `document_ids`, `row`.
        labels: "next" or "hugging-face"; see `penstock.load.fields`.
        dtype: of the tensors.
        prefetch_batches: how far tf.data reads ahead.
        loader_options: seed, shuffle, order, transforms, rank, world_size; see `Loader`.
    """

    def __init__(
        self,
        plan: Plan | Mixture,
        *,
        batch_rows: int,
        fields: Sequence[str] = DEFAULT_FIELDS,
        labels: str = "next",
        dtype: npt.DTypeLike = np.int64,
        prefetch_batches: int = 2,
        **loader_options: Any,
    ) -> None:
        self._plan, self._batch_rows = plan, batch_rows
        self._fields, self._labels, self._dtype = check_fields(fields, labels), labels, np.dtype(dtype)
        self._prefetch_batches = prefetch_batches
        self._options = loader_options
        self._new_loader()  # refuses what can't be loaded
        stream = {name: value for name, value in loader_options.items() if name not in ("rank", "world_size")}
        self._filler = filler_of(plan, **stream)
        self._own_rows = batch_rows // int(loader_options.get("world_size", 1))
        self.position = 0
        self._batches: Iterator[dict[str, Any]] | None = None

    def _new_loader(self) -> Loader:
        return loader_of(self._plan, batch_rows=self._batch_rows, prefetch_batches=0, **self._options)

    def dataset(self) -> Any:
        """A `tf.data.Dataset` that begins at `position` each time it is iterated."""
        made = tf.data.Dataset.from_generator(self._generated, output_signature=self._signature())
        return made.prefetch(self._prefetch_batches) if self._prefetch_batches else made

    def _generated(self) -> Iterator[dict[str, Any]]:
        with self._new_loader() as loader:
            loader.load_state_dict(self.state_dict())
            for batch in loader:
                made = fields_of(batch, self._fields, labels=self._labels, dtype=self._dtype)
                yield {**made, "position": np.int64(batch.position)}

    def _signature(self) -> dict[str, Any]:
        width = self._plan.seq_len + (self._labels != "next")
        shapes = {name: (self._own_rows,) if name == "row" else (self._own_rows, width) for name in self._fields}
        signature = {name: tf.TensorSpec(shape, self._dtype) for name, shape in shapes.items()}
        return {**signature, "position": tf.TensorSpec((), np.int64)}

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return self

    def __next__(self) -> dict[str, Any]:
        if self._batches is None:
            self._batches = iter(self.dataset())
        batch = next(self._batches)
        self.position += self._batch_rows
        return batch

    def state_dict(self) -> dict[str, Any]:
        """The state after the batches that iterating this object gave out; that of a `Loader`."""
        return state_at(self._filler, self.position)

    def state_after(self, batch: dict[str, Any]) -> dict[str, Any]:
        """The state after an element of `dataset()`."""
        return state_at(self._filler, int(batch["position"]) + self._batch_rows)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Goes to a saved position.

        Raises:
            ResumeError: the state belongs to another stream; both sides are shown.
        """
        self.position = restored_position(self._filler, state)
        self._batches = None
