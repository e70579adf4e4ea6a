"""Why a run's GPU was idle: where the seconds of training went, and what to change.

In: the records of a run. Out: `Idleness`: the share of each part of the time, what the card's own counters say, and
advice, the largest loss first. Only what the records show is judged; a part that is small is left alone. Cost: a few
passes over the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from penstock.report import measures, quantities
from penstock.report.fields import finite, line_of, mapping, sequence, whole
from penstock.report.run import Run
from penstock.report.speed import Account, account_of, gpu_activity
from penstock.runlog import Record

__all__ = ["Advice", "Idleness", "idleness_of"]

WORDS = {
    "computing": "computing",
    "data_wait": "waiting for data",
    "saves": "saving checkpoints",
    "evaluations": "evaluating",
    "start_up": "starting up: importing, opening, building, choosing",
    "first_steps": "slow first steps: compiling, growing the allocator",
    "other": "the host between steps: samples, records, the rest",
}
# Part of the time -> percent above which it is worth a word, and what to change.
LIMITS: dict[str, tuple[float, str]] = {
    "data_wait": (
        0.5,
        "raise prefetch_batches, keep the store on a local disk, see what loading does alone: `penstock bench load`",
    ),
    "saves": (2.0, "save less often (checkpoint_every_steps), or while training goes on (async_checkpoints=true)"),
    "evaluations": (5.0, "evaluate less often (eval_every_steps) or on fewer rows (eval_rows)"),
    "start_up": (10.0, "a longer run pays for it; tune=rules leaves out measuring, and the tuning cache keeps it"),
    "first_steps": (10.0, "a longer run pays for compiling; compile=off leaves it out"),
    "other": (5.0, "draw fewer samples (sample_tokens=0) and record fewer steps (log_every_steps)"),
}
# A matrix of fewer rows doesn't fill a current card.
FEW_TOKENS_AT_ONCE = 8_192
# Part of the card's memory that a larger micro-batch could use.
MUCH_FREE_PERCENT = 50.0
BUSY_SM_PERCENT = 60.0
UNEVEN_RATIO = 1.5


@dataclass(frozen=True, kw_only=True)
class Advice:
    """One cause and its remedy; `percent` of the time, or of the card, that it concerns."""

    cause: str
    percent: float | None
    change: str


@dataclass(frozen=True, kw_only=True)
class Idleness:
    """Where the time went."""

    account: Account
    activity: dict[str, float]
    advice: tuple[Advice, ...]

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        seconds = asdict(self.account)
        return {
            "shares_percent": self.account.shares(),
            "seconds": {name: seconds[name] for name in WORDS},
            "seconds_to_first_step": self.account.seconds_to_first_step,
            "gpu_activity_percent": self.activity,
            "advice": [asdict(one) for one in self.advice],
        }


def idleness_of(records: Sequence[Record]) -> Idleness:
    """Judges the records of a run that came to a step."""
    account = account_of(records)
    shares = account.shares()
    run = Run.from_records(records)
    activity = gpu_activity(records)
    found = [
        Advice(cause=WORDS[name], percent=share, change=LIMITS[name][1])
        for name, share in shares.items()
        if name in LIMITS and share > LIMITS[name][0]
    ]
    found += [one for one in (_small_micro_batch(run), _idle_units(activity), _uneven_steps(run)) if one is not None]
    return Idleness(account=account, activity=activity, advice=tuple(found))


def _choice(run: Run, name: str) -> Any:
    return next((choice.value for choice in run.choices if choice.name == name), None)


def _small_micro_batch(run: Run) -> Advice | None:
    """Too few tokens at once for a GPU; on a CPU small pieces are the fast ones."""
    rows = whole(_choice(run, "micro_batch_rows"))
    seq_len = whole(measures.parameters(run).get("seq_len"))
    if rows is None or seq_len is None or not line_of(_choice(run, "device")).startswith("cuda"):
        return None
    tokens = rows * seq_len
    if tokens >= FEW_TOKENS_AT_ONCE:
        return None
    free = _free_memory_percent(run)
    batch_rows = whole(measures.parameters(run).get("batch_rows")) or rows
    change = (
        f"raise batch_rows: a step has {batch_rows} rows, all of them at once already"
        if batch_rows <= rows
        else "set micro_batch_rows higher, or leave it out to have it measured"
    )
    if free is not None and free < MUCH_FREE_PERCENT:
        change = (
            "the memory is nearly full: loss_kernel=chunked or activation_checkpointing=selective make room for more"
        )
    return Advice(cause=f"small micro-batch: {tokens:,} tokens at once", percent=None, change=change)


def _free_memory_percent(run: Run) -> float | None:
    peak = measures.hardware_summary(run)["peak_gpu_memory_mb"]
    gpus = [mapping(gpu) for gpu in sequence(run.hardware.get("gpus"))]
    memory = finite(gpus[0].get("memory_bytes")) if gpus else None
    return 100 * (1 - peak * measures.BYTES_PER_MB / memory) if peak and memory else None


def _idle_units(activity: dict[str, float]) -> Advice | None:
    busy = activity.get("sm_active_percent")
    if busy is None or busy >= BUSY_SM_PERCENT:
        return None
    change = "many small kernels: compile=blocks joins them; a larger micro-batch or model fills the card"
    return Advice(cause="multiprocessors of the card idle while kernels run", percent=100 - busy, change=change)


def _uneven_steps(run: Run) -> Advice | None:
    timing = measures.timing(run)
    middle, slow = timing["step_seconds_median"], timing["step_seconds_p95"]
    if not middle or not slow or slow < UNEVEN_RATIO * middle:
        return None
    times = f"{quantities.duration(slow)} at the 95th percentile, {quantities.duration(middle)} in the middle"
    change = "something else uses the machine, or the card's clock falls: look at power and other processes"
    return Advice(cause=f"uneven steps: {times}", percent=None, change=change)
