"""The search over candidates: which are tried, in what order, and when to stop.

In: the rules' choices as a start, and a function that tries one candidate. Out: `Measured`, figures and not decisions
where a decision depends on the length of the run: compiling is weighed anew for each run from the figures kept.
The order is that of the gain to be expected: attention kernel, micro-batch (doubled until it gains less than 3 % or
memory passes 90 %), chunked loss where memory was what stopped it, then the best with and without compiling. Where the
rules compile, so do the trials: what is fastest by itself needn't be so in compiled layers. Time is looked at before
each trial; one that may take long is left out if too little is left. Pure but for the function and the clock it is
given.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.train.choices import Choices, halved
from penstock.train.tuning.break_even import ASSUMED, Compiling
from penstock.train.tuning.rules import MEMORY_SHARE, row_counts
from penstock.train.tuning.trials import Trial

__all__ = ["Measured", "Search"]

LEAST_GAIN = 0.03
# Another kernel costs nothing but the trial, so any gain that isn't noise will do.
LEAST_GAIN_OF_ATTENTION = 0.01
USUAL_TRIAL_SECONDS = 6.0
COMPILE_TRIAL_SECONDS = 25.0
# What compiling may gain at best: a run in which even this doesn't pay back needs no trial of it.
HOPED_FOR = Compiling(way="blocks", cost_seconds=7.0, saved_share=0.3)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """What trials found; JSON values, kept in the cache."""

    attention: str
    micro_batch_rows: int
    loss_kernel: str
    tokens_per_second: float  # eager, with the choices above
    gains: dict[str, float] = field(default_factory=dict)
    notes: dict[str, str] = field(default_factory=dict)
    compile_seconds: float | None = None  # None: not tried
    compile_saved_share: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return asdict(self)


@dataclass(kw_only=True)
class Search:
    """One search. `may_change` are the choices that the config leaves open."""

    try_out: Callable[[Choices], Trial]
    clock: Callable[[], float]
    seconds: float
    may_change: frozenset[str]
    attention_kernels: tuple[str, ...]
    local_rows: int
    memory_bytes: int
    optimizer_bytes: int
    trials: list[Trial] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._started = self.clock()
        self._last_seconds = 0.0

    def measured(self, start: Choices) -> Measured | None:
        """Tries everything but compiling; None if not even the start, halved as often as it takes, would run."""
        best = first = self._first_that_runs(start)
        if best is None and start.compile != "off" and "compile" in self.may_change and self.trials[-1].failure:
            failure = self.trials[-1].failure
            eager = self.measured(replace(start, compile="off"))
            return None if eager is None else _without_compiling(eager, f"failed: {failure}")
        if best is None or first is None:
            return None
        notes: dict[str, str] = {}
        gains: dict[str, float] = {}
        for name, step in (
            ("attention", self._best_attention),
            ("micro_batch_rows", self._knee),
            ("loss_kernel", self._chunked),
        ):
            if name not in self.may_change:
                continue
            before = best
            best, notes[name] = step(best)
            if best is not before:
                gains[name] = best.tokens_per_second / before.tokens_per_second - 1
        found = Measured(
            attention=best.choices.attention,
            micro_batch_rows=best.choices.micro_batch_rows,
            loss_kernel=best.choices.loss_kernel,
            tokens_per_second=best.tokens_per_second,
            gains=gains,
            notes=notes,
        )
        if start.compile == "off" or "compile" not in self.may_change:
            return found
        return self._with_eager(found, best, compile_seconds=first.first_seconds)

    def _with_eager(self, found: Measured, compiled: Trial, *, compile_seconds: float) -> Measured:
        """What compiling gained: the best once more without it. Assumed, where no time is left."""
        eager = self._tried(replace(compiled.choices, compile="off"))
        if eager is None or eager.failure:  # it may need memory that the compiled one doesn't
            rate, note = (1 - ASSUMED.saved_share) * compiled.tokens_per_second, "measured; without it assumed"
        else:
            rate, note = eager.tokens_per_second, "measured"
        saved = 1 - rate / compiled.tokens_per_second
        noted = _noted(found, "compile", note)
        return replace(noted, tokens_per_second=rate, compile_seconds=compile_seconds, compile_saved_share=saved)

    def with_compiling(self, found: Measured, choices: Choices, *, step_seconds: float, steps: int) -> Measured:
        """Adds the figures of compiling per block, if it may pay back and there is time to try."""
        if "compile" not in self.may_change or found.compile_seconds is not None:
            return found
        if HOPED_FOR.net_seconds(step_seconds=step_seconds, steps=steps) <= 0:
            return _noted(found, "compile", "not tried: no gain in this run could pay for it")
        if not self._has_time(COMPILE_TRIAL_SECONDS):
            return _noted(found, "compile", "not tried: no time left")
        trial = self._tried(replace(choices, compile="blocks"))
        if trial is None or trial.failure:
            return _without_compiling(found, f"failed: {trial.failure}" if trial else "not tried: no time left")
        saved = 1 - found.tokens_per_second / trial.tokens_per_second
        return replace(
            _noted(found, "compile", "measured"), compile_seconds=trial.first_seconds, compile_saved_share=saved
        )

    def _first_that_runs(self, start: Choices) -> Trial | None:
        candidate: Choices | None = start
        while candidate is not None:
            trial = self._tried(candidate)
            if trial is None or (trial.failure and not trial.is_out_of_memory):
                return None
            if not trial.failure:
                return trial
            candidate = halved(candidate) if "micro_batch_rows" in self.may_change else None
        return None

    def _best_attention(self, start: Trial) -> tuple[Trial, str]:
        tried, no_time_for = [start], []
        for kernel in self.attention_kernels:
            if kernel != start.choices.attention:
                trial = self._tried(replace(start.choices, attention=kernel))
                tried += [trial] if trial and not trial.failure and not self._is_past_memory(trial) else []
                no_time_for += [kernel] if trial is None else []
        best = max(tried, key=lambda trial: trial.tokens_per_second)
        if not _is_worth_it(best, start, least_gain=LEAST_GAIN_OF_ATTENTION):
            best = start
        if len(self.attention_kernels) < 2:
            return best, "the only kernel here"
        untried = f"; no time left for {', '.join(no_time_for)}" if no_time_for else ""
        return best, f"the fastest of {', '.join(trial.choices.attention for trial in tried)}{untried}"

    def _knee(self, start: Trial) -> tuple[Trial, str]:
        best = start
        while (rows := self._doubled(best.choices.micro_batch_rows)) is not None:
            trial = self._tried(replace(best.choices, micro_batch_rows=rows))
            if trial is None:
                return best, "no time left for more"
            if trial.failure or self._is_past_memory(trial):
                return best, f"{rows} rows need more than {MEMORY_SHARE:.0%} of the memory"
            if not _is_worth_it(trial, best):
                return best, f"{rows} rows gain less than {LEAST_GAIN:.0%}"
            best = trial
        return best, "all rows of a step at once"

    def _chunked(self, start: Trial) -> tuple[Trial, str]:
        rows = self._doubled(start.choices.micro_batch_rows)
        if start.choices.loss_kernel != "plain" or rows is None or "micro_batch_rows" not in self.may_change:
            return start, "nothing to gain from smaller logits"
        if not any(trial.choices.micro_batch_rows == rows and self._failed_for_memory(trial) for trial in self.trials):
            return start, "the logits fit"
        trial = self._tried(replace(start.choices, loss_kernel="chunked", micro_batch_rows=rows))
        if trial is None or trial.failure or self._is_past_memory(trial) or not _is_worth_it(trial, start):
            return start, f"chunked, with {rows} rows, is no faster"
        return trial, f"leaves room for {rows} rows"

    def _doubled(self, rows: int) -> int | None:
        larger = [count for count in row_counts(self.local_rows) if count >= 2 * rows]
        return min(larger, default=None)

    def _failed_for_memory(self, trial: Trial) -> bool:
        return trial.is_out_of_memory or self._is_past_memory(trial)

    def _is_past_memory(self, trial: Trial) -> bool:
        """The optimizer's state isn't there yet during trials, and counts."""
        if trial.peak_bytes is None:
            return False
        return trial.peak_bytes + self.optimizer_bytes > MEMORY_SHARE * self.memory_bytes

    def _has_time(self, for_seconds: float) -> bool:
        return self.clock() - self._started + for_seconds <= self.seconds

    def _tried(self, choices: Choices) -> Trial | None:
        """None if the time is over; the first trial is always made."""
        # Twice the rows take twice as long; another kernel as long as the one before, most of which was compiling.
        before = self.trials[-1].choices.micro_batch_rows if self.trials else choices.micro_batch_rows
        growth = max(1.0, choices.micro_batch_rows / before)
        if self.trials and not self._has_time(max(USUAL_TRIAL_SECONDS, growth * self._last_seconds)):
            return None
        started = self.clock()
        trial = self.try_out(choices)
        self._last_seconds = self.clock() - started
        self.trials.append(trial)
        return trial


def _is_worth_it(trial: Trial, before: Trial, *, least_gain: float = LEAST_GAIN) -> bool:
    return trial.tokens_per_second >= (1 + least_gain) * before.tokens_per_second


def _without_compiling(found: Measured, why: str) -> Measured:
    return replace(_noted(found, "compile", why), compile_seconds=0.0, compile_saved_share=-1.0)


def _noted(found: Measured, name: str, note: str) -> Measured:
    return replace(found, notes={**found.notes, name: note})
