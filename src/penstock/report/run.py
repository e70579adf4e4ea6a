"""A run as its records tell it.

In: the records of runlog.py, whole or cut short, of one start or of several (a resumed run starts again in the same
file). Out: one frozen `Run`, from which manifest, page and summary are written; they read nothing else. Where a resumed
run repeated a step, a phase or a choice, the last record stands. Cost: one pass per kind over the records.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import InputError
from penstock.report.fields import finite, line_of, mapping, sequence, shell_line, whole
from penstock.runlog import RECORDS_NAME, Record, latest_by_step, read_records

__all__ = [
    "Checkpoint",
    "Choice",
    "Evaluation",
    "Phase",
    "Run",
    "Sample",
    "Source",
    "Step",
    "StoreFacts",
    "read_run_records",
    "sessions_of",
]


@dataclass(frozen=True, kw_only=True)
class Choice:
    """A setting, asked for or chosen, and why."""

    name: str
    value: Any
    reason: str


@dataclass(frozen=True, kw_only=True)
class Phase:
    """A timed part of the run; `detail` holds what it counted."""

    name: str
    status: str
    seconds: float | None
    detail: dict[str, Any]


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """A store trained on; its name is that in a mixture, or of its folder."""

    name: str
    path: str
    version: int | None
    digest: str
    documents: int | None
    tokens: int | None
    num_bytes: int | None
    splits: dict[str, Any]
    skipped: dict[str, Any]
    statistics: dict[str, Any]

    @property
    def place(self) -> str:
        """What opens it: path and version."""
        return _place(self.path, self.version)


@dataclass(frozen=True, kw_only=True)
class Source:
    """A source of a mixture: a store, or part of one. Documents and tokens are those of its training split.

    Attributes:
        place: path and version of its store.
        weight: as given.
        share: of the rows of an epoch.
    """

    name: str
    place: str
    documents: int | None
    tokens: int | None
    weight: float | None
    share: float | None


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimiser step. `data_seconds`, the wait for the batch, is part of `seconds`; `position` is rows consumed."""

    step: int
    loss: float | None
    learning_rate: float | None
    grad_norm: float | None
    tokens: float | None
    seconds: float | None
    data_seconds: float | None
    position: int | None
    mfu_percent: float | None = None


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The loss on a held-out split: of `store`, one of several, or of all of them together."""

    step: int
    split: str
    loss: float | None
    bits_per_byte: float | None
    tokens: float | None
    seconds: float | None
    store: str | None = None


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A saved state."""

    step: int
    path: str
    num_bytes: int | None
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """What the model wrote after a prompt; `text` is without the prompt."""

    step: int
    prompt: str
    text: str


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the records say."""

    status: str = "interrupted"
    has_ended: bool = False
    message: str = ""
    failed_phase: str | None = None
    command: str = ""
    version: str = ""
    python: str = ""
    platform: str = ""
    hardware: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)
    started: float | None = None
    seconds: float = 0.0
    num_starts: int = 0
    choices: tuple[Choice, ...] = ()
    phases: tuple[Phase, ...] = ()
    stores: tuple[StoreFacts, ...] = ()
    mixture: tuple[Source, ...] = ()
    repository: dict[str, Any] = field(default_factory=dict)
    length: dict[str, Any] = field(default_factory=dict)
    epochs: tuple[Record, ...] = ()
    steps: tuple[Step, ...] = ()
    evaluations: tuple[Evaluation, ...] = ()
    checkpoints: tuple[Checkpoint, ...] = ()
    samples: tuple[Sample, ...] = ()
    rows: tuple[Record, ...] = ()
    hardware_samples: tuple[Record, ...] = ()
    events: tuple[tuple[float | None, str], ...] = ()

    @classmethod
    def from_records(cls, records: Sequence[Record]) -> Run:
        """Reads the records; fields that are missing or of another type stay at their empty value."""
        whole_records = [record for record in records if isinstance(record, dict)]
        sessions = sessions_of(whole_records)
        start = next((record for record in reversed(whole_records) if record.get("kind") == "start"), {})
        first_start = sessions[0][0] if sessions else {}
        data = next((record for record in reversed(whole_records) if record.get("kind") == "data"), {})
        return cls(
            **_outcome(sessions[-1] if sessions else []),
            command=shell_line(start.get("command")),
            version=line_of(start.get("version")),
            python=line_of(start.get("python")),
            platform=line_of(start.get("platform")),
            hardware=mapping(start.get("hardware")),
            settings=_settings(whole_records),
            started=finite(first_start.get("time")),
            seconds=sum(_session_seconds(session) for session in sessions),
            num_starts=sum(record.get("kind") == "start" for record in whole_records),
            choices=tuple(_choices(_of_kind(whole_records, "choice"))),
            phases=tuple(_phases(_of_kind(whole_records, "phase"))),
            stores=tuple(_stores(data)),
            mixture=tuple(_sources(data)),
            repository=mapping(data.get("repository")),
            length=next(iter(_of_kind(whole_records, "length")[-1:]), {}),
            epochs=tuple(_by_step(whole_records, "epoch")),
            steps=tuple(_step(record) for record in _by_step(whole_records, "step")),
            evaluations=tuple(_evaluation(record) for record in _by_step(whole_records, "evaluation")),
            checkpoints=tuple(_checkpoint(record) for record in _by_step(whole_records, "checkpoint")),
            samples=tuple(_sample(record) for record in _by_step(whole_records, "sample")),
            rows=tuple(_of_kind(whole_records, "rows")),
            hardware_samples=tuple(_of_kind(whole_records, "hardware")),
            events=tuple((finite(r.get("time")), line_of(r.get("message"))) for r in _of_kind(whole_records, "event")),
        )


def read_run_records(run_folder: Path) -> list[Record]:
    """The records of a run folder; refuses a folder that holds none, so that no page is written into a wrong place."""
    if not (run_folder / RECORDS_NAME).is_file():
        hint = "give the folder that `penstock run` or `penstock train` wrote with --out"
        raise InputError(f"{run_folder} is no run: it holds no {RECORDS_NAME}", hint=hint)
    return read_records(run_folder)


def _of_kind(records: list[Record], kind: str) -> list[Record]:
    return [record for record in records if record.get("kind") == kind]


def _by_step(records: list[Record], kind: str) -> list[Record]:
    stepped = [record for record in _of_kind(records, kind) if whole(record.get("step")) is not None]
    return latest_by_step(stepped, kind)


def sessions_of(records: Sequence[Record]) -> list[list[Record]]:
    """The records cut before each start: one session for each time the run was started."""
    sessions: list[list[Record]] = []
    for record in records:
        if record.get("kind") == "start" or not sessions:
            sessions.append([])
        sessions[-1].append(record)
    return sessions


def _session_seconds(session: list[Record]) -> float:
    times = [moment for record in session if (moment := finite(record.get("time"))) is not None]
    return max(times) - times[0] if times else 0.0


def _outcome(session: list[Record]) -> dict[str, Any]:
    """Status, message and failed phase of the last session: an end of an earlier one says nothing about this one."""
    ends = _of_kind(session, "end")
    failed = [record for record in _of_kind(session, "phase") if record.get("status") == "failed"]
    return {
        "status": line_of(ends[-1].get("status")) if ends else "interrupted",
        "has_ended": bool(ends),
        "message": line_of(ends[-1].get("message")) if ends else "",
        "failed_phase": line_of(failed[-1].get("name")) if failed else None,
    }


def _settings(records: list[Record]) -> dict[str, Any]:
    """What the configuration asked for: `config` of the start and train records, its sections unfolded."""
    settings: dict[str, Any] = {}
    for record in records:
        if record.get("kind") in ("start", "train"):
            for name, value in mapping(record.get("config")).items():
                settings.update(mapping(value) if isinstance(value, dict) else {name: value})
    return settings


def _choices(records: list[Record]) -> list[Choice]:
    by_name: dict[str, Choice] = {}
    for record in records:
        name = line_of(record.get("name"))
        by_name[name] = Choice(name=name, value=record.get("value"), reason=line_of(record.get("reason")))
    return list(by_name.values())


def _phases(records: list[Record]) -> list[Phase]:
    by_name: dict[str, Phase] = {}
    for record in records:
        name = line_of(record.get("name"))
        by_name.pop(name, None)  # a repeated phase moves to where it was last done
        by_name[name] = Phase(
            name=name,
            status=line_of(record.get("status")),
            seconds=finite(record.get("seconds")),
            detail=mapping(record.get("detail")),
        )
    return list(by_name.values())


def _stores(data: Record) -> list[StoreFacts]:
    """All stores of a `data` record. The first is its own; a mixture lists them all, with that one in front."""
    if not data:
        return []
    first = {**data, "name": None, "version": data.get("store_version")}
    listed = [mapping(one) for one in sequence(data.get("stores"))]
    # An older record lists the names of its stores alone: only the first one's figures are known then.
    return [_store(first | one if place == 0 else one) for place, one in enumerate(listed or [first])]


def _store(record: dict[str, Any]) -> StoreFacts:
    path = line_of(record.get("store"))
    return StoreFacts(
        name=line_of(record.get("name")) or path.rstrip("/").rpartition("/")[2],
        path=path,
        version=whole(record.get("version")),
        digest=line_of(record.get("digest")),
        documents=whole(record.get("documents")),
        tokens=whole(record.get("tokens")),
        num_bytes=whole(record.get("bytes")),
        splits=mapping(record.get("splits")),
        skipped=mapping(record.get("skipped")),
        statistics=mapping(record.get("statistics")),
    )


def _place(path: str, version: int | None) -> str:
    return path if version is None else f"{path}@{version}"


def _sources(data: Record) -> list[Source]:
    return [_source(mapping(one)) for one in sequence(mapping(data.get("mixture")).get("mix"))]


def _source(record: dict[str, Any]) -> Source:
    return Source(
        name=line_of(record.get("name")),
        place=_place(line_of(record.get("store")), whole(record.get("version"))),
        documents=whole(record.get("documents")),
        tokens=whole(record.get("tokens")),
        weight=finite(record.get("weight")),
        share=finite(record.get("share")),
    )


def _step(record: Record) -> Step:
    return Step(
        step=whole(record["step"]) or 0,
        loss=finite(record.get("loss")),
        learning_rate=finite(record.get("learning_rate")),
        grad_norm=finite(record.get("grad_norm")),
        tokens=finite(record.get("tokens")),
        seconds=finite(record.get("seconds")),
        data_seconds=finite(record.get("data_seconds")),
        position=whole(record.get("position")),
        mfu_percent=finite(record.get("mfu_percent")),
    )


def _evaluation(record: Record) -> Evaluation:
    return Evaluation(
        step=whole(record["step"]) or 0,
        split=line_of(record.get("split")),
        loss=finite(record.get("loss")),
        bits_per_byte=finite(record.get("bits_per_byte")),
        tokens=finite(record.get("tokens")),
        seconds=finite(record.get("seconds")),
        store=line_of(record["store"]) if record.get("store") else None,
    )


def _checkpoint(record: Record) -> Checkpoint:
    return Checkpoint(
        step=whole(record["step"]) or 0,
        path=line_of(record.get("path")),
        num_bytes=whole(record.get("bytes")),
        seconds=finite(record.get("seconds")),
    )


def _sample(record: Record) -> Sample:
    return Sample(
        step=whole(record["step"]) or 0,
        prompt=line_of(record.get("prompt")),
        text=line_of(record.get("text")),
    )
