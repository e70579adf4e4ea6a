"""Known lines of an import are held back, others are not."""

from __future__ import annotations

import importlib.util
import logging
import subprocess
import sys

import pytest

from penstock.train.quiet_imports import quiet_import


def test_only_known_lines_are_held_back_and_only_in_the_block(caplog: pytest.LogCaptureFixture) -> None:
    torchao = logging.getLogger("torchao")
    known = "Failed to load _C_other.so: Could not load this library: _C_other.so"
    with quiet_import():
        torchao.warning(known)
        torchao.warning("something that a user should see")
    torchao.warning(known)
    assert caplog.messages == ["something that a user should see", known]


@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao isn't installed")
def test_an_8_bit_optimizer_of_torchao_is_built_without_a_word() -> None:
    program = """
import torch
from penstock.train.optimizer import build_optimizer
build_optimizer(torch.nn.Linear(8, 8), weight_decay=0, betas=(0.9, 0.95), eps=1e-8, fused=False,
                kind="adamw-8bit", library="torchao")
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == ""
