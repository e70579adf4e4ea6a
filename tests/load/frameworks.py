"""Reads a stream with one framework, in a process of its own: `python frameworks.py NAME STORE OUT`.

JAX and TensorFlow start threads when imported, which a test process that forks workers must not have. Writes OUT.npz
(the batches) and prints one JSON object (states, shardings, refusals).
"""

from __future__ import annotations

import json
import pickle
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import PenstockError
from penstock.load import Loader
from penstock.load.mixed import MixedLoader
from penstock.load.transforms import RandomCrop
from penstock.pack import Plan, plan_concat
from penstock.pack.mixture import Mixture, make_mixture
from penstock.store import Store, open_store

SEQ_LEN, BATCH_ROWS, SEED, STOP, NUM_BATCHES = 16, 8, 3, 5, 40
FIELDS = ("input_ids", "labels", "position_ids", "document_ids")


def stream(plan: Plan) -> dict[str, Any]:
    return {"seed": SEED, "transforms": [RandomCrop.for_plan(plan, rate=0.3)]}


def mixture_of(store: Store, weight: float) -> Mixture:
    return make_mixture({"parts": store}, [f"memory/0*={weight}"], split="val", seq_len=SEQ_LEN)


def mixed_state(store: Store) -> dict[str, Any]:
    """Of a mixture after some batches and a change of weights."""
    with MixedLoader(mixture_of(store, 3), batch_rows=BATCH_ROWS, seed=SEED) as loader:
        for _ in range(STOP):
            next(loader)
        loader.change_weights({name: 1 + weight for name, weight in loader.weights.items() if weight > 1})
        return loader.state_dict()


def refusal(load: Any) -> str:
    try:
        load()
    except PenstockError as error:
        return error.message
    return ""


def other_state(plan: Plan) -> dict[str, Any]:
    return Loader(plan, batch_rows=1, seed=SEED + 1, prefetch_batches=0).state_dict()


def read_jax(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import jax
    from jax.sharding import Mesh

    from penstock.load.jax import JaxLoader

    mesh = Mesh(np.array(jax.devices()).reshape(2, 2), ("data", "model"))
    batches, told = [], {}
    with JaxLoader(plan, batch_rows=BATCH_ROWS, mesh=mesh, **stream(plan)) as loader:
        for number in range(NUM_BATCHES):
            if number == STOP:
                told["state"] = loader.state_dict()
            batch = next(loader)
            batches.append({name: np.asarray(getattr(batch, name)) for name in FIELDS} | {"row": batch.rows})
        told["devices"] = [shard.device.id for shard in batch.labels.addressable_shards]
        told["shards"] = [list(shard.data.shape) for shard in batch.labels.addressable_shards]
        told["spec"] = {str(getattr(batch, name).sharding.spec) for name in FIELDS}.pop()
        told["refused"] = refusal(lambda: loader.load_state_dict(other_state(plan)))
    with JaxLoader(plan, batch_rows=BATCH_ROWS, **stream(plan)) as again:  # all four devices on one axis
        again.load_state_dict(told["state"])
        batch = next(again)
        told["shards_of_four"] = [list(shard.data.shape) for shard in batch.labels.addressable_shards]
        told["resumed"] = np.asarray(batch.input_ids).tolist()
    with JaxLoader(mixture_of(plan.store, 0.5), batch_rows=BATCH_ROWS, seed=SEED) as mixed:
        mixed.load_state_dict(mixed_state(plan.store))
        told["mixed"] = [np.asarray(next(mixed).input_ids).tolist() for _ in range(STOP)]
        told["mixed_state"] = mixed.state_dict()
    told["too_few_rows"] = refusal(lambda: JaxLoader(plan, batch_rows=6))
    told["no_axis"] = refusal(lambda: JaxLoader(plan, batch_rows=8, mesh=mesh, axis="rows"))
    return batches, told


def read_grain(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    import grain

    from penstock.load.grain import RowSource, grain_pipeline

    options = {"batch_rows": BATCH_ROWS, "fields": [*FIELDS, "row"], **stream(plan)}
    told: dict[str, Any] = {"resumed": []}
    iterator = iter(grain_pipeline(plan, **options))
    batches, states = [], []
    for _ in range(NUM_BATCHES):
        states.append(json.loads(json.dumps(iterator.get_state())))
        batches.append(next(iterator))
    told["state"] = states[STOP]
    for number, state in enumerate(states[:-2]):  # restored at every state, by Grain
        again = iter(grain_pipeline(plan, num_threads=number % 3, **options))
        again.set_state(state)
        told["resumed"].append(next(again)["row"].tolist())
        if number == STOP:
            told["after_restore"] = again.get_state()["position"]
    halves = []  # begun from the state with another batch size, by two processes
    for rank in range(2):
        other = {**options, "batch_rows": 4, "rank": rank, "world_size": 2}
        halves.append(next(iter(grain_pipeline(plan, state=states[STOP], **other)))["row"].tolist())
    told["halves"] = halves
    told["one_pass"] = [batch["row"].tolist() for batch in grain_pipeline(plan, passes=1, **options)]
    told["refused"] = refusal(
        lambda: iter(grain_pipeline(plan, **options)).set_state(
            {**states[0], "identity": other_state(plan)["identity"]}
        )
    )
    told["refused_batch_size"] = refusal(
        lambda: iter(grain_pipeline(plan, **{**options, "batch_rows": 4})).set_state(states[2])
    )
    mixed_options = {"batch_rows": BATCH_ROWS, "seed": SEED, "fields": ["input_ids"]}
    mixed = iter(grain_pipeline(mixture_of(plan.store, 0.5), state=mixed_state(plan.store), **mixed_options))
    told["mixed"] = [next(mixed)["input_ids"].tolist() for _ in range(STOP)]
    told["mixed_state"] = mixed.get_state()
    told["rows_of_a_mixture"] = refusal(lambda: RowSource(mixture_of(plan.store, 0.5)))
    checkpoint = grain.checkpoint.CheckpointHandler()
    from etils import epath

    with tempfile.TemporaryDirectory() as folder:  # Grain's own file
        saved = iter(grain_pipeline(plan, **options))
        for _ in range(STOP):
            next(saved)
        checkpoint.save(epath.Path(folder), saved)
        fresh = checkpoint.restore(epath.Path(folder), iter(grain_pipeline(plan, **options)))
        told["from_checkpoint"] = next(fresh)["row"].tolist()
    source = RowSource(plan, fields=["row", "input_ids"])
    loader = grain.DataLoader(
        data_source=source,
        sampler=grain.samplers.IndexSampler(len(source), shard_options=grain.sharding.NoSharding(), num_epochs=1),
        operations=[grain.transforms.Batch(batch_size=4)],
    )
    told["data_loader_rows"] = [row for batch in loader for row in batch["row"].tolist()]
    there = pickle.loads(pickle.dumps(source))  # what Grain does for its worker processes
    told["travelled"] = bool(np.array_equal(there[3]["input_ids"], source[3]["input_ids"]))
    return batches, told


def read_tensorflow(plan: Plan) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    from penstock.load.tensorflow import TensorFlowLoader

    options = {"batch_rows": BATCH_ROWS, "fields": [*FIELDS, "row"], "dtype": np.int32, **stream(plan)}
    loader = TensorFlowLoader(plan, **options)
    told: dict[str, Any] = {"resumed": []}
    batches, states = [], []
    for _ in range(NUM_BATCHES):
        states.append(loader.state_dict())
        batches.append({name: tensor.numpy() for name, tensor in next(loader).items()})
    told["state"] = states[STOP]
    for state in states[1:-2:16]:
        again = TensorFlowLoader(plan, **options)
        again.load_state_dict(state)
        told["resumed"].append(next(again)["row"].numpy().tolist())
    mixed = TensorFlowLoader(mixture_of(plan.store, 0.5), batch_rows=BATCH_ROWS, seed=SEED)
    mixed.load_state_dict(mixed_state(plan.store))
    told["mixed"] = [next(mixed)["input_ids"].numpy().tolist() for _ in range(STOP)]
    told["mixed_state"] = mixed.state_dict()
    first = next(iter(TensorFlowLoader(plan, **options).dataset()))
    told["state_after_one"] = loader.state_after(first)["position"]
    told["shape"] = list(loader.dataset().element_spec["input_ids"].shape)
    told["refused"] = refusal(lambda: loader.load_state_dict(other_state(plan)))
    return batches, told


def main(name: str, store: str, out: str) -> None:
    readers = {"jax": read_jax, "grain": read_grain, "tensorflow": read_tensorflow}
    with open_store(store) as opened:
        batches, told = readers[name](plan_concat(opened, split="val", seq_len=SEQ_LEN))
    np.savez(Path(out), **{field: np.concatenate([batch[field] for batch in batches]) for field in [*FIELDS, "row"]})
    print(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
