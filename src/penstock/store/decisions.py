"""Everything that is decided with knowledge of the whole: splits, copies, what must stay out.

In: the options of a run and what the latest version recorded. Out: one object whose `options()` are part of the store
digest. Changing any of it rewrites the index, never the tokens.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.store.blocklist import Blocklist
from penstock.store.layout import Manifest
from penstock.store.near import NEAR_RULES_VERSION
from penstock.store.reader import Store
from penstock.store.splits import parse_split
from penstock.tokenize import Tokenizer

__all__ = ["DEDUP_CHOICES", "Decisions", "TimeSplit", "differences", "times_of"]

DEDUP_CHOICES = ("exact", "near", "off")
LEAST_NEAR_THRESHOLD = 0.5  # from there on every pair is surely found
MILLISECONDS_FROM = 10**11  # as seconds, this is the year 5138
# What the calendar can tell, in seconds since 1970: the years 1 to 9999.
FIRST_MOMENT, LAST_MOMENT = -62_135_596_800, 253_402_300_799


@dataclass(frozen=True, kw_only=True)
class TimeSplit:
    """A split by time: every split but the first begins at a moment, recorded once and for all.

    Attributes:
        fact: name of the document's fact that holds its time.
        cuts: (split, moment in seconds since 1970) in ascending order; None until they are drawn from the data.
    """

    fact: str
    cuts: tuple[tuple[str, int], ...] | None = None

    def splits(self, times: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
        """The split of each document; one without a time (NaN) is in the first, the least protected."""
        borders = [moment for _, moment in self.cuts or ()]
        numbers = np.searchsorted(borders, np.nan_to_num(times, nan=-np.inf), side="right")
        return numbers.astype(np.uint8)

    def drawn(self, times: npt.NDArray[np.float64], tokens: npt.NDArray[Any], shares: Mapping[str, float]) -> TimeSplit:
        """The cuts that give each split about its share of the tokens; documents of one moment are never parted."""
        known = np.flatnonzero(~np.isnan(times))
        if not len(known):
            raise ConfigError(
                f"--split-by time: no document has a fact {self.fact!r} that is a time",
                hint="name the column with --time-field; commits have `time`; files have none",
            )
        order = known[np.argsort(times[known], kind="stable")]
        reached = np.cumsum(tokens[order].astype(np.float64))
        borders = np.cumsum(list(shares.values()))[:-1] * reached[-1]
        places = np.minimum(np.searchsorted(reached, borders, side="left") + 1, len(order) - 1)
        moments = [int(np.ceil(times[order[place]])) for place in places]
        return dataclasses.replace(self, cuts=tuple(zip(list(shares)[1:], moments, strict=True)))

    def options(self) -> dict[str, Any]:
        """As recorded in the version."""
        return {"fact": self.fact, "cuts": [[name, _iso(moment)] for name, moment in self.cuts or ()]}


@dataclass(frozen=True, kw_only=True)
class Decisions:
    """See the module's docstring.

    Attributes:
        shares: split name -> share, least protected first.
        seed: of the splits.
        dedup: `exact`, `near` or `off`.
        near_threshold: similarity from which two documents are near copies; None unless `dedup` is `near`.
        blocklist: what must stay out.
        time: set where splits are cut by time instead of by group.
        by_source: whether a document's split is the one that its source is named after.
    """

    shares: Mapping[str, float]
    seed: int
    dedup: str
    near_threshold: float | None = None
    blocklist: Blocklist = field(default_factory=lambda: Blocklist([]))
    time: TimeSplit | None = None
    by_source: bool = False

    def options(self) -> dict[str, Any]:
        """What goes into the digest."""
        chosen: dict[str, Any] = {
            "split": [[name, f"{share:.12g}"] for name, share in self.shares.items()],  # a list: their order is meaning
            "dedup": self.dedup,
            "seed": self.seed,
        }
        if self.near_threshold is not None:
            chosen["near"] = {"threshold": self.near_threshold, "rules": NEAR_RULES_VERSION}
        if self.time is not None:
            chosen["split_by_time"] = self.time.options()
        if self.by_source:
            chosen["split_by_source"] = True
        if self.blocklist.rules:
            chosen["blocklist"] = self.blocklist.rules
        return chosen

    @classmethod
    def from_words(
        cls,
        *,
        split: str,
        seed: int,
        dedup: str,
        near_threshold: float,
        split_by: str,
        split_at: str | None,
        time_field: str,
        previous: Store | None,
        blocklist: Blocklist,
    ) -> Decisions:
        """From what a user wrote, and from the cuts in time that the latest version recorded.

        Raises:
            ConfigError: a word isn't one of those known, or a number is out of range.
        """
        if dedup not in DEDUP_CHOICES:
            raise ConfigError(f"--dedup {dedup!r} isn't known", hint=f"choose {', '.join(DEDUP_CHOICES)}")
        if not LEAST_NEAR_THRESHOLD < near_threshold <= 1:
            raise ConfigError(
                f"--near-threshold is {near_threshold:g}, expected is a share above {LEAST_NEAR_THRESHOLD} and up to 1",
                hint="0.7 is usual",
            )
        if split_by not in ("group", "time", "source"):
            raise ConfigError(f"--split-by {split_by!r} isn't known", hint="choose group, time or source")
        if split_at is not None and split_by != "time":
            raise ConfigError("--split-at needs --split-by time", hint="add --split-by time")
        shares = parse_split(split)
        return cls(
            shares=shares,
            seed=seed,
            dedup=dedup,
            near_threshold=near_threshold if dedup == "near" else None,
            blocklist=blocklist,
            time=_time_split(shares, split_at, time_field, previous) if split_by == "time" else None,
            by_source=split_by == "source",
        )

    @classmethod
    def from_recorded(cls, options: Mapping[str, Any], *, blocklist: Blocklist) -> Decisions:
        """As a version was decided, from its options; the blocklist may have grown."""
        near, by_time = options.get("near"), options.get("split_by_time")
        cuts = tuple((name, int(_moment(text) or 0)) for name, text in by_time["cuts"]) if by_time else None
        return cls(
            shares={name: float(share) for name, share in options["split"]},
            seed=options["seed"],
            dedup=options["dedup"],
            near_threshold=float(near["threshold"]) if near else None,
            blocklist=blocklist,
            time=TimeSplit(fact=by_time["fact"], cuts=cuts) if by_time else None,
            by_source=bool(options.get("split_by_source", False)),
        )


def _time_split(shares: Mapping[str, float], split_at: str | None, fact: str, previous: Store | None) -> TimeSplit:
    names = list(shares)[1:]
    if split_at is not None:
        pairs = [item.partition("=") for item in split_at.split(",")]
        moments = [(name.strip(), _moment(value.strip())) for name, _, value in pairs]
        if [name for name, _ in moments] != names or any(moment is None for _, moment in moments):
            raise ConfigError(
                f"--split-at {split_at!r} doesn't give a moment to each of {', '.join(names)}, in that order",
                hint="for instance --split-at " + ",".join(f"{n}=202{5 + k}-01-01" for k, n in enumerate(names)),
            )
        cuts = tuple((name, int(moment)) for name, moment in moments if moment is not None)
        if [moment for _, moment in cuts] != sorted(moment for _, moment in cuts):
            raise ConfigError(f"--split-at {split_at!r}: the moments don't ascend", hint="the most protected is last")
        return TimeSplit(fact=fact, cuts=cuts)
    recorded = previous.manifest.options.get("split_by_time") if previous is not None else None
    if isinstance(recorded, dict) and recorded.get("fact") == fact:
        cuts = tuple((name, int(_moment(text) or 0)) for name, text in recorded.get("cuts", []))
        if [name for name, _ in cuts] == names:
            return TimeSplit(fact=fact, cuts=cuts)
    return TimeSplit(fact=fact)


def times_of(facts: Sequence[str], name: str) -> npt.NDArray[np.float64]:
    """The documents' times in seconds since 1970; NaN where there is none."""
    # Sources write letters beyond ASCII as they are or escaped; whichever it is, most documents needn't be parsed.
    marks = {json.dumps(name), json.dumps(name, ensure_ascii=False)}
    return np.array(
        [_time_in(text, name) if any(mark in text for mark in marks) else np.nan for text in facts], np.float64
    )


def _time_in(facts: str, name: str) -> float:
    moment = _moment(json.loads(facts).get(name))
    return np.nan if moment is None else moment


def _moment(value: Any) -> float | None:
    """Seconds since 1970 of an ISO date or time (UTC where it has no zone), or of a number of seconds, ms, µs or ns."""
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return None
    try:
        parsed = datetime.datetime.fromisoformat(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):  # a number, perhaps written as a text
        try:
            moment = _seconds(float(value))
        except (ValueError, OverflowError):
            return None
    else:
        moment = (parsed if parsed.tzinfo else parsed.replace(tzinfo=datetime.UTC)).timestamp()
    return moment if FIRST_MOMENT <= moment <= LAST_MOMENT else None


def _seconds(number: float) -> float:
    for _ in range(3):  # ms, µs, ns
        if abs(number) >= MILLISECONDS_FROM:
            number /= 1000
    return number


def _iso(moment: int) -> str:
    return datetime.datetime.fromtimestamp(moment, datetime.UTC).isoformat()


def differences(manifest: Manifest, tokenizer: Tokenizer, options: Mapping[str, Any]) -> list[str]:
    """What is asked for now and wasn't for the latest version, each with what must be done again for it."""
    lines = []
    if manifest.tokenizer["digest"] != tokenizer.digest:
        lines.append(
            f"the tokenizer differs from version {manifest.version}'s ({manifest.tokenizer['origin']}, "
            f"{manifest.tokenizer.get('vocab_size')} ids): all documents are tokenised again"
        )
    before = {
        one["name"]: one for one in manifest.options.get("sources", []) if isinstance(one, dict) and "name" in one
    }
    after = {one["name"]: one for one in options["sources"]}
    for name in sorted(before.keys() | after.keys()):
        if name not in after:
            lines.append(f"source {name!r} isn't named any more: its documents leave")
        elif name not in before:
            lines.append(f"source {name!r} is new")
        elif changed := _changed(before[name], after[name]):
            lines.append(f"{_differ(changed, of=f' of source {name!r}')}: it is read again, new content is tokenised")
    decided = {name: value for name, value in manifest.options.items() if name != "sources"}
    if changed := _changed(decided, {name: value for name, value in options.items() if name != "sources"}):
        lines.append(f"{_differ(changed)}: the index is written again, no document is tokenised for that")
    return lines


def _differ(names: Sequence[str], *, of: str = "") -> str:
    return f"{', '.join(names)}{of} {'differs' if len(names) == 1 else 'differ'}"


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
