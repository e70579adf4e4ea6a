"""Norms and gates with gradients of our own against plain PyTorch: eager, compiled, and by their Triton kernels, on a
GPU where there is one, else in Triton's interpreter where Triton is installed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.train.gating import joined_gate
from penstock.train.norms import RMSNorm, normed_beside

from .interpreter import assert_passes, needs_triton

Layer = Callable[..., Tensor]


def drawn(seed: int, *size: int) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def with_gradients(layer: Layer, *inputs: Tensor) -> list[Tensor]:
    """What the layer makes of the inputs, and the gradients of all of these."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    output = layer(*leaves)
    (output * drawn(9, *output.shape)).sum().backward()
    return [output.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


def norm_as_written(stream: Tensor, weight: Tensor) -> Tensor:
    norm = RMSNorm(len(weight), 1e-5)
    del norm.weight
    norm.weight = weight  # a plain tensor, so that its gradient can be asked for
    return stream * 2 + torch.sin(norm(stream))


def norm_beside(stream: Tensor, weight: Tensor) -> Tensor:
    passed, normed = normed_beside(stream, weight, 1e-5)
    return passed * 2 + torch.sin(normed)


def gate_as_written(hidden: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(hidden, gate)) * F.linear(hidden, up)


CASES = [
    (norm_as_written, norm_beside, (drawn(1, 2, 5, 12), drawn(2, 12))),
    (gate_as_written, joined_gate, (drawn(1, 2, 5, 8), drawn(2, 12, 8), drawn(3, 12, 8))),
]


@pytest.mark.parametrize("backend", [None, "aot_eager"])
@pytest.mark.parametrize(("as_written", "ours", "inputs"), CASES, ids=["norm", "gate"])
def test_the_same_as_written_plainly(
    as_written: Layer, ours: Layer, inputs: tuple[Tensor, ...], backend: str | None
) -> None:
    expected = with_gradients(as_written, *inputs)
    found = with_gradients(ours if backend is None else torch.compile(ours, backend=backend, fullgraph=True), *inputs)
    assert len(found) == len(expected) == len(inputs) + 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cpu_passes_the_stream_on_as_it_is() -> None:
    norm, stream = RMSNorm(6, 1e-5), drawn(1, 3, 6)
    torch.nn.init.ones_(norm.weight)
    passed, normed = norm.beside(stream)
    assert passed is stream
    assert torch.equal(normed, norm(stream))


CHECK = """
import torch
from penstock.train.gating import gate_gradient, gate_gradient_by_kernel
from penstock.train.norms import norm_gradient, norm_gradient_by_kernel

device = "cuda" if torch.cuda.is_available() else "cpu"
for dtype, rows, columns in ((torch.float32, 9, 20), (torch.bfloat16, 37, 64), (torch.float32, 21, 5000)):
    chance = torch.Generator().manual_seed(columns)
    near = {"atol": 6e-2, "rtol": 2e-2} if dtype is torch.bfloat16 else {"atol": 2e-5, "rtol": 1e-4}
    stream, passed, given = (torch.randn(2, rows, columns, generator=chance).to(dtype) for _ in range(3))
    weight = torch.rand(columns, generator=chance)
    product = torch.randn(2, rows, 2 * columns, generator=chance).to(dtype)
    expected = [*norm_gradient(stream, weight, passed, given, 1e-5), gate_gradient(product, given)]
    stream, weight, passed, given, product = (one.to(device) for one in (stream, weight, passed, given, product))
    found = [*norm_gradient_by_kernel(stream, weight, passed, given, 1e-5), gate_gradient_by_kernel(product, given)]
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one.cpu(), other, **near)
"""


@needs_triton
def test_the_kernels_give_what_the_operations_give() -> None:
    assert_passes(CHECK)
