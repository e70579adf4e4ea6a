"""Two real processes (gloo) train one model: losses as of one process, worlds of other sizes, ranks that end."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from penstock import fs
from penstock.errors import ConfigError
from penstock.runlog import read_records
from penstock.train import find_latest
from penstock.train.checkpoint import SHARD_NAME
from penstock.train.distributed import World, _buckets, chosen_parallel, world_of_environment

from .conftest import Order, events, losses

pytestmark = pytest.mark.torture(lane="E", sample=True)

# float32 sums over two halves, in another order than over the whole.
TOLERANCE = 1e-5

IN_TORTURE_ONLY = pytest.mark.torture(lane="E", sample=False)


@pytest.fixture(scope="module")
def alone(order: Order, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run of one process that all others must agree with."""
    folder = tmp_path_factory.mktemp("alone") / "run"
    assert order(folder, 1)["said"][0]["status"] == "completed"
    return folder


def figures(folder: Path) -> dict[str, list[float]]:
    """Losses and norms of steps and evaluations, in order; tokens and positions, which must agree exactly."""
    records = read_records(folder)
    steps = {record["step"]: record for record in records if record["kind"] == "step"}
    tried = {record["step"]: record for record in records if record["kind"] == "evaluation"}
    return {
        "close": [value for step in steps.values() for value in (step["loss"], step["grad_norm"])]
        + [value for each in tried.values() for value in (each["loss"], each["bits_per_byte"])],
        "equal": [value for step in steps.values() for value in (step["step"], step["tokens"], step["position"])]
        + [each["tokens"] for each in tried.values()],
    }


def assert_agree(folder: Path, alone: Path) -> None:
    found, expected = figures(folder), figures(alone)
    assert found["equal"] == expected["equal"]
    assert found["close"] == pytest.approx(expected["close"], abs=TOLERANCE)


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_compute_what_one_does(order: Order, alone: Path, tmp_path: Path, parallel: str) -> None:
    answer = order(tmp_path, 2, f"parallel={parallel}")
    assert answer["exits"] == [0, 0]
    first, second = answer["said"]
    assert first == second
    assert first["status"] == "completed"
    assert_agree(tmp_path, alone)
    choices = {each["name"]: each["value"] for each in read_records(tmp_path) if each["kind"] == "choice"}
    assert (choices["parallel"], choices["world_size"]) == (parallel, 2)
    assert choices["gradient_accumulation_steps"] == 2  # of four rows a process has two, and takes one at a time
    checkpoint = find_latest(tmp_path)
    assert checkpoint is not None
    is_sharded = all(SHARD_NAME.fullmatch(name) for name in checkpoint.state["files"])
    assert is_sharded == (parallel == "fsdp")
    assert len(checkpoint.state["files"]) == 2
    assert {path.suffix for path in checkpoint.path.iterdir()} == {".safetensors", ".json"}  # nothing pickled
    names = [name for file in checkpoint.state["files"] for name in tensor_names(checkpoint.path / file)]
    assert names
    assert not any("_orig_mod." in name or "module." in name for name in names)


def tensor_names(path: Path) -> list[str]:
    with safe_open(path, framework="pt") as file:
        return list(file.keys())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ((2, "fsdp"), (1, "auto")),
        ((1, "auto"), (2, "fsdp")),
        pytest.param((2, "fsdp"), (2, "ddp"), marks=IN_TORTURE_ONLY),
        pytest.param((2, "ddp"), (1, "auto"), marks=IN_TORTURE_ONLY),
        pytest.param((1, "auto"), (2, "ddp"), marks=IN_TORTURE_ONLY),
    ],
)
def test_a_run_goes_on_in_a_world_of_another_size(
    order: Order, alone: Path, tmp_path: Path, before: tuple[int, str], after: tuple[int, str]
) -> None:
    stopped = order(tmp_path, before[0], f"parallel={before[1]}", "stop_after_steps=5")
    assert [said["status"] for said in stopped["said"]] == ["interrupted"] * before[0]
    resumed = order(tmp_path, after[0], f"parallel={after[1]}", resume=True)
    assert [said["status"] for said in resumed["said"]] == ["completed"] * after[0]
    assert_agree(tmp_path, alone)


@pytest.mark.parametrize("parallel", [pytest.param("ddp", marks=IN_TORTURE_ONLY), "fsdp"])
def test_killed_and_resumed_in_the_same_world_is_bit_identical(order: Order, tmp_path: Path, parallel: str) -> None:
    order(tmp_path / "whole", 2, f"parallel={parallel}")
    killed = order(tmp_path / "killed", 2, f"parallel={parallel}", kill={"rank": 1, "step": 6})
    assert killed["exits"] == [0, -signal.SIGKILL]
    assert killed["said"][0]["error"] == "WorkerDiedError"
    assert "lost another rank" in killed["said"][0]["message"]
    assert order(tmp_path / "killed", 2, f"parallel={parallel}", resume=True)["exits"] == [0, 0]
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    assert [path for path in tmp_path.rglob("*") if fs.TEMPORARY_MARK in path.name or path.name == "train.lock"] == []


def test_a_signal_to_one_rank_stops_all_after_the_same_step(order: Order, alone: Path, tmp_path: Path) -> None:
    answer = order(tmp_path, 2, stop={"rank": 1, "step": 3})
    assert [(said["status"], said["steps"]) for said in answer["said"]] == [("interrupted", 3)] * 2
    order(tmp_path, 1, resume=True)
    assert_agree(tmp_path, alone)


def test_memory_that_is_short_on_one_rank_makes_all_take_smaller_pieces(
    order: Order, alone: Path, tmp_path: Path
) -> None:
    answer = order(tmp_path, 2, "micro_batch_rows=2", memory={"rank": 1, "rows": 1})
    assert [said["status"] for said in answer["said"]] == ["completed"] * 2
    assert_agree(tmp_path, alone)
    assert sum("another rank ran out of memory" in message for message in events(tmp_path)) == 1


def test_an_optimizer_that_cannot_be_spread_is_refused_when_resuming(order: Order, tmp_path: Path) -> None:
    order(tmp_path, 1, "optimizer=adamw-bf16", "stop_after_steps=1")
    answer = order(tmp_path, 2, "optimizer=adamw-bf16", "parallel=fsdp", resume=True)
    assert answer["said"][0]["error"] == "ResumeError"
    assert "adamw-bf16" in answer["said"][0]["message"]


def test_an_error_of_rank_0_is_told_and_ends_the_others(order: Order, alone: Path) -> None:
    before = losses(alone)
    answer = order(alone, 2)  # holds a run already, and resuming wasn't asked for
    assert [said["error"] for said in answer["said"]] == ["ConfigError", "TrainingError"]
    assert losses(alone) == before


def test_torchruns_variables_are_read_and_junk_is_refused() -> None:
    assert world_of_environment({}) == World()
    found = world_of_environment({"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert (found.rank, found.size, found.local_rank, found.is_main) == (3, 4, 1, False)
    for junk in ({"RANK": "x"}, {"RANK": "-1"}, {"RANK": "4"}, {"LOCAL_RANK": ""}):
        with pytest.raises(ConfigError):
            world_of_environment({"RANK": "0", "WORLD_SIZE": "4", "LOCAL_RANK": "0", **junk})


def test_how_a_model_is_held_follows_from_its_size_and_the_gpus() -> None:
    def chosen(wanted: str, *, size: int = 2, parameters: int = 10**9, memory: int | None = 80 * 2**30) -> str:
        return chosen_parallel(wanted, size=size, num_parameters=parameters, gpu_memory_bytes=memory)[0]

    assert chosen("auto") == "ddp"
    assert chosen("auto", parameters=4 * 10**9) == "fsdp"
    assert chosen("auto", parameters=4 * 10**9, memory=None) == "ddp"
    assert chosen("fsdp") == "fsdp"
    assert [chosen(wanted, size=1) for wanted in ("auto", "none", "ddp", "fsdp")] == ["none"] * 4
    with pytest.raises(ConfigError, match="2 processes"):
        chosen("none")


def test_gradients_travel_in_pieces_of_one_type() -> None:
    tensors = [torch.zeros(3 * 2**20), torch.zeros(2**23, dtype=torch.bfloat16), torch.zeros(9 * 2**20), torch.zeros(5)]
    assert [[len(each) for each in bucket] for bucket in _buckets(tensors)] == [
        [3 * 2**20, 9 * 2**20],
        [5],
        [2**23],
    ]


@pytest.mark.parametrize("tied", ["true", "false"])
def test_a_run_with_the_chunked_loss_goes_on_where_parameters_are_spread(
    order: Order, tmp_path: Path, tied: str
) -> None:
    settings = ("loss_kernel=chunked", f"model.tie_embeddings={tied}")
    order(tmp_path / "alone", 1, *settings)
    order(tmp_path / "spread", 1, *settings, "stop_after_steps=2")
    resumed = order(tmp_path / "spread", 2, *settings, "parallel=fsdp", resume=True)
    assert [said.get("status") for said in resumed["said"]] == ["completed"] * 2
    assert_agree(tmp_path / "spread", tmp_path / "alone")
