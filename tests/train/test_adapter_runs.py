"""Runs that begin with a pretrained model: what is trained, what is saved, resuming, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError, ResumeError
from penstock.runlog import read_records
from penstock.store import Store
from penstock.train.building import model_of_checkpoint
from penstock.train.checkpoint import MODEL_NAME, OPTIMIZER_NAME, find_latest, read_tensors
from penstock.train.pretrained import load_pretrained

from .conftest import Train, assert_same_tensors, losses, saved_tensors

pytest.importorskip("transformers")

# The sizes of conftest's tiny decoder mean nothing here.
OWN_SIZES = ["model.num_layers=null", "model.num_heads=null", "model.hidden_size=null", "model.feed_forward_size=null"]
LORA = ["model.adapter.kind=lora", "model.adapter.rank=4", "model.adapter.dropout=0.1"]


def settings(folder: Path, *more: str) -> list[str]:
    return [*OWN_SIZES, f"model.pretrained={folder}", "steps=6", "checkpoint_every_steps=3", *more]


@pytest.mark.parametrize("adapter", [LORA, ["model.adapter.kind=dora", "model.adapter.target_modules=[q_proj]"]])
def test_an_adapter_is_trained_saved_alone_and_resumed_to_the_last_bit(
    adapter: list[str], tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    given = settings(saved_model("llama"), *adapter)
    whole = run_training(tmp_path / "whole", *given)
    run_training(tmp_path / "parts", *given, "stop_after_steps=4")
    resumed = run_training(tmp_path / "parts", *given, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert whole.checkpoint is not None
    assert resumed.checkpoint is not None
    assert_same_tensors(saved_tensors(whole.checkpoint), saved_tensors(resumed.checkpoint))
    names = read_tensors(whole.checkpoint / MODEL_NAME).keys()
    assert names
    assert all(".lora_" in name for name in names)
    assert all(".lora_" in name for name in read_tensors(whole.checkpoint / OPTIMIZER_NAME))


def test_all_of_a_pretrained_model_can_be_trained(
    tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    given = settings(saved_model("gpt2"), "learning_rate=0.01")  # with dropout
    result = run_training(tmp_path / "whole", *given)
    run_training(tmp_path / "parts", *given, "stop_after_steps=2")
    run_training(tmp_path / "parts", *given, resume=True)
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    assert result.final_loss is not None
    assert result.first_loss is not None
    assert result.final_loss < result.first_loss
    base = load_pretrained(str(saved_model("gpt2")), dtype=torch.float32)
    assert result.checkpoint is not None
    saved = read_tensors(result.checkpoint / MODEL_NAME)
    assert saved.keys() == dict(base.named_parameters()).keys()
    assert all(not torch.equal(saved[name], each) for name, each in base.named_parameters() if each.ndim == 2)


def test_a_checkpoint_becomes_the_model_again(
    tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    run_training(tmp_path / "run", *settings(saved_model("llama"), *LORA))
    checkpoint = find_latest(tmp_path / "run")
    assert checkpoint is not None
    model = model_of_checkpoint(checkpoint)
    base = load_pretrained(str(saved_model("llama")), dtype=torch.float32)
    ids = torch.arange(12)[None]
    with torch.no_grad():
        assert torch.equal(model(ids), model(ids))  # no dropout
        assert not torch.allclose(model(ids), base(ids), atol=1e-3)
    saved = read_tensors(checkpoint.path / MODEL_NAME)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert_same_tensors(saved, {name: each.detach() for name, each in trained.items()})


def test_other_weights_under_the_same_name_are_refused(
    tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(saved_model("llama"), base)
    given = settings(base, *LORA)
    run_training(tmp_path / "run", *given, "stop_after_steps=2")
    data = bytearray((base / "model.safetensors").read_bytes())
    data[-2] ^= 1
    (base / "model.safetensors").write_bytes(data)
    with pytest.raises(ResumeError, match="trained from weights"):
        run_training(tmp_path / "run", *given, resume=True)


def test_what_does_not_fit_is_refused_before_the_first_step(
    tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    with pytest.raises(ConfigError, match="rows of at most 64"):
        run_training(tmp_path / "long", *settings(saved_model("llama"), "seq_len=65"))
    with pytest.raises(ConfigError, match="feels other documents"):
        run_training(tmp_path / "recurrent", *settings(saved_model("mamba")))
    with pytest.raises(ConfigError, match="nf4 needs a GPU"):
        run_training(tmp_path / "quantised", *settings(saved_model("llama"), *LORA, "model.quantize=nf4"))
    with pytest.raises(ConfigError, match=r"float8 needs a GPU"):
        run_training(tmp_path / "float8", *settings(saved_model("llama"), "model.float8=true"))


def test_rates_of_pretrained_models_are_low(
    tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    peaks = []
    for name, more in (("all", []), ("adapter", LORA)):
        run_training(
            tmp_path / name, *settings(saved_model("llama"), "learning_rate=null", "stop_after_steps=1", *more)
        )
        choices = {record["name"]: record for record in read_records(tmp_path / name) if record["kind"] == "choice"}
        peaks.append(choices["learning_rate"]["value"])
    assert peaks == [2e-5, 2e-4]


def test_the_models_own_tokenizer_is_told_from_another(
    tmp_path: Path, run_training: Train, store: Store, saved_model: Callable[[str], Path]
) -> None:
    base = tmp_path / "base"
    shutil.copytree(saved_model("llama"), base)
    source = json.loads(store.tokenizer().spec.source_json)
    (base / "tokenizer.json").write_text(json.dumps(source))
    run_training(tmp_path / "same", *settings(base, "stop_after_steps=1"))
    vocabulary = source["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (base / "tokenizer.json").write_text(json.dumps(source))
    with pytest.raises(ConfigError, match="2 ids differ"):
        run_training(tmp_path / "other", *settings(base, "stop_after_steps=1"))
