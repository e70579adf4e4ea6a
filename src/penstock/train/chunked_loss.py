"""Head and cross-entropy in chunks of tokens, so that the whole logits never exist.

In: vectors [N, D], the head's weight [V, D], labels [N] with -100 where nothing is scored. Out: nats, summed. Each
chunk makes its logits, takes the softmax in float32, and at once the gradients of the chunk's vectors and of the
weight, which backward only scales: three products per chunk, as many as the plain loss has. Without gradients only the
first. On a GPU loss and gradient of a chunk are one kernel (fused_cross_entropy.py), which makes this the fastest way.

Memory: the logits of one chunk (`chunk_logits_bytes`), where they aren't overwritten about three times over, the
vectors' gradient [N, D], and where the head is trained the weight's gradient [V, D] in float32.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.load.torch import IGNORED_LABEL
from penstock.train import fused_cross_entropy
from penstock.train.kernel_support import has_triton
from penstock.train.tuning.memory import chunk_logits_bytes

__all__ = ["CrossEntropySum", "chunk_tokens", "chunked_cross_entropy_sum", "cross_entropy_sum"]

CHUNK_MULTIPLE = 64  # tokens: whole tiles

CrossEntropySum = Callable[[Tensor, Tensor], Tensor]


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Nats of logits [N, V] in float32, summed over the labels [N] that aren't -100."""
    return F.cross_entropy(logits.float(), labels, ignore_index=IGNORED_LABEL, reduction="sum")


def chunk_tokens(padded_vocab_size: int, device: torch.device, *, number_bytes: int = 4) -> int:
    """Tokens whose logits fit the limit, in whole tiles; at least one tile."""
    memory = torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else None
    limit = chunk_logits_bytes(memory) // (number_bytes * padded_vocab_size)
    return max(CHUNK_MULTIPLE, limit // CHUNK_MULTIPLE * CHUNK_MULTIPLE)


def chunked_cross_entropy_sum(
    vectors: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    tokens: int | None = None,
    of_logits: CrossEntropySum = cross_entropy_sum,
) -> Tensor:
    """The loss; `tokens` per chunk are chosen by `chunk_tokens` unless given, `of_logits` may be compiled."""
    device = vectors.device.type
    # Autocast doesn't reach inside a Function: what it would do to the product is done here.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else vectors.dtype
    # A kernel that overwrites the logits has no float32 copy of them.
    number_bytes = dtype.itemsize if _overwrites(vectors.device) else 4
    tokens = tokens or chunk_tokens(len(weight), vectors.device, number_bytes=number_bytes)
    # Asked here because inside a Function gradients are always off.
    wants_gradient = torch.is_grad_enabled()
    loss: Tensor = _ChunkedCrossEntropy.apply(vectors, weight, labels, tokens, dtype, wants_gradient, of_logits)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        vectors: Tensor,
        weight: Tensor,
        labels: Tensor,
        tokens: int,
        dtype: torch.dtype,
        wants_gradient: bool,
        of_logits: CrossEntropySum,
    ) -> Tensor:
        device = vectors.device.type
        needs_vectors, needs_weight = (wants_gradient and needed for needed in ctx.needs_input_grad[:2])
        vectors_gradient = torch.empty_like(vectors) if needs_vectors else None
        weight_gradient: Tensor | None = None
        total = torch.zeros((), dtype=torch.float32, device=vectors.device)
        with torch.autocast(device, enabled=False):
            narrow = weight.to(dtype)
            for first in range(0, len(vectors), tokens):
                chunk = slice(first, first + tokens)
                inputs = vectors[chunk].to(dtype)
                logits = inputs @ narrow.T  # [chunk, V]
                if not (needs_vectors or needs_weight):
                    total += of_logits(logits, labels[chunk])
                    continue
                nats, gradient = _with_gradient(of_logits, logits, labels[chunk])
                total += nats
                if vectors_gradient is not None and vectors_gradient.dtype == dtype:
                    torch.mm(gradient, narrow, out=vectors_gradient[chunk])
                elif vectors_gradient is not None:
                    vectors_gradient[chunk] = gradient @ narrow
                if needs_weight:
                    product = gradient.T @ inputs
                    weight_gradient = product.float() if weight_gradient is None else weight_gradient.add_(product)
        ctx.save_for_backward(vectors_gradient, weight_gradient)
        ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (scale,) = gradients
        for_vectors, for_weight = ctx.saved_tensors
        for_vectors = None if for_vectors is None else for_vectors * scale.to(for_vectors.dtype)
        for_weight = None if for_weight is None else (for_weight * scale).to(ctx.weight_dtype)
        return for_vectors, for_weight, None, None, None, None, None


def _overwrites(device: torch.device) -> bool:
    return device.type == "cuda" and has_triton()


def _with_gradient(of_logits: CrossEntropySum, logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The loss of a chunk, and the gradient of its logits in their precision and, on a GPU, their place."""
    if _overwrites(logits.device):
        return fused_cross_entropy.overwrite_with_gradient(logits, labels, ignored_label=IGNORED_LABEL), logits
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        nats = of_logits(leaf, labels)
        (gradient,) = torch.autograd.grad(nats, leaf)
    return nats.detach(), gradient
