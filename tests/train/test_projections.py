"""One product for query, key and value: heads and gradients as layer by layer, eager, compiled and by kernel."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from penstock.train.model import _rotations
from penstock.train.projections import joined_heads, rotated, rotated_heads

from .interpreter import assert_passes, needs_triton

HEAD_SIZE = 4
SIZES = (12, 4, 4)
POSITIONS = 5

Project = Callable[[Tensor, Sequence[nn.Linear], Tensor, Tensor], Sequence[Tensor]]


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, size, bias=False) for size in SIZES]


def angles() -> tuple[Tensor, Tensor]:
    return _rotations(POSITIONS, HEAD_SIZE, 10.0, torch.device("cpu"))


def results(project: Project) -> list[Tensor]:
    """Heads, then the gradients of the input and of each weight."""
    made = layers()
    hidden = torch.randn(2, POSITIONS, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    heads = project(hidden, made, *angles())
    # Weighted place by place: a sum of squares alone doesn't notice a turn.
    weights = [torch.randn(part.shape, generator=torch.Generator().manual_seed(2)) for part in heads]
    sum((part * weight).sum() for part, weight in zip(heads, weights, strict=True)).backward()  # type: ignore[union-attr]
    found = [*heads, hidden.grad, *(layer.weight.grad for layer in made)]
    return [each.detach() for each in found if each is not None]


def one_by_one(hidden: Tensor, made: Sequence[nn.Linear], cosine: Tensor, sine: Tensor) -> Sequence[Tensor]:
    query, key, value = (layer(hidden).view(2, POSITIONS, -1, HEAD_SIZE).transpose(1, 2) for layer in made)
    return rotated(query, cosine, sine), rotated(key, cosine, sine), value


def joined(hidden: Tensor, made: Sequence[nn.Linear], cosine: Tensor, sine: Tensor) -> Sequence[Tensor]:
    return joined_heads(hidden, [layer.weight for layer in made], cosine, sine)


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_one_product_is_the_same_as_several(backend: str | None) -> None:
    expected = results(one_by_one)
    found = results(joined if backend is None else torch.compile(joined, backend=backend, fullgraph=True))
    assert len(found) == len(expected) == len(SIZES) * 2 + 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cpu_takes_them_one_by_one() -> None:
    for one, other in zip(results(rotated_heads), results(one_by_one), strict=True):
        assert torch.equal(one, other)


CHECK = """
import torch
from penstock.train import projections
from penstock.train.model import _rotations

device = "cuda" if torch.cuda.is_available() else "cpu"
chance = torch.Generator().manual_seed(0)
cases = ((6, 6, 128, torch.bfloat16), (5, 1, 12, torch.float32), (3, 2, 64, torch.float32))
for heads, key_heads, size, dtype in cases:
    cosine, sine = _rotations(7, size, 10.0, torch.device(device))
    shapes = [(2, 7, heads, size), (2, 7, key_heads, size), (2, key_heads, 7, size)]
    parts = [torch.randn(shape, generator=chance).to(device, dtype) for shape in shapes]
    query, key, value = parts[0].transpose(1, 2), parts[1].transpose(1, 2), parts[2]
    back = sine.roll(size // 2, dims=-1)
    turned = projections.rotated(query, cosine, back), projections.rotated(key, cosine, back), value
    expected = torch.cat([part.transpose(1, 2).flatten(2) for part in turned], dim=-1)
    found = projections.turned_back_side_by_side(query, key, value, cosine, sine)
    torch.testing.assert_close(found, expected, atol=2e-2 if dtype is torch.bfloat16 else 1e-6, rtol=1e-2)
"""


@needs_triton
def test_the_kernel_is_the_same_as_the_operations() -> None:
    assert_passes(CHECK)
