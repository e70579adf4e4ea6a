"""Compiling a model in place.

In: a model and the way: `off`, `blocks` (each repeated layer by itself: layers of one shape share the compiled code, so
it takes seconds), `whole` (the model in one: a little faster, tens of seconds). Out: nothing; `Module.compile` keeps
the module and its parameters' names, so checkpoints hold no `_orig_mod.`. The loss asks `is_compiled`, and is compiled
by itself in both ways: softmax over the vocabulary moves more bytes than all layers if each operation is a kernel.
Never max-autotune: 401 s for nothing (measured on an H200). Costs come due at the first step of each shape of input,
not here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from penstock.train.language_model import LanguageModel

__all__ = ["compiled"]


@contextmanager
def compiled(model: LanguageModel, way: str) -> Iterator[None]:
    """Until the block ends, the model runs compiled."""
    ways: dict[str, list[nn.Module]] = {"off": [], "blocks": list(model.compiled_parts()), "whole": [model]}
    modules = ways[way]
    for module in modules:
        # For the sizes at hand: code for any size is slower, and a run has only a few.
        module.compile(dynamic=False)
    if way == "whole":
        # `compile` covers calls of the module; losses that form the logits themselves call this method.
        vars(model)["hidden"] = torch.compile(model.hidden, dynamic=False)
    model.is_compiled = way != "off"
    try:
        yield
    finally:
        model.is_compiled = False
        vars(model).pop("hidden", None)
        for module in modules:
            _forget_compiled(module)


def _forget_compiled(module: Any) -> None:
    """The way back, for which torch has no public call; set by `Module.compile`, read by `Module.__call__`."""
    module._compiled_call_impl = None
