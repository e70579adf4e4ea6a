"""The built-in decoder: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

In: token ids [B, T] and document ids [B, T]. Out: logits [B, T, V]. With document ids, a position attends to earlier
positions of its own document only; without them, to all earlier ones of the row. Positions count from the start of
the row: rotary attention depends on differences alone, so a document sees the same thing wherever it lies.

Parameters are named as in transformers' `LlamaForCausalLM`, and compute the same function: export is a copy.

Cost: `flops_per_token`; memory is dominated by the logits, B x T x V x 4 bytes, hence micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from penstock.train.attention import KERNELS, AttentionMask, attended, attention_mask
from penstock.train.gating import gated
from penstock.train.language_model import LanguageModel
from penstock.train.norms import RMSNorm
from penstock.train.projections import rotated_heads
from penstock.train.shape import ModelShape

__all__ = ["Decoder", "build_model", "flops_per_token", "num_parameters"]

INITIAL_STANDARD_DEVIATION = 0.02


class Attention(nn.Module):
    """Causal self-attention with rotary positions; several query heads may share one key/value head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.head_size = shape.head_size
        self.kernel = "sdpa"
        kv_size = shape.num_kv_heads * shape.head_size
        self.q_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, kv_size, bias=False)
        self.o_proj = nn.Linear(shape.hidden_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor, cosine: Tensor, sine: Tensor, mask: AttentionMask) -> Tensor:
        """hidden [B, T, D], cosine and sine [T, head], the kernel's mask or None (plain causal) -> [B, T, D]."""
        rows, positions, _ = hidden.shape
        query, key, value = rotated_heads(hidden, (self.q_proj, self.k_proj, self.v_proj), cosine, sine)
        mixed = attended(self.kernel, query, key, value, mask)
        output: Tensor = self.o_proj(mixed.transpose(1, 2).reshape(rows, positions, -1))
        return output


class FeedForward(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.feed_forward_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.feed_forward_size, bias=False)
        self.down_proj = nn.Linear(shape.feed_forward_size, shape.hidden_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, D]."""
        output: Tensor = self.down_proj(gated(hidden, self.gate_proj, self.up_proj))
        return output


class Block(nn.Module):
    """One layer: attention and feed-forward, each normed before and added after.

    What the feed-forward adds is left to the next layer to add, which norms the sum anyway: in compiled code that is
    one pass over the stream instead of two.
    """

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.post_attention_layernorm = RMSNorm(shape.hidden_size, shape.norm_eps)

    def forward(
        self, stream: Tensor, added: Tensor, cosine: Tensor, sine: Tensor, mask: AttentionMask
    ) -> tuple[Tensor, Tensor]:
        """The stream [B, T, D] and what is still to be added to it -> the same after this layer."""
        stream, normed = self.input_layernorm.beside(stream + added)
        stream, normed = self.post_attention_layernorm.beside(stream + self.self_attn(normed, cosine, sine, mask))
        return stream, self.mlp(normed)


class Body(nn.Module):
    """Everything below the head."""

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.padded_vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.num_layers))
        self.norm = RMSNorm(shape.hidden_size, shape.norm_eps)
        self.head_size = shape.head_size
        self.rope_theta = shape.rope_theta
        self.attention_kernel = "sdpa"

    def forward(self, inputs: Tensor, document_ids: Tensor | None, borders: Tensor | None = None) -> Tensor:
        """Ids [B, T] -> hidden [B, T, D]."""
        added = self.embed_tokens(inputs)
        if torch.is_autocast_enabled(added.device.type):
            # The stream between the layers in the run's precision, too: half the bytes to move, 2 % of a step.
            added = added.to(torch.get_autocast_dtype(added.device.type))
        stream = torch.zeros_like(added)
        cosine, sine = _rotations(inputs.shape[1], self.head_size, self.rope_theta, added.device)
        mask = attention_mask(self.attention_kernel, document_ids, borders)
        for layer in self.layers:
            stream, added = layer(stream, added, cosine, sine, mask)
        output: Tensor = self.norm(stream + added)
        return output


class Decoder(LanguageModel):
    """The whole model; build it with `build_model`, which also draws its first weights."""

    attention_kernels = KERNELS

    def __init__(self, shape: ModelShape) -> None:
        super().__init__()
        self._shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.hidden_size, shape.padded_vocab_size, bias=False)
        if shape.tie_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, inputs: Tensor, document_ids: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
        """Ids [B, T], document ids [B, T] or None for no borders -> logits [B, T, padded vocabulary]."""
        logits: Tensor = self.lm_head(self.model(inputs, document_ids, borders))
        return logits

    def hidden(self, inputs: Tensor, document_ids: Tensor | None = None, borders: Tensor | None = None) -> Tensor:
        """The same up to the head -> [B, T, D]."""
        output: Tensor = self.model(inputs, document_ids, borders)
        return output

    @property
    def head_weight(self) -> Tensor:
        """[padded vocabulary, D]."""
        return self.lm_head.weight

    @property
    def attention_kernel(self) -> str:
        """One of `attention.KERNELS`; may be set between steps, as tuning does."""
        return self.model.attention_kernel

    @attention_kernel.setter
    def attention_kernel(self, kernel: str) -> None:
        if kernel not in KERNELS:
            raise ValueError(f"attention kernel {kernel!r} is none of {', '.join(KERNELS)}")
        self.model.attention_kernel = kernel
        for module in self.model.modules():  # layers may have been wrapped since
            if isinstance(module, Attention):
                module.kernel = kernel

    def blocks(self) -> Sequence[nn.Module]:
        """The layers, first to last."""
        return list(self.model.layers)

    def compiled_parts(self) -> Sequence[nn.Module]:
        """The layers, and the norm after them, which operation by operation takes as long as many of theirs."""
        return [*self.model.layers, self.model.norm]

    def flops_per_token(self, seq_len: int) -> int:
        """See the function of that name."""
        return flops_per_token(self.shape, seq_len)

    @property
    def max_positions(self) -> int:
        """The longest row the model was made for."""
        return self.shape.max_positions

    @property
    def vocab_size(self) -> int:
        """Ids of the tokenizer."""
        return self.shape.vocab_size

    @property
    def padded_vocab_size(self) -> int:
        """Logits per position."""
        return self.shape.padded_vocab_size

    @property
    def shape(self) -> ModelShape:
        """Every size."""
        return self._shape

    def description(self) -> dict[str, Any]:
        """The kind and every size."""
        return {"kind": "decoder", **asdict(self.shape)}


def build_model(shape: ModelShape, *, seed: int) -> Decoder:
    """A decoder on the CPU whose weights are a pure function of `shape` and `seed`; the global RNG is left alone."""
    with torch.device("meta"):
        model = Decoder(shape)
    model = model.to_empty(device="cpu")
    if shape.tie_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight  # to_empty gives each name its own memory
    _draw_weights(model, torch.Generator().manual_seed(seed))
    return model


@torch.no_grad()
def _draw_weights(model: Decoder, generator: torch.Generator) -> None:
    """Normal with deviation 0.02; norms 1; what a layer adds to the stream scaled down by the number of additions."""
    residual_scale = 1 / math.sqrt(2 * model.shape.num_layers)
    for name, parameter in model.named_parameters():
        if parameter.ndim < 2:
            parameter.fill_(1.0)
            continue
        is_residual = name.endswith(("o_proj.weight", "down_proj.weight"))
        deviation = INITIAL_STANDARD_DEVIATION * (residual_scale if is_residual else 1.0)
        parameter.normal_(0.0, deviation, generator=generator)


def _rotations(positions: int, head_size: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosine and sine [T, head], the angles repeated for the two halves of a head, as transformers lays them out.

    The first half of the sines is negative: there the second half of a head is taken off.
    """
    # In float32 also under autocast: bfloat16 can't tell position 257 from 258.
    exponents = torch.arange(0, head_size, 2, dtype=torch.float32, device=device) / head_size
    angles = torch.outer(torch.arange(positions, dtype=torch.float32, device=device), theta**-exponents)
    cosine, sine = angles.cos(), angles.sin()
    return torch.cat((cosine, cosine), dim=-1), torch.cat((-sine, sine), dim=-1)


def num_parameters(model: nn.Module) -> int:
    """Learned numbers, tied ones counted once."""
    return sum(parameter.numel() for parameter in model.parameters())


def flops_per_token(shape: ModelShape, seq_len: int) -> int:
    """Floating-point operations of one training step per token: 6N + 12*L*d*T.

    N counts the parameters that are multiplied for every token: all matrices but the embedding, which is a look-up,
    with the head counted even when it shares the embedding's memory. A multiply-add is 2, and backward does twice the
    work of forward: 6. L layers of width d attend over T positions: two products of 2*d*T each, times 3 for backward.
    The causal half isn't taken off, as is the custom, so that figures compare with others'.
    """
    kv_size = shape.num_kv_heads * shape.head_size
    attention = 2 * shape.hidden_size**2 + 2 * shape.hidden_size * kv_size
    feed_forward = 3 * shape.hidden_size * shape.feed_forward_size
    multiplied = shape.num_layers * (attention + feed_forward) + shape.hidden_size * shape.padded_vocab_size
    return 6 * multiplied + 12 * shape.num_layers * shape.hidden_size * seq_len
