"""The host a step ahead of the device. A CPU has nothing to gain from it, but computes the same: here it is made to."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import TrainingError
from penstock.runlog import read_records
from penstock.train import stepping
from penstock.train.callbacks import Callback
from penstock.train.checkpoint import find_latest
from penstock.train.run import Run

from .conftest import Train, assert_same_tensors, events, losses, saved_tensors
from .test_loop import not_finite_at


@pytest.fixture
def queued_ahead(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Lets every run go ahead; the steps that were queued before the one before them was read."""
    ahead: list[int] = []
    queue = stepping.Stepper._queue

    def noted(self: stepping.Stepper, number: int) -> Any:
        queued = queue(self, number)
        if self._run.loader.position > self.position + self._run.config.batch_rows:
            ahead.append(number + 1)
        return queued

    monkeypatch.setattr(stepping, "can_run_ahead", lambda run: True)
    monkeypatch.setattr(stepping.Stepper, "_queue", noted)
    return ahead


def tensors(folder: Path) -> dict[str, Any]:
    newest = find_latest(folder)
    assert newest is not None
    return saved_tensors(newest.path)


def positions(folder: Path) -> list[int]:
    return [record["position"] for record in read_records(folder) if record["kind"] == "step"]


def test_a_run_ahead_is_the_same_run(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch, queued_ahead: list[int]
) -> None:
    run_training(tmp_path / "ahead", "steps=9", "max_grad_norm=0.5")
    assert queued_ahead == [2, 3, 4, 6, 7, 8]  # evaluations and saves after steps 4 and 8 are waited for
    monkeypatch.setattr(stepping, "can_run_ahead", lambda run: False)
    run_training(tmp_path / "plain", "steps=9", "max_grad_norm=0.5")
    assert losses(tmp_path / "ahead") == losses(tmp_path / "plain")
    assert positions(tmp_path / "ahead") == positions(tmp_path / "plain")
    assert_same_tensors(tensors(tmp_path / "ahead"), tensors(tmp_path / "plain"))


def test_the_device_leaves_out_what_is_not_finite(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch, queued_ahead: list[int]
) -> None:
    with not_finite_at({2, 5}):
        run_training(tmp_path / "ahead")
    assert [message for message in events(tmp_path / "ahead") if "step 2, rows 4 to 7" in message]
    monkeypatch.setattr(stepping, "can_run_ahead", lambda run: False)
    with not_finite_at({2, 5}):
        run_training(tmp_path / "plain")
    assert [str(each) for each in losses(tmp_path / "ahead")] == [str(each) for each in losses(tmp_path / "plain")]
    assert_same_tensors(tensors(tmp_path / "ahead"), tensors(tmp_path / "plain"))


def test_three_in_a_row_end_a_run_ahead(tmp_path: Path, run_training: Train, queued_ahead: list[int]) -> None:
    with not_finite_at({5, 6, 7}), pytest.raises(TrainingError, match="step 7, rows 24 to 27"):
        run_training(tmp_path)


def test_a_signal_waits_for_what_was_begun_and_resumes_alike(
    tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch, queued_ahead: list[int]
) -> None:
    settled = stepping.Stepper._settled

    def interrupted(self: stepping.Stepper, queued: Any) -> stepping.Step:
        step = settled(self, queued)
        if self.position == 2 * self._run.config.batch_rows:
            os.kill(os.getpid(), signal.SIGTERM)
        return step

    with monkeypatch.context() as patched:
        patched.setattr(stepping.Stepper, "_settled", interrupted)
        assert run_training(tmp_path / "cut").status == "interrupted"
    assert [step for step, _ in losses(tmp_path / "cut")] == [1, 2, 3]
    run_training(tmp_path / "cut", resume=True)
    run_training(tmp_path / "whole")
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    assert_same_tensors(tensors(tmp_path / "cut"), tensors(tmp_path / "whole"))


def test_callbacks_see_each_step_before_the_next_begins(
    tmp_path: Path, run_training: Train, queued_ahead: list[int]
) -> None:
    run_training(tmp_path, callbacks=[Callback()])
    assert queued_ahead == []


def test_a_cpu_is_not_run_ahead_of(tmp_path: Path, run_training: Train, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[bool] = []
    decide = stepping.can_run_ahead

    def noted(run: Run) -> bool:
        found.append(decide(run))
        return found[-1]

    monkeypatch.setattr(stepping, "can_run_ahead", noted)
    run_training(tmp_path)
    assert found == [False]
