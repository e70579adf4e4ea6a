"""Batches as JAX arrays on a mesh.

Tokens travel in store width, with two bits of every position (does the label count, does a document begin) as bytes;
inputs, labels, positions and document numbers are made on the devices, each from its own rows. Where the devices are
CPUs numpy makes them and JAX takes them as they are: its running sums take 10 times as long there.

The arrays are global: with several processes each brings its share, and `jax.make_array_from_process_local_data` puts
them together. The stream is that of `Loader`, and so is the state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, MissingExtraError
from penstock.load.fields import IGNORED_LABEL, document_begins, fields_of
from penstock.load.gather import Batch
from penstock.load.mixed import loader_of
from penstock.load.wrapping import WrappedLoader
from penstock.pack import Plan
from penstock.pack.mixture import Mixture

try:
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
except ImportError as error:
    raise MissingExtraError("jax", extra="jax", wanted_for="the JAX loader") from error

__all__ = ["JaxBatch", "JaxLoader"]

FIELDS = ("input_ids", "labels", "position_ids", "document_ids")


@dataclass(frozen=True, kw_only=True)
class JaxBatch:
    """A global batch of B rows; all arrays are [B, T] int32, cut along B.

    Attributes:
        input_ids: the tokens.
        labels: the next tokens, -100 where the label doesn't count.
        position_ids: counted from each document's begin.
        document_ids: 1, 2, 3… in each row; attention stays inside equal numbers. Known elsewhere as segment ids.
        rows: the plan's row numbers of this process, on the host; of a mixture, numbers in the plans of their sources.
        position: rows consumed by all processes before this batch.
    """

    input_ids: jax.Array
    labels: jax.Array
    position_ids: jax.Array
    document_ids: jax.Array
    rows: npt.NDArray[np.int64]
    position: int


class JaxLoader(WrappedLoader):
    """`Loader` with JAX arrays: an endless iterator of `JaxBatch`.

    Args:
        plan: the rows, of one plan or of a mixture.
        batch_rows: rows per global batch, over all processes and devices.
        mesh: the devices; None for all of them on one axis named "data".
        axis: the mesh axis, or axes, along which rows are cut; over the others they are copied.
        loader_options: seed, shuffle, order, transforms, prefetch_batches; see `Loader`. Rank and world size are those
            of the JAX processes.
    """

    def __init__(
        self,
        plan: Plan | Mixture,
        *,
        batch_rows: int,
        mesh: Mesh | None = None,
        axis: str | tuple[str, ...] = "data",
        **loader_options: Any,
    ) -> None:
        mesh = Mesh(np.array(jax.devices()), ("data",)) if mesh is None else mesh
        axes = (axis,) if isinstance(axis, str) else axis
        if unknown := [name for name in axes if name not in mesh.axis_names]:
            raise ConfigError(
                f"the mesh has no axis {unknown[0]!r}", hint=f"its axes: {', '.join(map(str, mesh.axis_names))}"
            )
        parts = int(np.prod([mesh.shape[name] for name in axes]))
        if batch_rows % parts:
            raise ConfigError(
                f"a global batch of {batch_rows} rows can't be cut over {parts} parts of the mesh",
                hint=f"choose a multiple of {parts}",
            )
        self.sharding = NamedSharding(mesh, PartitionSpec(axes))
        self._batch_rows = batch_rows
        place = {"rank": jax.process_index(), "world_size": jax.process_count()}
        self._loader = loader_of(plan, batch_rows=batch_rows, **{**place, **loader_options})
        self._on_cpu = all(device.platform == "cpu" for device in mesh.devices.flat)
        self._widen = jax.jit(_widened, out_shardings=self.sharding)

    def __next__(self) -> JaxBatch:
        batch = next(self._loader)
        if self._on_cpu:
            fields = {name: self._placed(array) for name, array in fields_of(batch, FIELDS, dtype=np.int32).items()}
        else:
            fields = self._widen(*(self._placed(array) for array in _wire(batch)))
        return JaxBatch(**fields, rows=batch.rows.copy(), position=batch.position)

    def _placed(self, array: npt.NDArray[Any]) -> jax.Array:
        shape = (self._batch_rows, *array.shape[1:])
        placed: jax.Array = jax.make_array_from_process_local_data(self.sharding, array, shape)
        return placed


def _wire(batch: Batch) -> tuple[npt.NDArray[Any], ...]:
    """What is sent, in memory of its own: JAX may read it after this call, on a CPU it may even keep it."""
    return batch.tokens.copy(), batch.loss_mask.copy(), document_begins(batch)


def _widened(tokens: jax.Array, loss_mask: jax.Array, begins: jax.Array) -> dict[str, jax.Array]:
    """[B, T + 1] tokens, [B, T] mask and begins to [B, T] int32 fields; every row by itself."""
    wide = tokens.astype(jnp.int32)
    places = jnp.arange(begins.shape[1], dtype=jnp.int32)
    latest_begin = jax.lax.cummax(jnp.where(begins, places, 0), axis=1)
    return {
        "input_ids": wide[:, :-1],
        "labels": jnp.where(loss_mask, wide[:, 1:], IGNORED_LABEL),
        "position_ids": places - latest_begin,
        "document_ids": jnp.cumsum(begins, axis=1, dtype=jnp.int32),
    }
