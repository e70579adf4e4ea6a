"""Two runs side by side: did quality hold, and what was gained?

In: two run folders, perhaps more of either kind that differ in their seed alone. Out: one `Comparison`. Quality is bits
per byte on held-out text, which compares across tokenizers; a loss per token doesn't. Both runs must have been scored
on the same rows: their records say so (store digest, split, row length, packing, borders, number of rows, targets), or
both models are scored again on documents that both hold out (rescoring.py). Seeds tell how much of a difference is
chance: without them the spread is unknown, and the comparison says so. Cost: the records; scoring again costs a forward
pass of each model over at most 2^18 tokens.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, InputError
from penstock.report import measures
from penstock.report.fields import flattened, line_of, mapping, whole
from penstock.report.run import Evaluation, Run, read_run_records
from penstock.report.speed import Speed, speed_of
from penstock.report.steps import trained_on
from penstock.runlog import Record

__all__ = [
    "Comparison",
    "HeldOut",
    "Rescore",
    "Rescored",
    "Score",
    "Side",
    "Spread",
    "compare_runs",
    "settings_of",
]

DEFAULT_THRESHOLD_PERCENT = 5.0
# Beyond two standard errors, chance alone makes a difference in one comparison of twenty.
STANDARD_ERRORS = 2.0
SEED = "seed"
# What is watched and kept, never computed: two runs of one kind may differ in these.
WATCHING = frozenset(
    {
        "checkpoint_every_steps",
        "eval_every_steps",
        "eval_rows",
        "keep_checkpoints",
        "log_every_steps",
        "prefetch_batches",
        "sample_tokens",
        "stop_after_steps",
    }
)


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What a run was scored on. Two scores compare where all of this is equal."""

    digests: tuple[str, ...]  # of the stores, in the run's order
    split: str
    seq_len: int
    pack: str
    overlap: int
    overlap_loss: bool
    boundaries: bool
    rows: int | None  # None: all of the split
    tokens: float | None  # targets scored

    def differences(self, other: HeldOut) -> list[str]:
        """What differs, in words."""
        mine, its = asdict(self), asdict(other)
        return [f"{name} {_short(mine[name])} and {_short(its[name])}" for name in mine if mine[name] != its[name]]


def _short(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.15g}"
    if isinstance(value, tuple):
        return " + ".join(map(_short, value))
    return value[:12] if isinstance(value, str) else "all" if value is None else str(value)


@dataclass(frozen=True, kw_only=True)
class Score:
    """How well a model predicts held-out text; `bits_per_byte` is infinite where the model's loss isn't finite."""

    bits_per_byte: float
    loss: float | None
    step: int
    num_bytes: int | None = None


@dataclass(frozen=True, kw_only=True)
class Side:
    """A finished run with an evaluation."""

    folder: Path
    run: Run
    held_out: HeldOut
    score: Score
    speed: Speed
    config: dict[str, Any]  # as asked for
    settings: dict[str, Any]  # and as chosen

    @property
    def name(self) -> str:
        """What the run is called: its folder."""
        return self.folder.resolve().name

    @property
    def seed(self) -> Any:
        """What its random numbers start from."""
        return self.config.get(SEED)


@dataclass(frozen=True, kw_only=True)
class Rescored:
    """Scores made anew on documents that all runs hold out, in the order of the runs."""

    scores: tuple[Score, ...]
    documents: int
    tokenizers_differ: bool
    seq_len: int


Rescore = Callable[[Sequence[Side]], Rescored]


@dataclass(frozen=True, kw_only=True)
class Spread:
    """What another seed changes: the standard deviation of bits per byte between runs of one kind."""

    bits_per_byte: float
    of_difference: float  # standard error of the difference of the two means
    runs_before: int
    runs_after: int


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """What was found. `before_bits` and `after_bits` are means over the runs of a kind."""

    before: Side
    after: Side
    before_bits: float
    after_bits: float
    threshold_percent: float
    spread: Spread | None
    rescored: Rescored | None
    settings: tuple[tuple[str, Any, Any], ...]

    @property
    def difference(self) -> float:
        """Bits per byte that the second run needs more; negative is better."""
        return self.after_bits - self.before_bits

    @property
    def difference_percent(self) -> float:
        """The same in percent of the first."""
        return 100 * self.difference / self.before_bits

    @property
    def held(self) -> bool:
        """Whether the second run is worse by no more than the threshold."""
        return self.difference_percent <= self.threshold_percent

    @property
    def beyond_spread(self) -> bool | None:
        """Whether seeds alone hardly make such a difference; None where the spread is unknown."""
        if self.spread is None:
            return None
        return abs(self.difference) > STANDARD_ERRORS * self.spread.of_difference

    @property
    def tokens_per_second_ratio(self) -> float | None:
        """The second run's steady rate over the first's."""
        return self.after.speed.ratio_to(self.before.speed).get("tokens_per_second")

    def as_dict(self) -> dict[str, Any]:
        """As JSON values; docs/comparing.md explains the keys."""
        from penstock.report.comparison_text import spread_sentence, verdict_line

        ratios = self.after.speed.ratio_to(self.before.speed)
        before, after = self.before.speed.as_dict(), self.after.speed.as_dict()
        return {
            "held": self.held,
            "verdict": verdict_line(self),
            "threshold_percent": self.threshold_percent,
            "quality": {
                "measure": "bits_per_byte",
                "before": _json_number(self.before_bits),
                "after": _json_number(self.after_bits),
                "difference": _json_number(self.difference),
                "difference_percent": _json_number(self.difference_percent),
                "seed_spread": asdict(self.spread) if self.spread else None,
                "beyond_spread": self.beyond_spread,
                "spread": spread_sentence(self),
                "evaluated": "again" if self.rescored else "by the runs",
                "documents": self.rescored.documents if self.rescored else None,
                "tokenizers_differ": bool(self.rescored and self.rescored.tokenizers_differ),
                "held_out": asdict(self.before.held_out),
            },
            "speed": {
                name: {"before": before[name], "after": after[name], "ratio": ratios.get(name)} for name in before
            },
            "settings": [{"name": name, "before": one, "after": other} for name, one, other in self.settings],
            "before": _run_facts(self.before),
            "after": _run_facts(self.after),
        }


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _run_facts(side: Side) -> dict[str, Any]:
    return {
        "run": side.name,
        "steps": side.speed.steps,
        "step_scored": side.score.step,
        "bits_per_byte": _json_number(side.score.bits_per_byte),
        "loss": side.score.loss,
        "seed": side.seed,
        "store_digests": list(side.held_out.digests),
    }


def compare_runs(
    before: Path,
    after: Path,
    *,
    seeds: Sequence[Path] = (),
    threshold_percent: float = DEFAULT_THRESHOLD_PERCENT,
    rescore: Rescore,
) -> Comparison:
    """Compares two run folders.

    Args:
        before: the run to hold on to.
        after: the run that should be as good.
        seeds: further runs that differ from one of the two in their seed alone.
        threshold_percent: how much worse, in percent of bits per byte, still counts as held.
        rescore: scores all runs on the same documents; called only where their records aren't of the same rows.

    Raises:
        ConfigError: a threshold that isn't one, or a seed run that is no rerun of either.
        InputError: a folder that holds no finished run with an evaluation.
    """
    if not (math.isfinite(threshold_percent) and threshold_percent >= 0):
        raise ConfigError(f"the threshold is {threshold_percent} %, expected 0 or more", hint="5 is the usual one")
    sides = [_side(folder) for folder in (before, after, *seeds)]
    groups = _groups(sides)
    rescored = None
    if any(side.held_out != sides[0].held_out for side in sides):
        rescored = rescore(sides)
        scores = list(rescored.scores)
    else:
        scores = [side.score for side in sides]
    if not math.isfinite(scores[0].bits_per_byte):
        raise InputError(
            f"{before} ended with a loss that isn't finite: there is no quality to hold",
            hint="compare with a run that learned something",
        )
    first, second = ([scores[number].bits_per_byte for number in group] for group in groups)
    return Comparison(
        before=_with_score(sides[0], scores[0]),
        after=_with_score(sides[1], scores[1]),
        before_bits=statistics.fmean(first),
        after_bits=statistics.fmean(second),
        threshold_percent=threshold_percent,
        spread=_spread(first, second),
        rescored=rescored,
        settings=_different_settings(sides[0].settings, sides[1].settings),
    )


def _with_score(side: Side, score: Score) -> Side:
    return Side(**{**vars(side), "score": score})


def _side(folder: Path) -> Side:
    """A run to compare; refuses what can't be, each in a line."""
    records = read_run_records(folder)
    run = Run.from_records(records)
    if run.status != "completed":
        wanted = measures.parameters(run).get("total_steps", "unknown")
        raise InputError(
            f"{folder} isn't finished: its status is {run.status!r} after step {measures.steps_done(run)} of {wanted}",
            hint="finish it with `penstock train … --resume`, or compare another run",
        )
    facts = trained_on(records)
    evaluation = next(reversed(measures.validations(run)), None)
    if facts is None or evaluation is None:
        raise InputError(
            f"{folder} has no held-out evaluation",
            hint="train on a store with a `val` split; `penstock inspect STORE` lists its splits",
        )
    config = _config(records)
    return Side(
        folder=folder,
        run=run,
        held_out=HeldOut(
            digests=tuple(store.digest for store in facts.stores),
            split=evaluation.split,
            seq_len=facts.seq_len,
            pack=facts.pack,
            overlap=facts.overlap,
            overlap_loss=facts.overlap_loss,
            boundaries=facts.boundaries,
            rows=whole(config.get("eval_rows")),
            tokens=evaluation.tokens,
        ),
        score=_score(evaluation),
        speed=speed_of(records),
        config=config,
        settings=settings_of(records),
    )


def _score(evaluation: Evaluation) -> Score:
    bits = evaluation.bits_per_byte
    return Score(bits_per_byte=math.inf if bits is None else bits, loss=evaluation.loss, step=evaluation.step)


def _config(records: Sequence[Record]) -> dict[str, Any]:
    """What the last start was asked for, by dotted name."""
    config = next((mapping(one.get("config")) for one in reversed(records) if one.get("kind") == "start"), {})
    return dict(flattened(config))


def settings_of(records: Sequence[Record]) -> dict[str, Any]:
    """All that a run was made with by dotted name: its config, and over it what was chosen."""
    settings = _config(records)
    for record in records:
        if record.get("kind") == "choice":
            settings[line_of(record.get("name"))] = record.get("value")
    return settings


def _different_settings(before: dict[str, Any], after: dict[str, Any]) -> tuple[tuple[str, Any, Any], ...]:
    names = _differing(before, after)
    return tuple((name, before.get(name), after.get(name)) for name in names)


def _differing(first: dict[str, Any], second: dict[str, Any]) -> list[str]:
    """Names whose values differ. A setting that one version of penstock doesn't have is off in it."""
    pairs = {name: (first.get(name), second.get(name)) for name in [*first, *second]}
    absent = {name for name in pairs if name not in first or name not in second}
    return [
        name for name, (one, other) in pairs.items() if one != other and not (name in absent and not (one or other))
    ]


def _asked_for(side: Side) -> dict[str, Any]:
    """What makes two runs of one kind: the config without seed and watching, and the data."""
    settings = {name: value for name, value in side.config.items() if name not in WATCHING and name != SEED}
    return {**settings, "stores": side.held_out.digests}


def _groups(sides: Sequence[Side]) -> tuple[list[int], list[int]]:
    """The places of the runs of the first kind and of the second; further runs go where their settings fit."""
    kinds = (_asked_for(sides[0]), _asked_for(sides[1]))
    groups: tuple[list[int], list[int]] = ([0], [1])
    for place, side in enumerate(sides[2:], start=2):
        asked = _asked_for(side)
        odd = [_differing(kind, asked) for kind in kinds]
        group = next((group for names, group in zip(odd, groups, strict=True) if not names), None)
        if group is None:
            first, second = (", ".join(names[:3]) for names in odd)
            raise ConfigError(
                f"{side.folder} is no rerun with another seed: it differs from the first run in {first}, "
                f"from the second in {second}",
                hint="give --seeds runs made with the same command and another seed: --set seed=43",
            )
        if side.seed in [sides[other].seed for other in group]:
            raise ConfigError(
                f"{side.folder} has seed {side.seed}, which another run of its kind has too",
                hint="it says nothing about the spread: leave it out, or train it with another seed",
            )
        group.append(place)
    return groups


def _spread(before: Sequence[float], after: Sequence[float]) -> Spread | None:
    """The standard deviation within the two groups, pooled; None where neither has two runs."""
    freedom = len(before) + len(after) - 2
    if freedom < 1 or not all(map(math.isfinite, [*before, *after])):
        return None
    squares = sum(sum((bits - statistics.fmean(group)) ** 2 for bits in group) for group in (before, after))
    deviation = math.sqrt(squares / freedom)
    return Spread(
        bits_per_byte=deviation,
        of_difference=deviation * math.sqrt(1 / len(before) + 1 / len(after)),
        runs_before=len(before),
        runs_after=len(after),
    )
