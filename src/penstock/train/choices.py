"""What a run computes with: device, precision, kernels, micro-batch, optimizer.

In: config, model, and what torch finds on this machine. Out: `Choices`, each recorded in the run's log with its reason
and, where it was measured, its gain. Tuning (tuning/) decides: by rule, and on a GPU by short measurements. A
checkpoint keeps the choices and a resumed run takes them over: on a CPU even the number of threads changes the last bit
of a sum. Importing this module pulls in no torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigError, ResumeError
from penstock.runlog import RunLog

if TYPE_CHECKING:
    from penstock.train.config import TrainConfig
    from penstock.train.language_model import LanguageModel
    from penstock.train.loss import Autocast

__all__ = ["Choices", "autocast_of", "chosen", "halved", "numeric_settings", "reused_choices"]


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a run computes with; part of its checkpoints. Defaults are what runs had before they could choose."""

    device: str
    dtype: str
    micro_batch_rows: int
    num_threads: int
    fused_optimizer: bool
    tf32: bool = True
    attention: str = "sdpa"
    loss_kernel: str = "plain"
    optimizer: str = "adamw"
    optimizer_library: str = "torch"
    activation_checkpointing: str = "none"
    compile: str = "off"


def chosen(
    config: TrainConfig, model: LanguageModel, log: RunLog, *, world_size: int = 1, is_sharded: bool = False
) -> Choices:
    """Decides, and records each decision with its reason.

    Where it measures, the model is moved to the device and comes back with the weights it had, gradients cleared, and
    the random generators as they were. `is_sharded`: the model's parameters will be spread over the processes.
    """
    from penstock.train.tuning.deciding import decided

    decision = decided(config, model, log, world_size=world_size, is_sharded=is_sharded)
    for name, value in asdict(decision.choices).items():
        gain = decision.gains.get(name)
        measured = {} if gain is None else {"gain": round(gain, 4)}
        log.append("choice", name=name, value=value, reason=decision.reasons[name], **measured)
    return decision.choices


def reused_choices(saved: dict[str, Any], log: RunLog, *, is_sharded: bool = False) -> Choices:
    """The choices of a checkpoint, recorded as such; refused where they can't be honoured."""
    import torch

    unknown = sorted(set(saved) - {field.name for field in fields(Choices)})
    if unknown:
        raise ResumeError(
            f"the checkpoint holds the choice {unknown[0]!r}, which this version of penstock doesn't know",
            hint="resume with the version that wrote it, or a later one",
        )
    choices = Choices(**saved)
    if choices.device == "cuda" and not torch.cuda.is_available():
        raise ResumeError(
            "the run was started on cuda, and this machine has no usable GPU",
            hint="resume it on a machine with a GPU, or start a new run with another --out",
        )
    if is_sharded and choices.optimizer != "adamw":
        raise ResumeError(
            f"the run's optimizer is {choices.optimizer!r}, which parallel=fsdp can't share: expected 'adamw'",
            hint="resume with parallel=ddp or in one process, or start a new run with another --out",
        )
    for name, value in asdict(choices).items():
        log.append("choice", name=name, value=value, reason="taken over from the checkpoint")
    return choices


def halved(choices: Choices) -> Choices | None:
    """The choices after running out of memory: half the micro-batch, rounded up. None at one row.

    The batch of a step stays as it was: its gradient is a sum over micro-batches, so only rounding changes.
    """
    if choices.micro_batch_rows == 1:
        return None
    return replace(choices, micro_batch_rows=-(-choices.micro_batch_rows // 2))


def chosen_device(config: TrainConfig) -> tuple[str, str]:
    """Where to compute, and why."""
    import torch

    has_gpu = torch.cuda.is_available()
    if config.device == "cuda" and not has_gpu:
        raise ConfigError("device is cuda, but torch finds no usable GPU", hint="set device=auto or device=cpu")
    if config.device != "auto":
        return config.device, "as set"
    return ("cuda", "torch finds a usable GPU") if has_gpu else ("cpu", "torch finds no usable GPU")


def autocast_of(choices: Choices) -> Autocast:
    """Makes the context in which forward passes run."""
    if choices.dtype == "float32":
        return nullcontext
    import torch

    dtype = getattr(torch, choices.dtype)

    def context() -> AbstractContextManager[None]:
        return torch.autocast(choices.device, dtype=dtype)

    return context


@contextmanager
def numeric_settings(choices: Choices, *, deterministic: bool) -> Iterator[None]:
    """Sets torch's process-wide switches for the block, and puts them back after it.

    cuDNN's benchmark switch is left alone: it picks convolutions, and these models have none.
    """
    import torch

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
            is_exact = deterministic or not choices.tf32
            torch.set_float32_matmul_precision("highest" if is_exact else "high")  # "high" is TF32
        yield
    finally:
        torch.set_num_threads(num_threads)
        torch.use_deterministic_algorithms(was_deterministic)
        torch.set_float32_matmul_precision(precision)
