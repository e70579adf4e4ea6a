"""What an adapter gives: our settings, what became of every key, and what is no setting of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.train.adapters.rules import Adapted

__all__ = ["Adaptation", "ExpertData", "TaskData"]


@dataclass(frozen=True, kw_only=True)
class TaskData:
    """The files or hub names of one task's splits; the only task of a single data set bears the expert's name."""

    name: str
    train: str
    valid: str | None = None
    test: str | None = None
    weight: float = 1.0


@dataclass(frozen=True, kw_only=True)
class ExpertData:
    """What an expert's stores are prepared from.

    Attributes:
        name: the expert's.
        folder: where paths are seen from.
        format: `jsonl`, `csv`, `parquet`: files; `huggingface`: names of the hub.
        tasks: one, or several that are mixed.
        field_map: FIELD=COLUMN words.
        template: of records; None: the tokenizer's own, or alpaca.
        cache: folder of the store that the manifest asks for; None: beside the runs.
        tokenizer: of the base model.
    """

    name: str
    folder: Path
    format: str
    tasks: tuple[TaskData, ...]
    field_map: tuple[str, ...]
    template: str | None
    cache: str | None
    tokenizer: str


@dataclass(frozen=True, kw_only=True)
class Adaptation:
    """Somebody else's settings as ours.

    Attributes:
        kind: what they were read as, for people.
        settings: ours, nested.
        adapted: every key met.
        data: what to prepare; None where a store must be named.
        resume: whether to go on from the last checkpoint.
        split: shares of the splits where data is prepared; None: the default.
        workers: that prepare it; None: as many as there are cores.
        ours: by their key, the dotted keys of ours that it gave.
        prepare_keys: theirs that only preparing reads.
    """

    kind: str
    settings: dict[str, Any]
    adapted: tuple[Adapted, ...]
    data: ExpertData | None = None
    resume: bool = False
    split: str | None = None
    workers: int | None = None
    ours: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    prepare_keys: frozenset[str] = frozenset()

    def with_prepared_store(self) -> Adaptation:
        """The same for a run on a store that is there already: keys that only preparing reads do nothing."""
        return self._without(dict.fromkeys(self.prepare_keys, "--data names a store that is prepared already"))

    def overridden(self, places: Mapping[str, str]) -> Adaptation:
        """The same after `--set`: `places` says which override took the place of a dotted key of ours."""
        reasons = {}
        for key, ours in self.ours.items():
            taken = [next((places[place] for place in places if _is_within(one, place)), None) for one in ours]
            if all(taken):
                reasons[key] = f"--set {taken[0]} comes before it"
        return self._without(reasons)

    def _without(self, reasons: Mapping[str, str]) -> Adaptation:
        adapted = (
            replace(one, outcome="not applicable", detail=reasons[one.key])
            if one.key in reasons and one.outcome == "takes effect"
            else one
            for one in self.adapted
        )
        return replace(self, adapted=tuple(adapted))


def _is_within(key: str, place: str) -> bool:
    return key == place or key.startswith(f"{place}.")
