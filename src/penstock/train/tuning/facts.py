"""What the rules need to know of a model: sizes, not weights.

In: a shape, or a built model. Out: `ModelFacts`. `facts_of_shape` needs no torch and no memory.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock.train.shape import ModelShape

if TYPE_CHECKING:
    from penstock.train.language_model import LanguageModel

__all__ = ["ModelFacts", "facts_of_model", "facts_of_shape"]


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Sizes of one model. Frozen parameters count as weights, and have neither gradient nor optimizer state."""

    weight_bytes: int  # all parameters as they are stored
    gradient_bytes: int  # trained parameters as they are stored
    num_trained: int
    num_multiplied: int  # elements of the matrices that autocast copies: all but the embedding's look-up
    num_layers: int
    hidden_size: int
    kv_size: int
    feed_forward_size: int
    padded_vocab_size: int
    flops_per_token: int
    has_head_weight: bool = True


def facts_of_shape(shape: ModelShape, *, seq_len: int) -> ModelFacts:
    """Of the built-in decoder, all of it trained, in float32."""
    size, kv_size = shape.hidden_size, shape.num_kv_heads * shape.head_size
    block = 2 * size * size + 2 * size * kv_size + 3 * size * shape.feed_forward_size
    embedding = shape.padded_vocab_size * size
    multiplied = shape.num_layers * block + embedding
    vectors = (2 * shape.num_layers + 1) * size
    count = multiplied + vectors + (0 if shape.tie_embeddings else embedding)
    return ModelFacts(
        weight_bytes=4 * count,
        gradient_bytes=4 * count,
        num_trained=count,
        num_multiplied=multiplied,
        num_layers=shape.num_layers,
        hidden_size=size,
        kv_size=kv_size,
        feed_forward_size=shape.feed_forward_size,
        padded_vocab_size=shape.padded_vocab_size,
        flops_per_token=6 * multiplied + 12 * shape.num_layers * size * seq_len,
    )


def facts_of_model(model: LanguageModel, *, seq_len: int) -> ModelFacts:
    """Of a built model: bytes are counted, widths are those of its shape."""
    weights = list(model.parameters())
    trained = [parameter for parameter in weights if parameter.requires_grad]
    shape = model.shape
    return ModelFacts(
        weight_bytes=sum(each.numel() * each.element_size() for each in weights),
        gradient_bytes=sum(each.numel() * each.element_size() for each in trained),
        num_trained=sum(each.numel() for each in trained),
        num_multiplied=sum(each.numel() for each in weights if each.ndim >= 2 and each.is_floating_point()),
        num_layers=len(model.blocks()),
        hidden_size=shape.hidden_size,
        kv_size=shape.num_kv_heads * shape.head_size,
        feed_forward_size=shape.feed_forward_size,
        padded_vocab_size=model.padded_vocab_size,
        flops_per_token=model.flops_per_token(seq_len),
        has_head_weight=model.head_weight is not None,
    )
