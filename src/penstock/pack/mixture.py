"""A mixture: several stores, or parts of stores chosen by path, each with a weight.

In: open stores and `NAME=WEIGHT` words. Out: a `Mixture`, whose sources each have a plan of their own: no row holds
documents of two. A word's name is that of a store, or a pattern as in .gitignore over the documents' paths
(`src/**=3`); the first pattern that matches a document decides its bucket, and what none matches is the rest, with
weight 1. docs/mixture.md tells it with examples.

A weight says how often the rows of a source come in an epoch: 1 once (the natural count), 3 three times, 0.3 another
30 % each epoch. With a temperature T above 1 sources grow more alike: a source of n rows counts as n^(1/T).

Cost: a plan per bucket, and about 2 µs per document and pattern where there are patterns.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any

import numpy as np

from penstock.errors import InputError, PlanError, nearest_first
from penstock.hashing import digest_of, strong_hash
from penstock.pack.making import make_plan
from penstock.pack.plan import Integers, Plan
from penstock.pack.stages import LEAST_WEIGHT, MOST_WEIGHT, Schedule, is_weight
from penstock.sources.hygiene import PathRules
from penstock.store import Store

__all__ = ["MixRecipe", "MixRule", "MixSource", "Mixture", "make_mixture", "names_of_stores", "parse_mix", "with_names"]

REST = "rest"
# Shares that differ in the last bits on another machine would be another mixture there.
SIGNIFICANT_DIGITS = 12
MOST_NAMES_SHOWN = 300


@dataclass(frozen=True, kw_only=True)
class MixRule:
    """One word of a mixture: a store's name or a pattern, and its weight."""

    name: str
    weight: float


@dataclass(frozen=True, kw_only=True, eq=False)
class MixSource:
    """One store, or one bucket of a store.

    Attributes:
        weight: passes per epoch.
        epochs: passes after which it leaves the mixture; None for never.
        bucket: hash of the chosen documents; empty where the source is a whole split.
    """

    name: str
    plan: Plan
    weight: float
    epochs: float | None = None
    bucket: str = ""

    @property
    def last_row(self) -> int | None:
        """Rows after which the source leaves."""
        return None if self.epochs is None else math.floor(Fraction(str(self.epochs)) * self.plan.num_rows)


@dataclass(frozen=True, kw_only=True)
class MixRecipe:
    """What `make_mixture` was told: names of stores with place and version, words, options of the plans."""

    stores: tuple[tuple[str, str, int], ...]
    mix: tuple[str, ...]
    epochs: tuple[str, ...]
    temperature: float
    split: str
    plan_options: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Mixture:
    """Sources that share tokenizer, width and row length. Rows are numbered over all of them, source after source.

    Attributes:
        recipe: the arguments of `make_mixture` but for the stores, so that another process can make it again; None of
            a mixture put together by hand.
    """

    sources: tuple[MixSource, ...]
    temperature: float = 1.0
    recipe: MixRecipe | None = None

    @cached_property
    def plans(self) -> tuple[Plan, ...]:
        """Of each source."""
        return tuple(source.plan for source in self.sources)

    @cached_property
    def first_rows(self) -> Integers:
        """[sources + 1], the number of each source's first row."""
        return np.concatenate([[0], np.cumsum([plan.num_rows for plan in self.plans], dtype=np.int64)])

    @property
    def store(self) -> Store:
        """The first source's; the others have the same tokenizer and width."""
        return self.plans[0].store

    @property
    def num_rows(self) -> int:
        """Rows of all sources, each counted once."""
        return int(self.first_rows[-1])

    @property
    def seq_len(self) -> int:
        """Inputs of a row."""
        return self.plans[0].seq_len

    @property
    def boundaries(self) -> bool:
        """See `Plan`."""
        return self.plans[0].boundaries

    @property
    def context(self) -> int:
        """See `Plan`."""
        return self.plans[0].context

    @property
    def waste_tokens(self) -> int:
        """See `Plan`."""
        return sum(plan.waste_tokens for plan in self.plans)

    @cached_property
    def most_documents_in_a_row(self) -> int:
        """See `Plan`."""
        return max(plan.most_documents_in_a_row for plan in self.plans)

    @cached_property
    def weights(self) -> tuple[float, ...]:
        """Passes per epoch of each source, the temperature applied; together they fill as many rows as without. 0 of a
        source that leaves before its first row."""
        return self._tempered([0.0 if source.last_row == 0 else source.weight for source in self.sources])

    def _tempered(self, given: Sequence[float]) -> tuple[float, ...]:
        if self.temperature == 1:
            return tuple(given)
        rows = [plan.num_rows for plan in self.plans]
        tempered = [weight * n ** (1 / self.temperature - 1) for weight, n in zip(given, rows, strict=True)]
        scale = _total(given, rows) / _total(tempered, rows)
        return tuple(float(f"{weight * scale:.{SIGNIFICANT_DIGITS}g}") for weight in tempered)

    @property
    def epoch_rows(self) -> int:
        """Rows of an epoch: each source by its weight, rounded to whole rows."""
        return max(1, round(_total(self.weights, [plan.num_rows for plan in self.plans])))

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What a position is a position in, but for the weights, which stages hold."""
        parts = [
            {"name": one.name, "plan": one.plan.identity, "bucket": one.bucket, "epochs": one.epochs}
            for one in self.sources
        ]
        names = ", ".join(source.name for source in self.sources)
        return {
            "mixture": digest_of(parts),
            "sources": names if len(names) <= MOST_NAMES_SHOWN else f"{names[:MOST_NAMES_SHOWN]}…",
            "rows": self.num_rows,
            "policy": self.plans[0].policy,
            "seq_len": self.seq_len,
            "boundaries": self.boundaries,
        }

    @cached_property
    def fingerprint(self) -> str:
        """Hash of `identity`."""
        return digest_of(self.identity)

    def schedule(self) -> Schedule:
        """The mixture's first stage."""
        # By the weights as given: a schedule knows itself who leaves at once, and saved positions hold these.
        weights = self._tempered([source.weight for source in self.sources])
        return Schedule.begun([p.num_rows for p in self.plans], [s.last_row for s in self.sources], weights)

    def describe(self) -> dict[str, Any]:
        """The figures that `penstock plan` prints: of each source, and of an epoch."""
        rows = [plan.num_rows for plan in self.plans]
        epoch = _total(self.weights, rows)
        sources = [
            {
                "name": source.name,
                "store": source.plan.store.location,
                "version": source.plan.store.version,
                "documents": len(source.plan.documents),
                "tokens": source.plan.num_tokens,
                "rows": source.plan.num_rows,
                "waste_tokens": source.plan.waste_tokens,
                "weight": source.weight,
                "share": round(passes * source.plan.num_rows / epoch, 9),
                "passes_per_epoch": passes,
                "rows_per_epoch": round(passes * source.plan.num_rows, 3),
                "epochs": source.epochs,
            }
            for source, passes in zip(self.sources, self.weights, strict=True)
        ]
        return {
            **self.identity,
            "split": self.plans[0].split,
            "temperature": self.temperature,
            "epoch_rows": round(epoch, 3),
            "tokens": sum(plan.num_tokens for plan in self.plans),
            "mix": sources,
        }


def _total(weights: Sequence[float], rows: Sequence[int]) -> float:
    return math.fsum(weight * n for weight, n in zip(weights, rows, strict=True))


def names_of_stores(words: Sequence[str]) -> dict[str, str]:
    """Stores as a user names them, by the names they have in a mixture: the folder's, or all of it where two agree.

    Raises:
        PlanError: a store is named twice.
    """
    short = [re.sub(r"@[0-9]+$", "", word).rstrip("/").rpartition("/")[2] or word for word in words]
    names = [name if short.count(name) == 1 else word for name, word in zip(short, words, strict=True)]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise PlanError(f"the store {twice!r} is named twice", hint="name it once, with --mix NAME=2 to have it twice")
    return dict(zip(names, words, strict=True))


def with_names(mix: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Words of a mixture in which a store is called by its path, with its name instead."""
    named = []
    for rule in parse_mix(mix):
        name, weight = rule.name, repr(rule.weight)
        for short, word in names.items():
            if name == word or name.startswith(f"{word}:"):
                name = short + name[len(word) :]
                break
        named.append(f"{name}={weight}")
    return named


def parse_mix(words: Sequence[str], *, option: str = "--mix") -> list[MixRule]:
    """`NAME=NUMBER` words; several may stand in one, with commas between.

    Raises:
        PlanError: a word has no number, or one that is no weight; or two have one name.
    """
    rules: dict[str, MixRule] = {}
    for word in (part for text in words for part in text.split(",")):
        name, equals, text = word.rpartition("=")
        try:
            weight = float(text)
        except ValueError:
            weight = math.nan
        if not equals or not name.strip() or not is_weight(weight):
            raise PlanError(
                f"{option} {word!r} can't be read, expected NAME=NUMBER, the number 0 or from {LEAST_WEIGHT:f} to "
                f"{MOST_WEIGHT:.0f}",
                hint=f"for example {option} 'src/**=3' {option} 'docs/**=0.3'",
            )
        rule = MixRule(name=name.strip(), weight=weight)
        if earlier := rules.get(rule.name):
            raise PlanError(
                f"{option} names {rule.name!r} twice, with {earlier.weight:g} and {weight:g}",
                hint="name it once, with the number that is meant",
            )
        rules[rule.name] = rule
    return list(rules.values())


def make_mixture(
    stores: Mapping[str, Store],
    mix: Sequence[str] = (),
    *,
    epochs: Sequence[str] = (),
    temperature: float = 1.0,
    split: str = "train",
    **plan_options: Any,
) -> Mixture:
    """A mixture of open stores by the words of `--mix`.

    Args:
        stores: by name.
        mix: `STORE=WEIGHT`, `PATTERN=WEIGHT` (in every store) or `STORE:PATTERN=WEIGHT`; a store's weight multiplies
            those of its buckets.
        epochs: `SOURCE=PASSES` after which a source leaves; by its name in the mixture.
        temperature: above 1 makes sources more alike.
        plan_options: policy, seq_len, overlap, boundaries, overlap_loss; see `make_plan`.

    Raises:
        PlanError: stores that don't go together, a name or pattern that fits nothing, no weight above 0.
    """
    _refuse_unlike(stores)
    if not 0 < temperature < math.inf:
        raise PlanError(f"a temperature of {temperature} is impossible", hint="1 changes nothing; try 1.5 or 2")
    rules = parse_mix(mix)
    store_weights = {rule.name: rule.weight for rule in rules if rule.name in stores}
    patterns = [rule for rule in rules if rule.name not in stores]
    sources: list[MixSource] = []
    used: set[MixRule] = set()
    for name, store in stores.items():
        buckets = [_Bucket(name=name, weight=1.0)]
        if own := {rule: pattern for rule in patterns if (pattern := _pattern_in(name, rule, stores))}:
            buckets = _buckets(store, own, split=split)
            used |= {bucket.rule for bucket in buckets if bucket.rule}
        for bucket in buckets:
            plan = make_plan(store, split=split, documents=bucket.documents, **plan_options)
            is_part = bucket.documents is not None
            sources.append(
                MixSource(
                    name=f"{name}:{bucket.name}" if is_part and len(stores) > 1 else bucket.name,
                    plan=plan,
                    weight=bucket.weight * store_weights.get(name, 1.0),
                    bucket=_documents_hash(bucket.documents) if bucket.documents is not None else "",
                )
            )
    for rule in patterns:
        if rule not in used:
            raise PlanError(
                f"--mix {rule.name!r} is no store's name, and matches no document that earlier patterns left",
                hint=f"stores: {nearest_first(rule.name, list(stores))}; patterns are those of .gitignore over paths",
            )
    if not any(source.weight for source in sources):
        raise PlanError("no source of the mixture has a weight above 0", hint="give one of them a weight")
    limited = _with_epochs(sources, epochs)
    if not any(source.weight and source.last_row != 0 for source in limited):
        raise PlanError(
            "every source of the mixture leaves before its first row", hint="allow one of them more passes in --epochs"
        )
    recipe = MixRecipe(
        stores=tuple((name, store.location, store.version) for name, store in stores.items()),
        mix=tuple(mix),
        epochs=tuple(epochs),
        temperature=temperature,
        split=split,
        plan_options=plan_options,
    )
    return Mixture(sources=limited, temperature=temperature, recipe=recipe)


@dataclass(frozen=True, kw_only=True)
class _Bucket:
    """Documents of a store that go together; None are all of the split."""

    name: str
    weight: float
    documents: Integers | None = None
    rule: MixRule | None = None


def _refuse_unlike(stores: Mapping[str, Store]) -> None:
    """Stores of two tokenizers or widths give tokens that mean different things."""
    if not stores:
        raise PlanError("a mixture of no stores has no rows", hint="name at least one store")
    (first_name, first), *others = stores.items()
    for name, store in others:
        for what, here, there in (
            ("tokenizer", first.manifest.tokenizer["digest"], store.manifest.tokenizer["digest"]),
            ("token width", first.manifest.dtype, store.manifest.dtype),
        ):
            if here != there:
                raise PlanError(
                    f"{first_name} has {what} {here}, {name} has {there}: they can't be mixed",
                    hint=f"prepare both with one tokenizer: penstock prepare INPUT --tokenizer "
                    f"{first.path / first.manifest.tokenizer_file.name}",
                )


def _pattern_in(name: str, rule: MixRule, stores: Mapping[str, Store]) -> str | None:
    """The pattern of a rule in the store of this name; None where it is another store's."""
    owner, colon, pattern = rule.name.partition(":")
    if colon and owner in stores:
        return pattern if owner == name else None
    return rule.name


def _buckets(store: Store, patterns: Mapping[MixRule, str], *, split: str) -> list[_Bucket]:
    """The documents of a split by the first pattern that matches path or key, the rest last; no empty ones."""
    try:
        matchers = [PathRules(include=[pattern], exclude=[]) for pattern in patterns.values()]
    except InputError as error:
        raise PlanError(f"a pattern of --mix is wrong: {error.message}", hint=error.hint) from None
    wanted = np.zeros(store.num_documents, np.bool_)
    wanted[store.kept_documents(split)] = True
    number_of = np.full(store.num_documents, -1, np.int32)
    document = 0
    for batch in store.provenance_batches(["key", "path"]):
        for key, path in zip(batch["key"].to_pylist(), batch["path"].to_pylist(), strict=True):
            if wanted[document]:
                number_of[document] = _first_match(matchers, key, path)
            document += 1
    named = [*((pattern, rule.weight, rule) for rule, pattern in patterns.items()), (REST, 1.0, None)]
    found = []
    for number, (name, weight, rule) in enumerate(named):
        documents = np.flatnonzero(number_of == number)
        if len(documents):
            found.append(_Bucket(name=name, weight=weight, documents=documents, rule=rule))
    return found


def _first_match(matchers: Sequence[PathRules], key: bytes, path: bytes) -> int:
    """Which pattern comes first; their number where none matches."""
    for number, matcher in enumerate(matchers):
        if (path and matcher.problem(path) is None) or matcher.problem(key) is None:
            return number
    return len(matchers)


def _documents_hash(documents: Integers) -> str:
    return strong_hash(documents.astype("<i8").data.cast("B"), purpose="penstock mixture bucket").hex()


def _with_epochs(sources: Sequence[MixSource], words: Sequence[str]) -> tuple[MixSource, ...]:
    limits = {rule.name: rule.weight for rule in parse_mix(words, option="--epochs")}
    names = [source.name for source in sources]
    for name in limits:
        if name not in names:
            raise PlanError(f"the mixture has no source {name!r}", hint=f"sources: {nearest_first(name, names)}")
    return tuple(replace(source, epochs=limits.get(source.name)) for source in sources)
