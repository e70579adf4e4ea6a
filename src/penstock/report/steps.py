"""What a run was trained on: the version of the store, and the documents of any of its steps.

In: a run's records and the store they name. Out: the rows of a step, each with its documents, their bytes in their
files and what the source knew of them (a commit's hash and time). Nothing of this is recorded while training: the rows
of step K are those at positions (K - 1) x B to K x B of an order that is computed from the seed. Cost: the rows asked
for are read and decoded; the rest of the store isn't touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.errors import InputError, NotAStoreError, StoreError
from penstock.load.order import rows_at
from penstock.load.rows import describe_row
from penstock.pack import Plan, make_plan
from penstock.report.fields import line_of, mapping, whole
from penstock.report.run import read_run_records
from penstock.runlog import Record, read_records
from penstock.store import Store, document_origin, list_versions, open_store
from penstock.store.mirror import Mirror
from penstock.store.provenance import byte_range
from penstock.store.urls import is_url, split_url
from penstock.tokenize import Tokenizer

__all__ = ["TrainedOn", "describe_step", "open_trained_store", "pinned_store", "trained_on"]

SPLIT = "train"


@dataclass(frozen=True, kw_only=True)
class TrainedOn:
    """The data of a run, as its records name it; `positions` are rows consumed by the end of recorded steps."""

    store: str
    version: int | None
    digest: str
    seq_len: int
    batch_rows: int
    seed: int
    pack: str
    overlap: int
    overlap_loss: bool
    boundaries: bool
    steps: int
    positions: dict[int, int]
    is_mixture: bool = False


def trained_on(records: Sequence[Record]) -> TrainedOn | None:
    """What the steps of a run read; None where the records don't say.

    A start that was refused (another store, another config) recorded its data too: the last start that came to a step
    decides, or the last of all if none did.
    """
    data: Record | None = None
    config: dict[str, Any] = {}
    chosen: tuple[Record, dict[str, Any]] | None = None
    positions: dict[int, int] = {}
    for record in records:
        kind = record.get("kind")
        if kind == "start":
            data, config = None, mapping(record.get("config"))
        elif kind == "data":
            data = record
            chosen = chosen if positions else (data, config)
        elif kind == "step" and data is not None:
            chosen = data, config
            step, position = whole(record.get("step")), whole(record.get("position"))
            if step is not None and position is not None:
                positions[step] = position
    return None if chosen is None else _trained_on(*chosen, positions)


def _trained_on(data: Record, config: dict[str, Any], positions: dict[int, int]) -> TrainedOn | None:
    numbers = {name: whole(config.get(name)) for name in ("seq_len", "batch_rows", "seed", "steps")}
    if None in numbers.values():
        return None
    return TrainedOn(
        store=line_of(data.get("store")),
        version=whole(data.get("store_version")),
        digest=line_of(data.get("digest")),
        pack=line_of(config.get("pack", "concat")),
        overlap=whole(config.get("overlap")) or 0,
        overlap_loss=config.get("overlap_loss") is True,
        boundaries=config.get("document_boundaries") is not False,
        positions=positions,
        is_mixture=bool(data.get("mixture")),
        **{name: number or 0 for name, number in numbers.items()},
    )


def pinned_store(path: str | Path, run_folder: Path) -> Store:
    """Opens a store to go on with a run: at the version that the run was trained on, though newer ones were committed.

    A version that the path names itself (`STORE@3`) is taken as it is, as is a store that doesn't have the run's
    version: the run's checkpoint then refuses it, and shows both.
    """
    return _at_its_version(path, trained_on(read_records(run_folder)))


def _at_its_version(path: str | Path, facts: TrainedOn | None) -> Store:
    if facts is not None and facts.version in _versions_at(path):
        pinned = open_store(path, version=facts.version)
        if pinned.digest == facts.digest:
            return pinned
        pinned.close()
    return open_store(path)


def _versions_at(place: str | Path) -> list[int]:
    """The versions of a store in a folder or behind a URL; none where there is no store, or one version is named."""
    if is_url(str(place)):
        url, version = split_url(str(place))
        return Mirror(url).versions() if version is None else []
    return list_versions(Path(place))


def open_trained_store(run_folder: Path, *, data: str | None = None) -> tuple[TrainedOn, Store]:
    """The version of the store that a run was trained on, from `data` where the store has moved.

    Raises:
        InputError: the folder holds no run, or one without data.
        StoreError: the store is gone, or isn't what the run was trained on.
    """
    facts = trained_on(read_run_records(run_folder))
    if facts is None:
        raise InputError(
            f"{run_folder} doesn't say what it was trained on",
            hint="it ended before its data was opened; start it again",
        )
    # `penstock run` keeps its store in its own folder, wherever that is moved to.
    places = [facts.store, str(run_folder / "store")] if data is None else [data]
    path = next((place for place in places if data is not None or list_versions(Path(place))), None)
    if path is None and is_url(facts.store):  # a record isn't the user: only who names an address asks for the network
        raise NotAStoreError(
            f"the run was trained on store {facts.store!r}, which isn't on this machine",
            hint=f"to read it from there, name it: --data {facts.store}",
        )
    if path is None:
        raise NotAStoreError(
            f"the run was trained on store {facts.store!r}, which isn't there any more",
            hint="say where it is now with --data STORE",
        )
    store = _at_its_version(path, facts)
    if store.digest != facts.digest:
        found = f"version {store.version} of {path} is {store.digest}"
        store.close()
        raise StoreError(
            f"the run was trained on digest {facts.digest}, {found}",
            hint="that version was pruned or the store made anew; say where the right one is with --data STORE",
        )
    return facts, store


def describe_step(run_folder: Path, step: int, *, data: str | None = None) -> dict[str, Any]:
    """The rows of one step of a run, each with its documents. Steps count updates: the first is 1.

    Raises:
        InputError: there is no run, or it has no such step.
        StoreError: the store is gone, or isn't what the run was trained on.
    """
    facts, store = open_trained_store(run_folder, data=data)
    with store:
        if facts.is_mixture:
            raise InputError(
                "the run was trained on a mixture, whose steps can't be listed yet",
                hint="its sources and weights are in the `data` record of records.jsonl",
            )
        if not 1 <= step <= facts.steps:
            raise InputError(f"the run has no step {step}", hint=f"its steps are numbered 1 to {facts.steps}")
        first = (step - 1) * facts.batch_rows
        recorded = facts.positions.get(step, first + facts.batch_rows)
        if recorded != first + facts.batch_rows:
            raise InputError(
                f"step {step} ended at position {recorded}, expected was {first + facts.batch_rows} "
                f"({facts.batch_rows} rows a step)",
                hint="the records are of several runs, or of a program with another order; see records.jsonl",
            )
        plan = _plan(store, facts)
        numbers = rows_at(first, facts.batch_rows, num_rows=plan.num_rows, seed=facts.seed, shuffle=True)
        tokenizer = store.tokenizer()
        return {
            "run": str(run_folder),
            "step": step,
            "is_done": step <= max(facts.positions, default=0),
            "store": store.location,
            "version": store.version,
            "digest": store.digest,
            "split": SPLIT,
            "seq_len": facts.seq_len,
            "pack": facts.pack,
            "batch_rows": facts.batch_rows,
            "first_position": first,
            "pass": first // plan.num_rows,
            "rows": [
                {"position": first + place, **_row(plan, int(number), tokenizer)}
                for place, number in enumerate(numbers)
            ],
        }


def _plan(store: Store, facts: TrainedOn) -> Plan:
    return make_plan(
        store,
        policy=facts.pack,
        split=SPLIT,
        seq_len=facts.seq_len,
        overlap=facts.overlap,
        boundaries=facts.boundaries,
        overlap_loss=facts.overlap_loss,
    )


def _row(plan: Plan, row: int, tokenizer: Tokenizer) -> dict[str, Any]:
    told = describe_row(plan, row, tokenizer)
    return {**told, "documents": [_with_origin(plan.store, one, tokenizer) for one in told["documents"]]}


def _with_origin(store: Store, one: dict[str, Any], tokenizer: Tokenizer) -> dict[str, Any]:
    """A stretch of a document in a row, with its bytes in the file and what the source knew."""
    origin = document_origin(store, one["document"])
    first, count = one["document_start"], one["row_end"] - one["row_start"]
    tokens = store.document_tokens(one["document"])
    start, end, exact = byte_range(tokenizer, tokens, origin, first=first, end=first + count)
    return {
        **{name: value for name, value in one.items() if name != "text"},
        "byte_start": start,
        "byte_end": end,
        "exact": exact,
        "facts": origin.facts,
        "text": one["text"],
    }
