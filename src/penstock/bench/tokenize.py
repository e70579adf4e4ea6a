"""`bench tokenize`: our Tokenizer beside the encoder below it and beside Hugging Face tokenizers, in memory."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.corpus import corpus_sources, tokenizer_path
from penstock.bench.options import CorpusOptions, resolved_workers
from penstock.bench.processes import Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Role, fastest, ratio

__all__ = ["Options", "run"]

# `tokenizers` runs at 1-2 MB/s: it gets this share of the sample, from all over it.
SLOW_SHARE = 16

ONE_THREAD = "penstock Tokenizer, 1 thread"
ALL_THREADS = "penstock Tokenizer, all threads"
GIGATOKEN_ONE = "gigatoken, 1 thread"
GIGATOKEN_THREADS = "gigatoken, a tokenizer per thread"
GIGATOKEN_POOL = "gigatoken, its own pool"
TOKENIZERS = "tokenizers, its own pool"


@dataclass(frozen=True, kw_only=True)
class Options(CorpusOptions):
    """Options of the benchmark; `sample_bytes` is what the fast ones get."""

    sample_bytes: int = 128_000_000


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    workers = resolved_workers(options.workers)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        tokenizer_file, tokenizer = tokenizer_path(options.tokenizer, options.inputs, folder)
        subjects = _subjects(options, workers=workers, tokenizer=str(tokenizer_file))
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    rows = {
        name: row_of(
            outcome,
            "megabytes_per_second",
            unit="MB/s",
            megabytes=round(outcome.reports[0]["megabytes"], 3) if outcome.reports else None,
        )
        for name, outcome in outcomes.items()
    }
    ceiling = fastest([rows[GIGATOKEN_THREADS], rows[GIGATOKEN_POOL]])
    ratios = [
        ratio("our Tokenizer to gigatoken, 1 thread", rows[ONE_THREAD], rows[GIGATOKEN_ONE]),
        ratio("our Tokenizer to gigatoken, all threads", rows[ALL_THREADS], ceiling),
        ratio("our Tokenizer to tokenizers, all threads", rows[ALL_THREADS], rows[TOKENIZERS]),
    ]
    settings = {
        "corpus": [source.name for source in corpus_sources(options.inputs)],
        "tokenizer": f"{tokenizer.vocab_size} ids, digest {tokenizer.digest[:12]}",
        "threads": workers,
        "repeats": options.repeats,
        "megabyte": "10^6 bytes of UTF-8",
    }
    return BenchResult(benchmark="tokenize", settings=settings, rows=list(rows.values()), ratios=ratios)


def _subjects(options: Options, *, workers: int, tokenizer: str) -> list[Subject]:
    common: dict[str, Any] = {
        "inputs": list(options.inputs),
        "tokenizer": tokenizer,
        "sample_bytes": options.sample_bytes,
    }
    pool = {"RAYON_NUM_THREADS": str(workers)}
    slow = {**common, "sample_bytes": max(1, options.sample_bytes // SLOW_SHARE)}

    def threads(number: int) -> dict[str, Any]:
        return {**common, "workers": number}

    ours, theirs = "encoding:encode_penstock", "encoding:encode_gigatoken_threads"
    return [
        Subject(name=ONE_THREAD, role=Role.OURS, task=ours, settings=threads(1)),
        Subject(name=GIGATOKEN_ONE, role=Role.CEILING, task=theirs, settings=threads(1)),
        Subject(name=ALL_THREADS, role=Role.OURS, task=ours, settings=threads(workers)),
        Subject(name=GIGATOKEN_THREADS, role=Role.CEILING, task=theirs, settings=threads(workers)),
        Subject(
            name=GIGATOKEN_POOL,
            role=Role.CEILING,
            task="encoding:encode_gigatoken_pool",
            settings=common,
            environment=pool,
        ),
        Subject(name=TOKENIZERS, role=Role.PEER, task="encoding:encode_tokenizers", settings=slow, environment=pool),
    ]
