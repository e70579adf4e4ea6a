"""What an adapter gives: our settings, what became of every key, and what is no setting of a run."""

from __future__ import annotations

from dataclasses import dataclass
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
    """

    kind: str
    settings: dict[str, Any]
    adapted: tuple[Adapted, ...]
    data: ExpertData | None = None
    resume: bool = False
    split: str | None = None
    workers: int | None = None
