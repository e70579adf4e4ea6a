from __future__ import annotations

import pytest
import torch
from safetensors.torch import load as deserialized
from safetensors.torch import save as serialized

from penstock.errors import ConfigError, ResumeError
from penstock.train import Decoder, ModelConfig, build_model
from penstock.train.bfloat16_adamw import rounded_by_chance
from penstock.train.checkpoint import plain_parameters
from penstock.train.optimizer import (
    build_optimizer,
    library_of,
    load_optimizer_tensors,
    optimizer_tensors,
    set_learning_rate,
)

SHAPE = ModelConfig(num_layers=1, num_heads=2, hidden_size=16, feed_forward_size=16).shape(vocab_size=64, seq_len=8)


# Every kind that works without a compiler; torchao's, which compiles, has a test of its own.
KINDS = [("adamw", "torch"), ("adamw-bf16", "torch"), ("adamw-8bit", "bitsandbytes")]

LARGER = ModelConfig(num_layers=1, num_heads=2, hidden_size=64, feed_forward_size=64).shape(vocab_size=64, seq_len=8)


def optimizer_of(
    model: Decoder, *, weight_decay: float = 0.0, kind: str = "adamw", library: str = "torch"
) -> torch.optim.Optimizer:
    if library != "torch":
        pytest.importorskip(library)
    optimizer = build_optimizer(
        model, weight_decay=weight_decay, betas=(0.9, 0.95), eps=1e-8, fused=True, kind=kind, library=library
    )
    set_learning_rate(optimizer, 0.5)
    return optimizer


def step(model: Decoder, optimizer: torch.optim.Optimizer, number: int) -> None:
    ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(number))
    optimizer.zero_grad()
    model(ids).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize(("kind", "library"), KINDS)
def test_only_matrices_decay(kind: str, library: str) -> None:
    model = build_model(SHAPE, seed=1)
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = optimizer_of(model, weight_decay=0.1, kind=kind, library=library)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.detach(), before[name] * (0.95 if parameter.ndim == 2 else 1.0))


@pytest.mark.parametrize(("kind", "library"), KINDS)
def test_a_restored_state_continues_to_the_bit(kind: str, library: str) -> None:
    model, twin = build_model(LARGER, seed=1), build_model(LARGER, seed=2)
    optimizer, other = (optimizer_of(each, kind=kind, library=library) for each in (model, twin))
    _continues_to_the_bit(model, optimizer, twin, other)


@pytest.mark.torture(lane="E")
def test_a_restored_state_of_torchao_continues_to_the_bit() -> None:
    model, twin = build_model(LARGER, seed=1), build_model(LARGER, seed=2)
    optimizer, other = (optimizer_of(each, kind="adamw-8bit", library="torchao") for each in (model, twin))
    _continues_to_the_bit(model, optimizer, twin, other)
    parts = {name.partition(".")[0] for name in optimizer_tensors(optimizer, plain_parameters(model))}
    assert {"exp_avg_codes", "exp_avg_scale", "exp_avg_sq_codes", "step"} <= parts


def _continues_to_the_bit(
    model: Decoder, optimizer: torch.optim.Optimizer, twin: Decoder, other: torch.optim.Optimizer
) -> None:
    for number in range(3):
        step(model, optimizer, number)
    twin.load_state_dict(model.state_dict())
    saved = {name: tensor.clone() for name, tensor in optimizer_tensors(optimizer, plain_parameters(model)).items()}
    assert all(type(tensor) is torch.Tensor for tensor in saved.values())
    assert deserialized(serialized(saved)).keys() == saved.keys()  # no two share memory
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


def test_another_optimizers_state_is_refused() -> None:
    model = build_model(SHAPE, seed=1)
    optimizer = optimizer_of(model)
    step(model, optimizer, 1)
    saved = optimizer_tensors(optimizer, plain_parameters(model))
    other = optimizer_of(model, kind="adamw-8bit", library="bitsandbytes")
    with pytest.raises(ResumeError, match=r"exp_avg\."):
        load_optimizer_tensors(other, plain_parameters(model), saved)


@pytest.mark.parametrize(("kind", "library"), KINDS)
def test_frozen_parameters_have_no_state(kind: str, library: str) -> None:
    model = build_model(SHAPE, seed=1)
    model.requires_grad_(False)
    trained = dict(model.named_parameters())["model.layers.0.mlp.up_proj.weight"].requires_grad_()
    optimizer = optimizer_of(model, kind=kind, library=library)
    step(model, optimizer, 1)
    saved = optimizer_tensors(optimizer, plain_parameters(model))
    assert {name.partition(".")[2] for name in saved} == {"model.layers.0.mlp.up_proj.weight"}
    load_optimizer_tensors(optimizer, plain_parameters(model), {name: each.clone() for name, each in saved.items()})
    assert [each for group in optimizer.param_groups for each in group["params"]] == [trained]


@pytest.mark.parametrize(("kind", "library"), KINDS[1:])
def test_smaller_states_learn_like_the_full_one(kind: str, library: str) -> None:
    results = []
    for options in ({}, {"kind": kind, "library": library}):
        model = build_model(LARGER, seed=1)
        optimizer = optimizer_of(model, **options)
        for number in range(12):
            set_learning_rate(optimizer, 0.01)
            step(model, optimizer, number % 3)
        ids = torch.randint(0, 64, (2, 8), generator=torch.Generator().manual_seed(0))
        results.append(float(model(ids).square().mean().detach()))
    before = float(build_model(LARGER, seed=1)(ids).square().mean().detach())
    full, small = results
    assert full < before / 2
    assert small == pytest.approx(full, rel=0.1)


def test_rounding_by_chance_is_right_on_average() -> None:
    wide = torch.full((200_000,), 1.0 + 0.3 / 128)  # 0.3 of the way from 1 to the next bfloat16
    rounded = rounded_by_chance(wide, torch.Generator().manual_seed(1))
    assert set(rounded.unique().tolist()) == {1.0, 1.0 + 1 / 128}
    assert float((rounded.float() - 1).mean() * 128) == pytest.approx(0.3, abs=0.005)
    exact = torch.tensor([0.0, -1.5, 2.0**-126, -3e38]).bfloat16().float()
    assert torch.equal(rounded_by_chance(exact, torch.Generator()).float(), exact)


def test_eight_bits_need_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    assert library_of("adamw", "cpu") == library_of("adamw-bf16", "cuda") == "torch"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if name == "bitsandbytes" else None)
    assert library_of("adamw-8bit", "cuda") == library_of("adamw-8bit", "cpu") == "bitsandbytes"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="neither torchao nor bitsandbytes") as caught:
        library_of("adamw-8bit", "cuda")
    assert "pip install torchao" in caught.value.hint
