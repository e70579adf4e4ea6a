"""Whether kernels of our own, written in Triton, can run here."""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from penstock.train.tuning.profiles import COMPILER_CAPABILITY

__all__ = ["has_triton", "num_multiprocessors"]


@cache
def has_triton() -> bool:
    """Whether this PyTorch has Triton, and a GPU that Triton compiles for."""
    if importlib.util.find_spec("triton") is None or not torch.cuda.is_available():
        return False
    return torch.cuda.get_device_capability() >= COMPILER_CAPABILITY


@cache
def num_multiprocessors() -> int:
    """Of the GPU; in Triton's interpreter, on a CPU, some number."""
    return torch.cuda.get_device_properties().multi_processor_count if torch.cuda.is_available() else 2
