"""What fits the hardware: choices by rule, corrected by measurements on a GPU.

    profiles, facts, memory -> rules -> [trials in measuring, kept by cache] -> deciding -> applying

The first row needs no torch: `PROFILES`, `rules` and `explain` answer for machines that aren't here.
"""

from __future__ import annotations

from penstock.train.tuning.facts import ModelFacts, facts_of_shape
from penstock.train.tuning.memory import MemoryEstimate, estimated_memory
from penstock.train.tuning.profiles import PROFILES, HardwareProfile, profile_named, profile_of
from penstock.train.tuning.rules import Decision, rules
from penstock.train.tuning.table import COLUMNS, choice_rows, explain
from penstock.train.tuning.tiers import batch_rows_for_memory, workers_for_cores

__all__ = [
    "COLUMNS",
    "PROFILES",
    "Decision",
    "HardwareProfile",
    "MemoryEstimate",
    "ModelFacts",
    "batch_rows_for_memory",
    "choice_rows",
    "estimated_memory",
    "explain",
    "facts_of_shape",
    "profile_named",
    "profile_of",
    "rules",
    "workers_for_cores",
]
