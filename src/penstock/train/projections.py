"""Query, key and value heads of an input, the first two turned by their positions; on GPUs by one product.

In: an input [B, T, D], three layers without bias, the angles' cosine and sine [T, head]. Out: query, key and value
[B, heads, T, head]. One large product runs nearer the peak than three, and the input's gradient is summed inside it,
where otherwise a whole activation is written for each layer.

Backward, the parts' gradients are turned back and put side by side by one kernel of our own. The compiler would ask at
each number which part it belongs to, 1.3 ms a layer instead of 0.15 (64 x 1024 x 768 on an H200), and with an operator
of PyTorch for the putting together it is two kernels and 0.3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.train.kernel_support import has_triton, power_of_two, triton_kernel

__all__ = ["joined_heads", "rotated", "rotated_heads"]

Heads = tuple[Tensor, Tensor, Tensor]
"""Query, key and value, [B, heads, T, head] each; their numbers of heads may differ."""


def rotated_heads(hidden: Tensor, layers: Sequence[nn.Linear], cosine: Tensor, sine: Tensor) -> Heads:
    """See the module. Layers that aren't plain (float8), and a CPU, take the layers one by one."""
    if hidden.device.type == "cuda" and all(type(layer) is nn.Linear for layer in layers):
        return joined_heads(hidden, [layer.weight for layer in layers], cosine, sine)
    return _turned([layer(hidden) for layer in layers], cosine, sine)


def joined_heads(hidden: Tensor, weights: Sequence[Tensor], cosine: Tensor, sine: Tensor) -> Heads:
    """The same by one product with the weights [size, D]."""
    product = F.linear(hidden, torch.cat(list(weights)))
    heads: Heads = _Heads.apply(product, cosine, sine, [len(weight) for weight in weights])  # type: ignore[no-untyped-call]
    return heads


def rotated(heads: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Each pair (i, i + head/2) of the last axis turned by its position's angle; the first half of `sine` is negative.

    The angles broadcast against the heads.
    """
    # The halves swapped by `roll`: compiled code then reads each number once, where `cat` has it ask which half it is.
    return (heads * cosine + heads.roll(heads.shape[-1] // 2, dims=-1) * sine).to(heads.dtype)


def _turned(parts: Sequence[Tensor], cosine: Tensor, sine: Tensor) -> Heads:
    """[B, T, heads x head] of query, key and value -> [B, heads, T, head] of each, turned."""
    query, key, value = (part.view(*part.shape[:2], -1, cosine.shape[-1]) for part in parts)  # [B, T, heads, head]
    # Turned before the axes change places: a position's heads stay neighbours in memory, as kernels over documents laid
    # end to end want them, and as the product after attention does.
    angles = cosine[:, None], sine[:, None]
    return rotated(query, *angles).transpose(1, 2), rotated(key, *angles).transpose(1, 2), value.transpose(1, 2)


class _Heads(torch.autograd.Function):
    """`split` along the last axis, and the turning."""

    @staticmethod
    def forward(ctx: Any, product: Tensor, cosine: Tensor, sine: Tensor, sizes: list[int]) -> Heads:
        ctx.save_for_backward(cosine, sine)
        return _turned(torch.split(product, sizes, dim=-1), cosine, sine)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient_side_by_side(*gradients, *ctx.saved_tensors), None, None, None


@torch.library.custom_op("penstock::gradient_side_by_side", mutates_args=())
def gradient_side_by_side(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Gradients [B, heads, T, head] of turned query, turned key and value -> that of the product [B, T, sizes]."""
    if query.device.type == "cuda" and has_triton():
        return turned_back_side_by_side(query, key, value, cosine, sine)
    # Turned by the angle, backward by its negative: the sine's other half.
    back = sine.roll(sine.shape[-1] // 2, dims=-1)
    parts = (rotated(query, cosine, back), rotated(key, cosine, back), value)
    return torch.cat([part.transpose(1, 2).flatten(2) for part in parts], dim=-1)


@gradient_side_by_side.register_fake
def _shape_side_by_side(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    rows, _, positions, head_size = query.shape
    num_heads = sum(part.shape[1] for part in (query, key, value))
    return query.new_empty((rows, positions, num_heads * head_size))


def turned_back_side_by_side(query: Tensor, key: Tensor, value: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """`gradient_side_by_side` in one kernel."""
    rows, _, positions, head_size = query.shape
    # The kernel asks for numbers of a head to be neighbours, which what attention returns always are.
    query, key, value = (part if part.stride(-1) == 1 else part.contiguous() for part in (query, key, value))
    num_heads = sum(part.shape[1] for part in (query, key, value))
    joined = query.new_empty((rows, positions, num_heads * head_size))
    triton_kernel("rotation_kernel", "turn_back_kernel")[(rows * positions,)](
        query,
        key,
        value,
        cosine,
        sine,
        joined,
        positions,
        *query.stride()[:3],
        *key.stride()[:3],
        *value.stride()[:3],
        QUERY_HEADS=query.shape[1],
        KEY_HEADS=key.shape[1],
        MOST_HEADS=power_of_two(query.shape[1]),
        HALF=head_size // 2,
        HALF_BLOCK=power_of_two(head_size // 2),
        num_warps=2,
    )
    return joined
