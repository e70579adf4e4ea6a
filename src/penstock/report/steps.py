"""What a run was trained on: the versions of its stores, and the documents of any of its steps.

In: a run's records and the stores they name. Out: the rows of a step, each with its documents, their bytes in their
files and what the source knew of them (a commit's hash and time). Nothing of this is recorded while training: the rows
of step K are those at positions (K - 1) x B to K x B of a stream that is computed from the settings; of a mixture, from
its stages as well, which every start of a run records. Cost: the rows asked for are read and decoded, and the order is
made where it isn't computed; the rest of the stores isn't touched.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import InputError, NotAStoreError, StoreError
from penstock.load.filling import Filler
from penstock.load.mixed import MixedFiller, filler_of
from penstock.load.rows import describe_row
from penstock.load.stream import StreamSettings
from penstock.pack import Plan, make_plan
from penstock.pack.mixture import Mixture, make_mixture
from penstock.pack.stages import stages_from
from penstock.report.fields import finite, line_of, mapping, sequence, whole
from penstock.report.run import read_run_records
from penstock.runlog import Record, read_records
from penstock.store import Store, document_origin, list_versions, open_store
from penstock.store.mirror import Mirror
from penstock.store.provenance import byte_range
from penstock.store.urls import is_url, split_url
from penstock.tokenize import Tokenizer

__all__ = [
    "TrainedOn",
    "TrainedStore",
    "describe_step",
    "open_store_of_run",
    "opened_stores",
    "pinned_store",
    "trained_on",
]

SPLIT = "train"


@dataclass(frozen=True, kw_only=True)
class TrainedStore:
    """A store that a run read; its name is that in a mixture."""

    name: str
    store: str
    version: int | None
    digest: str


@dataclass(frozen=True, kw_only=True)
class TrainedOn:
    """The data of a run, as its records name it; `positions` are rows consumed by the end of recorded steps.

    Attributes:
        steps: of the whole run; None where the records don't say.
        stores: all of them, the first of which is `store`.
        settings: of the start that came to the last step.
        stream: the state of its loader as it began: identity and, of a mixture, the stages.
    """

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
    steps: int | None
    positions: dict[int, int]
    is_mixture: bool = False
    stores: tuple[TrainedStore, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict)
    stream: dict[str, Any] = field(default_factory=dict)


@dataclass(kw_only=True)
class _Start:
    """What one start of a run recorded about its data."""

    config: dict[str, Any]
    data: Record | None = None
    stream: dict[str, Any] = field(default_factory=dict)
    steps: int | None = None
    has_steps: bool = False


def trained_on(records: Sequence[Record]) -> TrainedOn | None:
    """What the steps of a run read; None where the records don't say.

    A start that was refused (another store, another config) recorded its data too: the last start that came to a step
    decides, or the last of all if none did. Steps that a later start did again are its own.
    """
    start = _Start(config={})
    chosen: _Start | None = None
    positions: dict[int, int] = {}
    for record in records:
        kind = record.get("kind")
        if kind == "start":
            start = _Start(config=mapping(record.get("config")))
        elif kind == "data":
            start.data = record
            chosen = chosen if positions else start
        elif kind == "stream":
            start.stream = mapping(record)
        elif kind == "length":
            start.steps = whole(record.get("steps"))
        elif kind == "step" and start.data is not None:
            step, position = whole(record.get("step")), whole(record.get("position"))
            if step is not None and position is not None:
                if not start.has_steps:
                    positions = {done: where for done, where in positions.items() if done < step}
                start.has_steps = True
                positions[step] = position
            chosen = start
    return None if chosen is None else _trained_on(chosen, positions)


def _trained_on(start: _Start, positions: dict[int, int]) -> TrainedOn | None:
    data, config = start.data or {}, start.config
    numbers = {name: whole(config.get(name)) for name in ("seq_len", "batch_rows", "seed")}
    if None in numbers.values():
        return None
    first = TrainedStore(
        name="",
        store=line_of(data.get("store")),
        version=whole(data.get("store_version")),
        digest=line_of(data.get("digest")),
    )
    stores = tuple(_store_of(mapping(one)) for one in sequence(data.get("stores")))
    return TrainedOn(
        store=first.store,
        version=first.version,
        digest=first.digest,
        pack=line_of(config.get("pack", "concat")),
        overlap=whole(config.get("overlap")) or 0,
        overlap_loss=config.get("overlap_loss") is True,
        boundaries=config.get("document_boundaries") is not False,
        steps=whole(config.get("steps")) or start.steps,
        positions=positions,
        is_mixture=bool(data.get("mixture")),
        stores=stores or (first,),
        settings=config,
        stream=start.stream,
        **{name: number or 0 for name, number in numbers.items()},
    )


def _store_of(record: dict[str, Any]) -> TrainedStore:
    return TrainedStore(
        name=line_of(record.get("name")),
        store=line_of(record.get("store")),
        version=whole(record.get("version")),
        digest=line_of(record.get("digest")),
    )


def pinned_store(path: str | Path, run_folder: Path, *, name: str | None = None) -> Store:
    """Opens a store to go on with a run: at the version that the run was trained on, though newer ones were committed.

    A version that the path names itself (`STORE@3`) is taken as it is, as is a store that doesn't have the run's
    version: the run's checkpoint then refuses it, and shows both. `name` is that of a store of a mixture after the
    first.
    """
    facts = trained_on(read_records(run_folder))
    stores = facts.stores if facts is not None else ()
    found = next((one for one in stores if one.name == name), None) if name is not None else next(iter(stores), None)
    return _at_its_version(path, found)


def _at_its_version(path: str | Path, wanted: TrainedStore | None) -> Store:
    if wanted is not None and wanted.version in _versions_at(path):
        pinned = open_store(path, version=wanted.version)
        if pinned.digest == wanted.digest:
            return pinned
        pinned.close()
    return open_store(path)


def _versions_at(place: str | Path) -> list[int]:
    """The versions of a store in a folder or behind a URL; none where there is no store, or one version is named."""
    if is_url(str(place)):
        url, version = split_url(str(place))
        return Mirror(url).versions() if version is None else []
    return list_versions(Path(place))


def open_store_of_run(run_folder: Path, *, data: str | None = None) -> Store:
    """The version of a run's store to look into; of several, the one that `data` names.

    Raises:
        InputError: the folder holds no run, or one without data, or one with several stores and none was named.
        StoreError: the store is gone, or isn't what the run was trained on.
    """
    stores = _facts(run_folder).stores
    if len(stores) == 1:
        return _opened(stores[0], run_folder, [data] if data is not None else [])
    if data is None:
        raise InputError(
            f"the run was trained on {len(stores)} stores, this looks into one",
            hint=f"name it: {' or '.join(f'--data {one.store}' for one in stores)}",
        )
    for wanted in stores:
        store = _at_its_version(data, wanted)
        if store.digest == wanted.digest:
            return store
        store.close()
    raise StoreError(
        f"version {store.version} of {data} is {store.digest}, the run was trained on "
        + ", ".join(wanted.digest for wanted in stores),
        hint=f"name one of its stores: {', '.join(one.store for one in stores)}",
    )


@contextmanager
def opened_stores(run_folder: Path, *, data: Sequence[str] = ()) -> Iterator[tuple[TrainedOn, dict[str, Store]]]:
    """All stores of a run by name, at their versions. `data` are places to look in first, in any order.

    Raises:
        InputError: the folder holds no run, or one without data.
        StoreError: a store is gone, or isn't what the run was trained on.
    """
    facts = _facts(run_folder)
    with ExitStack() as stack:
        yield facts, {one.name: stack.enter_context(_opened(one, run_folder, data)) for one in facts.stores}


def _facts(run_folder: Path) -> TrainedOn:
    facts = trained_on(read_run_records(run_folder))
    if facts is None:
        raise InputError(
            f"{run_folder} doesn't say what it was trained on",
            hint="it ended before its data was opened; start it again",
        )
    return facts


def _opened(wanted: TrainedStore, run_folder: Path, data: Sequence[str]) -> Store:
    # `penstock run` keeps its store in its own folder, wherever that is moved to.
    recorded = [place for place in (wanted.store, str(run_folder / "store")) if list_versions(Path(place))]
    # Of a mixture only the stores that moved need be named.
    places = [*data, *(recorded if wanted.name or not data else [])]
    if not places and is_url(wanted.store):  # a record isn't the user: only who names an address asks for the network
        raise NotAStoreError(
            f"the run was trained on store {wanted.store!r}, which isn't on this machine",
            hint=f"to read it from there, name it: --data {wanted.store}",
        )
    if not places:
        raise NotAStoreError(
            f"the run was trained on store {wanted.store!r}, which isn't there any more",
            hint="say where it is now with --data STORE",
        )
    found = []
    for place in places:
        store = _at_its_version(place, wanted)
        if store.digest == wanted.digest:
            return store
        found.append(f"version {store.version} of {place} is {store.digest}")
        store.close()
    raise StoreError(
        f"the run was trained on digest {wanted.digest}, {'; '.join(found)}",
        hint="that version was pruned or the store made anew; say where the right one is with --data STORE",
    )


def describe_step(run_folder: Path, step: int, *, data: str | Sequence[str] | None = None) -> dict[str, Any]:
    """The rows of one step of a run, each with its documents. Steps count updates: the first is 1.

    Args:
        run_folder: the run.
        step: its number.
        data: where the stores are now, if they were moved.

    Raises:
        InputError: there is no run, or it has no such step, or its records tell of another order.
        StoreError: a store is gone, or isn't what the run was trained on.
    """
    places = [data] if isinstance(data, str) else list(data or ())
    with opened_stores(run_folder, data=places) as (facts, stores):
        first = _first_position(facts, step)
        filler = _filler(facts, stores)
        numbers, passes = filler.at(first, facts.batch_rows)
        batch = filler.read(numbers, passes, position=first)
        tokenizer = next(iter(stores.values())).tokenizer()
        rows = []
        for place, own in enumerate(_owned(filler, numbers)):
            told = {"position": first + place, "pass": int(passes[place]), **_row(own, tokenizer)}
            told["targets"] = int(batch.loss_mask[place].sum())
            if filler.transforms:
                told["as_trained"] = tokenizer.decode(batch.tokens[place, :-1])
            rows.append(told)
        stores_told = [
            {"name": name, "store": one.location, "version": one.version, "digest": one.digest}
            for name, one in stores.items()
        ]
        return {
            "run": str(run_folder),
            "step": step,
            "is_done": step <= max(facts.positions, default=0),
            **{name: stores_told[0][name] for name in ("store", "version", "digest")},
            **({"stores": stores_told} if facts.is_mixture else {"pass": int(passes[0])}),
            "split": SPLIT,
            "seq_len": facts.seq_len,
            "pack": facts.pack,
            "order": line_of(facts.settings.get("order")) or "shuffled",
            "transforms": [transform.identity for transform in filler.transforms],
            "batch_rows": facts.batch_rows,
            "first_position": first,
            "rows": rows,
        }


def _first_position(facts: TrainedOn, step: int) -> int:
    if step < 1 or (facts.steps is not None and step > facts.steps):
        last = "" if facts.steps is None else f" to {facts.steps}"
        raise InputError(f"the run has no step {step}", hint=f"its steps are numbered 1{last}")
    first = (step - 1) * facts.batch_rows
    recorded = facts.positions.get(step, first + facts.batch_rows)
    if recorded != first + facts.batch_rows:
        raise InputError(
            f"step {step} ended at position {recorded}, expected was {first + facts.batch_rows} "
            f"({facts.batch_rows} rows a step)",
            hint="the records are of several runs, or of a program with another order; see records.jsonl",
        )
    return first


def _filler(facts: TrainedOn, stores: Mapping[str, Store]) -> Filler:
    """The stream that the run's loader had."""
    rows = _mixture(facts, stores) if facts.is_mixture else _plan(next(iter(stores.values())), facts)
    try:
        settings = StreamSettings.of(facts.settings)
    except TypeError:  # a record is input: a share may be a word in it
        raise InputError("the run's records hold impossible settings", hint="see the config in records.jsonl") from None
    filler = filler_of(rows, seed=facts.seed, **settings.options(rows, seed=facts.seed, batch_rows=facts.batch_rows))
    if isinstance(filler, MixedFiller):
        if not facts.stream:
            raise InputError(
                "the run's records don't hold the stages of its mixture",
                hint="they are of an older version; its sources and weights are in the `data` record of records.jsonl",
            )
        filler.schedule = filler.schedule_of(stages_from(facts.stream.get("stages")))
    recorded = facts.stream.get("identity", filler.identity)
    if recorded != filler.identity:
        differing = [
            name
            for name in {**filler.identity, **mapping(recorded)}
            if mapping(recorded).get(name) != filler.identity.get(name)
        ]
        raise InputError(
            f"the run's loader had another stream than its settings make here; different: {', '.join(differing)}",
            hint="the records were changed, or are of another version of penstock",
        )
    return filler


def _owned(filler: Filler, numbers: Any) -> Iterator[tuple[str, Plan, int]]:
    """Source, plan and number there of each row; rows of a mixture are numbered over all sources."""
    if not isinstance(filler, MixedFiller):
        yield from (("", filler.plan, int(number)) for number in numbers)
        return
    mixture: Mixture = filler.plan
    owners = np.searchsorted(mixture.first_rows, numbers, side="right") - 1
    for owner, number in zip(owners.tolist(), numbers.tolist(), strict=True):
        source = mixture.sources[owner]
        yield source.name, source.plan, number - int(mixture.first_rows[owner])


def _options(facts: TrainedOn) -> dict[str, Any]:
    return {
        "policy": facts.pack,
        "split": SPLIT,
        "seq_len": facts.seq_len,
        "overlap": facts.overlap,
        "boundaries": facts.boundaries,
        "overlap_loss": facts.overlap_loss,
    }


def _plan(store: Store, facts: TrainedOn) -> Plan:
    return make_plan(store, **_options(facts))


def _mixture(facts: TrainedOn, stores: Mapping[str, Store]) -> Mixture:
    words = {name: [line_of(word) for word in sequence(facts.settings.get(name))] for name in ("mix", "mix_epochs")}
    temperature = finite(facts.settings.get("mix_temperature")) or 1.0
    return make_mixture(stores, words["mix"], epochs=words["mix_epochs"], temperature=temperature, **_options(facts))


def _row(own: tuple[str, Plan, int], tokenizer: Tokenizer) -> dict[str, Any]:
    source, plan, row = own
    told = describe_row(plan, row, tokenizer)
    documents = [_with_origin(plan.store, one, tokenizer) for one in told["documents"]]
    return {**({"source": source} if source else {}), **told, "documents": documents}


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
