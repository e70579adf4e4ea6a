"""Checks of Triton kernels: on a GPU where there is one, else in Triton's interpreter where Triton is installed."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton isn't installed: PyTorch for CPUs"
)


def assert_passes(check: str) -> None:
    """Runs a script in a process of its own: Triton reads once, when it is imported, whether it is to interpret."""
    interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", check], env={**os.environ, **interpreted}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
