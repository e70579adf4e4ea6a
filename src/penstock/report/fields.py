"""Reading values that may be anything.

In: values from records.jsonl, which another process wrote and a kill, an old version or a stranger may have bent.
Out: the type asked for, or None where the value isn't one. A report of a broken run is worth more than a traceback, so
nothing here raises; what can't be read is left out of the report. Cost: constant time per value.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

__all__ = ["finite", "flattened", "line_of", "mapping", "sequence", "shell_line", "whole"]

DEEPEST_LEVEL = 4
# A float32 loss ends at 3e38. Below this bound, sums and differences of what is read stay finite.
LARGEST_NUMBER = 1e100


def finite(value: Any) -> float | None:
    """A number of at most 1e100 either way, or None; `True` isn't a number here."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # an integer of more than 308 digits
        return None
    return number if abs(number) <= LARGEST_NUMBER else None


def whole(value: Any) -> int | None:
    """An integer, or a float that is one; None otherwise."""
    number = finite(value)
    if number is None or not number.is_integer():
        return None
    return value if isinstance(value, int) else int(number)


def mapping(value: Any) -> dict[str, Any]:
    """The value where it is a mapping with text keys, else an empty one."""
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def sequence(value: Any) -> list[Any]:
    """The value where it is a list, else an empty one."""
    return list(value) if isinstance(value, (list, tuple)) else []


def line_of(value: Any) -> str:
    """The value as text: nothing for None, commas between the items of a list."""
    if value is None:
        return ""
    if isinstance(value, (list, tuple)):
        return ", ".join(line_of(item) for item in value)
    return value if isinstance(value, str) else str(value)


def shell_line(value: Any) -> str:
    """A command as text: a list of words is quoted as a shell needs it."""
    return shlex.join(line_of(word) for word in value) if isinstance(value, (list, tuple)) else line_of(value)


def flattened(value: Any, *, prefix: str = "", level: int = 0) -> list[tuple[str, Any]]:
    """The leaves of nested mappings and lists of mappings as (dotted name, leaf), in order; the deepest stay whole."""
    if level < DEEPEST_LEVEL and isinstance(value, Mapping):
        items = [(str(key), item) for key, item in value.items()]
    elif (
        level < DEEPEST_LEVEL and isinstance(value, (list, tuple)) and any(isinstance(item, Mapping) for item in value)
    ):
        items = [(str(place), item) for place, item in enumerate(value)]
    else:
        return [(prefix, value)]
    leaves = []
    for name, item in items:
        leaves += flattened(item, prefix=f"{prefix}.{name}" if prefix else name, level=level + 1)
    return leaves
