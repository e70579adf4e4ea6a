"""How units of work are run. An engine knows nothing of documents or stores: it calls three functions per unit."""

from penstock.engines.local import run_units
from penstock.engines.processes import (
    can_fork,
    die_with,
    drawn_beside,
    run_side_by_side,
    run_units_in_processes,
    settled_objects,
)

__all__ = [
    "can_fork",
    "die_with",
    "drawn_beside",
    "run_side_by_side",
    "run_units",
    "run_units_in_processes",
    "settled_objects",
]
