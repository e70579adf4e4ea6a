"""What becomes of one key of somebody else's settings, and how a whole section of them is gone through.

In: a mapping under their names, and a `Rule` for each name that may be in it. Out: our settings by dotted key, and an
`Adapted` for every key met, which says whether it takes effect (as what), is not applicable (why), or is refused (why).
Nothing is dropped in silence: a name without a rule is an error that gives the nearest known one, a value of another
kind than the rule's is an error that shows it. Names that begin with `_` are comments. Pure, and needs no torch.

The rules are also what docs/configuration.md shows (`adapters.tables`), so a rule's words are read by people.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from penstock.errors import ConfigError, nearest_first

__all__ = [
    "ANYTHING",
    "COUNT",
    "FLAG",
    "MAPPING",
    "MAPPINGS",
    "NUMBER",
    "OUTSIDE",
    "SHARE",
    "TEXT",
    "TEXTS",
    "WHOLE",
    "Adapt",
    "Adapted",
    "Kind",
    "Outcome",
    "Rule",
    "Ruled",
    "Verdict",
    "apply_rules",
    "nested",
    "one_of",
    "without_comments",
]

OUTSIDE = ("data.", "run.")
"""Before names of results that are no settings of a run."""

Outcome = Literal["takes effect", "not applicable", "refused"]
DEEPEST_NESTING = 32


class _WrongKindError(ValueError):
    """A value isn't what its rule says."""


@dataclass(frozen=True, kw_only=True)
class Adapted:
    """What became of one key: `detail` is the setting of ours it turned into, or the reason why it did not."""

    key: str
    value: Any
    outcome: Outcome
    detail: str


class Verdict(enum.Enum):
    """Of a value that sets nothing; the reason is the rule's."""

    IDLE = "not applicable"
    REFUSED = "refused"


@dataclass(frozen=True, kw_only=True)
class Kind:
    """What a value must be: `read` gives it, as our type, or raises ValueError."""

    name: str
    read: Callable[[Any], Any]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _WrongKindError
    return value


def _number(value: Any, *, least: float = 0.0, most: float = float("inf")) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _WrongKindError
    number = float(value)  # text too: YAML reads 5e-5 as text
    if not least <= number <= most or number == float("inf"):
        raise _WrongKindError
    return number


def _whole(value: Any, *, least: int = 0) -> int:
    number = _number(value, least=least)
    if isinstance(value, str) or number != int(number):
        raise _WrongKindError
    return int(number)


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _WrongKindError
    return value


def _texts(value: Any) -> list[str]:
    if not isinstance(value, list) or not value:
        raise _WrongKindError
    return [_text(one) for one in value]


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise _WrongKindError
    return value


def _mappings(value: Any) -> list[dict[str, Any]]:
    if not isinstance(value, list):
        raise _WrongKindError
    return [_mapping(one) for one in value]


FLAG = Kind(name="true or false", read=_flag)
NUMBER = Kind(name="a number of at least 0", read=_number)
SHARE = Kind(name="a number from 0 to 1", read=lambda value: _number(value, most=1.0))
WHOLE = Kind(name="a whole number of at least 0", read=_whole)
COUNT = Kind(name="a whole number of at least 1", read=lambda value: _whole(value, least=1))
TEXT = Kind(name="a text", read=_text)
TEXTS = Kind(name="a list of names", read=_texts)
MAPPING = Kind(name="a mapping", read=_mapping)
MAPPINGS = Kind(name="a list of mappings", read=_mappings)
ANYTHING = Kind(name="anything", read=lambda value: value)


def one_of(*words: str | bool) -> Kind:
    """One of these values and no other."""

    def read(value: Any) -> Any:
        if not any(type(value) is type(word) and value == word for word in words):
            raise _WrongKindError
        return value

    return Kind(name="one of " + ", ".join(_shown(word) for word in words), read=read)


Adapt = Callable[[Any, Mapping[str, Any]], dict[str, Any] | Verdict]
"""Given the value and its whole section, our settings by dotted key, or a verdict."""


@dataclass(frozen=True, kw_only=True)
class Rule:
    """One key of theirs.

    Attributes:
        name: theirs, inside its section.
        kind: what its value must be.
        effect: what it takes effect as, for people.
        idle: why it may be not applicable.
        refusal: why it may be refused.
        sets: our dotted key, where the value is simply taken over.
        adapt: the rest; None: `sets`, else idle where there is a reason for it, else refused.
        is_section: whether it holds keys with rules of their own, which are what is told of.
    """

    name: str
    kind: Kind = ANYTHING
    effect: str = ""
    idle: str = ""
    refusal: str = ""
    sets: str = ""
    adapt: Adapt | None = None
    is_section: bool = False

    def outcome_of(self, value: Any, section: Mapping[str, Any]) -> tuple[dict[str, Any], Outcome, str]:
        """Our settings, what became of the value, and the words for it."""
        if self.adapt is not None:
            given = self.adapt(value, section)
        elif self.sets:
            given = {self.sets: value}
        else:
            given = Verdict.IDLE if self.idle else Verdict.REFUSED
        if isinstance(given, dict):
            ours = {key: one for key, one in given.items() if not key.startswith(OUTSIDE)}
            return given, "takes effect", _assigned(ours) or self.effect
        if given is Verdict.IDLE:
            return {}, "not applicable", self.idle
        return {}, "refused", self.refusal


@dataclass(kw_only=True)
class Ruled:
    """What came of some sections so far.

    Attributes:
        settings: by dotted key; of two that set the same, the later.
        adapted: every key met.
        given: what each of those set.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    adapted: list[Adapted] = field(default_factory=list)
    given: dict[str, dict[str, Any]] = field(default_factory=dict)

    def settled(self) -> tuple[Adapted, ...]:
        """Every key, once all of them are known: one whose setting another key took over has no effect."""
        return tuple(self._settled(one) for one in self.adapted)

    def ours(self) -> dict[str, tuple[str, ...]]:
        """The settings of ours that each key gave, by dotted key."""
        return {key: tuple(given) for key, given in self.given.items() if given}

    def _settled(self, one: Adapted) -> Adapted:
        lost = {
            key: self.settings[key] for key, value in self.given.get(one.key, {}).items() if self.settings[key] != value
        }
        if not lost:
            return one
        return Adapted(
            key=one.key,
            value=one.value,
            outcome="not applicable",
            detail=f"another key comes before it: {_assigned(lost)}",
        )


def apply_rules(
    section: Mapping[str, Any], rules: Sequence[Rule], ruled: Ruled, *, prefix: str, where: str
) -> dict[str, Any]:
    """Goes through a section's keys in the order of the rules, adds to `ruled`, and gives the values as read.

    Args:
        section: theirs, comments taken off.
        rules: for every name that may be in it.
        ruled: what comes of it is added here.
        prefix: of the section's names, such as `training.config.`.
        where: the file, for messages.

    Raises:
        ConfigError: an unknown name, or a value of another kind.
    """
    known = {rule.name: rule for rule in rules}
    for name in section:
        if name not in known:
            raise ConfigError(
                f"unknown key {prefix + str(name)!r} in {where}",
                hint=f"known keys: {nearest_first(str(name), known)}",
            )
    values = {rule.name: _read(rule, section[rule.name], prefix, where) for rule in rules if rule.name in section}
    present = {name: value for name, value in values.items() if value is not None}
    for name, value in values.items():
        if value is None:
            ruled.adapted.append(_left_out(prefix + name))
            continue
        if known[name].is_section:
            continue
        settings, outcome, detail = known[name].outcome_of(value, present)
        ruled.settings.update(settings)
        ruled.given[prefix + name] = settings
        ruled.adapted.append(Adapted(key=prefix + name, value=section[name], outcome=outcome, detail=detail))
    return present


def _left_out(key: str) -> Adapted:
    return Adapted(key=key, value=None, outcome="not applicable", detail="null: as if it weren't there")


def _read(rule: Rule, value: Any, prefix: str, where: str) -> Any:
    if value is None:
        return None
    try:
        return rule.kind.read(value)
    except ValueError:
        raise ConfigError(
            f"{prefix}{rule.name} is {_shown(value):.120} in {where}, expected {rule.kind.name}",
            hint=f"mend {prefix}{rule.name}, or leave it out",
        ) from None


def without_comments(value: Any, depth: int = 0) -> Any:
    """The same without the keys that begin with `_`, at every level."""
    if depth > DEEPEST_NESTING:
        raise ConfigError(f"settings are nested more than {DEEPEST_NESTING} deep", hint="flatten them")
    if isinstance(value, dict):
        return {
            str(key): without_comments(one, depth + 1) for key, one in value.items() if not str(key).startswith("_")
        }
    if isinstance(value, list):
        return [without_comments(one, depth + 1) for one in value]
    return value


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """`{"model.preset": "tiny"}` as `{"model": {"preset": "tiny"}}`."""
    levels: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, last = key.split(".")
        level = levels
        for parent in parents:
            level = level.setdefault(parent, {})
        level[last] = value
    return levels


def _assigned(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={_shown(one)}" for key, one in settings.items())


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    return "null" if value is None else repr(value) if isinstance(value, str | list | dict) else f"{value}"
