"""`bench formats`: the same documents as JSONL, CSV, Parquet and Arrow, and the history of a repository.

Each table is prepared into a committed store with as many workers as there are cores; the ceiling is gigatoken with the
same documents in memory, ids thrown away, a tokenizer per thread, on as many threads. The repository is made of the
same files: their first halves committed, then a line changed here and there, so that its diffs are of real code; its
figure is megabytes of rendered text per second, from `git clone` to the commit of the store.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.corpus import tokenizer_path
from penstock.bench.gathering import with_gathered_inputs
from penstock.bench.options import CorpusOptions, resolved_workers
from penstock.bench.processes import Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Bound, Role, Row, ratio, ratio_to

__all__ = ["Options", "run"]

REQUIRED_SHARE_OF_ENCODER = 0.5
REQUIRED_GIT_RATE = 30.0
MEMORY_LIMIT_GB = 2.0

CEILING = "gigatoken in memory, a tokenizer per thread, 8 MiB a call"
GIT = "git history"
TABLES = {
    "JSONL": "corpus.jsonl",
    "JSONL.zst": "corpus.jsonl.zst",
    "JSONL.gz": "corpus.jsonl.gz",
    "CSV": "corpus.csv",
    "Parquet": "corpus.parquet",
    "Arrow": "corpus.arrow",
}
JUDGED = ("JSONL", "Parquet")


@dataclass(frozen=True, kw_only=True)
class Options(CorpusOptions):
    """Options of the benchmark; `commits` are those of the repository."""

    commits: int = 5_000


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    workers = resolved_workers(options.workers)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        options, corpus = with_gathered_inputs(options, folder, tell)
        tokenizer_file, tokenizer = tokenizer_path(options.tokenizer, options.inputs, folder)
        subjects = _subjects(options, workers=workers, tokenizer=str(tokenizer_file), folder=folder)
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    rows: dict[str, Row] = {}
    for outcome in outcomes.values():
        row = row_of(outcome, "megabytes_per_second", unit="MB/s")
        rows[row.name] = row
        if outcome.reports and outcome.subject.role is Role.OURS:
            memory = row_of(outcome, "peak_memory_bytes", name=f"{row.name}, peak memory", unit="GB", scale=1e-9)
            rows[memory.name] = memory
    settings = {
        **corpus,
        "tokenizer": f"{tokenizer.vocab_size} ids, digest {tokenizer.digest[:12]}",
        "workers": workers,
        "commits": options.commits,
        "repeats": options.repeats,
        "page_cache": "warm",
        "megabyte": "10^6 bytes of UTF-8 as encoded, without JSON's or CSV's own escapes",
    }
    return BenchResult(benchmark="formats", settings=settings, rows=list(rows.values()), ratios=_ratios(rows))


def _subjects(options: Options, *, workers: int, tokenizer: str, folder: Path) -> list[Subject]:
    common: dict[str, Any] = {"tokenizer": tokenizer, "workers": workers}
    write_tables = (
        "format_files:write_tables",
        {"inputs": list(options.inputs), "folder": str(folder), "names": list(TABLES.values())},
    )
    write_repository = (
        "format_files:write_repository",
        {"inputs": list(options.inputs), "folder": str(folder / "repository"), "commits": options.commits},
    )

    def ours(name: str, word: str, setup: Any) -> Subject:
        settings = {**common, "inputs": [word], "out": str(folder / "store")}
        return Subject(name=name, role=Role.OURS, task="preparing:prepare_store", settings=settings, setup=setup)

    tables = [
        ours(name, str(folder / file), [write_tables] if number == 0 else ())
        for number, (name, file) in enumerate(TABLES.items())
    ]
    history = ours(GIT, f"git:{folder / 'repository'}", [write_repository])
    ceiling = Subject(
        name=CEILING,
        role=Role.CEILING,
        task="encoding:encode_gigatoken_threads",
        settings={**common, "inputs": list(options.inputs)},
    )
    return [*tables, history, ceiling]


def _ratios(rows: Mapping[str, Row]) -> list[Any]:
    shares = [
        ratio(
            f"prepare of {name} to the encoder alone, documents in memory",
            rows[name],
            rows[CEILING],
            required=REQUIRED_SHARE_OF_ENCODER if name in JUDGED else None,
        )
        for name in TABLES
    ]
    memories = [row for name, row in rows.items() if name.endswith("peak memory")]
    largest = max(memories, key=lambda row: row.value or 0.0) if memories else None
    return [
        *shares,
        ratio_to("git history, rendered text, to 30 MB/s", rows[GIT], REQUIRED_GIT_RATE),
        *([ratio_to("peak memory to the limit", largest, MEMORY_LIMIT_GB, bound=Bound.AT_MOST)] if largest else []),
    ]
