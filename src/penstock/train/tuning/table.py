"""The table of choices: choice, value, reason, measured gain.

In: a run's `choice` records, or a profile and a config for a machine that isn't here. Out: rows of text, for the
command line and the page.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, fields

from penstock.runlog import Record
from penstock.train.choices import Choices
from penstock.train.config import TrainConfig
from penstock.train.shape import ModelShape
from penstock.train.tuning.facts import facts_of_shape
from penstock.train.tuning.profiles import HardwareProfile
from penstock.train.tuning.rules import Decision, rules
from penstock.train.tuning.tiers import workers_for_cores

__all__ = ["COLUMNS", "choice_rows", "explain", "memory_row"]

COLUMNS = ("choice", "value", "reason", "measured gain")


def choice_rows(records: Iterable[Record]) -> list[tuple[str, str, str, str]]:
    """The rows of a run's table, in the order decided; of a choice made twice the later one counts."""
    latest = {str(record.get("name")): record for record in records if record.get("kind") == "choice"}
    return [
        (name, _shown(record.get("value")), str(record.get("reason", "")), _gain(record.get("gain")))
        for name, record in latest.items()
    ]


def explain(profile: HardwareProfile, config: TrainConfig, shape: ModelShape) -> list[tuple[str, str, str]]:
    """What the rules would choose on a machine: (choice, value, reason) for each choice, memory and workers."""
    decision = rules(profile, facts_of_shape(shape, seq_len=config.seq_len), config)
    # How many threads torch takes is known on the machine alone.
    names = [each.name for each in fields(Choices) if each.name != "num_threads"]
    rows = [(name, _shown(getattr(decision.choices, name)), decision.reasons[name]) for name in names]
    workers = workers_for_cores(profile.cores)
    return [*rows, memory_row(decision), ("workers", str(workers), f"half of {profile.cores} cores, 1 to 8")]


def memory_row(decision: Decision) -> tuple[str, str, str]:
    """The estimate and its parts."""
    parts = [f"{name} {value / 2**30:.2f}" for name, value in asdict(decision.memory).items() if value >= 2**20 * 5]
    return "memory", f"{decision.memory.total / 2**30:.2f} GiB", f"estimated, GiB: {', '.join(parts)}"


def _shown(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _gain(value: object) -> str:
    return f"{value:+.1%}" if isinstance(value, int | float) and not isinstance(value, bool) else ""
