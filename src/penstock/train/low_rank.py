"""LoRA's products beside frozen layers, in fewer passes over memory; on GPUs.

In: an input [..., K], a frozen weight [N, K], and an adapter's trained A [r, K] and B [N, r]. Out: x Wᵀ + (x Aᵀ) Bᵀ,
[..., N], as peft computes it, but summed inside the large product and rounded once.

peft writes the adapter's part as an activation of its own, reads both to add them, and does so again backward. Here the
few columns of the low rank are laid beside the narrower side of the large product, as further columns of what it sums
over: [x, x Aᵀ] times [W, B]. Where the input is the wide side (a layer that narrows), or where rows are so few that
writing [W, B] takes longer than what it spares, the large product is added to the adapter's part instead. Measured on
an H200, a Llama of 1B with rank 16 and 16,384 rows: docs/models.md.

Memory: the input and its r columns for the way back, no [..., N] besides the output.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.train.quiet_imports import quiet_import

__all__ = ["adapted_product", "quicken"]

# Elsewhere nothing waits for memory that much, and a run's losses stay what they were.
QUICK_DEVICES = ("cuda",)
# Rows of another length in 16 bits don't begin at 16 bytes, which the quickest kernels want.
RANK_MULTIPLE = 8


def quicken(model: nn.Module) -> int:
    """Lets the model's LoRA layers compute this way where they can; they stay peft's in all else. Returns how many."""
    with quiet_import():
        from peft.tuners.lora import Linear
    layers = [layer for layer in model.modules() if type(layer) is Linear]
    for layer in layers:
        # Another class, not another `forward`: compiled code is shared by layers of one class.
        layer.__class__ = _quick_class()
    return len(layers)


@cache
def _quick_class() -> Any:
    """Made at first use: peft takes seconds to import."""
    from peft.tuners.lora import Linear

    class QuickLinear(Linear):
        """peft's layer; what this can't compute is left to peft."""

        def forward(self, x: Tensor, *arguments: Any, **named: Any) -> Tensor:
            """See the module."""
            if arguments or named or not _is_quick(self, x):
                output: Tensor = super().forward(x, *arguments, **named)
                return output
            layer: Any = self
            (name,) = layer.active_adapters
            base, dtype = layer.base_layer, _dtype_of_products(x)
            a, b = layer.lora_A[name].weight * layer.scaling[name], layer.lora_B[name].weight
            product = adapted_product(x.to(dtype), base.weight.to(dtype), a.to(dtype), b.to(dtype))
            return product if base.bias is None else product + base.bias.to(dtype)

    return QuickLinear


def _is_quick(layer: Any, x: Tensor) -> bool:
    """Whether this is one plain adapter, not merged, beside a frozen layer that is plain too, on a GPU."""
    base, names = layer.base_layer, layer.active_adapters
    if type(base) is not nn.Linear or base.weight.requires_grad or x.device.type not in QUICK_DEVICES or x.dim() < 2:
        return False
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return False
    (name,) = names
    # peft knows variants since 0.16; before, it told DoRA in other ways.
    is_plain = name not in getattr(layer, "lora_variant", names) and layer.lora_B[name].bias is None
    has_good_rank = layer.lora_A[name].out_features % RANK_MULTIPLE == 0
    return is_plain and has_good_rank and isinstance(layer.lora_dropout[name], nn.Identity)


def _dtype_of_products(x: Tensor) -> torch.dtype:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def adapted_product(x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """See the module; all of one type."""
    product: Tensor = _AdaptedProduct.apply(x.flatten(0, -2), weight, a, b)  # type: ignore[no-untyped-call]
    return product.view(*x.shape[:-1], weight.shape[0])


class _AdaptedProduct(torch.autograd.Function):
    """Of an input [M, K]; the weight gets no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        low = F.linear(x, a)  # [M, r]
        ctx.save_for_backward(x, low, weight, a, b)
        num_out, num_in = weight.shape
        if num_in <= num_out and num_in < len(x):
            return F.linear(torch.cat((x, low), dim=1), torch.cat((weight, b), dim=1))
        added: Tensor = sum_of_products(low, b.t(), x, weight.t())
        return added

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, None, Tensor, Tensor]:
        (given,) = gradients
        x, low, weight, a, b = ctx.saved_tensors
        num_out, num_in = weight.shape
        low_gradient = given @ b  # [M, r]
        gradient = None
        if ctx.needs_input_grad[0]:  # not before the first layer: embeddings are frozen too
            if num_out <= num_in and num_out < len(x):
                gradient = torch.cat((given, low_gradient), dim=1) @ torch.cat((weight, a))
            else:
                gradient = sum_of_products(low_gradient, a, given, weight)
        return gradient, None, low_gradient.t() @ x, given.t() @ low


@torch.library.custom_op("penstock::sum_of_products", mutates_args=())
def sum_of_products(few: Tensor, few_weights: Tensor, many: Tensor, many_weights: Tensor) -> Tensor:
    """`few @ few_weights + many @ many_weights`, added where the first lies; the compiler would copy it before."""
    return torch.mm(few, few_weights).addmm_(many, many_weights)


@sum_of_products.register_fake
def _shape_of_sum(few: Tensor, few_weights: Tensor, many: Tensor, many_weights: Tensor) -> Tensor:
    return few.new_empty((few.shape[0], few_weights.shape[1]))
