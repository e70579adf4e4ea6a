"""`bench load`: shuffled batches from a store, against promised rates, against peers, and against a bare gather.

Rows of the plan go out in three ways. On the wire: tokens in store width with loss mask and document borders, as they
travel to a device. As torch tokens: int64 and nothing else, which is what the peers give. Complete: int64 inputs,
labels and positions, for which a peer's tokens are completed in plain numpy. The first pass of a fresh process
checks every block of the store; later ones don't have to. Single figures stand beside the rates: resume at step 10^9, a
store of 10^9 tokens opened, memory estimated and measured, how well the order shuffles.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.bench.corpus import corpus_sources
from penstock.bench.load_subjects import Data, figure_subjects, rate_subjects
from penstock.bench.load_table import advice, ratios, table
from penstock.bench.processes import Subject, Tell, is_named, measured, run_own
from penstock.bench.result import BenchResult
from penstock.bench.stores import store_path
from penstock.errors import ConfigError, PlanError, nearest_first

__all__ = ["Options", "run"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        store: an existing store; None prepares the corpus into a temporary one.
        inputs: the corpus; empty for the packages installed here and Python's library.
        tokenizer: for the corpus; None trains 8,192 tokens on it.
        num_batches: batches per pass; None for all the rows there are.
        batch_size: rows per batch; promises are judged on the first size.
        seq_len: tokens per row.
        large_tokens: also open a store of so many drawn tokens; 0 for none.
        repeats: rounds; the median counts.
        skip: subjects to leave out, by name or a word of it.
    """

    store: str | None = None
    inputs: tuple[str, ...] = field(default=(), metadata={"flag": "input"})
    tokenizer: str | None = None
    num_batches: int | None = None
    batch_size: tuple[int, ...] = (256,)
    seq_len: int = 1024
    large_tokens: int = 0
    repeats: int = 2
    skip: tuple[str, ...] = ()


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        _check_skips(options, folder)
        data = _data(options, folder, tell)
        subjects = _subjects(options, data)
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    rows = table(outcomes, data)
    corpus = [source.name for source in corpus_sources(options.inputs)] if options.store is None else ["a given store"]
    settings = {
        "corpus": corpus,
        "batch": ", ".join(f"{size} x {options.seq_len} tokens" for size in data.batch_sizes),
        "num_batches": {str(size): count for size, count in data.num_batches.items()},
        "store_dtype": data.dtype,
        "device": f"{data.device}, copies awaited" if data.device != "cpu" else data.device,
        "repeats": options.repeats,
        "page_cache": "warm",
    }
    return BenchResult(
        benchmark="load",
        settings=settings,
        rows=list(rows.values()),
        ratios=ratios(rows, data),
        advice=advice(rows, data),
    )


def _subjects(options: Options, data: Data) -> list[Subject]:
    rates = [subject for size in data.batch_sizes for subject in rate_subjects(data, size)]
    return [*rates, *figure_subjects(data, large_tokens=options.large_tokens)]


def _check_skips(options: Options, folder: Path) -> None:
    """Refuses a name that no subject has, before anything is measured."""
    pretended = Data.pretended(folder, seq_len=options.seq_len, batch_sizes=options.batch_size)
    names = [subject.name for subject in _subjects(options, pretended)]
    for word in options.skip:
        if not any(is_named(name, [word]) for name in names):
            raise ConfigError(f"--skip {word!r} names nothing here", hint=f"subjects: {_nearest(word, names)}")


def _nearest(word: str, names: Sequence[str]) -> str:
    return nearest_first(word, sorted({part for name in names for part in name.split(", ")}))


def _data(options: Options, folder: Path, tell: Tell) -> Data:
    store = store_path(options.store, inputs=options.inputs, tokenizer=options.tokenizer, folder=folder, tell=tell)
    where = {"store": store, "seq_len": options.seq_len}
    facts: Mapping[str, Any] = run_own("loading:describe_rows", where, folder=folder)
    num_rows = max(0, (facts["tokens"] - 1) // options.seq_len)  # those that are full; the last may be padded
    sizes = tuple(dict.fromkeys(options.batch_size))
    available = {size: num_rows // size for size in sizes}
    if min(available.values()) < 2:
        raise PlanError(
            f"the store's train split has {num_rows} full rows of {options.seq_len}, too few for two batches of "
            f"{max(sizes)}",
            hint="give a larger --store or --input, or smaller --batch-size and --seq-len",
        )
    tell("writing the rows for the peers")
    run_own("loading:write_rows", {**where, "out": str(folder / "rows")}, folder=folder)
    return Data(
        folder=folder,
        store=store,
        seq_len=options.seq_len,
        dtype=facts["dtype"],
        end_id=facts["end_id"],
        device=facts["device"],
        num_tokens=facts["tokens"],
        num_rows=num_rows,
        num_batches={size: min(options.num_batches or count, count) for size, count in available.items()},
    )
