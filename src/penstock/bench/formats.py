"""`bench formats`: the same documents as JSONL, CSV, Parquet and Arrow, and the history of a repository.

Each table is prepared into a committed store with as many workers as there are cores, and the two that are judged with
one as well, which leaves the other cores to reading and writing. The ceiling is gigatoken with the same documents in
memory, ids thrown away, a tokenizer per thread, on as many threads. The repository is made of the same files: their
first halves committed, then a line changed here and there, so that its diffs are of real code; its figure is megabytes
of rendered text per second, from `git clone` to the commit of the store.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.corpus import tokenizer_path
from penstock.bench.gathering import with_gathered_inputs
from penstock.bench.options import CorpusOptions, on_threads, resolved_workers, thread_counts
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
    ratios = _ratios(rows, thread_counts(workers))
    return BenchResult(benchmark="formats", settings=settings, rows=list(rows.values()), ratios=ratios)


def _subjects(options: Options, *, workers: int, tokenizer: str, folder: Path) -> list[Subject]:
    write_tables = (
        "format_files:write_tables",
        {"inputs": list(options.inputs), "folder": str(folder), "names": list(TABLES.values())},
    )
    write_repository = (
        "format_files:write_repository",
        {"inputs": list(options.inputs), "folder": str(folder / "repository"), "commits": options.commits},
    )

    def ours(name: str, word: str, setup: Any, *, threads: int) -> Subject:
        store = str(folder / "store")
        settings = {"tokenizer": tokenizer, "workers": threads, "inputs": [word], "out": store}
        return Subject(name=name, role=Role.OURS, task="preparing:prepare_store", settings=settings, setup=setup)

    subjects = [ours(GIT, f"git:{folder / 'repository'}", [write_repository], threads=workers)]
    for threads in thread_counts(workers):
        subjects += [
            ours(on_threads(name, threads), str(folder / TABLES[name]), [write_tables], threads=threads)
            for name in _tables_on(threads, workers)
        ]
        subjects.append(
            Subject(
                name=on_threads(CEILING, threads),
                role=Role.CEILING,
                task="encoding:encode_gigatoken_threads",
                settings={"tokenizer": tokenizer, "workers": threads, "inputs": list(options.inputs)},
            )
        )
    return subjects


def _tables_on(threads: int, workers: int) -> tuple[str, ...]:
    return tuple(TABLES) if threads == workers else JUDGED


def _ratios(rows: Mapping[str, Row], counts: Sequence[int]) -> list[Any]:
    shares = [
        ratio(
            on_threads(f"prepare of {name} to the encoder alone, documents in memory", threads),
            rows[on_threads(name, threads)],
            rows[on_threads(CEILING, threads)],
            required=REQUIRED_SHARE_OF_ENCODER if name in JUDGED else None,
        )
        for threads in counts
        for name in _tables_on(threads, counts[0])
    ]
    memories = [row for name, row in rows.items() if name.endswith("peak memory")]
    largest = max(memories, key=lambda row: row.value or 0.0) if memories else None
    return [
        *shares,
        ratio_to("git history, rendered text, to 30 MB/s", rows[GIT], REQUIRED_GIT_RATE),
        *([ratio_to("peak memory to the limit", largest, MEMORY_LIMIT_GB, bound=Bound.AT_MOST)] if largest else []),
    ]
