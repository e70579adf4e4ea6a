from __future__ import annotations

import contextlib
import json
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ResumeError, StoreError
from penstock.load.torch import TorchBatch, TorchLoader
from penstock.runlog import RunLog, read_records
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, open_store, prepare
from penstock.store.mirror import Cancelled
from penstock.train import evaluate, find_latest, train, watching
from penstock.train.checkpoint import MODEL_NAME, checkpoint_folders
from penstock.train.randomness import restore_random_state, saved_random_state, seed_everything

from .conftest import TINY_SETTINGS, Train, assert_same_tensors, events, losses, saved_tensors, tiny_config

pytestmark = pytest.mark.torture(lane="E", sample=True)

NUM_STEPS = 8


@pytest.fixture
def whole_run(tmp_path: Path, run_training: Train) -> Path:
    """A run that nothing interrupted."""
    folder = tmp_path / "whole"
    assert run_training(folder).status == "completed"
    return folder


def last_checkpoint(folder: Path) -> Path:
    checkpoint = find_latest(folder)
    assert checkpoint is not None
    return checkpoint.path


def assert_equal_runs(folder: Path, whole: Path) -> None:
    assert losses(folder) == losses(whole)
    assert_same_tensors(saved_tensors(last_checkpoint(folder)), saved_tensors(last_checkpoint(whole)))


def test_stopped_after_any_step_and_resumed_is_the_same_run(
    tmp_path: Path, run_training: Train, whole_run: Path
) -> None:
    for step in range(1, NUM_STEPS):
        folder = tmp_path / f"stopped-{step}"
        stopped = run_training(folder, f"stop_after_steps={step}")
        assert (stopped.status, stopped.steps) == ("interrupted", step)
        result = run_training(folder, resume=True)
        assert (result.status, result.steps) == ("completed", NUM_STEPS)
        assert_equal_runs(folder, whole_run)


def test_a_chain_of_stops_with_other_free_settings_is_the_same_run(
    tmp_path: Path, run_training: Train, whole_run: Path
) -> None:
    folder = tmp_path / "chain"
    free = ["eval_every_steps=1", "prefetch_batches=0", "sample_tokens=9", "eval_rows=2", "checkpoint_every_steps=1"]
    results = [run_training(folder, "stop_after_steps=1", *free, resume=True) for _ in range(NUM_STEPS)]
    assert [result.status for result in results] == ["interrupted"] * (NUM_STEPS - 1) + ["completed"]
    assert_equal_runs(folder, whole_run)
    assert results[-1].tokens == sum(record["tokens"] for record in read_records(whole_run) if record["kind"] == "step")


def start_child(store_path: Path, folder: Path, step: int, action: str) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        str(Path(__file__).with_name("child.py")),
        str(store_path),
        str(folder),
        str(step),
        action,
    ]
    return subprocess.Popen([*command, *TINY_SETTINGS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(
    "step",
    [
        6,
        *(pytest.param(step, marks=pytest.mark.torture(lane="E")) for step in range(1, NUM_STEPS + 1) if step != 6),
    ],
)
def test_killed_and_resumed_is_the_same_run(
    tmp_path: Path, store_path: Path, run_training: Train, whole_run: Path, step: int
) -> None:
    folder = tmp_path / "killed"
    with start_child(store_path, folder, step, "kill") as child:
        child.communicate()
        assert child.returncode == -signal.SIGKILL
    # A thread writes while steps go on: the checkpoint of step 4 may not be there yet.
    assert [path.name for path in checkpoint_folders(folder)] in ([], ["step-00000004"] if step > 4 else [])
    result = run_training(folder, resume=True)
    assert result.status == "completed"
    assert_equal_runs(folder, whole_run)
    assert not (folder / "train.lock").exists()


def test_sigterm_saves_and_the_resumed_run_is_the_same(
    tmp_path: Path, store_path: Path, run_training: Train, whole_run: Path
) -> None:
    folder = tmp_path / "terminated"
    with start_child(store_path, folder, 3, "wait") as child:
        assert child.stdout is not None
        assert json.loads(child.stdout.readline()) == {"waiting_at": 3}
        child.send_signal(signal.SIGTERM)
        answer, _ = child.communicate("go on\n")
        assert child.returncode == 0
    assert json.loads(answer) == {"status": "interrupted", "steps": 3}
    assert run_training(folder, resume=True).status == "completed"
    assert_equal_runs(folder, whole_run)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_run_after_the_step_and_handlers_come_back(
    tmp_path: Path, run_training: Train, whole_run: Path, number: signal.Signals
) -> None:
    before = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGINT)}

    def interrupt(record: dict[str, object]) -> None:
        if record["kind"] == "step" and record["step"] == 3:
            signal.raise_signal(number)

    result = run_training(tmp_path / "run", on_progress=interrupt)
    assert (result.status, result.steps) == ("interrupted", 3)
    assert {each: signal.getsignal(each) for each in before} == before
    assert number.name in events(tmp_path / "run")[-1]
    run_training(tmp_path / "run", resume=True)
    assert_equal_runs(tmp_path / "run", whole_run)


def test_a_signal_does_not_wait_for_a_batch_that_does_not_come(
    tmp_path: Path, run_training: Train, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over a network that is slow, or down."""
    wait, batch_rows = TorchLoader.wait, tiny_config().batch_rows

    def waited(loader: TorchLoader, seconds: float) -> bool:
        if loader.position < 3 * batch_rows:
            return wait(loader, seconds)
        signal.raise_signal(signal.SIGTERM)
        return False

    with monkeypatch.context() as patched:
        patched.setattr(TorchLoader, "wait", waited)
        result = run_training(tmp_path / "run")
    assert (result.status, result.steps) == ("interrupted", 3)
    run_training(tmp_path / "run", resume=True)
    assert_equal_runs(tmp_path / "run", whole_run)


@pytest.mark.parametrize("missing", ["batch", "held-out batch"])
def test_data_that_can_not_be_had_ends_the_run_saved(
    tmp_path: Path, run_training: Train, whole_run: Path, monkeypatch: pytest.MonkeyPatch, missing: str
) -> None:
    """As when the server of a remote store goes away for longer than its reader tries."""
    following, held_out, folder = TorchLoader.__next__, watching.held_out_batches, tmp_path / "run"

    def refused(loader: TorchLoader) -> TorchBatch:
        if loader.position < 3 * tiny_config().batch_rows:
            return following(loader)
        raise StoreError("s3://gone can't be reached", hint="is it up?")

    def refused_held_out(*arguments: Any, **options: Any) -> Iterator[TorchBatch]:
        yield next(held_out(*arguments, **options))
        raise StoreError("s3://gone can't be reached", hint="is it up?")

    with monkeypatch.context() as patched:
        if missing == "batch":
            patched.setattr(TorchLoader, "__next__", refused)
        else:
            patched.setattr(watching, "held_out_batches", refused_held_out)
        with pytest.raises(StoreError, match="can't be reached"):
            run_training(folder)
    first_evaluation = next(record["step"] for record in read_records(whole_run) if record["kind"] == "evaluation")
    assert last_checkpoint(folder).name == f"step-{3 if missing == 'batch' else first_evaluation:08d}"
    run_training(folder, resume=True)
    assert_equal_runs(folder, whole_run)


def test_a_signal_does_not_wait_for_a_held_out_batch_that_does_not_come(
    tmp_path: Path, run_training: Train, whole_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batches_of_rows, folder = evaluate.batches_of_rows, tmp_path / "run"

    def held(*arguments: Any, is_cancelled: Callable[[], bool], **options: Any) -> Iterator[TorchBatch]:
        batches = batches_of_rows(*arguments, is_cancelled=is_cancelled, **options)
        if options["batch_rows"] > 1:  # the evaluation, not the look for a prompt
            yield next(batches)
            signal.raise_signal(signal.SIGTERM)
            while not is_cancelled():
                time.sleep(0.01)
            raise Cancelled
        yield from batches

    with monkeypatch.context() as patched:
        patched.setattr(evaluate, "batches_of_rows", held)
        result = run_training(folder)
    assert result.status == "interrupted"
    assert any("no evaluation" in message and "SIGTERM" in message for message in events(folder))
    run_training(folder, resume=True)
    assert_equal_runs(folder, whole_run)


def test_a_signal_during_the_last_step_leaves_only_the_evaluation(
    tmp_path: Path, run_training: Train, whole_run: Path
) -> None:
    folder = tmp_path / "run"
    result = run_training(folder, on_progress=_interrupt_at_the_end)
    assert (result.status, result.steps) == ("interrupted", NUM_STEPS)
    result = run_training(folder, resume=True)
    assert result.status == "completed"
    assert result.val_loss == run_training(whole_run, resume=True).val_loss
    assert_equal_runs(folder, whole_run)
    # Now it is known to be finished: nothing is evaluated once more.
    assert run_training(folder, resume=True).val_loss == result.val_loss
    assert "nothing to resume" in events(folder)[-1]
    assert len([each for each in read_records(folder) if each["kind"] == "evaluation"]) == 2


def test_a_kill_while_the_last_state_is_replaced_leaves_a_whole_checkpoint(
    tmp_path: Path, run_training: Train, set_before_operation: Callable[[Callable[[str, str], None] | None], None]
) -> None:
    class KilledError(BaseException):
        pass

    def kill(operation: str, path: str) -> None:
        if "/checkpoints/step-" in path:
            seen.append(operation)
            if len(seen) == number:
                raise KilledError

    folder = tmp_path / "run"
    run_training(folder, on_progress=_interrupt_at_the_end)
    last_checkpoint(folder).with_name("state.json.tmp-123-0123abcd").write_bytes(b"half of it")  # of an earlier kill
    kept, number, seen = tmp_path / "kept", 0, list[str]()
    shutil.copytree(folder, kept)
    while len(seen) >= number:  # until an operation that never comes
        number, seen = number + 1, []
        shutil.rmtree(folder)
        shutil.copytree(kept, folder)
        set_before_operation(kill)
        with contextlib.suppress(KilledError):
            run_training(folder, resume=True)
        set_before_operation(None)
        assert run_training(folder, resume=True).status == "completed"
        assert list((folder / "checkpoints").rglob("*.tmp-*")) == []
    assert number > 3


def _interrupt_at_the_end(record: dict[str, object]) -> None:
    if record["kind"] == "step" and record["step"] == NUM_STEPS:
        signal.raise_signal(signal.SIGTERM)


def test_resuming_a_finished_run_does_nothing_and_says_so(run_training: Train, whole_run: Path) -> None:
    before = losses(whole_run), last_checkpoint(whole_run).stat().st_mtime_ns
    first = next(record for record in read_records(whole_run) if record["kind"] == "step")
    result = run_training(whole_run, resume=True)
    assert (result.status, result.steps, result.first_loss) == ("completed", NUM_STEPS, first["loss"])
    assert (losses(whole_run), last_checkpoint(whole_run).stat().st_mtime_ns) == before
    assert "all its 8 steps" in events(whole_run)[-1]


def test_resuming_nothing_starts(tmp_path: Path, run_training: Train, whole_run: Path) -> None:
    run_training(tmp_path / "new", resume=True)
    assert_equal_runs(tmp_path / "new", whole_run)
    assert any("starting at step 0" in message for message in events(tmp_path / "new"))


def test_a_damaged_newest_costs_steps_not_the_run(tmp_path: Path, run_training: Train, whole_run: Path) -> None:
    folder = tmp_path / "run"
    run_training(folder, "stop_after_steps=6")
    (folder / "checkpoints" / "step-00000006" / MODEL_NAME).write_bytes(b"torn")
    told: list[dict[str, Any]] = []
    run_training(folder, resume=True, on_progress=told.append)
    assert_equal_runs(folder, whole_run)
    warnings = [record["message"] for record in told if record["kind"] == "event"]
    assert any("step-00000006/model.safetensors" in message for message in warnings)
    assert set(warnings) <= set(events(folder))


@pytest.mark.parametrize("change", ["steps=9", "learning_rate=2e-2", "model.num_layers=3", "seed=1", "batch_rows=8"])
def test_a_changed_setting_is_refused_with_both_values(tmp_path: Path, run_training: Train, change: str) -> None:
    folder = tmp_path / "run"
    run_training(folder, "stop_after_steps=2")
    key, _, value = change.partition("=")
    with pytest.raises(ResumeError) as caught:
        run_training(folder, change, resume=True)
    old = tiny_config().bound_settings()[key]
    new = tiny_config(change).bound_settings()[key]
    assert f"{key} was {old}, is {new}" in caught.value.message
    assert float(value) == new


def test_another_store_is_refused_with_both_digests(tmp_path: Path, run_training: Train, store_path: Path) -> None:
    run_training(tmp_path / "run", "stop_after_steps=2")
    chance = random.Random(1)
    (tmp_path / "texts").mkdir()
    for number in range(50):
        (tmp_path / "texts" / f"{number}.txt").write_text(" ".join(chance.choices(["other", "words", "here"], k=90)))
    source = FilesSource(name="texts", root=str(tmp_path / "texts"))
    prepare([source], tmp_path / "other", options=PrepareOptions(vocab_size=300))
    with open_store(tmp_path / "other") as other, open_store(store_path) as store, RunLog(tmp_path / "run") as log:
        with pytest.raises(ResumeError) as caught:
            train(tiny_config(), other, tmp_path / "run", log, resume=True)
        assert store.digest in caught.value.message
        assert other.digest in caught.value.message


def test_global_random_states_come_back() -> None:
    import numpy as np

    def draws() -> list[float]:
        return [random.random(), random.gauss(0, 1), float(np.random.rand()), float(torch.rand(()))]

    seed_everything(3)
    draws()
    state = json.loads(json.dumps(saved_random_state()))
    first = draws()
    assert draws() != first
    restore_random_state(state)
    assert draws() == first
