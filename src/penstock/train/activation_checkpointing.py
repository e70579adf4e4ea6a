"""Activation checkpointing: activations computed again in the backward pass instead of being kept.

In: a model and how much: `none`, `selective` (every second block, the first one among them), `full` (every block). Out:
nothing; the blocks run under torch's non-reentrant checkpoint while gradients are on, with the random state of the
first time, so losses and gradients are the same. Parameter names don't change. Memory: of a block only its input is
kept, plus one block's activations while it is its turn; each such block costs a second forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

__all__ = ["checkpointed_activations", "checkpointed_blocks"]


def checkpointed_blocks(blocks: Sequence[nn.Module], how_much: str) -> list[nn.Module]:
    """The blocks that compute twice. Half of them, rounded up: the estimate in tuning/memory.py counts the rest."""
    return list(blocks[:: {"full": 1, "selective": 2}[how_much]]) if how_much != "none" else []


@contextmanager
def checkpointed_activations(blocks: Sequence[nn.Module], how_much: str) -> Iterator[None]:
    """Until the block ends, the chosen blocks compute their activations twice."""
    chosen = checkpointed_blocks(blocks, how_much)
    for block in chosen:
        # An attribute of the instance hides the class's method: hooks, names and `compile` stay as they are.
        block.forward = _twice(block.forward)
    try:
        yield
    finally:
        for block in chosen:
            del block.forward


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    def checkpointed(*inputs: Any, **options: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*inputs, **options)
        return checkpoint(forward, *inputs, use_reentrant=False, **options)

    return checkpointed
