from __future__ import annotations

import pytest
import torch

from penstock.errors import ResumeError
from penstock.train import Decoder, ModelConfig, build_model
from penstock.train.checkpoint import plain_parameters
from penstock.train.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors, set_learning_rate

SHAPE = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, feed_forward_size=16).shape(vocab_size=64, seq_len=8)


def optimizer_of(model: Decoder, *, weight_decay: float = 0.0) -> torch.optim.AdamW:
    optimizer = build_optimizer(model, weight_decay=weight_decay, betas=(0.9, 0.95), eps=1e-8, fused=True)
    set_learning_rate(optimizer, 0.5)
    return optimizer


def step(model: Decoder, optimizer: torch.optim.AdamW, number: int) -> None:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()


def test_only_matrices_decay() -> None:
    model = build_model(SHAPE, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model, weight_decay=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.ndim == 2 else 1.0))


def test_a_restored_state_continues_to_the_bit() -> None:
    model, twin = build_model(SHAPE, seed=1), build_model(SHAPE, seed=2)
    optimizer, other = optimizer_of(model), optimizer_of(twin)
    for number in range(3):
        step(model, optimizer, number)
    twin.load_state_dict(model.state_dict())
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, plain_parameters(model)).items()}
    load_optimizer_tensors(other, plain_parameters(twin), saved)
    for number in range(3, 6):
        step(model, optimizer, number)
        step(twin, other, number)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


def test_another_models_state_is_refused() -> None:
    model = build_model(SHAPE, seed=1)
    optimizer = optimizer_of(model)
    step(model, optimizer, 1)
    tensors = optimizer_tensors(optimizer, plain_parameters(model))
    name = sorted(tensors)[0]
    del tensors[name]
    with pytest.raises(ResumeError, match=name.replace(".", r"\.")):
        load_optimizer_tensors(optimizer, plain_parameters(model), tensors)
