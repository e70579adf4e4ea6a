"""Every source of chance outside our own generators, seeded, saved and put back.

The built-in model draws its weights, and the sampler its tokens, from generators of their own; the data order is
computed, not drawn. What is left, and saved all the same because a model may use it (dropout), is the global state of
torch, numpy and Python. Out: JSON values, about 30 KB.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

__all__ = ["restore_random_state", "saved_random_state", "seed_everything"]


def seed_everything(seed: int) -> None:
    """Seeds the global generators of Python, numpy and torch (all devices)."""
    random.seed(seed)
    np.random.seed(seed % 2**32)  # the legacy global generator takes 32 bits
    torch.manual_seed(seed)


def saved_random_state() -> dict[str, Any]:
    """The global generators' states as JSON values."""
    version, words, gaussian = random.getstate()
    kind, keys, position, has_gaussian, cached_gaussian = np.random.get_state(legacy=True)
    on_gpu = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": [version, list(words), gaussian],
        "numpy": [kind, np.asarray(keys).tolist(), position, has_gaussian, cached_gaussian],
        "torch": _as_hex(torch.get_rng_state()),
        "cuda": [_as_hex(state) for state in on_gpu],
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Puts back what `saved_random_state` gave. GPUs beyond those saved keep their state."""
    version, words, gaussian = state["python"]
    random.setstate((version, tuple(words), gaussian))
    kind, keys, position, has_gaussian, cached_gaussian = state["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), position, has_gaussian, cached_gaussian))
    torch.set_rng_state(_from_hex(state["torch"]))
    for index, text in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_from_hex(text), index)


def _as_hex(state: torch.Tensor) -> str:
    return bytes(state.numpy()).hex()


def _from_hex(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
