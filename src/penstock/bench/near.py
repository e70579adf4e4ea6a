"""`bench near`: what `--dedup near` costs and what it finds.

Signatures on one core, beside the encoder that made the ids (one thread) and rensa. The choice of who stays is timed on
made-up signatures, because no corpus at hand has a million documents. Times are of the processor. Copies are planted in
Python's library.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path

from penstock.bench.corpus import corpus_sources, tokenizer_path
from penstock.bench.options import CorpusOptions
from penstock.bench.processes import Outcome, Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Bound, Role, Row, ratio, ratio_to

__all__ = ["Options", "run"]

REQUIRED_MEGABYTES_PER_SECOND = 50.0
REQUIRED_SECONDS = 60.0
REQUIRED_PERCENT = 99.0

OURS, ENCODER = "signatures", "gigatoken, one thread"
RENSA = {"rho": "rensa, one-pass sketch", "exact": "rensa, R-MinHash"}
STAYING = {"unique": "nothing alike", "equal": "all equal", "pairs": "each with a near copy"}
COPIES = {"mixed": "replaced, deleted or inserted", "replaced": "replaced"}
LARGEST = 1_000_000


@dataclass(frozen=True, kw_only=True)
class Options(CorpusOptions):
    """Options of the benchmark; `workers` is 1 throughout.

    Attributes:
        sample_bytes: of the corpus, from all over it.
        num_documents: of the made-up signatures; a tenth of it as well.
        num_texts: originals of the planted copies, which get one per share of lines changed.
    """

    sample_bytes: int = 100_000_000
    num_documents: int = LARGEST
    num_texts: int = 500


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        path, _ = tokenizer_path(options.tokenizer, options.inputs, Path(name))
        subjects = [*_signing(options, str(path)), *_staying(options), *_finding(options, str(path))]
        outcomes = measured(subjects, repeats=options.repeats, folder=Path(name), skip=options.skip, tell=tell)
    rates = {
        subject: row_of(outcomes[subject], "megabytes_per_second", unit="MB/s")
        for subject in (OURS, ENCODER, *RENSA.values())
    }
    times = [
        row_of(outcome, "seconds", unit="s", excluded=outcome.reports[0]["excluded"] if outcome.reports else None)
        for name, outcome in outcomes.items()
        if name.startswith("staying")
    ]
    found = [row for kind in COPIES for row in _found(outcomes[_copies(kind)], kind)]
    ratios = [
        ratio_to("signatures on one core", rates[OURS], REQUIRED_MEGABYTES_PER_SECOND),
        ratio("signatures to gigatoken", rates[OURS], rates[ENCODER]),
        *[ratio(f"signatures to {name}", rates[OURS], rates[name]) for name in RENSA.values()],
        *[ratio_to(row.name, row, REQUIRED_SECONDS, bound=Bound.AT_MOST) for row in times],
        *[ratio_to(row.name, row, REQUIRED_PERCENT) for row in found if row.name.startswith("found, 5 %")],
    ]
    shown = {
        "corpus": [source.name for source in corpus_sources(options.inputs)],
        "sample": f"{options.sample_bytes / 1e6:g} MB",
        "planted": f"copies of {options.num_texts} modules of Python's library per row",
        "repeats": options.repeats,
        "megabyte": "10^6 bytes of UTF-8",
    }
    return BenchResult(benchmark="near", settings=shown, rows=[*rates.values(), *times, *found], ratios=ratios)


def _signing(options: Options, tokenizer: str) -> list[Subject]:
    common = {"inputs": list(options.inputs), "tokenizer": tokenizer, "sample_bytes": options.sample_bytes}
    return [
        Subject(name=OURS, role=Role.OURS, task="signing:sign_penstock", settings=common),
        Subject(name=ENCODER, role=Role.CEILING, task="signing:encode_gigatoken", settings=common),
        *[
            Subject(
                name=name,
                role=Role.PEER,
                task="signing:sign_rensa",
                settings={**common, "kind": kind},
                environment={"RAYON_NUM_THREADS": "1"},
            )
            for kind, name in RENSA.items()
        ],
    ]


def _staying(options: Options) -> list[Subject]:
    return [
        Subject(
            name=f"staying of {count} documents, {words}",
            role=Role.OURS,
            task="signing:choose_staying",
            settings={"num_documents": count, "kind": kind},
            repeats=1,
        )
        for count in (max(options.num_documents // 10, 1), options.num_documents)
        for kind, words in STAYING.items()
    ]


def _copies(kind: str) -> str:
    return f"planted copies, lines {COPIES[kind]}"


def _finding(options: Options, tokenizer: str) -> list[Subject]:
    return [
        Subject(
            name=_copies(kind),
            role=Role.OURS,
            task="signing:find_copies",
            settings={"tokenizer": tokenizer, "num_texts": options.num_texts, "only_replace": kind == "replaced"},
            repeats=1,
        )
        for kind in COPIES
    ]


def _found(outcome: Outcome, kind: str) -> list[Row]:
    """Copies found, share by share; then recall and precision over all of them."""
    lines = COPIES[kind]
    if not outcome.reports:
        return [Row(name=f"found, lines {lines}", role=Role.OURS, unit="%", skipped=outcome.skipped)]
    report = outcome.reports[0]
    shares = {
        f"found, {100 * each['changed']:g} % of lines {lines}": (each["found"] / each["copies"], each)
        for each in report["shares"]
    }
    shares[f"found of copies over a similarity of {report['threshold']:g}, lines {lines}"] = (report["recall"], {})
    shares[f"found pairs that are over it, lines {lines}"] = (report["precision"], {})
    return [
        Row(name=name, role=Role.OURS, unit="%", values=(100 * share,), details=details)
        for name, (share, details) in shares.items()
    ]
