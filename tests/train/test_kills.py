"""Training killed at random steps and at every file operation of its saves: what follows is the same run to the bit."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import fs
from penstock.runlog import read_records
from penstock.train import find_latest

from .conftest import Order, assert_same_tensors, losses, saved_tensors

NUM_STEPS = 12
ADAPTER_STEPS = (2, 5, 11)  # each start imports transformers and peft anew, which takes longer than the steps
SETTINGS = [f"steps={NUM_STEPS}", "checkpoint_every_steps=3", "eval_every_steps=6", "eval_rows=2", "sample_tokens=0"]


@pytest.fixture(scope="module")
def whole(order: Order, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    assert order(folder, 1, *SETTINGS)["said"][0]["status"] == "completed"
    return folder


def check_same_run(folder: Path, whole: Path) -> None:
    """Also of steps that were done twice, each record agrees."""
    expected = dict(losses(whole))
    records = [record for record in read_records(folder) if record["kind"] == "step"]
    assert [(each["step"], each["loss"]) for each in records if each["loss"] != expected[each["step"]]] == []
    assert dict(losses(folder)) == expected
    ours, theirs = find_latest(folder), find_latest(whole)
    assert ours is not None
    assert theirs is not None
    assert_same_tensors(saved_tensors(ours.path), saved_tensors(theirs.path))
    assert [path for path in folder.rglob("*") if fs.TEMPORARY_MARK in path.name or path.name == "train.lock"] == []


@pytest.mark.torture(lane="E")
def test_killed_at_random_steps(
    order: Order, whole: Path, scratch: Path, scale: Callable[..., int], torture_figures: Callable[..., None]
) -> None:
    """Chains of up to six kills, each at a random step that the run hasn't got to."""
    chance, wanted, kills, failures = random.Random(11), scale(test=20, torture=200), 0, []
    for number in range(10 * wanted):
        folder = scratch / str(number)
        step = 0
        for _ in range(chance.randint(4, 6)):
            if kills == wanted:
                break
            step = chance.randint(step + 1, NUM_STEPS)
            answer = order(folder, 1, *SETTINGS, resume=True, kill={"rank": 0, "step": step})
            if answer["exits"] == [-signal.SIGKILL]:
                kills += 1
            if step == NUM_STEPS:
                break
        assert order(folder, 1, *SETTINGS, resume=True)["said"][0]["status"] == "completed"
        try:
            check_same_run(folder, whole)
        except AssertionError as error:
            failures.append(f"run {number}: {error}")
        if kills == wanted:
            break
    torture_figures(
        lane="E", case="SIGKILL at random steps, up to six in a row: later losses bit-identical", trials=kills,
        failures=len(failures), random=True,
    )  # fmt: skip
    assert failures == []
    assert kills == wanted


@pytest.mark.torture(lane="E")
def test_killed_at_every_file_operation_of_the_saves(
    order: Order, whole: Path, scratch: Path, scale: Callable[..., int], torture_figures: Callable[..., None]
) -> None:
    """Four saves, three of them beside the steps, and what they prune; the newest complete one is gone on from."""
    settings = [*SETTINGS, "keep_checkpoints=1"]
    num_operations = order(scratch / "count", 1, *settings)["said"][0]["operations"]
    assert num_operations > 60
    count = scale(test=6, torture=num_operations)
    places = sorted({1 + round(place * (num_operations - 1) / max(1, count - 1)) for place in range(count)})
    failures, kills, met = [], 0, []
    for place in places:
        folder = scratch / str(place)
        answer = order(folder, 1, *settings, kill_operation=place)
        kills += answer["exits"] == [-signal.SIGKILL]
        found = find_latest(folder)
        met.append(found.step if found else 0)
        resumed = order(folder, 1, *settings, resume=True)
        try:
            assert resumed["said"][0]["status"] == "completed"
            check_same_run(folder, whole)
        except AssertionError as error:
            failures.append(f"operation {place}: {error}")
    torture_figures(
        lane="E", case="SIGKILL before each file operation of a run's saves: later losses bit-identical",
        trials=kills, failures=len(failures), exhaustive=len(places) == num_operations,
    )  # fmt: skip
    assert failures == []
    assert kills >= len(places) - 1  # a write that is still waiting for its turn may leave out an operation
    assert met == sorted(met)  # a whole one is never lost for a newer one
    assert (met[0], met[-1]) == (0, NUM_STEPS)


@pytest.mark.torture(lane="E", sample=False)
def test_killed_runs_of_an_adapter_go_on_too(
    order: Order, scratch: Path, saved_model: Callable[[str], Path], torture_figures: Callable[..., None]
) -> None:
    """A LoRA adapter with dropout beside frozen weights: the random state is part of what must come back."""
    sizes = [f"model.{name}=null" for name in ("num_layers", "num_heads", "hidden_size", "feed_forward_size")]
    adapter = ["model.adapter.kind=lora", "model.adapter.rank=4", "model.adapter.dropout=0.1"]
    settings = [*SETTINGS, *sizes, f"model.pretrained={saved_model('llama')}", *adapter]
    assert order(scratch / "whole", 1, *settings)["said"][0]["status"] == "completed"
    failures = []
    for step in ADAPTER_STEPS:
        folder = scratch / str(step)
        assert order(folder, 1, *settings, kill={"rank": 0, "step": step})["exits"] == [-signal.SIGKILL]
        assert order(folder, 1, *settings, resume=True)["said"][0]["status"] == "completed"
        try:
            check_same_run(folder, scratch / "whole")
        except AssertionError as error:
            failures.append(f"step {step}: {error}")
    torture_figures(
        lane="E", case="SIGKILL of an adapter's training: later losses bit-identical",
        trials=len(ADAPTER_STEPS), failures=len(failures),
    )  # fmt: skip
    assert failures == []
