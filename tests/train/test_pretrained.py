"""Models of transformers, small and random, as the trainer takes them; adapters beside them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from penstock.errors import ConfigError
from penstock.train import ModelConfig
from penstock.train.adapting import add_adapter
from penstock.train.model_config import AdapterConfig
from penstock.train.pretrained import PretrainedModel, load_pretrained, refuse_felt_neighbours, weights_digest

transformers = pytest.importorskip("transformers")

SavedModel = Callable[[str], Path]


def loaded(folder: Path, **options: Any) -> PretrainedModel:
    return load_pretrained(str(folder), dtype=torch.float32, **options)


def random_ids(seed: int, *size: int) -> torch.Tensor:
    return torch.randint(0, 384, size, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "qwen3", "mistral"])
def test_it_says_what_transformers_says_and_keeps_documents_apart(kind: str, saved_model: SavedModel) -> None:
    model = loaded(saved_model(kind))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(saved_model(kind))
    ids = random_ids(1, 2, 24)
    documents = torch.tensor([[3] * 7 + [4] + [9] * 16, [1] * 24])
    with torch.no_grad():
        assert torch.equal(model(ids), theirs(ids).logits)
        packed = model(ids, documents)
        # Each document as if alone: positions count from its begin.
        for row, begin, end in ((0, 0, 7), (0, 7, 8), (0, 8, 24), (1, 0, 24)):
            alone = theirs(ids[row : row + 1, begin:end]).logits[0]
            torch.testing.assert_close(packed[row, begin:end], alone, rtol=1e-5, atol=1e-5)
        assert not torch.allclose(model(ids)[0, 8:], packed[0, 8:], atol=1e-2)  # borders do matter
        assert model.head_weight is not None
        torch.testing.assert_close(F.linear(model.hidden(ids, documents), model.head_weight), packed)
    refuse_felt_neighbours(model)
    assert list(dict(model.named_parameters())) == list(dict(theirs.named_parameters()))
    assert len(model.blocks()) == 2
    assert (model.max_positions, model.padded_vocab_size, model.shape.hidden_size) == (64, 384, 32)


def test_a_head_that_bends_its_logits_is_no_single_product(saved_model: SavedModel) -> None:
    assert loaded(saved_model("gemma2")).head_weight is None


def test_a_model_that_feels_its_neighbours_is_refused(saved_model: SavedModel) -> None:
    model = loaded(saved_model("mamba"))
    with pytest.raises(ConfigError, match="feels other documents") as refused:
        refuse_felt_neighbours(model)
    assert "document_boundaries=false" in refused.value.hint


def test_the_mode_reaches_the_whole_model(saved_model: SavedModel) -> None:
    model = loaded(saved_model("gpt2"))  # has dropout
    ids = random_ids(1, 1, 8)
    assert torch.equal(model(ids), model(ids))
    model.train()
    assert model.causal.training
    assert not torch.equal(model(ids), model(ids))


def test_the_work_of_a_step_is_counted(saved_model: SavedModel) -> None:
    model = loaded(saved_model("llama"))
    layers = sum(each.numel() for each in model.causal.model.layers.parameters() if each.ndim == 2)
    head = 384 * 32
    attention = 12 * 2 * 32 * 10
    assert model.flops_per_token(10) == 6 * (layers + head) + attention
    add_adapter(model, AdapterConfig(rank=4, target_modules=("q_proj",)), seed=1)
    added = 2 * (4 * 32 + 32 * 4)
    assert model.flops_per_token(10) == 4 * (layers + head) + 6 * added + attention


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
@pytest.mark.parametrize("adapter", ["lora", "dora"])
def test_an_adapter_starts_as_no_change_and_is_all_that_is_trained(
    kind: str, adapter: Any, saved_model: SavedModel
) -> None:
    ids = random_ids(2, 2, 12)
    model, again, other = (loaded(saved_model(kind)) for _ in range(3))
    expected = model(ids).detach()
    before = torch.get_rng_state()
    for each, seed in ((model, 1), (again, 1), (other, 2)):
        add_adapter(each, AdapterConfig(kind=adapter, rank=4), seed=seed)
    assert torch.equal(before, torch.get_rng_state())
    torch.testing.assert_close(model(ids).detach(), expected, rtol=1e-4, atol=1e-4)
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    assert trained
    assert all("lora_" in name for name in trained)
    assert not any("lm_head" in name for name in trained)
    same, different = dict(again.named_parameters()), dict(other.named_parameters())
    assert all(torch.equal(each, same[name]) for name, each in trained.items())
    assert any(not torch.equal(each, different[name]) for name, each in trained.items())


def test_an_adapter_on_the_head_takes_the_single_product_away(saved_model: SavedModel) -> None:
    model = loaded(saved_model("llama"))
    assert model.head_weight is not None
    add_adapter(model, AdapterConfig(rank=4, target_modules=("lm_head",)), seed=1)
    assert model.head_weight is None
    assert model.padded_vocab_size == 384


def test_what_cannot_be_loaded_is_refused_in_one_line(tmp_path: Path, saved_model: SavedModel) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk").mkdir()
    (tmp_path / "junk" / "config.json").write_text('{"model_type": "no-such-model"}')
    (tmp_path / "code").mkdir()
    code = {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (tmp_path / "code" / "config.json").write_text(json.dumps(code))
    (tmp_path / "code" / "mine.py").write_text("raise SystemExit('code of a model was run')")
    (tmp_path / "pickled").mkdir()
    (tmp_path / "pickled" / "config.json").write_bytes((saved_model("llama") / "config.json").read_bytes())
    (tmp_path / "pickled" / "pytorch_model.bin").write_bytes(b"never read")
    for name in ("empty", "junk", "code", "pickled", "absent/folder/here"):
        with pytest.raises(ConfigError) as refused:
            loaded(tmp_path / name)
        assert "\n" not in refused.value.message
        assert refused.value.hint


def test_a_hub_id_needs_the_network_to_be_allowed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match="no hub id that is on this disk") as refused:
        load_pretrained("someone/some-model", dtype=torch.float32)
    assert "--network" in refused.value.hint


def test_a_tokenizer_with_more_ids_is_refused(saved_model: SavedModel) -> None:
    assert loaded(saved_model("llama"), vocab_size=300).vocab_size == 300
    with pytest.raises(ConfigError, match=r"385 ids.*has 384") as refused:
        loaded(saved_model("llama"), vocab_size=385)
    assert "--tokenizer" in refused.value.hint


def test_four_bits_need_a_gpu(saved_model: SavedModel) -> None:
    with pytest.raises(ConfigError, match="nf4 needs a GPU") as refused:
        loaded(saved_model("llama"), quantize="nf4")
    assert "pip install" in refused.value.hint


def test_target_modules_that_do_not_exist_are_refused(saved_model: SavedModel) -> None:
    with pytest.raises(ConfigError, match="q_prog") as refused:
        add_adapter(loaded(saved_model("llama")), AdapterConfig(target_modules=("q_prog",)), seed=1)
    assert refused.value.hint.startswith("its linear layers: q_proj")


def test_the_digest_follows_the_weights(saved_model: SavedModel) -> None:
    digests = {weights_digest(saved_model(kind)) for kind in ("llama", "gpt2", "qwen3")}
    assert len(digests) == 3
    assert weights_digest(saved_model("llama")) in digests


@pytest.mark.parametrize(
    "settings",
    [
        {"adapter": {"kind": "lora"}},
        {"quantize": "nf4"},
        {"pretrained": "x", "quantize": "nf4"},
        {"pretrained": "x", "num_layers": 3},
        {"pretrained": "x", "preset": "small"},
        {"pretrained": "x", "adapter": {}, "quantize": "nf4", "float8": True},
    ],
)
def test_settings_that_would_do_nothing_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ModelConfig.model_validate(settings)
