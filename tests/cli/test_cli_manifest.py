"""The checks on a run's manifest that whoever automates runs relies on, by jq, on real runs of a small repository."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.live import Figures

SETTINGS = {
    "model.num_layers": "1",
    "model.num_heads": "2",
    "model.hidden_size": "16",
    "model.feed_forward_size": "16",
    "seq_len": "32",
    "batch_rows": "4",
    "micro_batch_rows": "2",
    "steps": "null",
    "epochs": "4",
    "eval_rows": "4",
    "sample_tokens": "0",
    "device": "cpu",
    "seed": "42",
}


def arguments(**changed: str) -> list[str]:
    settings = SETTINGS | changed
    return [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repo")
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_SYSTEM": os.devnull}

    def git(*words: str, day: int = 1) -> None:
        when = f"2024-03-{day:02d}T12:00:00+0000"
        names = {f"GIT_{who}_{what}": "a@b" for who in ("AUTHOR", "COMMITTER") for what in ("NAME", "EMAIL")}
        dates = {"GIT_AUTHOR_DATE": when, "GIT_COMMITTER_DATE": when}
        subprocess.run(["git", *words], cwd=folder, env=environment | names | dates, check=True, capture_output=True)

    git("init", "-q", "-b", "main")
    for day in range(1, 12):
        (folder / f"file{day}.py").write_text(f"def number_{day}(x):\n    return x * {day}\n" * (day + 4))
        git("add", ".")
        git("commit", "-q", "-m", f"Add number {day}", day=day)
    return folder


def jq(query: str, manifest: Path) -> Any:
    done = subprocess.run(["jq", "-e", query, str(manifest)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.mark.skipif(shutil.which("jq") is None or shutil.which("git") is None, reason="needs jq and git")
def test_the_checks_by_jq(penstock, repository: Path, tmp_path: Path) -> None:
    penstock("prepare", f"git:{repository}", "--out", "store", "--split", "train=70,val=30")
    for name in ("a", "b"):
        penstock("train", "--data", "store", "--out", name, *arguments())
    manifest = tmp_path / "a" / "manifest.json"

    first = jq(".training_report.learning_rate.history | .[0:5]", manifest)
    warmup = jq(".training_parameters.warmup_steps", manifest)
    assert warmup >= 5
    assert all(later > earlier for earlier, later in itertools.pairwise(first))
    assert jq(".training_parameters.batch_size", manifest) == 2
    assert jq(".training_parameters.gradient_accumulation_steps", manifest) == 2
    assert jq(".training_report.training.epoch_summaries | length", manifest) == 4
    assert jq("[.training_report.training.epoch_summaries[].complete] | all", manifest) is True
    assert jq(".training_report.hardware.collection_interval_seconds", manifest) == 5
    parameters = jq(".training_parameters | {total_steps, warmup_steps, steps_per_epoch, num_sequences}", manifest)
    assert parameters["warmup_steps"] == -(-parameters["total_steps"] // 10)
    assert parameters["total_steps"] == parameters["num_sequences"]
    assert jq(".training_parameters.epochs", manifest) == 4
    assert jq(".total_execution_time_seconds", manifest) > 0
    assert jq(".execution_timestamp", manifest).startswith("20")
    assert jq(".repository_stats.unique_commits", manifest) == 11
    assert jq(".repository_stats.time_span_days", manifest) == 10
    assert jq(".repository_stats.branches", manifest) == 1
    assert jq(".sequence_metadata.seq_len", manifest) == 32
    assert jq(".phase_results.train.status", manifest) == "ok"
    assert jq(".training_report.hardware.device", manifest).startswith("cpu")
    losses = [
        jq(
            ".training_report.training | [.final_train_loss, .final_val_loss, (.epoch_summaries[].mean_train_loss)]",
            path,
        )
        for path in (manifest, tmp_path / "b" / "manifest.json")
    ]
    assert losses[0] == losses[1]
    assert all(loss > 0 for loss in losses[0])

    failed = penstock("train", "--data", "store", "--out", "c", *arguments(device="cuda"), expect=1)
    assert "error: device is cuda" in failed.err
    assert jq("[.status, .failed_phase]", tmp_path / "c" / "manifest.json") == ["failed", "train"]


def step(number: int, **more: float) -> dict[str, Any]:
    figures = {
        "loss": 2.5,
        "learning_rate": 1e-3,
        "grad_norm": 1.0,
        "tokens": 500,
        "seconds": 0.5,
        "data_seconds": 0.05,
    }
    return {"kind": "step", "step": number, **figures, **more}


def test_the_live_table_shows_what_is_known_and_fits() -> None:
    figures = Figures()
    figures.take({"kind": "length", "steps": 100})
    assert figures.columns() == {"step": "0/100"}
    for number in range(1, 41):
        figures.take(step(number))
    shown = figures.columns(memory_bytes=2_000_000_000)
    assert shown["step"] == " 40/100"
    assert shown["tokens/s"] == "1 k"
    assert (shown["data stall"], shown["memory"], shown["ETA"]) == ("10.0 %", "2 GB", "0:00:30")
    assert "MFU" not in shown
    assert "val bpb" not in shown
    figures.take({"kind": "evaluation", "split": "val", "store": "one", "loss": 1.0, "bits_per_byte": 9.0})
    figures.take({"kind": "evaluation", "split": "val", "loss": 1.0, "bits_per_byte": 2.0})
    figures.take(step(41, mfu_percent=41.25))
    shown = figures.columns()
    assert (shown["val bpb"], shown["MFU"]) == ("2.0000", "41.2 %")
    for width in range(1, 140):
        fitting = figures.fitting_columns(width, memory_bytes=2_000_000_000)
        used = sum(max(len(name), len(text)) + 2 for name, text in fitting.items())
        assert used <= width or len(fitting) <= 1
    assert list(figures.fitting_columns(24)) == ["step", "loss"]
