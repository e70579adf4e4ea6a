"""What the hardware decides: device, precision, micro-batch, threads, optimizer kernel.

In: config, model size, and what torch finds on this machine. Out: `Choices`, each recorded in the run's log with its
reason. By rule, not by measurement, so that the same machine always chooses the same. A checkpoint keeps the choices
and a resumed run takes them over: on a CPU even the number of threads changes the last bit of a sum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch

from penstock.errors import ConfigError, ResumeError
from penstock.runlog import RunLog
from penstock.train.config import TrainConfig
from penstock.train.loss import Autocast
from penstock.train.optimizer import has_fused_update
from penstock.train.shape import ModelShape

__all__ = ["Choices", "autocast_of", "chosen", "numeric_settings", "reused_choices"]

# float32 logits of one micro-batch. On two CPU cores the tiny preset took 0.93, 0.80, 0.70, 0.70 s a step at 128, 64,
# 32 and 16 MiB: past the caches a larger micro-batch only costs. On a GPU the matrices must be large to be fast.
LOGITS_LIMIT_BYTES = {"cpu": 32 * 2**20, "cuda": 2**30}


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run computes with; part of its checkpoints."""

    device: str
    dtype: str
    micro_batch_rows: int
    num_threads: int
    fused_optimizer: bool


def chosen(config: TrainConfig, shape: ModelShape, log: RunLog) -> Choices:
    """Decides, and records each decision with its reason."""
    device, device_reason = _device(config)
    dtype, dtype_reason = _dtype(config, device)
    micro_batch_rows, micro_batch_reason = _micro_batch_rows(config, shape, device)
    fused = has_fused_update(torch.device(device))
    choices = Choices(
        device=device,
        dtype=dtype,
        micro_batch_rows=micro_batch_rows,
        num_threads=torch.get_num_threads(),
        fused_optimizer=fused,
    )
    reasons = {
        "device": device_reason,
        "dtype": dtype_reason,
        "micro_batch_rows": micro_batch_reason,
        "num_threads": "torch's own choice for this machine; OMP_NUM_THREADS changes it",
        "fused_optimizer": f"torch {'has' if fused else 'has no'} one-kernel AdamW for {device}",
    }
    for name, value in asdict(choices).items():
        log.append("choice", name=name, value=value, reason=reasons[name])
    return choices


def reused_choices(saved: dict[str, Any], log: RunLog) -> Choices:
    """The choices of a checkpoint, recorded as such; refused if this machine can't honour them."""
    choices = Choices(**saved)
    if choices.device == "cuda" and not torch.cuda.is_available():
        raise ResumeError(
            "the run was started on cuda, and this machine has no usable GPU",
            hint="resume it on a machine with a GPU, or start a new run with another --out",
        )
    for name, value in saved.items():
        log.append("choice", name=name, value=value, reason="taken over from the checkpoint")
    return choices


def _device(config: TrainConfig) -> tuple[str, str]:
    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no usable GPU", hint="set device=auto or device=cpu")
    if config.device != "auto":
        return config.device, "as set"
    return ("cuda", "torch finds a usable GPU") if has_gpu else ("cpu", "torch finds no usable GPU")


def _dtype(config: TrainConfig, device: str) -> tuple[str, str]:
    if config.dtype != "auto":
        return config.dtype, "as set"
    if device == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bfloat16", "the GPU computes in bfloat16; weights stay float32"
    return "float32", "bfloat16 is taken by rule only on a GPU that computes in it"


def _micro_batch_rows(config: TrainConfig, shape: ModelShape, device: str) -> tuple[int, str]:
    if config.micro_batch_rows is not None:
        return config.micro_batch_rows, "as set"
    limit = LOGITS_LIMIT_BYTES[device]
    row_bytes = config.seq_len * shape.padded_vocab_size * 4
    fitting = (rows for rows in range(config.batch_rows, 0, -1) if config.batch_rows % rows == 0)
    rows = next((rows for rows in fitting if rows * row_bytes <= limit), 1)
    return rows, f"the most that divides {config.batch_rows} rows with logits of at most {limit >> 20} MiB on {device}"


def autocast_of(choices: Choices) -> Autocast:
    """Makes the context in which forward passes run."""
    if choices.dtype == "float32":
        return nullcontext
    dtype = getattr(torch, choices.dtype)

    def context() -> AbstractContextManager[None]:
        return torch.autocast(choices.device, dtype=dtype)

    return context


@contextmanager
def numeric_settings(choices: Choices, *, deterministic: bool) -> Iterator[None]:
    """Sets torch's process-wide switches for the block, and puts them back after it."""
    num_threads = torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    was_deterministic = torch.are_deterministic_algorithms_enabled()
    if deterministic:
        # cuBLAS reads it when its first handle is made; without it, deterministic mode refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        torch.set_num_threads(choices.num_threads)
        torch.use_deterministic_algorithms(deterministic or was_deterministic)
        if choices.device == "cuda":
            torch.set_float32_matmul_precision("highest" if deterministic else "high")  # "high" is TF32
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_float32_matmul_precision(precision)
