"""float8 needs a GPU; which layers it would take, and that names and weights stay, can be seen without one."""

from __future__ import annotations

import pytest
import torch

from penstock.errors import ConfigError
from penstock.train import ModelConfig, build_model
from penstock.train.adapting import convert_to_float8, use_float8


def test_large_layers_of_the_blocks_are_taken_and_nothing_else_changes() -> None:
    pytest.importorskip("torchao")
    settings = ModelConfig(num_layers=1, num_heads=2, num_kv_heads=1, hidden_size=256, feed_forward_size=264)
    model = build_model(settings.shape(vocab_size=256, seq_len=8), seed=1)
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    convert_to_float8(model)
    taken = [name for name, layer in model.named_modules() if type(layer).__name__ == "Float8Linear"]
    # Keys are 128 wide, the feed-forward is no multiple of 16, the head is no part of the blocks.
    assert taken == ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"]
    after = dict(model.named_parameters())
    assert list(after) == list(before)
    assert all(torch.equal(each, before[name]) for name, each in after.items())


def test_it_is_refused_without_such_a_gpu() -> None:
    model = build_model(ModelConfig(num_layers=1).shape(vocab_size=64, seq_len=8), seed=1)
    with pytest.raises(ConfigError, match=r"8\.9"):
        use_float8(model, torch.device("cpu"))
