"""One product for several layers: the same outputs and gradients as layer by layer, eager and compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from penstock.train.projections import all_projected, joined_product

SIZES = (12, 4, 4)


def layers() -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, size, bias=False) for size in SIZES]


def gradients(project: Callable[[Tensor, Sequence[nn.Linear]], Sequence[Tensor]]) -> list[Tensor]:
    """Outputs, then the gradients of the input and of each weight."""
    made = layers()
    hidden = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(1), requires_grad=True)
    outputs = project(hidden, made)
    sum((part * (place + 1)).square().sum() for place, part in enumerate(outputs)).backward()  # type: ignore[union-attr]
    found = [*outputs, hidden.grad, *(layer.weight.grad for layer in made)]
    return [each.detach() for each in found if each is not None]


def joined(hidden: Tensor, made: Sequence[nn.Linear]) -> Sequence[Tensor]:
    return joined_product(hidden, [layer.weight for layer in made])


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_one_product_is_the_same_as_several(backend: str | None) -> None:
    expected = gradients(lambda hidden, made: [layer(hidden) for layer in made])
    found = gradients(joined if backend is None else torch.compile(joined, backend=backend, fullgraph=True))
    assert len(found) == len(expected) == len(SIZES) * 2 + 1
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


def test_a_cpu_takes_them_one_by_one() -> None:
    hidden, made = torch.randn(3, 8), layers()
    for one, layer in zip(all_projected(hidden, made), made, strict=True):
        assert torch.equal(one, layer(hidden))
