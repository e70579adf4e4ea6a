"""Every setting changes what a run does: shown here by running it, or by a test elsewhere that is named.

A run's trace is what it computed and left: losses, learning rates, norms, positions, evaluations, samples, checkpoints
and how it ended. Not the choices that it recorded: those may say anything. A new setting that is in neither list fails.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.runlog import RunLog, read_records
from penstock.store import Store
from penstock.train import TrainConfig, train

from .conftest import tiny_config

TESTS = Path(__file__).resolve().parents[1]
BASE = ("steps=4", "seq_len=16", "eval_every_steps=2", "checkpoint_every_steps=2", "eval_rows=2", "sample_tokens=2")

# Setting -> (what else both runs have, what one of them has besides).
HERE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "seq_len": ((), ("seq_len=24",)),
    "batch_rows": ((), ("batch_rows=6",)),
    "micro_batch_rows": ((), ("micro_batch_rows=4",)),
    "document_boundaries": ((), ("document_boundaries=false",)),
    "pack": ((), ("pack=pad",)),
    "overlap": (("pack=windows",), ("overlap=8",)),
    "overlap_loss": (("pack=windows", "overlap=8"), ("overlap_loss=true",)),
    "order": ((), ("order=sequential",)),
    "random_crop": ((), ("random_crop=1",)),
    "random_crop_smallest": (("random_crop=1",), ("random_crop_smallest=0.05",)),
    "mix": ((), ("mix=['texts/0*=3']",)),
    "mix_temperature": (("mix=['texts/00*=3']",), ("mix_temperature=5",)),
    "mix_epochs": (("mix=['texts/0*=9']",), ("mix_epochs=['texts/0*=0.001']",)),
    "steps": ((), ("steps=3",)),
    "learning_rate": ((), ("learning_rate=1e-3",)),
    "warmup_steps": ((), ("warmup_steps=4",)),
    "warmup_ratio": ((), ("warmup_ratio=1",)),
    "warmup_steps_min": ((), ("warmup_steps_min=3",)),
    "warmup_steps_max": (("warmup_ratio=1",), ("warmup_steps_max=1",)),
    "schedule": ((), ("schedule=linear",)),
    "schedule_power": (("schedule=polynomial",), ("schedule_power=3",)),
    "schedule_cycles": (("schedule=cosine-restarts",), ("schedule_cycles=2",)),
    "decay_ratio": (("schedule=wsd",), ("decay_ratio=1",)),
    "min_learning_rate_ratio": ((), ("min_learning_rate_ratio=0.9",)),
    "weight_decay": ((), ("weight_decay=1",)),
    "betas": ((), ("betas=[0.5,0.6]",)),
    "eps": ((), ("eps=1",)),
    "max_grad_norm": ((), ("max_grad_norm=0.001",)),
    "seed": ((), ("seed=1",)),
    "dtype": ((), ("dtype=bfloat16",)),
    "loss_kernel": ((), ("loss_kernel=chunked",)),
    "optimizer": ((), ("optimizer=adamw-bf16",)),
    "eval_every_steps": ((), ("eval_every_steps=null",)),
    "eval_rows": ((), ("eval_rows=1",)),
    "patience": (("eval_every_steps=1", "keep_best=true", "min_delta=100"), ("patience=1",)),
    "min_delta": (("eval_every_steps=1", "patience=1"), ("min_delta=100",)),
    "checkpoint_every_steps": ((), ("checkpoint_every_steps=3",)),
    "keep_checkpoints": ((), ("keep_checkpoints=1",)),
    "log_every_steps": ((), ("log_every_steps=2",)),
    "hardware_interval_seconds": ((), ("hardware_interval_seconds=0.002",)),
    "sample_tokens": ((), ("sample_tokens=0",)),
    "stop_after_steps": ((), ("stop_after_steps=1",)),
    "model.preset": (("learning_rate=null",), ("model.preset=small",)),
    "model.num_layers": ((), ("model.num_layers=1",)),
    "model.num_heads": ((), ("model.num_heads=4",)),
    "model.num_kv_heads": ((), ("model.num_kv_heads=1",)),
    "model.hidden_size": ((), ("model.hidden_size=16",)),
    "model.feed_forward_size": ((), ("model.feed_forward_size=16",)),
    "model.rope_theta": ((), ("model.rope_theta=2",)),
    "model.norm_eps": ((), ("model.norm_eps=0.1",)),
    "model.tie_embeddings": ((), ("model.tie_embeddings=false",)),
}

# Setting -> (the test that shows it, why not here).
ELSEWHERE: dict[str, tuple[str, str]] = {
    "activation_checkpointing": ("train/tuning/test_memory.py", "changes memory, never a loss"),
    "async_checkpoints": ("train/test_saving.py", "changes when a checkpoint is written, not what"),
    "attention": ("train/test_attention.py", "kernels agree; most need a GPU"),
    "compile": ("train/test_attention.py", "compiled blocks compute the same; takes long"),
    "curriculum_by": ("train/test_stream_settings.py", "needs documents with facts"),
    "deterministic": ("train/test_loop.py", "a CPU always is"),
    "device": ("train/test_loop.py", "needs a GPU, or is refused without"),
    "epochs": ("train/test_length.py", "takes whole passes"),
    "fim_rate": ("train/test_stream_settings.py", "needs a vocabulary with such tokens"),
    "fim_spm_rate": ("train/test_stream_settings.py", "needs a vocabulary with such tokens"),
    "fim_tokens": ("train/test_stream_settings.py", "needs a vocabulary with such tokens"),
    "keep_best": ("train/test_early_stopping.py", "needs a best checkpoint that isn't the last"),
    "max_epochs": ("train/test_length.py", "takes whole passes"),
    "min_epochs": ("train/test_length.py", "takes whole passes"),
    "model.adapter": ("train/test_adapter_runs.py", "needs a pretrained model"),
    "model.float8": ("train/test_pretrained.py", "needs a GPU that has it"),
    "model.max_positions": ("train/test_config.py", "is checked against seq_len and exported"),
    "model.pretrained": ("train/test_pretrained.py", "needs a pretrained model"),
    "model.quantize": ("train/test_pretrained.py", "needs a GPU"),
    "network": ("train/test_pretrained.py", "the tests have none; without it a hub id is refused"),
    "parallel": ("train/test_distributed.py", "needs several processes"),
    "prefetch_batches": ("train/test_resume.py", "changes when a batch is filled, never which"),
    "target_tokens": ("train/test_length.py", "takes whole passes"),
    "tf32": ("train/tuning/test_rules.py", "does nothing on a CPU"),
    "trackers": ("train/test_watchers.py", "needs their packages, or fakes"),
    "tune": ("train/tuning/test_rules.py", "measures on a GPU alone"),
    "tune_cache": ("train/tuning/test_measuring.py", "measures on a GPU alone"),
    "window_segments": ("train/test_stream_settings.py", "needs a store of several segments"),
    "tune_seconds": ("train/tuning/test_measuring.py", "measures on a GPU alone"),
}


def settings() -> set[str]:
    model = TrainConfig.model_fields["model"].default
    return {name for name in TrainConfig.model_fields if name != "model"} | {
        f"model.{name}" for name in type(model).model_fields
    }


def test_every_setting_is_shown_to_take_effect() -> None:
    assert set(HERE) & set(ELSEWHERE) == set()
    assert settings() - set(HERE) - set(ELSEWHERE) == set(), "new settings: add them to a list, with a test"
    assert set(HERE) | set(ELSEWHERE) == settings()


@pytest.mark.parametrize("name", ELSEWHERE)
def test_what_is_shown_elsewhere_is_named_there(name: str) -> None:
    path, reason = ELSEWHERE[name]
    assert reason
    assert name.removeprefix("model.") in (TESTS / path).read_text()


_traces: dict[tuple[str, ...], dict[str, Any]] = {}


def trace(store: Store, folder: Path, overrides: tuple[str, ...]) -> dict[str, Any]:
    if overrides in _traces:
        return _traces[overrides]
    with RunLog(folder) as log:
        result = train(tiny_config(*BASE, *overrides), store, folder, log)
    kept = {
        "step": ("step", "loss", "learning_rate", "grad_norm", "tokens", "position"),
        "evaluation": ("step", "loss", "tokens"),
        "sample": ("step", "text"),
        "checkpoint": ("step",),
    }
    records = read_records(folder)
    found: dict[str, Any] = {
        kind: [[record[field] for field in fields] for record in records if record["kind"] == kind]
        for kind, fields in kept.items()
    }
    found["status"] = result.status
    found["checkpoints left"] = sorted(path.name for path in (folder / "checkpoints").iterdir() if path.is_dir())
    found["hardware"] = min(sum(record["kind"] == "hardware" for record in records), 3) > 2
    _traces[overrides] = found
    return found


@pytest.mark.parametrize("name", HERE)
def test_a_setting_changes_the_run(store: Store, tmp_path: Path, name: str) -> None:
    shared, changes = HERE[name]
    without = trace(store, tmp_path / "without", shared)
    assert trace(store, tmp_path / "with", (*shared, *changes)) != without


def test_the_same_settings_change_nothing(store: Store, tmp_path: Path) -> None:
    """The trace holds nothing that differs by itself, or the tests above could not fail."""
    first = trace(store, tmp_path / "first", ())
    assert trace(store, tmp_path / "second", ("steps=4",)) == first
