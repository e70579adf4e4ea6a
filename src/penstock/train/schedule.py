"""The learning rate of each step: a pure function, so that resuming needs no state.

Steps count from 0. Warm-up rises in equal parts and reaches the peak with its last step; it starts above zero, since a
step with a rate of zero would be wasted. What follows falls towards `minimum`, the rate of the step after the last:

    linear           in equal parts
    cosine           along half a wave
    polynomial       as (share of steps left) ** power
    cosine-restarts  half a wave, `cycles` times, each from the peak
    constant         not at all
    wsd              not at all, then in equal parts over the last `decay_ratio` of the run's steps, to zero
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Literal

__all__ = ["Schedule", "learning_rate_at"]

Schedule = Literal["linear", "cosine", "constant", "polynomial", "cosine-restarts", "wsd"]


def learning_rate_at(
    step: int,
    *,
    num_steps: int,
    num_warmup_steps: int,
    peak: float,
    minimum: float,
    schedule: Schedule,
    power: float = 1.0,
    cycles: int = 1,
    decay_ratio: float = 0.2,
) -> float:
    """The rate of step `step` of `num_steps`; a warm-up longer than the run is cut to the run."""
    num_warmup_steps = min(num_warmup_steps, num_steps)
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if schedule == "constant":
        return peak
    if schedule == "wsd":
        num_decay_steps = min(math.ceil(Fraction(str(decay_ratio)) * num_steps), num_steps - num_warmup_steps)
        return peak * min(1.0, (num_steps - step) / max(1, num_decay_steps))
    done = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)  # 0 at the peak, below 1 at the last step
    return minimum + (peak - minimum) * _remaining(done, schedule, power=power, cycles=cycles)


def _remaining(done: float, schedule: Schedule, *, power: float, cycles: int) -> float:
    """The share of the fall still to come, 1 at the peak."""
    if schedule == "linear":
        return 1 - done
    if schedule == "polynomial":
        return float((1 - done) ** power)
    part = done * cycles % 1.0 if schedule == "cosine-restarts" else done
    return (1 + math.cos(math.pi * part)) / 2
