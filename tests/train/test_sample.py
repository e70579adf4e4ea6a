from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.utils import counters

from penstock.train import Decoder, ModelConfig, build_model
from penstock.train.compiling import compiled
from penstock.train.sample import sampled_ids

SHAPE = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, feed_forward_size=16).shape(vocab_size=65, seq_len=8)


def sampled(
    model: Decoder, *, seed: int = 1, temperature: float = 1.0, end_id: int = -1, length: int = 40
) -> list[int]:
    return sampled_ids(
        model, [1, 2, 3], num_tokens=length, end_id=end_id, seed=seed, temperature=temperature, autocast=nullcontext
    )


def test_the_seed_decides_and_the_global_state_stays() -> None:
    model = build_model(SHAPE, seed=1)
    torch.manual_seed(9)
    before = torch.get_rng_state()
    assert sampled(model) == sampled(model)
    assert sampled(model) != sampled(model, seed=2)
    assert torch.equal(before, torch.get_rng_state())


def test_temperature_zero_takes_the_likeliest() -> None:
    model = build_model(SHAPE, seed=1)
    ids = [1, 2, 3]
    for _ in range(12):
        with torch.no_grad():
            ids.append(int(model(torch.tensor([ids[-8:]]))[0, -1, :65].argmax()))
    assert sampled(model, temperature=0.0, length=12) == ids[3:]


def test_padding_ids_are_never_drawn() -> None:
    model = build_model(SHAPE, seed=1)
    assert SHAPE.padded_vocab_size == 128
    model.register_forward_hook(lambda _module, _inputs, logits: logits.index_fill(2, torch.arange(65, 128), 100.0))
    assert max(sampled(model)) < 65


def test_an_end_token_ends_it() -> None:
    model = build_model(SHAPE, seed=1)
    ids = sampled(model)
    end_id = ids[5]
    assert sampled(model, end_id=end_id) == ids[: ids.index(end_id)]


@pytest.mark.parametrize("way", ["blocks", "whole"])
def test_a_compiled_model_compiles_nothing_for_a_sample(way: str) -> None:
    model = build_model(SHAPE, seed=1)
    eagerly = sampled(model, length=4)
    counters.clear()
    with compiled(model, way):
        assert sampled(model, length=4) == eagerly
    assert counters["frames"]["total"] == 0
