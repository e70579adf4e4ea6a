"""LoRA beside frozen layers in one product: what peft computes, forward and backward, and still peft's layers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.profiler import profile

from penstock.train import low_rank
from penstock.train.adapting import add_adapter
from penstock.train.low_rank import adapted_product
from penstock.train.model_config import AdapterConfig
from penstock.train.pretrained import PretrainedModel, load_pretrained

SavedModel = Callable[[str], Path]

peft = pytest.importorskip("peft")


def drawn(*size: int) -> torch.Tensor:
    return torch.randn(size, dtype=torch.float64, requires_grad=True)


@pytest.mark.parametrize("num_rows", [0, 1, 7, 11])
@pytest.mark.parametrize(("num_in", "num_out"), [(6, 10), (10, 6), (8, 8)])
def test_the_product_and_its_gradients_are_those_of_the_sum(num_in: int, num_out: int, num_rows: int) -> None:
    torch.manual_seed(0)
    x, a, b = drawn(2, num_rows, num_in), drawn(3, num_in), drawn(num_out, 3)
    weight = drawn(num_out, num_in).detach()
    found, expected = adapted_product(x, weight, a, b), F.linear(x, weight) + F.linear(F.linear(x, a), b)
    torch.testing.assert_close(found, expected)
    given = torch.randn_like(expected)
    wanted = torch.autograd.grad(expected, (x, a, b), given)
    torch.testing.assert_close(torch.autograd.grad(found, (x, a, b), given), wanted)
    assert torch.autograd.gradcheck(lambda *parts: adapted_product(parts[0], weight, *parts[1:]), (x, a, b))
    first = adapted_product(x.detach(), weight, a, b)  # as in a first layer: nobody wants the input's gradient
    torch.testing.assert_close(torch.autograd.grad(first, (a, b), given), wanted[1:])


@pytest.mark.parametrize(("num_in", "num_out"), [(64, 96), (96, 64), (64, 64)])
def test_few_rows_have_no_copy_made_of_the_weight(num_in: int, num_out: int) -> None:
    x, a, b = drawn(2, 5, num_in), drawn(8, num_in), drawn(num_out, 8)
    weight = drawn(num_out, num_in).detach()
    with profile(profile_memory=True, record_shapes=True) as seen:
        adapted_product(x, weight, a, b).sum().backward()
    taken = max(event.self_cpu_memory_usage for event in seen.events())
    assert 0 < taken < weight.nbytes


def adapted(folder: Path, *, seed: int = 5, **adapter: Any) -> PretrainedModel:
    model = load_pretrained(str(folder), dtype=torch.float32)
    add_adapter(model, AdapterConfig(kind="lora", rank=8).model_copy(update=adapter), seed=seed)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # else the adapter says nothing yet
            nn.init.normal_(parameter, std=0.2)
    return model


def answers(model: PretrainedModel) -> list[torch.Tensor]:
    """Logits, and the gradient of each trained parameter."""
    ids = torch.randint(0, 384, (2, 24), generator=torch.Generator().manual_seed(1))
    logits = model(ids, torch.tensor([[0] * 9 + [1] * 15] * 2))
    logits.square().mean().backward()
    return [logits.detach(), *(each.grad for each in model.parameters() if each.grad is not None)]


def quick_layers(model: PretrainedModel) -> list[Any]:
    return [layer for layer in model.modules() if type(layer).__name__ == "QuickLinear"]


@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3", "gpt2"])
def test_a_model_answers_as_with_peft_alone(
    kind: str, saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = adapted(saved_model(kind))
    expected = answers(model)
    model.zero_grad()
    calls = 0
    whole = low_rank.adapted_product

    def counted(*parts: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return whole(*parts)

    monkeypatch.setattr(low_rank, "adapted_product", counted)
    monkeypatch.setattr(low_rank, "QUICK_DEVICES", ("cpu",))
    found = answers(model)
    # GPT-2's layers keep their weights the other way round: they are left to peft.
    assert calls == (0 if kind == "gpt2" else 14)
    assert len(quick_layers(model)) == (8 if kind == "gpt2" else 14)
    assert len(found) == len(expected) > 8
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_compiled_layers_answer_the_same(saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "QUICK_DEVICES", ("cpu",))
    torch.manual_seed(0)
    model = adapted(saved_model("llama"))
    expected = answers(model)
    model.zero_grad()
    for block in model.blocks():
        block.compile(dynamic=False, backend="aot_eager")
    for one, other in zip(answers(model), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def left_to_peft(model: PretrainedModel, change: str) -> None:
    layer = quick_layers(model)[0]
    if change == "merged":
        layer.merge()
    elif change == "switched off":
        layer.enable_adapters(False)
    elif change == "trained base":
        layer.base_layer.weight.requires_grad_()
    elif change == "another base":

        class Other(nn.Linear):
            pass

        layer.base_layer.__class__ = Other


@pytest.mark.parametrize(
    ("change", "adapter"),
    [
        ("dropout", {"dropout": 0.5}),
        ("dora", {"kind": "dora"}),
        ("odd rank", {"rank": 4}),
        *((change, {}) for change in ("merged", "switched off", "trained base", "another base", "vector")),
    ],
)
def test_what_it_cannot_compute_is_left_to_peft(
    change: str, adapter: dict[str, Any], saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    model = adapted(saved_model("llama"), **adapter)
    left_to_peft(model, change)
    monkeypatch.setattr(low_rank, "QUICK_DEVICES", ("cpu",))
    layer = quick_layers(model)[0]
    x = torch.randn(*(() if change == "vector" else (3,)), layer.in_features)

    def refused(*parts: torch.Tensor) -> torch.Tensor:
        raise AssertionError("computed the quick way")

    monkeypatch.setattr(low_rank, "adapted_product", refused)
    torch.manual_seed(2)
    found = layer(x)
    torch.manual_seed(2)
    assert torch.equal(found, peft.tuners.lora.Linear.forward(layer, x))


def test_layers_of_a_peft_without_variants_are_left_to_it(
    saved_model: SavedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(low_rank, "QUICK_DEVICES", ("cpu",))
    layer = quick_layers(adapted(saved_model("llama")))[0]
    monkeypatch.setattr(peft.tuners.lora.Linear, "forward", lambda layer, x: layer.base_layer(x))  # before 0.16
    del layer.lora_variant
    x = torch.randn(3, layer.in_features)
    assert torch.equal(layer(x), layer.base_layer(x))
