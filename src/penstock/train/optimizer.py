"""AdamW, and its state as named tensors.

Weight decay applies to matrices only: pulling a norm's scale towards zero helps nobody. `fused` runs the whole update
in one kernel; torch has it for CPU and CUDA. The state is keyed by parameter name, not by position as torch's own
`state_dict`, so that a checkpoint says what it holds and doesn't depend on the order in which a model lists itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from penstock.errors import ResumeError

__all__ = ["build_optimizer", "has_fused_update", "load_optimizer_tensors", "optimizer_tensors", "set_learning_rate"]

_STATE_PARTS = ("exp_avg", "exp_avg_sq", "step")


def has_fused_update(device: torch.device) -> bool:
    """Whether torch has a one-kernel AdamW for this device."""
    return device.type in ("cpu", "cuda")


def build_optimizer(
    model: nn.Module, *, weight_decay: float, betas: tuple[float, float], eps: float, fused: bool
) -> torch.optim.AdamW:
    """AdamW over all parameters of the model; the learning rate is set before each step."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=fused)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The rate of the next update, for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state as `exp_avg.<parameter name>` and so on; empty before the first update."""
    return {
        f"{part}.{name}": optimizer.state[parameter][part]
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for part in _STATE_PARTS
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` gave; refuses the state of another model by name."""
    expected = {f"{part}.{name}" for name in parameters for part in _STATE_PARTS}
    if tensors and set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        raise ResumeError(
            f"the saved optimizer state differs from this model in {len(odd)} tensors, the first is {odd[0]!r}",
            hint="the checkpoint is of another model: start a new run with another --out",
        )
    for name, parameter in parameters.items():
        if tensors:
            # The step counter is a 0-d float32 tensor, kept where the fused kernel wants it: beside the parameter.
            optimizer.state[parameter] = {
                part: tensors[f"{part}.{name}"].to(parameter.device, copy=True) for part in _STATE_PARTS
            }
