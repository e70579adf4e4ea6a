"""Our stream inside other frameworks' loaders, timed: PyTorch's DataLoader, JAX, Grain, tf.data.

Each gives the fields a model takes, inputs, labels and positions, in the framework's own arrays; `bench load` says how
much slower that is than `TorchLoader`, which needs none of them. Where there is a GPU a batch counts when it is there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.bench.loading import Timing, opened_plan

__all__ = ["load_data_loader", "load_grain", "load_jax", "load_tensorflow"]


def load_data_loader(*, timing: dict[str, Any], store: str, data_set: str) -> dict[str, Any]:
    """A DataLoader without workers over `RowDataset` (rows, put together by PyTorch) or `RowStream` (batches)."""
    from torch.utils.data import DataLoader

    from penstock.load.torch import RowDataset, RowSampler, RowStream

    wanted = Timing(**timing)
    plan = opened_plan(store, seq_len=wanted.seq_len)
    pin = wanted.device != "cpu"
    loader: Any
    if data_set == "RowDataset":
        loader = DataLoader(
            RowDataset(plan), sampler=RowSampler(plan), batch_size=wanted.batch_size, drop_last=True, pin_memory=pin
        )
    else:
        stream = RowStream(plan, batch_rows=wanted.batch_size, batched=True, rank=0, world_size=1)
        loader = DataLoader(stream, batch_size=None, pin_memory=pin)

    def batches() -> Iterator[Any]:
        for batch in loader:
            yield {name: tensor.to(wanted.device, non_blocking=True) for name, tensor in batch.items()}

    return wanted.measured(batches)


def load_jax(*, timing: dict[str, Any], store: str) -> dict[str, Any]:
    """`JaxLoader` over all of JAX's devices; a batch counts when its four fields are there."""
    import jax

    from penstock.load.jax import JaxLoader

    wanted = Timing(**timing)
    plan = opened_plan(store, seq_len=wanted.seq_len)
    with JaxLoader(plan, batch_rows=wanted.batch_size) as loader:
        passes = wanted.passes_of(loader, plan.num_rows)

        def batches() -> Iterator[Any]:
            for batch in passes():
                yield jax.block_until_ready((batch.input_ids, batch.labels, batch.position_ids, batch.document_ids))

        return {**wanted.measured(batches), "jax_devices": str(jax.devices()[0].platform)}


def load_grain(*, timing: dict[str, Any], store: str) -> dict[str, Any]:
    """`grain_pipeline` with its own threads: numpy fields, sent on by JAX where there is a GPU."""
    from penstock.load.grain import grain_pipeline

    wanted = Timing(**timing)
    pipeline = grain_pipeline(opened_plan(store, seq_len=wanted.seq_len), batch_rows=wanted.batch_size)
    if wanted.device == "cpu":
        return wanted.measured(lambda: iter(pipeline))
    import jax

    return wanted.measured(lambda: (jax.block_until_ready(jax.device_put(batch)) for batch in pipeline))


def load_tensorflow(*, timing: dict[str, Any], store: str) -> dict[str, Any]:
    """`TensorFlowLoader.dataset()`, iterated; sent on to the GPU where TensorFlow has one."""
    import tensorflow as tf

    from penstock.load.tensorflow import TensorFlowLoader

    wanted = Timing(**timing)
    loader = TensorFlowLoader(opened_plan(store, seq_len=wanted.seq_len), batch_rows=wanted.batch_size)
    dataset = loader.dataset()
    if not tf.config.list_physical_devices("GPU"):
        return wanted.measured(lambda: iter(dataset))

    def on_gpu() -> Iterator[Any]:
        for batch in dataset:
            with tf.device("/GPU:0"):
                sent = {name: tf.identity(tensor) for name, tensor in batch.items()}
            tf.test.experimental.sync_devices()
            yield sent

    return wanted.measured(on_gpu)
