"""The learning rate of each step: a pure function, so that resuming needs no state.

Steps count from 0. Warm-up rises in equal parts and reaches the peak with its last step; it starts above zero, since a
step with a rate of zero would be wasted. What follows falls towards `minimum`, the rate of the step after the last.
"""

from __future__ import annotations

import math
from typing import Literal

__all__ = ["Schedule", "learning_rate_at"]

Schedule = Literal["linear", "cosine", "constant"]


def learning_rate_at(
    step: int, *, num_steps: int, num_warmup_steps: int, peak: float, minimum: float, schedule: Schedule
) -> float:
    """The rate of step `step` of `num_steps`; a warm-up longer than the run is cut to the run."""
    num_warmup_steps = min(num_warmup_steps, num_steps)
    if step < num_warmup_steps:
        return peak * (step + 1) / num_warmup_steps
    if schedule == "constant":
        return peak
    done = (step - num_warmup_steps) / max(1, num_steps - num_warmup_steps)  # 0 at the peak, below 1 at the last step
    remaining = 1 - done if schedule == "linear" else (1 + math.cos(math.pi * done)) / 2
    return minimum + (peak - minimum) * remaining
