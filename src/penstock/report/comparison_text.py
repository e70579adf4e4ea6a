"""A comparison in words: the verdict, and tables for a terminal and for the page.

In: a `Comparison`. Out: lines and rows of plain text; names from records have their control characters escaped by
whoever prints them. Cost: constant.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from penstock.report import quantities
from penstock.report.comparison import Comparison
from penstock.report.tables import ABSENT, line

__all__ = ["SPEED_NAMES", "evaluated_sentence", "setting_rows", "speed_rows", "spread_sentence", "verdict_line"]

Text = Callable[[float], str]

# Name of a figure -> its words, how it is printed, and whether more is better (None: neither).
SPEED_NAMES: dict[str, tuple[str, Text, bool | None]] = {
    "tokens_per_second": ("tokens/s, steady state", quantities.compact, True),
    "mfu_percent": ("MFU", quantities.percent, True),
    "data_stall_percent": ("data stall", quantities.percent, False),
    "step_seconds_median": ("step, median", quantities.duration, False),
    "seconds_to_first_step": ("command to first step", quantities.duration, False),
    "peak_memory_bytes": ("peak memory", quantities.bytes_text, False),
    "peak_gpu_memory_bytes": ("peak GPU memory", quantities.bytes_text, False),
    "training_seconds": ("training", quantities.duration, False),
    "seconds": ("whole run", quantities.duration, False),
    "steps": ("steps", quantities.count, None),
}


def verdict_line(comparison: Comparison) -> str:
    """The whole comparison in a line."""
    word = "held" if comparison.held else "not held"
    before, after = bits_text(comparison.before_bits), bits_text(comparison.after_bits)
    if math.isfinite(comparison.difference):
        change = f"{comparison.difference_percent:+.2f} %, at most {comparison.threshold_percent:+g} % allowed"
    else:
        change = "the loss isn't finite"
    sentence = f"quality {word}: {before} -> {after} bits per byte ({change})"
    if comparison.tokens_per_second_ratio is not None:
        sentence += f"; {comparison.tokens_per_second_ratio:.2f} times the tokens per second"
    return sentence


def bits_text(bits: float) -> str:
    """Bits per byte to four digits after the point: differences of interest are in the third."""
    return f"{bits:.4f}" if math.isfinite(bits) else "not finite"


def spread_sentence(comparison: Comparison) -> str:
    """What seeds have to say about the difference."""
    spread = comparison.spread
    if spread is None:
        return "seed spread unknown: give reruns with other seeds with --seeds to learn what is chance"
    runs = f"{spread.runs_before} and {spread.runs_after} runs"
    known = f"seed spread {spread.bits_per_byte:.4f} bits per byte ({runs})"
    if not comparison.beyond_spread:
        return f"{known}: seeds alone make such a difference"
    times = abs(comparison.difference) / spread.of_difference if spread.of_difference else math.inf
    return f"{known}: the difference is {times:.1f} standard errors, more than chance"


def evaluated_sentence(comparison: Comparison) -> str:
    """On what the two were scored."""
    held_out = comparison.before.held_out
    again = comparison.rescored
    if again is None:
        tokens = f", {quantities.count(held_out.tokens)} targets" if held_out.tokens else ""
        rows = "all" if held_out.rows is None else f"at most {held_out.rows:,}"
        return f"both runs were scored on the same rows: {rows} of {held_out.split}, {held_out.seq_len} tokens{tokens}"
    sentence = (
        f"the runs were scored on different rows, so both models were scored again on {again.documents:,} documents "
        f"that both hold out, in rows of {again.seq_len} tokens"
    )
    if again.tokenizers_differ:
        sentence += "; their tokenizers differ, so losses per token don't compare and bits per byte do"
    return sentence


def speed_rows(comparison: Comparison) -> list[tuple[str, str, str, str]]:
    """(figure, before, after, ratio) of every figure that either run has."""
    before, after = comparison.before.speed, comparison.after.speed
    ratios = after.ratio_to(before)
    rows = []
    for name, (words, text, _) in SPEED_NAMES.items():
        one, other = getattr(before, name), getattr(after, name)
        if one is None and other is None:
            continue
        ratio = f"{ratios[name]:.2f}x" if name in ratios else ABSENT
        rows.append((words, _text(one, text), _text(other, text), ratio))
    return rows


def _text(value: float | None, text: Text) -> str:
    return ABSENT if value is None else text(value)


def setting_rows(comparison: Comparison) -> list[tuple[str, str, str]]:
    """(setting, before, after) of all that differ."""
    return [(line(name), setting_text(one), setting_text(other)) for name, one, other in comparison.settings]


def setting_text(value: Any) -> str:
    """A setting's value; a dash where a run has no such setting."""
    return ABSENT if value is None else line(value)
