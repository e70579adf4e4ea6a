"""Checkpoints written while training goes on, and steps repeated in smaller pieces when memory is short."""

from __future__ import annotations

import errno
import json
import math
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import DiskError, TrainingError
from penstock.hashing import canonical_json
from penstock.report import build_manifest
from penstock.runlog import read_records
from penstock.train import find_latest
from penstock.train.checkpoint import checkpoint_folders, host_copies, save_checkpoint
from penstock.train.model import Body
from penstock.train.start import Progress

from .conftest import Train, assert_same_tensors, events, losses, saved_tensors

pytestmark = pytest.mark.torture(lane="E", sample=True)

Seam = Callable[[Callable[[str, str], None] | None], None]
EVERY_STEP = ["checkpoint_every_steps=1", "keep_checkpoints=9", "eval_every_steps=8"]


def newest(folder: Path) -> Path:
    checkpoint = find_latest(folder)
    assert checkpoint is not None
    return checkpoint.path


def test_what_is_written_by_a_thread_is_the_state_of_its_step(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path / "beside", *EVERY_STEP)
    run_training(tmp_path / "between", *EVERY_STEP, "async_checkpoints=false")
    assert losses(tmp_path / "beside") == losses(tmp_path / "between")
    folders = [checkpoint_folders(tmp_path / name) for name in ("beside", "between")]
    assert [len(each) for each in folders] == [8, 8]
    for beside, between in zip(*folders, strict=True):
        assert_same_tensors(saved_tensors(beside), saved_tensors(between))


def test_training_goes_on_during_a_write_and_the_next_save_waits(
    tmp_path: Path, run_training: Train, set_before_operation: Seam
) -> None:
    """The writer is held until two more steps were done; the save after them must not overtake it."""
    steps_done, writers = threading.Semaphore(0), set()

    def hold(operation: str, path: str) -> None:
        if "checkpoints" in path:
            writers.add(threading.current_thread().name)
        if operation == "create" and "step-00000002" in path and "model.safetensors" in path:
            for _ in range(2):
                assert steps_done.acquire(timeout=30)

    def count(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] > 2:
            steps_done.release()

    set_before_operation(hold)
    run_training(tmp_path, "checkpoint_every_steps=2", "keep_checkpoints=9", "eval_every_steps=8", on_progress=count)
    assert writers == {"penstock-save"}
    records = read_records(tmp_path)
    saves = [record for record in records if record["kind"] == "checkpoint"]
    assert [record["step"] for record in saves] == [2, 4, 6, 8]
    order = [(record["kind"], record["step"]) for record in records if record["kind"] in ("step", "checkpoint")]
    assert order.index(("checkpoint", 2)) > order.index(("step", 4))
    assert all(record["seconds"] > 0 and record["waited_seconds"] >= 0 for record in saves)
    assert saves[0]["waited_seconds"] < saves[0]["seconds"]


@pytest.mark.parametrize("error_number", [errno.ENOSPC, errno.EIO])
def test_a_disk_that_refuses_a_thread_costs_a_checkpoint_not_the_run(
    tmp_path: Path, run_training: Train, set_before_operation: Seam, error_number: int
) -> None:
    def refuse(operation: str, path: str) -> None:
        if operation == "write" and "step-00000004" in path:
            raise OSError(error_number, os.strerror(error_number), path)

    set_before_operation(refuse)
    assert run_training(tmp_path).status == "completed"
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-00000008"]
    assert any("checkpoint of step 4 not saved, training goes on" in message for message in events(tmp_path))


def test_the_last_checkpoint_must_be_written(tmp_path: Path, run_training: Train, set_before_operation: Seam) -> None:
    def refuse(operation: str, path: str) -> None:
        if operation == "write" and "step-00000008" in path:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), path)

    set_before_operation(refuse)
    with pytest.raises(DiskError, match="step-00000008"):
        run_training(tmp_path)
    set_before_operation(None)
    assert [path.name for path in checkpoint_folders(tmp_path)] == ["step-00000004"]
    assert run_training(tmp_path, resume=True).status == "completed"


def test_a_run_that_fails_leaves_no_write_behind_it(
    tmp_path: Path, run_training: Train, set_before_operation: Seam
) -> None:
    class EndedError(Exception):
        pass

    def slow(operation: str, path: str) -> None:
        if operation == "fsync" and "model.safetensors" in path:
            time.sleep(0.2)

    def fail(record: dict[str, Any]) -> None:
        if record["kind"] == "step" and record["step"] == 5:
            raise EndedError

    set_before_operation(slow)
    with pytest.raises(EndedError):
        run_training(tmp_path, on_progress=fail)
    assert not any(thread.name == "penstock-save" for thread in threading.enumerate())
    assert newest(tmp_path).name == "step-00000004"
    assert not (tmp_path / "train.lock").exists()


def test_sigterm_during_a_write_ends_the_run_within_seconds(
    tmp_path: Path, run_training: Train, set_before_operation: Seam
) -> None:
    """The write is finished, the step too, and its state saved."""
    run_training(tmp_path / "whole")
    sent: list[float] = []

    def interrupt(operation: str, path: str) -> None:
        if operation == "fsync" and "step-00000004" in path and not sent:
            sent.append(time.monotonic())
            os.kill(os.getpid(), signal.SIGTERM)

    set_before_operation(interrupt)
    result = run_training(tmp_path / "stopped")
    assert time.monotonic() - sent[0] < 5
    set_before_operation(None)
    assert result.status == "interrupted"
    assert newest(tmp_path / "stopped").name == f"step-{result.steps:08d}"
    assert (tmp_path / "stopped" / "checkpoints" / "step-00000004").is_dir()
    run_training(tmp_path / "stopped", resume=True)
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")


def test_host_copies_stay_as_they_are_and_keep_their_memory() -> None:
    tensors = {"a": torch.ones(3), "b": torch.zeros((), dtype=torch.int64)}
    buffers: dict[str, torch.Tensor] = {}
    first = host_copies(tensors, buffers)
    addresses = {name: tensor.data_ptr() for name, tensor in first.items()}
    tensors["a"].fill_(7.0)
    assert first["a"].tolist() == [1.0, 1.0, 1.0]
    second = host_copies({"a": tensors["a"]}, buffers)
    assert second["a"].tolist() == [7.0, 7.0, 7.0]
    assert second["a"].data_ptr() == addresses["a"]
    assert list(buffers) == ["a"]
    assert host_copies({"a": torch.ones(2)}, buffers)["a"].tolist() == [1.0, 1.0]


def test_protected_checkpoints_are_never_pruned(tmp_path: Path) -> None:
    from penstock.train.checkpoint import prune_checkpoints

    for step in (1, 2, 3, 4, 5):
        saved = save_checkpoint(tmp_path, step=step, model_tensors={"a": torch.ones(1)}, optimizer_tensors={}, state={})
        prune_checkpoints(tmp_path, keep=2, verified=saved, protected={"step-00000002"})
    assert [path.name[-1] for path in checkpoint_folders(tmp_path)] == ["5", "4", "2"]


@pytest.fixture
def most_rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`most_rows(1)`: from now on models have no memory for more rows at once."""

    def limit(most: int) -> None:
        forward = Body.forward

        def limited(self: Body, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
            if len(inputs) > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB\nand so on")
            return forward(self, inputs, *more)

        monkeypatch.setattr(Body, "forward", limited)

    return limit


def test_out_of_memory_repeats_the_step_in_smaller_pieces(
    tmp_path: Path, run_training: Train, most_rows: Callable[[int], None]
) -> None:
    """Every row is seen once and in order, and the run is that of the small micro-batch to the last bit: the failed
    attempts, all of the first step, leave nothing behind."""
    run_training(tmp_path / "small", "micro_batch_rows=1")
    most_rows(1)
    run_training(tmp_path / "short", "micro_batch_rows=4")
    assert losses(tmp_path / "short") == losses(tmp_path / "small")
    assert_same_tensors(saved_tensors(newest(tmp_path / "short")), saved_tensors(newest(tmp_path / "small")))
    positions = [
        [record["position"] for record in read_records(tmp_path / name) if record["kind"] == "step"]
        for name in ("small", "short")
    ]
    assert positions[0] == positions[1]
    said = [message for message in events(tmp_path / "short") if "out of memory" in message]
    assert [("with 4 rows" in message, "with 2 rows" in message) for message in said] == [(True, False), (False, True)]
    # What the manifest and the page say is what was used.
    sizes = build_manifest(read_records(tmp_path / "short"))["training_parameters"]
    assert (sizes["batch_size"], sizes["gradient_accumulation_steps"]) == (1, 4)


def test_memory_that_runs_out_later_costs_nothing_and_a_resume_knows(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At step 4 the second micro-batch fails, with gradients of the first one there already."""
    run_training(tmp_path / "whole")
    forward, calls = Body.forward, [0]

    def limited(self: Body, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
        calls[0] += self.training
        if calls[0] == 8 and len(inputs) == 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return forward(self, inputs, *more)

    monkeypatch.setattr(Body, "forward", limited)
    run_training(tmp_path / "short", "stop_after_steps=5")
    monkeypatch.undo()
    run_training(tmp_path / "short", resume=True)
    whole, short = (dict(losses(tmp_path / name)) for name in ("whole", "short"))
    assert [whole[step] for step in (1, 2, 3)] == [short[step] for step in (1, 2, 3)]
    # From then on sums have four pieces in place of two: equal but for the rounding of float32.
    assert list(short.values()) == pytest.approx(list(whole.values()), abs=1e-5)
    choices = [record for record in read_records(tmp_path / "short") if record.get("name") == "micro_batch_rows"]
    assert [record["value"] for record in choices] == [2, 1, 1]  # as chosen, as used from step 4 on, as resumed with


def test_one_row_that_is_too_much_ends_the_run_with_a_hint(
    tmp_path: Path, run_training: Train, most_rows: Callable[[int], None]
) -> None:
    most_rows(0)
    with pytest.raises(TrainingError, match="1 rows of 32 tokens") as caught:
        run_training(tmp_path)
    assert "activation_checkpointing" in caught.value.hint
    assert "and so on" not in caught.value.message


def test_no_memory_for_the_optimizers_state_is_found_before_any_update(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.train import optimizer

    run_training(tmp_path / "small", "micro_batch_rows=1")
    make, calls = optimizer._new_state, [0]

    def failing(*arguments: Any) -> dict[str, Any]:
        calls[0] += 1
        if calls[0] == 5:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make(*arguments)

    monkeypatch.setattr(optimizer, "_new_state", failing)
    run_training(tmp_path / "short", "micro_batch_rows=2")
    assert losses(tmp_path / "short") == losses(tmp_path / "small")


def test_a_held_out_loss_that_is_not_finite_does_not_keep_a_run_from_being_saved() -> None:
    progress = Progress(step=3)
    progress.count_evaluation(loss=math.nan, bits_per_byte=math.inf, min_delta=0.0)
    saved = json.loads(canonical_json(progress.as_state()))
    assert Progress(**saved) == replace(progress, val_loss=None, val_bits_per_byte=None)
