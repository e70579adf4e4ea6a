"""The last lines of `penstock run`.

In: the records of a run. Out: lines of plain text: what happened, a table of phases with seconds and rates, where to
look. Text from records has its control characters shown as escapes, so that no path can write to the terminal what it
likes. Cost: a few passes over the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.report import measures, quantities
from penstock.report.fields import finite
from penstock.report.manifest import MANIFEST_NAME, PAGE_NAME
from penstock.report.markup import clipped, visible
from penstock.report.run import Phase, Run
from penstock.runlog import Record

__all__ = ["headline", "phase_rates", "plural", "summary_lines"]

MOST_MESSAGE_CHARACTERS = 500
OUTCOMES = {"completed": "Completed", "failed": "Failed", "interrupted": "Interrupted"}


def summary_lines(records: Sequence[Record], *, run_folder: Path | None = None) -> list[str]:
    """What happened, how long each phase took, and where to look; without the folder, paths are relative to it."""
    run = Run.from_records(records)
    lines = [headline(run)]
    if run.phases:
        lines += ["", *_phase_table(run)]
    return [visible(line) for line in [*lines, "", *_places(run, run_folder or Path())]]


def headline(run: Run) -> str:
    """The run in one or two sentences."""
    if run.started is None:
        return "Nothing is recorded yet."
    sentence = OUTCOMES.get(run.status, clipped(run.status, most_characters=40))
    if not run.has_ended:
        sentence = "Interrupted, or still running,"
    if run.failed_phase:
        sentence += f" in phase {run.failed_phase}"
    sentence += f" after {quantities.duration(run.seconds)}"
    if run.message and run.status != "completed":
        sentence += f": {clipped(run.message, most_characters=MOST_MESSAGE_CHARACTERS).rstrip('.')}"
    training = _training_sentence(run)
    return f"{sentence}. {training}" if training else f"{sentence}."


def _training_sentence(run: Run) -> str:
    change = measures.loss_change(run)
    if not run.steps or change is None:
        return ""
    tokens = measures.tokens_trained(run)
    sentence = plural(measures.steps_done(run), "step")
    if tokens:
        sentence += f" over {quantities.compact(tokens)} tokens"
    first, last = change
    if len(run.steps) == 1:
        sentence += f", loss {quantities.decimal(last)}"
    else:
        sentence += f" took the loss from {quantities.decimal(first)} to {quantities.decimal(last)}"
    validations = measures.validations(run)
    if validations and validations[-1].bits_per_byte is not None:
        bits = quantities.decimal(validations[-1].bits_per_byte)
        sentence += f"; {bits} bits per byte on {validations[-1].split}"
    return f"{sentence}."


def plural(number: int, noun: str, many: str = "") -> str:
    """A count with its noun; `many` is the noun for several, where it isn't the noun with an s."""
    return f"{number:,} {noun if number == 1 else many or f'{noun}s'}"


def phase_rates(phase: Phase, run: Run) -> str:
    """What the phase did per second.

    Training gives its own rate, or else that of its steps: its tokens are those of the whole run, its seconds those
    since the last resume.
    """
    if phase.name == measures.TRAINING_PHASE:
        rate = finite(phase.detail.get("tokens_per_second")) or measures.tokens_per_second(run)
        return f"{quantities.compact(rate)} tokens/s" if rate else ""
    num_bytes, num_tokens = finite(phase.detail.get("bytes")), finite(phase.detail.get("tokens"))
    return quantities.rates(seconds=phase.seconds, num_bytes=num_bytes, num_tokens=num_tokens)


def _phase_table(run: Run) -> list[str]:
    rows = [("phase", "time", "rate")]
    for phase in run.phases:
        name = phase.name if phase.status == "ok" else f"{phase.name} ({phase.status})"
        seconds = quantities.duration(phase.seconds) if phase.seconds is not None else "?"
        rows.append((visible(clipped(name, most_characters=60)), seconds, phase_rates(phase, run)))
    name_width, time_width = (max(len(row[column]) for row in rows) for column in (0, 1))
    return [f"  {name:<{name_width}}  {time:>{time_width}}  {rate}".rstrip() for name, time, rate in rows]


def _places(run: Run, run_folder: Path) -> list[str]:
    places = [("report", run_folder / PAGE_NAME), ("manifest", run_folder / MANIFEST_NAME)]
    if run.checkpoints:
        places.append(("checkpoint", run_folder / run.checkpoints[-1].path))
    return [f"  {what:<10}  {place}" for what, place in places]
