"""`bench refused`: tokenizers that gigatoken refuses, end to end, beside datasets with the same vocabulary.

A Unigram, a WordPiece and a digit-splitting (StarCoder's) vocabulary are trained on the corpus when the benchmark runs.
Ours is `prepare` of the documents as files: self-check, walk, reading, encoding, checksums, fsync, index and commit.
datasets gets the same documents in memory and `map` with as many processes; the promise is judged against `map` alone,
because `save_to_disk` costs seconds however little there is to save. With it, it is a row of its own.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.corpus import corpus_sources
from penstock.bench.options import DEFAULT_REPEATS, resolved_workers
from penstock.bench.processes import Subject, Tell, measured, row_of, run_own
from penstock.bench.result import BenchResult, Role, Row, ratio

__all__ = ["Options", "run"]

REQUIRED_TIMES_DATASETS = 1.5
MAP, MAP_AND_SAVE = "datasets map", "datasets map and save_to_disk"
FAMILIES = {"unigram": "Unigram", "word-piece": "WordPiece", "digits": "split digits"}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        inputs: the corpus; empty for the packages installed here and Python's library.
        repeats: rounds; the median counts.
        workers: worker processes on both sides; None for every core.
        sample_bytes: what is encoded, from all over the corpus.
        vocab_size: of each vocabulary.
        skip: subjects to leave out, by name or a word of it.
    """

    inputs: tuple[str, ...] = field(default=(), metadata={"flag": "input"})
    repeats: int = DEFAULT_REPEATS
    workers: int | None = None
    sample_bytes: int = 24_000_000
    vocab_size: int = 8000
    skip: tuple[str, ...] = ()


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    workers = resolved_workers(options.workers)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        tell("training three vocabularies")
        settings = {
            "inputs": list(options.inputs),
            "sample_bytes": options.sample_bytes,
            "vocab_size": options.vocab_size,
            "out": str(folder / "made"),
        }
        made = run_own("refused_tokenizers:make_corpus_and_tokenizers", settings, folder=folder)
        subjects = [subject for family in FAMILIES for subject in _subjects(family, folder, workers)]
        outcomes = measured(subjects, repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    rows: dict[str, Row] = {}
    for name, outcome in outcomes.items():
        engine = outcome.reports[0].get("engine", "tokenizers") if outcome.reports else None
        rows[name] = row_of(outcome, "megabytes_per_second", unit="MB/s", engine=engine)
        if outcome.subject.role is Role.PEER:
            saved = name.replace(MAP, MAP_AND_SAVE)
            rows[saved] = row_of(outcome, "saved_megabytes_per_second", name=saved, unit="MB/s", engine=engine)
    ratios = [
        ratio(f"{title} to datasets map", rows[_ours(title)], rows[f"{MAP}, {title}"], required=REQUIRED_TIMES_DATASETS)
        for title in FAMILIES.values()
    ] + [
        ratio(f"{title} to datasets, saved too", rows[_ours(title)], rows[f"{MAP_AND_SAVE}, {title}"])
        for title in FAMILIES.values()
    ]
    settings_shown = {
        "corpus": [source.name for source in corpus_sources(options.inputs)],
        "documents": f"{made['documents']}, {made['megabytes']:.1f} MB, an even sample",
        "vocabularies": f"{options.vocab_size} ids each, trained on {made['training_megabytes']:.1f} MB",
        "workers": workers,
        "repeats": options.repeats,
        "megabyte": "10^6 bytes of UTF-8",
    }
    return BenchResult(benchmark="refused", settings=settings_shown, rows=list(rows.values()), ratios=ratios)


def _ours(title: str) -> str:
    return f"penstock prepare, {title}"


def _subjects(family: str, folder: Path, workers: int) -> list[Subject]:
    title, made = FAMILIES[family], folder / "made"
    common = {
        "inputs": [str(made / "documents")],
        "tokenizer": str(made / f"{family}.json"),
        "workers": workers,
        "out": str(folder / "out"),
    }
    return [
        Subject(name=_ours(title), role=Role.OURS, task="preparing:prepare_store", settings=common),
        Subject(name=f"{MAP}, {title}", role=Role.PEER, task="refused_tokenizers:map_with_datasets", settings=common),
    ]
