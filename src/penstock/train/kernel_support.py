"""Kernels of our own, written in Triton: whether they can run here, and what calling one takes."""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch

from penstock.train.tuning.profiles import COMPILER_CAPABILITY

__all__ = ["has_triton", "num_multiprocessors", "power_of_two", "triton_kernel"]


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


@cache
def triton_kernel(module: str, name: str) -> Any:
    """A kernel by its module in this folder and its name. Made at first use: machines without a GPU have no Triton."""
    return getattr(importlib.import_module(f"penstock.train.{module}"), name)


def power_of_two(least: int) -> int:
    """The smallest that is no less: the sizes that Triton's blocks come in."""
    return 1 << (least - 1).bit_length()
