"""Rules that several foreign configs share under one name, and shapes of rules that come up again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.train.adapters.rules import COUNT, FLAG, NUMBER, Rule, Verdict

__all__ = ["LENGTH_AND_RATE", "MAX_GRAD_NORM", "compiled", "read_together", "refused_if_true"]

MAX_GRAD_NORM = Rule(
    name="max_grad_norm",
    kind=NUMBER,
    effect="`max_grad_norm`; 0: no clipping",
    adapt=lambda value, _: {"max_grad_norm": value or None},
)

LENGTH_AND_RATE = (
    Rule(name="epochs", kind=NUMBER, effect="`epochs`", sets="epochs"),
    Rule(
        name="max_steps",
        kind=COUNT,
        effect="`steps`, instead of epochs",
        adapt=lambda value, _: {"steps": value, "epochs": None},
    ),
    Rule(name="learning_rate", kind=NUMBER, effect="`learning_rate`", sets="learning_rate"),
)


def compiled(name: str) -> Rule:
    """A flag that turns compiling on or off."""
    return Rule(
        name=name,
        kind=FLAG,
        effect="`compile`: blocks; false: off",
        adapt=lambda value, _: {"compile": "blocks" if value else "off"},
    )


def refused_if_true(name: str, refusal: str, *, idle: str = "false: as always") -> Rule:
    """A flag whose false is what happens here anyway, and whose true isn't offered."""
    return Rule(
        name=name,
        kind=FLAG,
        idle=idle,
        refusal=refusal,
        adapt=lambda value, _: Verdict.REFUSED if value else Verdict.IDLE,
    )


def read_together(value: Any, section: Mapping[str, Any]) -> dict[str, Any]:
    """Of a key that takes effect with others: whoever adapts the whole section reads it there."""
    return {}
