"""JAX, Grain and TensorFlow give the stream that PyTorch and the plain loader give, and go on from one another."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.load import Loader
from penstock.load.fields import fields_of
from penstock.load.mixed import MixedLoader
from penstock.pack import plan_concat

from .conftest import Sample
from .frameworks import BATCH_ROWS, FIELDS, NUM_BATCHES, SEED, SEQ_LEN, STOP, mixed_state, mixture_of, stream

Samples = Callable[[str], Sample]
CHILD = Path(__file__).with_name("frameworks.py")


def read_with(framework: str, store: Path, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """The arrays and the JSON of a child process."""
    if importlib.util.find_spec(framework) is None:
        pytest.skip(f"{framework} isn't installed")
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=4",
        "JAX_PLATFORMS": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    done = subprocess.run(
        [sys.executable, str(CHILD), framework, str(store), str(folder / "batches.npz")],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    with np.load(folder / "batches.npz") as arrays:
        return dict(arrays), json.loads(done.stdout.splitlines()[-1])


def expected(sample: Sample) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """All batches of the plain loader as wide arrays, and its state before each."""
    plan = plan_concat(sample.store, split="val", seq_len=SEQ_LEN)
    with Loader(plan, batch_rows=BATCH_ROWS, prefetch_batches=0, **stream(plan)) as loader:
        states, made = [], []
        for _ in range(NUM_BATCHES):
            states.append(loader.state_dict())
            made.append(fields_of(next(loader), [*FIELDS, "row"]))
    assert 2 * plan.num_rows < NUM_BATCHES * BATCH_ROWS  # several passes
    return {name: np.concatenate([batch[name] for batch in made]) for name in made[0]}, states


def assert_streams_equal(arrays: dict[str, Any], wanted: dict[str, Any]) -> None:
    for name in [*FIELDS, "row"]:
        np.testing.assert_array_equal(arrays[name], wanted[name], err_msg=name)


def assert_mixtures_equal(told: dict[str, Any], one: Sample) -> None:
    """A mixture's stream goes on in the framework, from a state with changed weights, as in `MixedLoader`."""
    with MixedLoader(mixture_of(one.store, 0.5), batch_rows=BATCH_ROWS, seed=SEED) as loader:
        loader.load_state_dict(mixed_state(one.store))
        assert told["mixed"] == [next(loader).tokens[:, :-1].tolist() for _ in range(STOP)]
        state = loader.state_dict()
    assert len(state["stages"]) == 2
    assert {name: told["mixed_state"][name] for name in state} == state


def test_jax_on_a_mesh(sample: Samples, tmp_path: Path) -> None:
    one = sample("parts")
    wanted, states = expected(one)
    arrays, told = read_with("jax", one.path, tmp_path)
    assert_streams_equal(arrays, wanted)
    assert told["state"] == states[STOP]
    # Two by two devices: rows are cut in two along "data" and copied along "model"; four on one axis: cut in four.
    assert told["shards"] == [[BATCH_ROWS // 2, SEQ_LEN]] * 4
    assert sorted(told["devices"]) == [0, 1, 2, 3]
    assert "data" in told["spec"]
    assert told["shards_of_four"] == [[BATCH_ROWS // 4, SEQ_LEN]] * 4
    assert told["resumed"] == wanted["input_ids"][STOP * BATCH_ROWS : (STOP + 1) * BATCH_ROWS].tolist()
    assert f"saved {SEED + 1}" in told["refused"]
    assert f"here {SEED}" in told["refused"]
    assert_mixtures_equal(told, one)
    assert "6 rows" in told["too_few_rows"]
    assert "'rows'" in told["no_axis"]


def test_grain(sample: Samples, tmp_path: Path) -> None:
    one = sample("parts")
    wanted, states = expected(one)
    arrays, told = read_with("grain", one.path, tmp_path)
    assert_streams_equal(arrays, wanted)
    rows = wanted["row"].reshape(-1, BATCH_ROWS).tolist()
    assert told["resumed"] == rows[: len(told["resumed"])]
    assert told["from_checkpoint"] == rows[STOP]
    assert told["after_restore"] == (STOP + 1) * BATCH_ROWS
    assert {name: told["state"][name] for name in states[STOP]} == states[STOP]
    assert [row for half in told["halves"] for row in half] == rows[STOP][:4]
    num_rows = plan_concat(one.store, split="val", seq_len=SEQ_LEN).num_rows
    assert [row for batch in told["one_pass"] for row in batch] == wanted["row"][:num_rows].tolist()
    assert_mixtures_equal(told, one)
    assert "mixture" in told["rows_of_a_mixture"]
    assert sorted(told["data_loader_rows"]) == list(range(num_rows))
    assert told["travelled"]
    assert f"saved {SEED + 1}" in told["refused"]
    assert "batch_rows" in told["refused_batch_size"]
    assert len(json.dumps(told["state"])) < 4096


def test_tensorflow(sample: Samples, tmp_path: Path) -> None:
    one = sample("parts")
    wanted, states = expected(one)
    arrays, told = read_with("tensorflow", one.path, tmp_path)
    assert_streams_equal(arrays, wanted)
    assert told["state"] == states[STOP]
    assert told["resumed"] == wanted["row"].reshape(-1, BATCH_ROWS)[1:-2:16].tolist()
    assert_mixtures_equal(told, one)
    assert told["state_after_one"] == BATCH_ROWS
    assert told["shape"] == [BATCH_ROWS, SEQ_LEN]
    assert f"here {SEED}" in told["refused"]
