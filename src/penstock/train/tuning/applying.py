"""Choices taking effect on a model: attention kernel, activation checkpointing, compiling.

The other choices are arguments of what uses them: precision, loss kernel, micro-batch, optimizer.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from penstock.train.activation_checkpointing import checkpointed_activations
from penstock.train.choices import Choices
from penstock.train.compiling import compiled
from penstock.train.language_model import LanguageModel

__all__ = ["applied"]


@contextmanager
def applied(model: LanguageModel, choices: Choices) -> Iterator[None]:
    """Until the block ends, the model computes as chosen; then as before. Parameters and their names stay."""
    kernel_before = model.attention_kernel
    with ExitStack() as stack:
        if choices.attention != kernel_before:
            model.attention_kernel = choices.attention
            stack.callback(setattr, model, "attention_kernel", kernel_before)
        # Checkpointing goes inside what is compiled.
        stack.enter_context(checkpointed_activations(model.blocks(), choices.activation_checkpointing))
        stack.enter_context(compiled(model, choices.compile))
        yield
