"""Attention over documents laid end to end, for models of transformers.

In: what transformers gives every attention function (query, key and value [B, heads, T, head]) and the documents'
borders, under the name that its models pass through to it. Out: [B, T, heads, head]. A model that has a flash kernel in
transformers needs nothing else: neither a mask nor a bias. Windows, caps on scores, sinks, dropout and other scales are
refused; a model that asks for one at some layer keeps to the other kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from penstock.train.attention import BORDER_KERNELS, attended

__all__ = ["BORDERS_ARGUMENT", "UnfitAttentionError", "can_take_borders", "register", "transformers_name"]

BORDERS_ARGUMENT = "cu_seq_lens_q"
# What some architectures ask of attention besides, and these kernels don't do.
_REFUSED = ("sliding_window", "softcap", "s_aux")


class UnfitAttentionError(RuntimeError):
    """A layer asks for more than a kernel over borders does; to a trial one of many reasons why a kernel may fail."""

    def __init__(self, kernel: str, wanted: dict[str, str]) -> None:
        super().__init__(f"attention kernel {kernel!r} has no {', '.join(wanted.values())}")
        self.wanted = wanted


def transformers_name(kernel: str) -> str:
    """What transformers calls the kernel."""
    if kernel in BORDER_KERNELS:
        return f"penstock_{kernel.replace('-', '_')}"
    return "flex_attention" if kernel == "flex" else "sdpa"


def can_take_borders(causal: Any) -> bool:
    """Whether the model's attention is plain causal attention, as far as its class and its config say."""
    config = causal.config.get_text_config()
    windows = getattr(config, "layer_types", None) or ()
    is_plain = getattr(config, "attn_logit_softcapping", None) is None and not (
        any(kind != "full_attention" for kind in windows) or getattr(config, "sliding_window", None)
    )
    # Some older classes have code of their own for each kernel: transformers leaves them at what they have.
    can_be_set = getattr(causal, "_can_set_attn_implementation", lambda: True)()
    return bool(getattr(causal, "_supports_flash_attn", False)) and bool(can_be_set) and is_plain


@cache
def register() -> None:
    """Makes the kernels known to transformers. It builds no masks for names that it has no rule for."""
    from transformers import AttentionInterface

    for kernel in BORDER_KERNELS:
        function: Callable[..., tuple[Tensor, None]] = partial(_attended, kernel)
        AttentionInterface.register(transformers_name(kernel), function)


def _attended(
    kernel: str,
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """An attention function of transformers."""
    wanted = {name: name for name in _REFUSED if others.get(name) is not None}
    if attention_mask is not None:
        wanted["mask"] = "mask"
    if dropout:
        wanted["dropout"] = f"dropout of {dropout:g}"
    if scaling not in (None, query.shape[-1] ** -0.5):
        wanted["scale"] = f"scale of {scaling:g} instead of 1/sqrt({query.shape[-1]})"
    if wanted:
        raise UnfitAttentionError(kernel, wanted)
    if torch.is_autocast_enabled(query.device.type):
        # Rotations may have left float32, in which these kernels don't compute.
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    return attended(kernel, query, key, value, others.get(BORDERS_ARGUMENT)).transpose(1, 2), None
