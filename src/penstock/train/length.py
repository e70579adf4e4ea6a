"""How long a run is: steps, from passes or tokens where those were given.

In: a config and the rows of the run. Out: the config with its steps. One pass is every row once; of a mixture, its
epoch: every source as often as its weight says.

    epochs          steps = ceil(rows of a pass * epochs / batch_rows)
    target_tokens   epochs = ceil(target_tokens / tokens of a pass), not below min_epochs, not above max_epochs
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

from penstock.pack import Plan
from penstock.pack.mixture import Mixture
from penstock.train.config import TrainConfig

__all__ = ["Length", "run_length"]


@dataclass(frozen=True, kw_only=True)
class Length:
    """A run's length in the units that people ask in; `reason` says what it follows from."""

    steps: int
    rows_per_pass: int
    tokens_per_pass: int
    epochs: float
    steps_per_epoch: int
    reason: str


def run_length(config: TrainConfig, rows: Plan | Mixture) -> Length:
    """The length of a run over these rows."""
    rows_per_pass, tokens_per_pass = _pass(rows)
    epochs, reason = _asked_epochs(config, tokens_per_pass)
    steps = config.num_steps if epochs is None else math.ceil(epochs * rows_per_pass / config.batch_rows)
    if epochs is not None:
        reason = f"{reason}: ceil({rows_per_pass} rows x {float(epochs):g} / {config.batch_rows} rows a step)"
    return Length(
        steps=steps,
        rows_per_pass=rows_per_pass,
        tokens_per_pass=tokens_per_pass,
        epochs=steps * config.batch_rows / rows_per_pass if epochs is None else float(epochs),
        steps_per_epoch=math.ceil(rows_per_pass / config.batch_rows),
        reason=reason,
    )


def _pass(rows: Plan | Mixture) -> tuple[int, int]:
    """Rows and tokens of one pass."""
    if isinstance(rows, Plan):
        return rows.num_rows, rows.num_tokens
    parts = list(zip(rows.weights, rows.plans, strict=True))
    num_rows = math.fsum(weight * plan.num_rows for weight, plan in parts)
    num_tokens = math.fsum(weight * plan.num_tokens for weight, plan in parts)
    return max(1, round(num_rows)), max(1, round(num_tokens))


def _asked_epochs(config: TrainConfig, tokens_per_pass: int) -> tuple[Fraction | None, str]:
    if config.epochs is not None:
        return Fraction(str(config.epochs)), "epochs as set"
    if config.target_tokens is None:
        return None, "as set"
    needed = math.ceil(config.target_tokens / max(1, tokens_per_pass))
    epochs = max(needed, config.min_epochs or 1)
    if config.max_epochs is not None:
        epochs = min(epochs, config.max_epochs)
    limits = f", within {config.min_epochs or 1} and {config.max_epochs or 'any'}"
    return Fraction(epochs), f"{needed} passes of {tokens_per_pass} tokens reach {config.target_tokens}{limits}"
