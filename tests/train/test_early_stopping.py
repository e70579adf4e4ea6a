"""When a run ends before its last step, and what is kept of its best."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.runlog import read_records
from penstock.train.checkpoint import checkpoint_folders
from penstock.train.start import Progress

from .conftest import Train, events, losses

# A learning rate this high makes the held-out loss rise soon.
SPOILED = (
    "learning_rate=3",
    "warmup_steps=4",
    "steps=40",
    "eval_every_steps=2",
    "schedule=constant",
    "sample_tokens=0",
)


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [record for record in read_records(folder) if record["kind"] == "evaluation"]


@pytest.mark.parametrize(
    ("found", "min_delta", "best_step", "without_gain"),
    [
        ([3.0, 2.0, 1.0], 0.0, 3, 0),
        ([3.0, 2.0, 2.0], 0.0, 2, 1),
        ([3.0, 2.9, 2.8], 0.15, 3, 0),  # the first gain is too small, both together aren't
        ([3.0, 2.95, 2.94], 0.1, 1, 2),
        ([3.0, 2.5], 0.5, 2, 0),  # a gain of exactly min_delta counts
        ([float("nan"), 3.0, float("nan")], 0.0, 2, 1),
    ],
)
def test_what_counts_as_a_gain(found: list[float], min_delta: float, best_step: int, without_gain: int) -> None:
    progress = Progress()
    for step, loss in enumerate(found, start=1):
        progress.step = step
        progress.count_evaluation(loss=loss, bits_per_byte=loss, min_delta=min_delta)
    assert (progress.best_step, progress.evaluations_without_gain) == (best_step, without_gain)


def test_a_run_that_gains_no_more_ends_and_its_best_is_kept(tmp_path: Path, run_training: Train) -> None:
    result = run_training(tmp_path, *SPOILED, "patience=3", "keep_checkpoints=1")
    assert (result.status, result.steps < 40) == ("completed", True)
    found = {record["step"]: record["loss"] for record in evaluations(tmp_path)}
    best = min(found, key=lambda step: found[step])
    assert result.steps == best + 2 * 3
    assert (result.best_step, result.best_val_loss) == (best, found[best])
    assert result.best_checkpoint == tmp_path / "checkpoints" / f"step-{best:08d}"
    assert {path.name for path in checkpoint_folders(tmp_path)} == {f"step-{s:08d}" for s in (best, result.steps)}
    assert result.stop_reason is not None
    assert any(f"ended early after step {result.steps} of 40" in message for message in events(tmp_path))

    again = run_training(tmp_path, *SPOILED, "patience=3", "keep_checkpoints=1", resume=True)
    assert (again.status, again.steps, again.best_checkpoint) == ("completed", result.steps, result.best_checkpoint)
    assert "nothing to resume" in events(tmp_path)[-1]


def test_patience_survives_stops_at_any_step(tmp_path: Path, run_training: Train) -> None:
    whole = run_training(tmp_path / "whole", *SPOILED, "patience=2")
    for stop in (1, 2, 3):
        folder = tmp_path / str(stop)
        result = run_training(folder, *SPOILED, "patience=2", f"stop_after_steps={stop}")
        for _ in range(40):
            if result.status == "completed":
                break
            result = run_training(folder, *SPOILED, "patience=2", f"stop_after_steps={stop}", resume=True)
        assert (result.steps, result.best_step) == (whole.steps, whole.best_step)
        assert result.stop_reason == whole.stop_reason
        assert losses(folder) == losses(tmp_path / "whole")
        assert [e["loss"] for e in evaluations(folder)] == [e["loss"] for e in evaluations(tmp_path / "whole")]


def test_without_patience_nothing_ends_early_and_the_best_may_be_kept(tmp_path: Path, run_training: Train) -> None:
    result = run_training(tmp_path, *SPOILED, "steps=12", "keep_best=true", "keep_checkpoints=1")
    assert (result.status, result.steps, result.stop_reason) == ("completed", 12, None)
    assert result.best_step is not None
    assert result.best_step < 12
    assert result.best_checkpoint is not None
    assert result.best_checkpoint.is_dir()
    plain = run_training(tmp_path / "plain", *SPOILED, "steps=12", "keep_checkpoints=1")
    assert (plain.best_step, plain.best_checkpoint) == (result.best_step, None)
    assert losses(tmp_path / "plain") == losses(tmp_path)
