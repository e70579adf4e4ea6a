"""Batch and workers by size of the machine: the tier rules of a `training_config.yaml` (seed 002).

Pure arithmetic: gigabytes or cores in, a number out.
"""

from __future__ import annotations

__all__ = ["batch_rows_for_memory", "workers_for_cores"]


def batch_rows_for_memory(
    gigabytes: float | None,
    *,
    large: int = 8,
    medium: int = 4,
    small: int = 2,
    large_gigabytes: float = 7.0,
    medium_gigabytes: float = 4.0,
    small_gigabytes: float = 2.0,
) -> int:
    """Rows for a card of so much memory; `None`, no card at all, is the small tier; a card below it gets one row."""
    if gigabytes is None:
        return small
    tiers = ((large_gigabytes, large), (medium_gigabytes, medium), (small_gigabytes, small))
    return next((rows for least, rows in tiers if gigabytes >= least), 1)


def workers_for_cores(cores: int, *, lowest: int = 1, highest: int = 8) -> int:
    """Half of the cores, within the limits."""
    return max(lowest, min(cores // 2, highest))
