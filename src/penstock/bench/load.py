"""`bench load`: shuffled batches from a store, against a promised rate, litdata, and a bare gather from memory.

Batches on the wire are tokens in store width with loss mask and document borders, as they travel to a device. Against
others like is compared with like: a torch int64 batch on both sides. The first pass of a fresh process checks every
block of the store (`first pass`); later ones don't have to.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.corpus import corpus_sources
from penstock.bench.options import DEFAULT_REPEATS
from penstock.bench.processes import Outcome, Subject, Tell, measured, row_of, run_own
from penstock.bench.result import BenchResult, Ratio, Role, Row, fastest, ratio, ratio_to
from penstock.bench.stores import store_path
from penstock.errors import PlanError

__all__ = ["Options", "run"]

REQUIRED_TOKENS_PER_SECOND_MILLIONS = 300.0
REQUIRED_TIMES_LITDATA = 4.0
SMALLEST_STORE_MILLIONS = 50.0
PASSES = 4
# Of those that take many seconds a pass: one first, one later.
SLOW_PASSES = 2
PREFETCH_BATCHES = None  # the loader's own choice

WIRE_THREAD = "penstock, wire batches, filled ahead by a thread"
WIRE_DEMAND = "penstock, wire batches, filled on demand"
TORCH_THREAD = "penstock, torch int64 tokens, filled ahead by a thread"
TORCH_DEMAND = "penstock, torch int64 tokens, filled on demand"
TORCH_EVERYTHING = "penstock, torch int64 tokens, labels and document ids"
NUMPY_WIRE = "numpy memory-map gather, store width"
NUMPY_TORCH = "numpy memory-map gather, torch int64"
LITDATA = "litdata"
FIRST, LATER = "first pass", "later passes"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        store: an existing store; None prepares the corpus into a temporary one.
        inputs: the corpus; empty for the packages installed here and Python's library.
        tokenizer: for the corpus; None trains 8,192 tokens on it.
        num_batches: batches per pass; None for all the rows there are.
        batch_size: rows per batch.
        seq_len: tokens per row.
        repeats: rounds; the median counts.
        skip: subjects to leave out, by name or a word of it.
    """

    store: str | None = None
    inputs: tuple[str, ...] = field(default=(), metadata={"flag": "input"})
    tokenizer: str | None = None
    num_batches: int | None = None
    batch_size: int = 32
    seq_len: int = 1024
    repeats: int = DEFAULT_REPEATS
    skip: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Data:
    """What all subjects read: our store, and its tokens as one flat file."""

    folder: Path
    store: str
    dtype: str
    num_tokens: int
    num_batches: int


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        data = _data(options, Path(name), tell)
        subjects = [*_own_subjects(options, data), *_numpy_subjects(options, data), *_peer_subjects(options, data)]
        outcomes = measured(subjects, repeats=options.repeats, folder=data.folder, skip=options.skip, tell=tell)
    rows = _rows(outcomes, data)
    corpus = [source.name for source in corpus_sources(options.inputs)] if options.store is None else ["a given store"]
    settings = {
        "corpus": corpus,
        "batch": f"{options.batch_size} x {options.seq_len} tokens",
        "num_batches": data.num_batches,
        "store_dtype": data.dtype,
        "passes": f"1 first, {PASSES - 1} later",
        "repeats": options.repeats,
        "page_cache": "warm",
    }
    return BenchResult(benchmark="load", settings=settings, rows=list(rows.values()), ratios=_ratios(rows))


def _data(options: Options, folder: Path, tell: Tell) -> _Data:
    store = store_path(options.store, inputs=options.inputs, tokenizer=options.tokenizer, folder=folder, tell=tell)
    rows = {"store": store, "seq_len": options.seq_len}
    facts = run_own("loading:describe_rows", rows, folder=folder)
    run_own("loading:write_stream", {**rows, "out": str(folder / "stream")}, folder=folder)
    # The others' rows don't overlap, so they have a few less.
    available = facts["tokens"] // (options.seq_len + 1) // options.batch_size
    if available < 2:
        raise PlanError(
            f"the store's train split has {facts['rows']} rows of {options.seq_len}, too few for two batches",
            hint="give a larger --store or --input, or smaller --batch-size and --seq-len",
        )
    return _Data(
        folder=folder,
        store=store,
        dtype=facts["dtype"],
        num_tokens=facts["tokens"],
        num_batches=min(options.num_batches or available, available),
    )


def _shape(options: Options, data: _Data) -> dict[str, Any]:
    return {
        "seq_len": options.seq_len,
        "batch_size": options.batch_size,
        "num_batches": data.num_batches,
        "passes": PASSES,
    }


def _own_subjects(options: Options, data: _Data) -> list[Subject]:
    common = {**_shape(options, data), "store": data.store}

    def subject(name: str, task: str, prefetch_batches: int | None, **settings: Any) -> Subject:
        settings = {**common, "prefetch_batches": prefetch_batches, **settings}
        return Subject(name=name, role=Role.OURS, task=f"loading:{task}", settings=settings)

    return [
        subject(WIRE_THREAD, "load_wire", PREFETCH_BATCHES),
        subject(WIRE_DEMAND, "load_wire", 0),
        subject(TORCH_THREAD, "load_torch", PREFETCH_BATCHES, everything=False),
        subject(TORCH_DEMAND, "load_torch", 0, everything=False),
        subject(TORCH_EVERYTHING, "load_torch", PREFETCH_BATCHES, everything=True),
    ]


def _numpy_subjects(options: Options, data: _Data) -> list[Subject]:
    common = {**_shape(options, data), "stream": str(data.folder / "stream"), "dtype": data.dtype}
    return [
        Subject(
            name=name,
            role=Role.CEILING,
            task="loading:gather_with_numpy",
            settings={**common, "as_torch": name == NUMPY_TORCH},
        )
        for name in (NUMPY_WIRE, NUMPY_TORCH)
    ]


def _peer_subjects(options: Options, data: _Data) -> list[Subject]:
    """litdata in each integer width it knows, with and without workers; datasets in torch's format and its fastest."""
    # torch has the store's 16-bit type but not its 32-bit one; ids of either fit 32 bits with a sign.
    widths = ["int64", "int32", *(["uint16"] if data.dtype == "uint16" else [])]
    subjects = [_litdata(options, data, width, num_workers=0) for width in widths]
    subjects += [_litdata(options, data, width, num_workers=2) for width in (widths[0], widths[-1])]
    subjects += [_datasets(options, data, row_format) for row_format in ("torch", "numpy")]
    return subjects


def _litdata(options: Options, data: _Data, width: str, *, num_workers: int) -> Subject:
    out = str(data.folder / f"litdata-{width}")
    settings = {**_shape(options, data), "folder": out, "num_workers": num_workers}
    if num_workers:
        settings["passes"] = SLOW_PASSES
    return Subject(
        name=f"{LITDATA}, {width} on disk, {num_workers or 'no'} workers",
        role=Role.PEER,
        task="loading_peers:load_litdata",
        settings=settings,
        setup=[("loading_peers:write_litdata", _written(options, data, width, out))],
        repeats=1 if num_workers else None,
    )


def _datasets(options: Options, data: _Data, row_format: str) -> Subject:
    out = str(data.folder / "datasets")
    return Subject(
        name=f"datasets, {row_format} format",
        role=Role.PEER,
        task="loading_peers:load_datasets",
        settings={**_shape(options, data), "folder": out, "row_format": row_format, "passes": SLOW_PASSES},
        setup=[("loading_peers:write_datasets", _written(options, data, "int64", out))],
    )


def _written(options: Options, data: _Data, width: str, out: str) -> dict[str, Any]:
    """Settings of a task that writes our tokens in a peer's own format."""
    stream = str(data.folder / "stream")
    return {"stream": stream, "dtype": data.dtype, "seq_len": options.seq_len, "wanted": width, "out": out}


def _rows(outcomes: Mapping[str, Outcome], data: _Data) -> dict[str, Row]:
    rows = [
        row_of(
            outcome,
            key,
            name=f"{name}, {part}",
            unit="M tokens/s",
            scale=1e-6,
            first_batch_ms=[round(1000 * report[first], 3) for report in outcome.reports],
        )
        for name, outcome in outcomes.items()
        for key, part, first in (
            ("first_pass", FIRST, "first_batch_seconds"),
            ("later_passes", LATER, "later_first_batch_seconds"),
        )
    ]
    rows.append(Row(name="tokens in the rows", role=Role.OURS, unit="M tokens", values=(data.num_tokens / 1e6,)))
    return {row.name: row for row in rows}


def _ratios(rows: Mapping[str, Row]) -> list[Ratio]:
    """Promises are judged on the loader as users get it, filled ahead by a thread; on demand stands beside it."""
    ratios: list[Ratio] = []
    for part in (FIRST, LATER):
        litdata = fastest(row for name, row in rows.items() if name.startswith(LITDATA) and name.endswith(part))
        wire, wire_demand = rows[f"{WIRE_THREAD}, {part}"], rows[f"{WIRE_DEMAND}, {part}"]
        torch, torch_demand = rows[f"{TORCH_THREAD}, {part}"], rows[f"{TORCH_DEMAND}, {part}"]
        ratios += [
            ratio_to(f"wire batches to the promise, {part}", wire, REQUIRED_TOKENS_PER_SECOND_MILLIONS),
            ratio(f"torch int64 to litdata, {part}", torch, litdata, required=REQUIRED_TIMES_LITDATA),
            ratio(f"torch int64 on demand to litdata, {part}", torch_demand, litdata),
            ratio(f"wire batches to a bare numpy gather, {part}", wire, rows[f"{NUMPY_WIRE}, {part}"]),
            ratio(f"wire batches on demand to a bare numpy gather, {part}", wire_demand, rows[f"{NUMPY_WIRE}, {part}"]),
            ratio(f"torch int64 to a bare numpy gather, {part}", torch, rows[f"{NUMPY_TORCH}, {part}"]),
        ]
    ratios.append(ratio_to("tokens to the fewest that count", rows["tokens in the rows"], SMALLEST_STORE_MILLIONS))
    return ratios
