"""An exported model says in transformers and peft what it says here."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.errors import ConfigError, InputError, StoreError
from penstock.runlog import RunLog
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.train import train
from penstock.train.building import model_of_checkpoint
from penstock.train.checkpoint import find_latest
from penstock.train.export import export_model
from penstock.train.language_model import LanguageModel

from .conftest import Train, tiny_config
from .test_adapter_runs import settings

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

IDS = torch.randint(0, 320, (2, 24), generator=torch.Generator().manual_seed(5))


def newest_model(run: Path) -> LanguageModel:
    checkpoint = find_latest(run)
    assert checkpoint is not None
    return model_of_checkpoint(checkpoint)


def reloaded(folder: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)


@pytest.mark.parametrize("more", [[], ["model.tie_embeddings=false", "model.rope_theta=500000"]])
def test_the_decoder_is_a_llama_with_the_same_logits(
    more: list[str], tmp_path: Path, run_training: Train, store: Store
) -> None:
    run_training(tmp_path / "run", "model.num_heads=4", "model.num_kv_heads=2", "learning_rate=0.1", *more)
    result = export_model(tmp_path / "run", tmp_path / "out", output_format="transformers")
    ours, theirs = newest_model(tmp_path / "run"), reloaded(tmp_path / "out")
    assert type(theirs).__name__ == "LlamaForCausalLM"
    assert theirs.dtype == torch.float32
    with torch.no_grad():
        expected, found = ours(IDS), theirs(IDS).logits
    assert found.shape[-1] == 320  # already a multiple of 64
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)
    assert result.parameters == sum(each.numel() for each in theirs.parameters())
    assert result.step == 8
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True)
    text = "abc defg 12"
    assert tokenizer(text)["input_ids"] == store.tokenizer().encode([text.encode()])[0].tolist()
    assert tokenizer.eos_token_id == store.tokenizer().end_id == theirs.config.eos_token_id


def test_padding_of_the_vocabulary_is_kept(tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} is a number; {number * 7919} is another. " * 9)
    source = FilesSource(name="texts", root=str(tmp_path / "texts"))
    prepare([source], tmp_path / "store", options=PrepareOptions(vocab_size=300))
    with open_store(tmp_path / "store") as store, RunLog(tmp_path / "run") as log:
        train(tiny_config("steps=1"), store, tmp_path / "run", log)
        vocab_size = store.tokenizer().vocab_size
    export_model(tmp_path / "run", tmp_path / "out", output_format="transformers")
    theirs = reloaded(tmp_path / "out")
    assert theirs.config.vocab_size == theirs.get_input_embeddings().weight.shape[0] == 320 > vocab_size
    with torch.no_grad():
        torch.testing.assert_close(theirs(IDS).logits, newest_model(tmp_path / "run")(IDS), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["gpt2", "qwen3"])
def test_a_pretrained_model_trained_whole(
    kind: str, tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    run_training(tmp_path / "run", *settings(saved_model(kind), "learning_rate=0.01"))
    export_model(tmp_path / "run", tmp_path / "out", output_format="transformers")
    with torch.no_grad():
        found = reloaded(tmp_path / "out")(IDS).logits
        assert torch.equal(found, newest_model(tmp_path / "run")(IDS))
        assert not torch.allclose(found, reloaded(saved_model(kind))(IDS).logits, atol=1e-2)
    with pytest.raises(ConfigError, match="no adapter"):
        export_model(tmp_path / "run", tmp_path / "adapter", output_format="peft")
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize(("kind", "adapter"), [("llama", "lora"), ("llama", "dora"), ("gpt2", "lora")])
def test_an_adapter_for_peft_and_merged(
    kind: str, adapter: str, tmp_path: Path, run_training: Train, saved_model: Callable[[str], Path]
) -> None:
    given = settings(saved_model(kind), f"model.adapter.kind={adapter}", "model.adapter.rank=4", "learning_rate=0.01")
    run_training(tmp_path / "run", *given)
    export_model(tmp_path / "run", tmp_path / "adapter", output_format="peft")
    export_model(tmp_path / "run", tmp_path / "merged", output_format="transformers")
    base = reloaded(saved_model(kind))
    with torch.no_grad():
        before = base(IDS).logits
        expected = newest_model(tmp_path / "run")(IDS)
        assert torch.equal(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()(IDS).logits, expected)
        # One product of the sum of matrices, instead of the sum of two products: other rounding.
        torch.testing.assert_close(reloaded(tmp_path / "merged")(IDS).logits, expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(before, expected, atol=1e-2)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["use_dora"]) == (4, 8, adapter == "dora")
    assert config["base_model_name_or_path"] == str(saved_model(kind))


def test_exports_are_the_same_bytes_each_time_and_replace_only_exports(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path / "run", "steps=4", "checkpoint_every_steps=2")
    first = export_model(tmp_path / "run", tmp_path / "one", output_format="transformers", step=2)
    export_model(tmp_path / "run", tmp_path / "two", output_format="transformers", step=2)
    newest = export_model(tmp_path / "run", tmp_path / "three", output_format="transformers")
    assert (first.step, newest.step) == (2, 4)
    names = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert len(names) == first.num_files == 6
    for name in names:
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    assert (tmp_path / "one" / "model.safetensors").read_bytes() != (
        tmp_path / "three" / "model.safetensors"
    ).read_bytes()
    with pytest.raises(StoreError, match="earlier export"):
        export_model(tmp_path / "run", tmp_path / "one", output_format="transformers")
    export_model(tmp_path / "run", tmp_path / "one", output_format="transformers", force=True)
    with pytest.raises(InputError, match="no checkpoint of step 3"):
        export_model(tmp_path / "run", tmp_path / "four", output_format="transformers", step=3)
    with pytest.raises(ConfigError, match="'jsonl'"):
        export_model(tmp_path / "run", tmp_path / "four", output_format="jsonl")
    with pytest.raises(InputError, match="holds no checkpoint"):
        export_model(tmp_path / "nothing", tmp_path / "four", output_format="transformers")
