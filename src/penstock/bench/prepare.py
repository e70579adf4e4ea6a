"""`bench prepare`: raw files to a committed store, against the encoder's own speed, the least that could be written
around it, Hugging Face datasets and datatrove.

The ceiling is gigatoken with the documents already in memory and the ids thrown away, on the same number of threads, in
three ways, of which the fastest counts. Both sides have the same documents, each of them once, gathered from the inputs
beforehand (see `gathering`). Measured with one encoder thread and with as many as there are cores: with one,
reading, hashing and writing have the other cores to themselves; with all, everything shares them, and so it does on a
user's machine. The page cache is warm: a first run of ours, not counted, reads every file.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.corpus import tokenizer_path
from penstock.bench.gathering import with_gathered_inputs
from penstock.bench.options import CorpusOptions, on_threads, resolved_workers, thread_counts
from penstock.bench.processes import Outcome, Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Bound, Role, Row, fastest, ratio, ratio_to

__all__ = ["NO_RULES", "Options", "run"]

REQUIRED_SHARE_OF_ENCODER = 0.6
REQUIRED_TIMES_DATASETS = 100.0
REQUIRED_TIMES_DATATROVE = 50.0
MEMORY_LIMIT_GB = 2.0
SMALLEST_CORPUS_MB = 200.0
POOL_BATCH_BYTES = 32 * 2**20

OURS = "penstock prepare"
# Reading, encoding and storing alone; what the rules cost has a bar of its own (`bench rerun`).
BARE = "penstock prepare, no rules over content, no copies looked for"
NO_RULES: dict[str, Any] = {"secrets": "keep", "minified": True, "generated": True, "dedup": "off"}
CEILINGS = (
    "gigatoken in memory, its own pool, one call",
    "gigatoken in memory, its own pool, 32 MiB a call",
    "gigatoken in memory, a tokenizer per thread, 8 MiB a call",
)
DATASETS = "datasets map and save_to_disk"
DATATROVE = "datatrove JSONL reader and tokenizer"
BARE_PIPELINE = "forty lines around gigatoken: read, encode, end tokens, write"


@dataclass(frozen=True, kw_only=True)
class Options(CorpusOptions):
    """Options of the benchmark; `sample_bytes` is how much of the corpus the slow peers get."""

    sample_bytes: int = 20_000_000


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    workers = resolved_workers(options.workers)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        options, corpus = with_gathered_inputs(options, folder, tell)
        tokenizer_file, tokenizer = tokenizer_path(options.tokenizer, options.inputs, folder)
        subjects = _subjects(options, workers=workers, tokenizer=str(tokenizer_file), folder=folder)
        tell(f"{OURS}: warm-up")
        measured(subjects[:1], repeats=1, folder=folder, tell=lambda line: None)
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    rows = _rows(outcomes, workers)
    settings = {
        **corpus,
        "tokenizer": f"{tokenizer.vocab_size} ids, digest {tokenizer.digest[:12]}",
        "threads": workers,
        "repeats": options.repeats,
        "page_cache": "warm",
        "megabyte": "10^6 bytes of UTF-8",
    }
    return BenchResult(benchmark="prepare", settings=settings, rows=list(rows.values()), ratios=_ratios(rows, workers))


def _subjects(options: Options, *, workers: int, tokenizer: str, folder: Path) -> list[Subject]:
    common: dict[str, Any] = {"inputs": list(options.inputs), "tokenizer": tokenizer}
    subjects = [
        subject for threads in thread_counts(workers) for subject in _subjects_on(threads, common=common, folder=folder)
    ]
    sampled = {**common, "workers": workers, "sample_bytes": options.sample_bytes, "out": str(folder / "peer-out")}
    written = {**common, "out": str(folder / "tokens.bin")}
    pool = {"RAYON_NUM_THREADS": str(workers)}
    peers = [
        Subject(
            name=on_threads(BARE_PIPELINE, workers),
            role=Role.PEER,
            task="bare_pipeline:tokens_to_file",
            settings=written,
            environment=pool,
        ),
        Subject(name=DATASETS, role=Role.PEER, task="preparing:map_with_datasets", settings=sampled),
        Subject(name=DATATROVE, role=Role.PEER, task="preparing:tokenize_with_datatrove", settings=sampled),
    ]
    return [*subjects, *peers]


def _subjects_on(threads: int, *, common: dict[str, Any], folder: Path) -> list[Subject]:
    """Ours and the three forms of the ceiling, with so many encoder threads."""
    pool = {"RAYON_NUM_THREADS": str(threads)}
    encoding = "encoding:encode_gigatoken"
    one_call, batches, own_threads = (on_threads(name, threads) for name in CEILINGS)
    return [
        Subject(
            name=on_threads(OURS, threads),
            role=Role.OURS,
            task="preparing:prepare_store",
            settings={**common, "workers": threads, "out": str(folder / "store")},
        ),
        Subject(
            name=on_threads(BARE, threads),
            role=Role.OURS,
            task="preparing:prepare_store",
            settings={**common, "workers": threads, "out": str(folder / "store"), "choices": NO_RULES},
        ),
        Subject(name=one_call, role=Role.CEILING, task=f"{encoding}_pool", settings=common, environment=pool),
        Subject(
            name=batches,
            role=Role.CEILING,
            task=f"{encoding}_pool",
            settings={**common, "batch_bytes": POOL_BATCH_BYTES},
            environment=pool,
        ),
        Subject(
            name=own_threads,
            role=Role.CEILING,
            task=f"{encoding}_threads",
            settings={**common, "workers": threads},
        ),
    ]


def _rows(outcomes: Mapping[str, Outcome], workers: int) -> dict[str, Row]:
    """Our figures, then everybody else's rate."""
    ours = outcomes[on_threads(OURS, workers)]
    rows = [
        row_of(ours, "megabytes_per_second", unit="MB/s", **_details(ours)),
        row_of(ours, "tokens_per_second", name=f"{OURS}, tokens", unit="M tokens/s", scale=1e-6),
        row_of(ours, "seconds", name=f"{OURS}, time", unit="s"),
        row_of(ours, "peak_memory_bytes", name=f"{OURS}, peak memory", unit="GB", scale=1e-9),
        row_of(ours, "document_bytes", name="corpus", unit="MB", scale=1e-6),
        row_of(ours, "verify_seconds", name="penstock verify of that store", unit="s"),
        row_of(ours, "store_bytes", name="store on disk, all of it fsynced", unit="MB", scale=1e-6),
    ]
    others = [outcome for outcome in outcomes.values() if outcome is not ours]
    rows += [row_of(other, "megabytes_per_second", unit="MB/s", **_details(other)) for other in others]
    return {row.name: row for row in rows}


def _details(outcome: Outcome) -> dict[str, Any]:
    """What belongs to the rate: of the repeat with the middle one."""
    if not outcome.reports:
        return {}
    ordered = sorted(outcome.reports, key=lambda report: float(report["megabytes_per_second"]))
    middle = ordered[(len(ordered) - 1) // 2]
    left_out = ("megabytes_per_second", "tokens_per_second", "seconds", "peak_memory_bytes", "store_bytes", "digest")
    kept = {key: value for key, value in middle.items() if key not in left_out}
    if "phases" in kept:
        kept["phases"] = {phase: round(seconds, 3) for phase, seconds in kept["phases"].items()}
    return {key: round(value, 3) if isinstance(value, float) else value for key, value in kept.items()}


def _ratios(rows: Mapping[str, Row], workers: int) -> list[Any]:
    memory, ours = rows[f"{OURS}, peak memory"], rows[on_threads(OURS, workers)]
    bare_pipeline = rows[on_threads(BARE_PIPELINE, workers)]
    return [
        *(_share_of_encoder(rows, name, threads) for threads in thread_counts(workers) for name in (OURS, BARE)),
        ratio("prepare to forty lines that check nothing", ours, bare_pipeline, required=1.0),
        ratio("prepare to datasets", ours, rows[DATASETS], required=REQUIRED_TIMES_DATASETS),
        ratio("prepare to datatrove", ours, rows[DATATROVE], required=REQUIRED_TIMES_DATATROVE),
        ratio_to("peak memory of prepare to the limit", memory, MEMORY_LIMIT_GB, bound=Bound.AT_MOST),
        ratio_to("corpus to the smallest that counts", rows["corpus"], SMALLEST_CORPUS_MB),
    ]


def _share_of_encoder(rows: Mapping[str, Row], ours: str, threads: int) -> Any:
    ceiling = fastest([rows[on_threads(name, threads)] for name in CEILINGS])
    which = "prepare" if ours == OURS else "prepare without rules over content"
    name = on_threads(f"{which} to the encoder alone, documents in memory", threads)
    return ratio(name, rows[on_threads(ours, threads)], ceiling, required=REQUIRED_SHARE_OF_ENCODER)
