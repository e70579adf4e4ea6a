"""How fast a run was, and where its time went.

In: the records of a run. Out: `Speed`, whose rate leaves out the first steps after every start (they compile, fill
caches and grow the allocator), and `Account`, the run's seconds by what they were spent on. Where the records don't
hold a figure it is None, never a guess. Cost: a few passes over the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from penstock.report import measures
from penstock.report.fields import finite, mapping, sequence, whole
from penstock.report.run import Run, sessions_of
from penstock.runlog import Record

__all__ = ["FIRST_STEPS", "Account", "Speed", "account_of", "gpu_activity", "speed_of", "steady_steps"]

# Left out after every start. The bench commands leave out as many, so that their figures and these agree.
FIRST_STEPS = 3


@dataclass(frozen=True, kw_only=True)
class Speed:
    """What a run did per second; `ratio_to` compares two."""

    tokens_per_second: float | None  # steady state
    mfu_percent: float | None
    data_stall_percent: float | None  # of steady steps
    step_seconds_median: float | None
    seconds_to_first_step: float | None  # from the command's first record, preparing left out
    peak_memory_bytes: float | None
    peak_gpu_memory_bytes: float | None
    training_seconds: float | None  # all steps, evaluations and saves
    seconds: float | None  # the whole run
    steady_steps: int
    steps: int

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)

    def ratio_to(self, before: Speed) -> dict[str, float]:
        """This one's figures over another's, where both have them."""
        names = [field.name for field in fields(self) if field.name not in ("steps", "steady_steps")]
        pairs = {name: (getattr(self, name), getattr(before, name)) for name in names}
        return {name: mine / other for name, (mine, other) in pairs.items() if mine is not None and other}


def steady_steps(records: Sequence[Record]) -> list[Record]:
    """The step records after the first few of every start; all of them where a run has no more than those."""
    latest: dict[int, Record] = {}
    every: dict[int, Record] = {}
    seen = 0
    for record in records:
        if record.get("kind") == "start":
            seen = 0
        step = whole(record.get("step"))
        if record.get("kind") != "step" or step is None or not _is_timed(record):
            continue
        seen += 1
        every[step] = record
        latest.pop(step, None)
        if seen > FIRST_STEPS:
            latest[step] = record
    chosen = latest or every
    return [chosen[step] for step in sorted(chosen)]


def _is_timed(record: Record) -> bool:
    seconds = finite(record.get("seconds"))
    return seconds is not None and seconds > 0


def speed_of(records: Sequence[Record]) -> Speed:
    """The speed of a run."""
    run = Run.from_records(records)
    steady = steady_steps(records)
    seconds = sum(finite(one.get("seconds")) or 0 for one in steady)
    tokens = sum(finite(one.get("tokens")) or 0 for one in steady)
    waited = sum(finite(one.get("data_seconds")) or 0 for one in steady)
    rate = tokens / seconds if seconds and tokens else None
    memory = measures.hardware_summary(run)
    account = account_of(records)
    return Speed(
        tokens_per_second=rate,
        mfu_percent=_mfu_percent(steady),
        data_stall_percent=100 * waited / seconds if seconds else None,
        step_seconds_median=measures.timing(run)["step_seconds_median"],
        seconds_to_first_step=account.seconds_to_first_step,
        peak_memory_bytes=_bytes(memory["peak_memory_mb"]),
        peak_gpu_memory_bytes=_bytes(memory["peak_gpu_memory_mb"]),
        training_seconds=account.training_seconds,
        seconds=run.seconds or None,
        steady_steps=len(steady),
        steps=measures.steps_done(run),
    )


def _bytes(megabytes: float | None) -> float | None:
    return None if megabytes is None else megabytes * measures.BYTES_PER_MB


def _mfu_percent(steady: Sequence[Record]) -> float | None:
    """The mean over steady step time; None where the steps don't say, as on a CPU."""
    pairs = [(finite(one.get("mfu_percent")), finite(one.get("seconds")) or 0.0) for one in steady]
    seconds = sum(taken for share, taken in pairs if share is not None)
    return sum(share * taken for share, taken in pairs if share is not None) / seconds if seconds else None


@dataclass(frozen=True, kw_only=True)
class Account:
    """The seconds of training by what they went to; without `start_up` they add up to `training_seconds`."""

    seconds_to_first_step: float | None
    training_seconds: float | None
    start_up: float  # from the command to its first step: importing, opening, building, choosing
    first_steps: float  # what the first steps took beyond the usual
    data_wait: float
    computing: float  # steady step time without the wait
    saves: float
    evaluations: float
    other: float  # the rest: samples, records, the host between steps

    def shares(self) -> dict[str, float]:
        """Each part in percent of the whole, largest first."""
        parts = {name: getattr(self, name) for name in PARTS}
        total = sum(parts.values())
        ordered = sorted(parts, key=lambda name: -parts[name])
        return {name: 100 * parts[name] / total if total else 0.0 for name in ordered}


PARTS = ("start_up", "first_steps", "data_wait", "computing", "saves", "evaluations", "other")


def account_of(records: Sequence[Record]) -> Account:
    """Where the seconds of training went, over all starts of a run."""
    training: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    to_first: float | None = None
    total = 0.0
    for session in sessions_of(records):
        spent, first = _session_account(session)
        to_first = to_first if to_first is not None else first
        for name, seconds in spent.items():
            training[name] += seconds
        total += sum(spent.values()) - spent["start_up"]
    return Account(seconds_to_first_step=to_first, training_seconds=total or None, **training)


def _session_account(session: Sequence[Record]) -> tuple[dict[str, float], float | None]:
    """The parts of one start of the run, and the seconds from its first record to the first update."""
    steps = [record for record in session if record.get("kind") == "step" and _is_timed(record)]
    if not steps:
        return dict.fromkeys(PARTS, 0.0), None
    begin = finite(session[0].get("time"))
    ends = [moment for record in session if (moment := finite(record.get("time"))) is not None]
    first_step_at = finite(steps[0].get("time"))
    prepared = _sum(session, "phase", where=lambda record: record.get("name") not in (measures.TRAINING_PHASE, None))
    to_first = max(first_step_at - begin - prepared, 0.0) if begin is not None and first_step_at is not None else None
    durations = [finite(step.get("seconds")) or 0.0 for step in steps]
    waits = [min(finite(step.get("data_seconds")) or 0.0, taken) for step, taken in zip(steps, durations, strict=True)]
    usual = sorted(durations[FIRST_STEPS:] or durations)[len(durations[FIRST_STEPS:] or durations) // 2]
    slow_start = sum(max(taken - usual, 0.0) for taken in durations[:FIRST_STEPS])
    # A run may record every tenth step only: the others took as long as those beside them.
    numbers = [whole(step.get("step")) or 0 for step in steps]
    covered = max(numbers[-1] - numbers[0], 0) + 1
    scale = (covered - 1) / (len(steps) - 1) if len(steps) > 1 else 1.0
    spent = {
        "start_up": max((to_first or 0.0) - durations[0], 0.0),
        "first_steps": slow_start,
        "data_wait": sum(waits) * scale,
        "computing": max((sum(durations) - slow_start - sum(waits)) * scale, 0.0),
        "saves": _sum(session, "checkpoint", field="waited_seconds"),
        "evaluations": _sum(session, "evaluation"),
    }
    total = max(ends) - begin - prepared if begin is not None and ends else 0.0
    return {**spent, "other": max(total - sum(spent.values()), 0.0)}, to_first


def _sum(records: Sequence[Record], kind: str, *, field: str = "seconds", where: Any = lambda record: True) -> float:
    """Seconds of the records of a kind: of `field`, which a save that a thread writes has, where there is one."""
    chosen = [one for one in records if one.get("kind") == kind and where(one)]
    return sum(finite(one.get(field, one.get("seconds"))) or 0.0 for one in chosen)


def gpu_activity(records: Sequence[Record]) -> dict[str, float]:
    """Means of what the hardware samples say about the first GPU, in percent: whatever fields end in `_percent`."""
    found: dict[str, list[float]] = {}
    for record in records:
        if record.get("kind") == "hardware":
            for gpu in sequence(record.get("gpu"))[:1]:
                for name, value in mapping(gpu).items():
                    number = finite(value)
                    if name.endswith("_percent") and number is not None:
                        found.setdefault(name, []).append(number)
    return {name: sum(values) / len(values) for name, values in found.items()}
