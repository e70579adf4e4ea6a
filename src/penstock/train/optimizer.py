"""AdamW in three sizes, and its state as named tensors.

    adamw        float32 averages, 8 bytes a parameter; `fused`: the whole update in one kernel (CPU and CUDA)
    adamw-bf16   bfloat16 averages, 4 bytes a parameter, rounded by chance (bfloat16_adamw.py)
    adamw-8bit   averages in blocks of 256 of one byte each, about 2 bytes a parameter; by torchao or bitsandbytes

Only parameters that are trained (`requires_grad`) have state. Weight decay applies to matrices only: pulling a norm's
scale towards zero helps nobody. The state is keyed by parameter name, not by position as torch's own `state_dict`, so
that a checkpoint says what it holds and doesn't depend on the order in which a model lists itself. What isn't a plain
tensor is taken apart: `exp_avg_codes.<name>` and `exp_avg_scale.<name>` are the two halves of a torchao state.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, ResumeError
from penstock.train.bfloat16_adamw import BFloat16AdamW
from penstock.train.quiet_imports import quiet_import

__all__ = [
    "allocate_state",
    "build_optimizer",
    "library_of",
    "load_optimizer_tensors",
    "optimizer_tensors",
    "set_learning_rate",
]

# Tables from a code of one byte to its number: the same for all parameters, and made anew with the state.
_TABLE_PARTS = frozenset({"qmap", "qmap1", "qmap2"})


def library_of(kind: str, device: str) -> str:
    """Where an optimizer comes from. 8-bit on a GPU is torchao's if installed, on a CPU bitsandbytes', else the other.

    torchao compiles its update for every shape: on a GPU it pays back, on a CPU it needs a C++ compiler and minutes.

    Raises:
        ConfigError: 8-bit is wanted, and neither library is installed.
    """
    if kind != "adamw-8bit":
        return "torch"
    order = ("torchao", "bitsandbytes") if device == "cuda" else ("bitsandbytes", "torchao")
    for library in order:
        if importlib.util.find_spec(library) is not None:
            return library
    raise ConfigError(
        "optimizer is 'adamw-8bit', but neither torchao nor bitsandbytes is installed",
        hint=f"pip install {order[0]}, or set optimizer=adamw (4 times the state) or adamw-bf16 (twice the state)",
    )


def build_optimizer(
    model: nn.Module,
    *,
    weight_decay: float,
    betas: tuple[float, float],
    eps: float,
    fused: bool,
    kind: str = "adamw",
    library: str = "torch",
) -> torch.optim.Optimizer:
    """AdamW over the trained parameters of the model; the learning rate is set before each step."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.ndim >= 2]
    vectors = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ConfigError("the model has no trained parameter, expected at least one", hint="leave some unfrozen")
    if kind == "adamw":
        return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=fused)
    if kind == "adamw-bf16":
        return BFloat16AdamW(groups, betas=betas, eps=eps)
    if importlib.util.find_spec(library) is None:
        raise ConfigError(
            f"the run's 8-bit AdamW is that of {library}, which is not installed",
            hint=f"pip install {library}",
        )
    with quiet_import():
        module = importlib.import_module(f"{library}.optim")
    eight_bit: torch.optim.Optimizer = module.AdamW8bit(groups, lr=0.0, betas=betas, eps=eps)
    return eight_bit


def allocate_state(optimizer: torch.optim.Optimizer) -> None:
    """Makes the state of all parameters, as the first update would: here running out of memory spoils nothing."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter] = _new_state(optimizer, parameter)


def set_learning_rate(optimizer: torch.optim.Optimizer, learning_rate: float) -> None:
    """The rate of the next update, for all groups."""
    for group in optimizer.param_groups:
        if isinstance(group["lr"], Tensor):  # torchao's, which its compiled update reads
            group["lr"].fill_(learning_rate)
        else:
            group["lr"] = learning_rate


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """The state as `exp_avg.<parameter name>` and so on; empty before the first update."""
    return {
        f"{part}.{name}": tensor
        for name, parameter in parameters.items()
        if parameter in optimizer.state
        for part, tensor in _flat_parts(optimizer.state[parameter])
    }


def load_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, nn.Parameter], tensors: Mapping[str, Tensor]
) -> None:
    """Puts back what `optimizer_tensors` gave; refuses the state of another model, or optimizer, by name."""
    if not tensors:
        return
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    states = {name: _new_state(optimizer, parameter) for name, parameter in trained.items()}
    expected = {f"{part}.{name}" for name, state in states.items() for part, _ in _flat_parts(state)}
    if set(tensors) != expected:
        odd = sorted(set(tensors) ^ expected)
        raise ResumeError(
            f"the saved optimizer state differs from this model in {len(odd)} tensors, the first is {odd[0]!r}",
            hint="the checkpoint is of another model: start a new run with another --out",
        )
    for name, parameter in trained.items():
        saved = {part: tensors[f"{part}.{name}"] for part, _ in _flat_parts(states[name])}
        optimizer.state[parameter] = _filled_state(states[name], saved)


def _flat_parts(state: Mapping[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """The plain tensors of one parameter's state by part; a count that bitsandbytes keeps as a number becomes one."""
    for part, value in state.items():
        if part in _TABLE_PARTS:
            continue
        # A sharded state (DTensor) stays whole: checkpoints know how to write it.
        if isinstance(value, Tensor) and hasattr(value, "__tensor_flatten__") and not hasattr(value, "device_mesh"):
            for inner in value.__tensor_flatten__()[0]:
                if inner not in _TABLE_PARTS:
                    yield f"{part}_{inner}", getattr(value, inner)
        else:
            yield part, value if isinstance(value, Tensor) else torch.tensor(value)


@torch.no_grad()
def _filled_state(state: dict[str, Any], saved: Mapping[str, Tensor]) -> dict[str, Any]:
    """A new state with the saved tensors in it: copied where the state has memory of its own."""
    for part, tensor in _flat_parts(state):
        if tensor.shape != saved[part].shape:
            raise ResumeError(
                f"the saved optimizer state {part!r} has shape {list(saved[part].shape)}, "
                f"expected {list(tensor.shape)}",
                hint="the checkpoint is of another model: start a new run with another --out",
            )
        if isinstance(state.get(part), int):
            state[part] = int(saved[part])
        else:
            tensor.copy_(saved[part])
    return state


def _new_state(optimizer: Any, parameter: nn.Parameter) -> dict[str, Any]:
    """One parameter's state as the optimizer's first update would make it."""
    if hasattr(optimizer, "init_state"):  # bitsandbytes
        for group_index, group in enumerate(optimizer.param_groups):
            for index, other in enumerate(group["params"]):
                if other is parameter:
                    optimizer.init_state(group, parameter, group_index, index)
        state: dict[str, Any] = optimizer.state.pop(parameter)
        return state
    if hasattr(optimizer, "_new_buffer"):  # torchao
        averages = {"exp_avg": True, "exp_avg_sq": False}
        made = {part: optimizer._new_buffer(parameter, is_signed) for part, is_signed in averages.items()}
        return {"step": torch.tensor(0.0), **made}
    if isinstance(optimizer, BFloat16AdamW):
        return optimizer.new_state(parameter)
    # The step counter is a 0-d float32 tensor, kept where the fused kernel wants it: beside the parameter.
    zeros = {part: torch.zeros_like(parameter) for part in ("exp_avg", "exp_avg_sq")}
    step = torch.zeros((), device=parameter.device if optimizer.defaults["fused"] else "cpu")
    return {**zeros, "step": step}
