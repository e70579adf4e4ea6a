from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from penstock.errors import ConfigError
from penstock.train import Decoder, ModelConfig, ModelShape, build_model, flops_per_token, load_config, num_parameters
from penstock.train.shape import PRESETS


def small_shape(**overrides: object) -> ModelShape:
    settings = {"num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "hidden_size": 32, "feed_forward_size": 48}
    return ModelConfig.model_validate({**settings, **overrides}).shape(vocab_size=100, seq_len=24)


def random_ids(seed: int, *size: int) -> torch.Tensor:
    return torch.randint(0, 100, size, generator=torch.Generator().manual_seed(seed))


def test_a_document_does_not_see_its_neighbours() -> None:
    model = build_model(small_shape(), seed=1)
    documents = torch.tensor([[3] * 7 + [4] * 9 + [9] * 8, [1] * 16 + [2] * 8], dtype=torch.int32)
    first, second = random_ids(1, 2, 24), random_ids(2, 2, 24)
    mixed = second.clone()
    mixed[0, 7:16] = first[0, 7:16]  # only document 4 is kept
    alone = model(first[:1, 7:16])  # the same document at the start of a row of its own
    with torch.no_grad():
        assert torch.equal(model(first, documents)[0, 7:16], model(mixed, documents)[0, 7:16])
        torch.testing.assert_close(model(first, documents)[0, 7:16], alone[0], rtol=1e-4, atol=1e-5)
        # Without borders the neighbours do matter: the comparison above can fail.
        assert not torch.allclose(model(first)[0, 7:16], model(mixed)[0, 7:16], atol=1e-3)


def test_the_future_is_not_seen() -> None:
    model = build_model(small_shape(), seed=1)
    ids = random_ids(1, 1, 24)
    changed = ids.clone()
    changed[0, 12:] = random_ids(2, 12)
    for documents in (None, torch.zeros(1, 24, dtype=torch.int32)):
        with torch.no_grad():
            assert torch.equal(model(ids, documents)[0, :12], model(changed, documents)[0, :12])


def test_one_document_masked_is_plain_causal() -> None:
    model = build_model(small_shape(), seed=1)
    ids = random_ids(3, 2, 24)
    torch.testing.assert_close(model(ids, torch.zeros(2, 24, dtype=torch.int32)), model(ids))


def test_weights_follow_from_the_seed_alone() -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    first, again, other = (build_model(small_shape(), seed=seed) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))
    assert not torch.equal(first.model.embed_tokens.weight, other.model.embed_tokens.weight)


def test_first_weights_have_the_standard_spread() -> None:
    model = build_model(small_shape(num_layers=8, hidden_size=128, feed_forward_size=256), seed=1)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            assert torch.equal(parameter, torch.ones_like(parameter))
        else:
            expected = 0.02 / 4 if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
            assert float(parameter.detach().std()) == pytest.approx(expected, rel=0.05), name


@pytest.mark.parametrize("tie_embeddings", [True, False])
def test_sizes_are_counted_as_the_formula_says(tie_embeddings: bool) -> None:
    shape = small_shape(tie_embeddings=tie_embeddings)
    model = build_model(shape, seed=1)
    matrices = sum(each.numel() for each in model.model.layers.parameters() if each.ndim == 2)
    head = shape.padded_vocab_size * shape.hidden_size
    vectors = sum(each.numel() for each in model.parameters() if each.ndim == 1)
    assert num_parameters(model) == matrices + vectors + head * (1 if tie_embeddings else 2)
    assert flops_per_token(shape, 24) == 6 * (matrices + head) + 12 * 2 * 32 * 24
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie_embeddings


def preset_on_paper(name: str) -> Decoder:
    with torch.device("meta"):
        return Decoder(ModelConfig(preset=name).shape(vocab_size=50257, seq_len=8))


def test_presets_have_the_sizes_they_are_named_for() -> None:
    expected = {"tiny": 7.2e6, "small": 124e6, "medium": 355e6, "large": 0.85e9, "xlarge": 1.8e9}
    for name, size in expected.items():
        model = preset_on_paper(name)
        assert num_parameters(model) == pytest.approx(size, rel=0.02), name
        assert model.padded_vocab_size == 50304
        assert name == "tiny" or model.shape.head_size == 128


@pytest.mark.parametrize("name", PRESETS)
def test_the_documentation_has_the_presets_as_they_are(name: str) -> None:
    pages = Path(__file__).parents[2] / "docs"
    rows = re.findall(rf"^\| `{name}` \|(.+)\|$", (pages / "models.md").read_text(), re.MULTILINE)
    assert len(rows) == 1
    cells = [cell.strip() for cell in rows[0].split("|")]
    model, preset = preset_on_paper(name), PRESETS[name]
    heads = f"{preset.num_heads} x {model.shape.head_size}"
    if preset.num_kv_heads != preset.num_heads:
        heads += f", {preset.num_kv_heads} of keys"
    assert cells == [
        f"{num_parameters(model):,}",
        str(preset.num_layers),
        str(preset.hidden_size),
        heads,
        str(preset.feed_forward_size),
        f"{preset.rope_theta:,.0f}",
        f"{preset.learning_rate:g}",
    ]


def test_presets_for_long_rows_bring_their_length() -> None:
    assert load_config(None, ["model.preset=small-16k"]).seq_len == 16384
    assert load_config(None, ["model.preset=large-32k"]).seq_len == 32768
    shorter = load_config(None, ["model.preset=small-32k", "seq_len=512"])
    assert shorter.seq_len == 512
    assert shorter.model.shape(vocab_size=100, seq_len=512).max_positions == 32768
    assert load_config(None, ["model.preset=small"]).seq_len == 256
    with pytest.raises(ConfigError, match="small-8k") as refused:
        load_config(None, ["model.preset=small-8k"])
    assert refused.value.hint.startswith("known presets: small-")


@pytest.mark.parametrize("overrides", [{"tie_embeddings": True}, {"tie_embeddings": False, "rope_theta": 500_000.0}])
def test_names_and_logits_equal_those_of_transformers(overrides: dict[str, object]) -> None:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:  # absent, or installed beside a torch it doesn't fit
        pytest.skip(f"the reference, transformers' Llama, can't be imported here: {error}")
    shape = small_shape(**overrides)
    ours = build_model(shape, seed=1)
    theirs = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=shape.padded_vocab_size,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.feed_forward_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_kv_heads,
            max_position_embeddings=shape.max_positions,
            rms_norm_eps=shape.norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            tie_word_embeddings=shape.tie_embeddings,
        )
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    theirs.load_state_dict(ours.state_dict())
    ids = random_ids(4, 3, 24)
    with torch.no_grad():
        torch.testing.assert_close(ours(ids), theirs(ids).logits, rtol=1e-4, atol=1e-5)
