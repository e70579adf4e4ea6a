"""Subjects, each measured in a fresh process, round after round.

A round measures every subject once, so that a slow minute of the machine falls on all of them alike. Nothing is shared
between two measurements but the page cache and what `setup` put into the work folder. A peer that is missing, fails or
hangs is skipped with the reason; a failure of our own is an error.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench.result import Role, Row
from penstock.errors import PenstockError

__all__ = ["Outcome", "Report", "Subject", "Tell", "is_named", "measured", "row_of", "run_fresh", "run_own"]

TIMEOUT_SECONDS = 1200.0

Report = dict[str, Any]
Tell = Callable[[str], None]


class TaskFailed(Exception):  # noqa: N818  it is an answer, caught here, and never reaches a user
    """A task gave no report."""


class PackageMissing(TaskFailed):
    """It needs a package that isn't installed here, which is nobody's failure."""


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something to measure.

    Attributes:
        name: of its row, and what `--skip` takes (so does any word of it: `--skip litdata`).
        task: `module:function` inside penstock.bench.
        settings: keyword arguments of the function; JSON values.
        environment: variables set for its process.
        setup: tasks run once before the first round, in order: (task, settings).
        repeats: rounds it takes part in, where that isn't all of them.
        timeout_seconds: of one measurement; None for 20 minutes.
    """

    name: str
    role: Role
    task: str
    settings: Mapping[str, Any]
    environment: Mapping[str, str] = field(default_factory=dict)
    setup: Sequence[tuple[str, Mapping[str, Any]]] = ()
    repeats: int | None = None
    timeout_seconds: float | None = None


@dataclass(kw_only=True)
class Outcome:
    """The reports of a subject, one per round, or why there are none."""

    subject: Subject
    reports: list[Report] = field(default_factory=list)
    skipped: str | None = None


def measured(
    subjects: Sequence[Subject], *, repeats: int, folder: Path, skip: Sequence[str] = (), tell: Tell
) -> dict[str, Outcome]:
    """Measures the subjects `repeats` times, interleaved.

    Args:
        subjects: in the order of a round.
        repeats: rounds.
        folder: where processes may leave files; the caller removes it.
        skip: names, or words of names, to leave out.
        tell: given a line before each measurement.

    Raises:
        PenstockError: one of our own subjects gave no report.
    """
    outcomes = {subject.name: Outcome(subject=subject) for subject in subjects}
    setups: dict[str, str | None] = {}
    for name, outcome in outcomes.items():
        if is_named(name, skip):
            outcome.skipped = "left out with --skip"
        for task, settings in outcome.subject.setup:
            if outcome.skipped is not None:
                break
            # Subjects may share a setup; it runs once, and its failure is the failure of all of them.
            identity = json.dumps([task, dict(settings)], sort_keys=True)
            if identity not in setups:
                tell(f"{name}: {task.partition(':')[2].replace('_', ' ')}")
                _attempt(outcome, task, settings, folder=folder)
                setups[identity] = outcome.skipped
            outcome.skipped = setups[identity]
    for number in range(repeats):
        for name, outcome in outcomes.items():
            if outcome.skipped is not None or number >= (outcome.subject.repeats or repeats):
                continue
            tell(f"{name}: {number + 1} of {outcome.subject.repeats or repeats}")
            report = _attempt(outcome, outcome.subject.task, outcome.subject.settings, folder=folder)
            if report is not None:
                outcome.reports.append(report)
    return outcomes


def row_of(
    outcome: Outcome, key: str, *, name: str | None = None, unit: str, scale: float = 1.0, **details: Any
) -> Row:
    """A row from one number of each report."""
    subject = outcome.subject
    row_name = name or subject.name
    if outcome.skipped is not None:
        return Row(name=row_name, role=subject.role, unit=unit, skipped=outcome.skipped)
    values = tuple(report[key] * scale for report in outcome.reports)
    return Row(name=row_name, role=subject.role, unit=unit, values=values, details=details)


def is_named(name: str, skip: Sequence[str]) -> bool:
    """Whether a subject is meant by one of some words: its name, a part of it between commas, or a word of it."""
    words = {*re.findall(r"[\w+-]+", name.lower()), *re.findall(r"[\w.+-]+", name.lower()), *name.lower().split(", ")}
    return any(each.lower() == name.lower() or each.lower() in words for each in skip)


def _attempt(outcome: Outcome, task: str, settings: Mapping[str, Any], *, folder: Path) -> Report | None:
    """One report; where a peer gives none, or a package is missing, the outcome says why from then on."""
    try:
        return run_fresh(
            task,
            settings,
            folder=folder,
            environment=outcome.subject.environment,
            timeout_seconds=outcome.subject.timeout_seconds or TIMEOUT_SECONDS,
        )
    except TaskFailed as failure:
        if outcome.subject.role is Role.OURS and not isinstance(failure, PackageMissing):
            raise _own_failure(outcome.subject.name, failure) from None
        outcome.skipped = str(failure)
        outcome.reports.clear()
        return None


def run_own(task: str, settings: Mapping[str, Any], *, folder: Path) -> Report:
    """The report of a task that everything else depends on; a `PenstockError` if it gives none."""
    try:
        return run_fresh(task, settings, folder=folder)
    except TaskFailed as failure:
        raise _own_failure(task, failure) from None


def _own_failure(name: str, failure: TaskFailed) -> PenstockError:
    return PenstockError(
        f"measuring {name!r} failed: {failure}", hint="this is a bug of penstock; please report it with that line"
    )


def run_fresh(
    task: str,
    settings: Mapping[str, Any],
    *,
    folder: Path,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Report:
    """The report of a task, run in a process of its own.

    Raises:
        TaskFailed: it needs a package that isn't there, or failed, or took too long.
    """
    with tempfile.TemporaryDirectory(prefix="task-", dir=folder) as name:
        settings_file, result_file = Path(name, "settings.json"), Path(name, "result.json")
        fs.write_atomic(settings_file, json.dumps(dict(settings)).encode())
        command = [sys.executable, "-m", "penstock.bench.worker", task, str(settings_file), str(result_file)]
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env={**os.environ, **_quiet_environment(folder), **(environment or {})},
            start_new_session=True,
        )
        try:
            _, errors = process.communicate(timeout=timeout_seconds)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)  # its session, worker processes of a peer included
            process.communicate()
            if isinstance(error, subprocess.TimeoutExpired):
                raise TaskFailed(f"gave no result within {timeout_seconds:g} s") from None
            raise
        if process.returncode != 0 or not result_file.exists():
            raise TaskFailed(_last_line(errors) or f"ended with status {process.returncode}")
        report: Report = json.loads(result_file.read_bytes())
    if "missing" in report:
        raise PackageMissing(report["missing"])
    return report


def _quiet_environment(folder: Path) -> dict[str, str]:
    """Keeps peers off the network and out of the user's home; their caches go with the work folder."""
    return {
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "HF_HOME": str(folder / "huggingface"),
        "HF_HUB_OFFLINE": "1",
        "HF_DATASETS_OFFLINE": "1",
        "HF_DATASETS_DISABLE_PROGRESS_BARS": "1",
        "LITDATA_DISABLE_VERSION_CHECK": "1",
        "TOKENIZERS_PARALLELISM": "true",
    }


def _last_line(errors: bytes) -> str:
    """The last line of a traceback, without the places it names."""
    lines = errors.decode(errors="replace").strip().splitlines()
    return re.sub(r"(?:/[\w.@+=-]+)+/([\w.@+=-]+)", r"\1", lines[-1].strip()) if lines else ""
