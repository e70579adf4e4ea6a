"""AdamW whose two averages are kept in bfloat16: 4 bytes a parameter instead of 8.

bfloat16 has 8 bits of precision, and an average moves by less than that when beta is near 1: rounded to nearest it
would stand still. So it is rounded by chance: up with the probability of the part that is cut off, which is right on
average. Parameters that are bfloat16 themselves are rounded so too, for the same reason. The chance is a pure function
of the step and of the parameter's place in the optimizer: nothing to save, the same after a resume, and the same in
every process of a data-parallel run. The update itself is computed in float32.

Memory: two float32 copies of one parameter at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["BFloat16AdamW", "rounded_by_chance"]

# More parameters than any model lists, so that no two updates share their chance.
_PLACES = 1 << 24


class BFloat16AdamW(torch.optim.Optimizer):
    """AdamW with bfloat16 state; groups as torch's."""

    def __init__(self, groups: list[dict[str, Any]], *, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": 0.0, "betas": betas, "eps": eps, "weight_decay": 0.0})

    def new_state(self, parameter: Tensor) -> dict[str, Any]:
        """The state before a parameter's first update. The counter is on the host: reading it waits for nothing."""
        zeros = {part: torch.zeros_like(parameter, dtype=torch.bfloat16) for part in ("exp_avg", "exp_avg_sq")}
        return {**zeros, "step": torch.zeros(())}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter that has a gradient."""
        loss = None if closure is None else closure()
        place = 0
        for group in self.param_groups:
            for parameter in group["params"]:
                place += 1
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state.update(self.new_state(parameter))
                _update(parameter, state, group, place=place)
        return loss


def _update(parameter: Tensor, state: dict[str, Any], group: dict[str, Any], *, place: int) -> None:
    state["step"] += 1
    step = int(state["step"])
    beta1, beta2 = group["betas"]
    generator = torch.Generator(parameter.device).manual_seed(step * _PLACES + place)
    gradient = parameter.grad.float()  # type: ignore[union-attr]
    average = state["exp_avg"].float().lerp_(gradient, 1 - beta1)
    square = state["exp_avg_sq"].float().mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
    state["exp_avg"].copy_(rounded_by_chance(average, generator))
    state["exp_avg_sq"].copy_(rounded_by_chance(square, generator))
    wide = parameter.float()  # the parameter itself if it is float32
    wide.mul_(1 - group["lr"] * group["weight_decay"])
    denominator = square.sqrt_().div_((1 - beta2**step) ** 0.5).add_(group["eps"])
    wide.addcdiv_(average, denominator, value=-group["lr"] / (1 - beta1**step))
    if parameter.dtype is torch.bfloat16:
        parameter.copy_(rounded_by_chance(wide, generator))


def rounded_by_chance(wide: Tensor, generator: torch.Generator) -> Tensor:
    """Finite float32 -> bfloat16, one of the two neighbours, each as likely as it is near.

    bfloat16 is the upper half of a float32. A random lower half added as an integer carries into the upper half with
    just that probability; the lower half is then cut off.
    """
    noise = torch.randint(0, 1 << 16, wide.shape, dtype=torch.int32, device=wide.device, generator=generator)
    bits = wide.view(torch.int32).add(noise).bitwise_and_(-(1 << 16))
    return bits.view(torch.float32).to(torch.bfloat16)
