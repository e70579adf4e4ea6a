"""Head and cross-entropy in chunks of tokens, so that the whole logits never exist.

In: vectors [N, D], the head's weight [V, D], labels [N] with -100 where nothing is scored. Out: nats, summed. Each
chunk makes its logits, takes the softmax in float32, and at once the gradients of the chunk's vectors and of the
weight, which backward only scales: three products per chunk, as many as the plain loss has. Without gradients only the
first.

Memory: logits, softmax and gradient of one chunk (`CHUNK_LOGITS_BYTES` as float32, about three times over), the
vectors' gradient [N, D], and where the head is trained the weight's gradient [V, D] in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.load.torch import IGNORED_LABEL

__all__ = ["CHUNK_LOGITS_BYTES", "chunk_tokens", "chunked_cross_entropy_sum"]

# On a GPU a chunk must still be a large product; on a CPU it should stay near the caches.
CHUNK_LOGITS_BYTES = {"cpu": 16 * 2**20, "cuda": 256 * 2**20}
CHUNK_MULTIPLE = 64  # tokens: whole tiles


def chunk_tokens(padded_vocab_size: int, device: str) -> int:
    """Tokens whose float32 logits fit the limit, in whole tiles; at least one tile."""
    limit = CHUNK_LOGITS_BYTES[device] // (4 * padded_vocab_size)
    return max(CHUNK_MULTIPLE, limit // CHUNK_MULTIPLE * CHUNK_MULTIPLE)


def chunked_cross_entropy_sum(vectors: Tensor, weight: Tensor, labels: Tensor, *, tokens: int | None = None) -> Tensor:
    """The loss; `tokens` per chunk are chosen by `chunk_tokens` unless given."""
    device = vectors.device.type
    tokens = tokens or chunk_tokens(len(weight), device)
    # Autocast doesn't reach inside a Function: what it would do to the product is done here.
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else vectors.dtype
    # Asked here because inside a Function gradients are always off.
    loss: Tensor = _ChunkedCrossEntropy.apply(vectors, weight, labels, tokens, dtype, torch.is_grad_enabled())  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, vectors: Tensor, weight: Tensor, labels: Tensor, tokens: int, dtype: torch.dtype, wants_gradient: bool
    ) -> Tensor:
        device = vectors.device.type
        needs_vectors, needs_weight = (wants_gradient and needed for needed in ctx.needs_input_grad[:2])
        vectors_gradient = torch.empty_like(vectors) if needs_vectors else None
        weight_gradient = torch.zeros_like(weight, dtype=torch.float32) if needs_weight else None
        total = torch.zeros((), dtype=torch.float32, device=vectors.device)
        with torch.autocast(device, enabled=False):
            narrow = weight.to(dtype)
            for first in range(0, len(vectors), tokens):
                chunk = slice(first, first + tokens)
                inputs = vectors[chunk].to(dtype)
                log_probabilities = (inputs @ narrow.T).float().log_softmax(-1)  # [chunk, V]
                total += F.nll_loss(log_probabilities, labels[chunk], ignore_index=IGNORED_LABEL, reduction="sum")
                if not (needs_vectors or needs_weight):
                    continue
                gradient = _logits_gradient(log_probabilities, labels[chunk]).to(dtype)
                if vectors_gradient is not None:
                    vectors_gradient[chunk] = gradient @ narrow
                if weight_gradient is not None:
                    weight_gradient += gradient.T @ inputs
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
        return for_vectors, for_weight, None, None, None, None


def _logits_gradient(log_probabilities: Tensor, labels: Tensor) -> Tensor:
    """Softmax less one at the label; zero rows where nothing is scored. Overwrites its input."""
    is_scored = labels != IGNORED_LABEL
    gradient = log_probabilities.exp_()
    rows = torch.arange(len(labels), device=labels.device)
    gradient[rows, labels.clamp(min=0)] -= 1.0
    return gradient.mul_(is_scored[:, None])
