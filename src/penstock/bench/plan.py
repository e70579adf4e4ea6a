"""`bench plan`: how long plans take, what they waste, and how fast the rows of each policy come.

10 M documents of drawn lengths are planned by each policy, in a process whose peak memory is reported. The same on a
real store gives the waste that counts, and its rows are loaded as they go on the wire, shuffled, 32 x 1024 at a time.
There are no peers here: libraries that pack at all do it while tokenising, for one length.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.options import CorpusOptions
from penstock.bench.processes import Outcome, Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Bound, Ratio, Role, Row, ratio_to
from penstock.bench.stores import store_path
from penstock.pack import POLICIES

__all__ = ["Options", "run"]

MOST_SECONDS = 15.0
MOST_MEMORY_GB = 2.0
MOST_WASTE_PERCENT = 1.0
TOKENS_PER_SECOND_MILLIONS = {"concat": 500.0, "best-fit": 300.0}
PASSES = 4


@dataclass(frozen=True, kw_only=True)
class Options(CorpusOptions):
    """Options of the benchmark; `store` is used instead of preparing one."""

    store: str | None = None
    num_documents: int = 10_000_000
    seq_len: int = 1024
    batch_size: int = 32
    num_batches: int = 1000


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares with what was promised."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        store = store_path(options.store, inputs=options.inputs, tokenizer=options.tokenizer, folder=folder, tell=tell)
        subjects = _subjects(options, store)
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    rows = _rows(options, outcomes)
    settings = {
        "documents": options.num_documents,
        "lengths": "log-normal, median 403 tokens, mean 940",
        "batch": f"{options.batch_size} x {options.seq_len} tokens",
        "num_batches": options.num_batches,
        "passes": f"1 first, {PASSES - 1} later",
        "repeats": options.repeats,
        "page_cache": "warm",
    }
    return BenchResult(benchmark="plan", settings=settings, rows=list(rows.values()), ratios=_ratios(rows))


def _planned(policy: str) -> str:
    return f"{policy}, drawn lengths"


def _wasted(policy: str) -> str:
    return f"{policy}, real documents"


def _loaded(policy: str) -> str:
    return f"{policy}, wire batches"


def _subjects(options: Options, store: str) -> list[Subject]:
    # No plan may come out of the user's cache, nor go into it.
    environment = {"PENSTOCK_CACHE": "off"}

    def subject(name: str, task: str, **settings: Any) -> Subject:
        settings |= {"seq_len": options.seq_len}
        return Subject(name=name, role=Role.OURS, task=f"planning:{task}", settings=settings, environment=environment)

    batches = {"batch_size": options.batch_size, "num_batches": options.num_batches, "passes": PASSES}
    subjects: list[Subject] = []
    for policy in POLICIES:
        subjects += [
            subject(_planned(policy), "make_synthetic_plan", policy=policy, num_documents=options.num_documents),
            subject(_wasted(policy), "make_store_plan", policy=policy, store=store),
            subject(_loaded(policy), "load_packed", policy=policy, store=store, **batches),
        ]
    return subjects


def _rows(options: Options, outcomes: Mapping[str, Outcome]) -> dict[str, Row]:
    rows: list[Row] = []
    for policy in POLICIES:
        planned, wasted, loaded = (outcomes[name(policy)] for name in (_planned, _wasted, _loaded))
        rows += [
            row_of(planned, "seconds", name=f"{_planned(policy)}, time", unit="s"),
            row_of(planned, "peak_memory_bytes", name=f"{_planned(policy)}, peak memory", unit="GB", scale=1e-9),
            row_of(planned, "waste_percent", name=f"{_planned(policy)}, waste", unit="%"),
            row_of(wasted, "waste_percent", name=f"{_wasted(policy)}, waste", unit="%"),
            row_of(wasted, "rows", name=f"{_wasted(policy)}, rows", unit="rows"),
            row_of(loaded, "first_pass", name=f"{_loaded(policy)}, first pass", unit="M tokens/s", scale=1e-6),
            row_of(loaded, "later_passes", name=f"{_loaded(policy)}, later passes", unit="M tokens/s", scale=1e-6),
        ]
    return {row.name: row for row in rows}


def _ratios(rows: Mapping[str, Row]) -> list[Ratio]:
    best = _planned("best-fit")
    at_most = [
        ("time of a best-fit plan to the limit", rows[f"{best}, time"], MOST_SECONDS),
        ("peak memory of a best-fit plan to the limit", rows[f"{best}, peak memory"], MOST_MEMORY_GB),
        ("waste of best-fit to the limit", rows[f"{_wasted('best-fit')}, waste"], MOST_WASTE_PERCENT),
    ]
    rates = [
        (f"{policy}, wire batches, later passes, to the promise", rows[f"{_loaded(policy)}, later passes"], rate)
        for policy, rate in TOKENS_PER_SECOND_MILLIONS.items()
    ]
    return [
        *(ratio_to(name, row, limit, bound=Bound.AT_MOST) for name, row, limit in at_most),
        *(ratio_to(name, row, rate) for name, row, rate in rates),
    ]
