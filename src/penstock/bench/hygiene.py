"""`bench hygiene`: what each rule over content costs, and how many planted secrets are found.

Rates are of one core. "All rules" is what `Cleaning` does after reading; whether a file is text is asked while it is
read, and has a row of its own. The ceiling is one pass over the same bytes at memory speed, a search for NUL. Secrets
are made up, in known formats; what is found in the corpus itself, which is published code, counts as false alarms,
although some of it is real: tokens of test accounts, passwords of examples.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.corpus import corpus_sources
from penstock.bench.options import DEFAULT_REPEATS
from penstock.bench.processes import Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Bound, Role, Row, ratio, ratio_to

__all__ = ["Options", "run"]

REQUIRED_MEGABYTES_PER_SECOND = 1000.0
REQUIRED_PERCENT = 95.0
ALLOWED_ALARMS_PER_MEGABYTE = 1.0

CLEANING, MEMORY, FOUND = "all rules after reading (Cleaning)", "one pass over memory", "planted secrets found"
ALARMS = "false alarms on published code"
RULES = {
    "text": "is it text (while reading)",
    "minified": "minified",
    "head": "generated, licence",
    "secrets": "secrets",
}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        inputs: the corpus; empty for the packages installed here and Python's library.
        repeats: rounds; the median counts.
        sample_bytes: of the corpus, from all over it.
        num_secrets: planted ones.
    """

    inputs: tuple[str, ...] = field(default=(), metadata={"flag": "input"})
    repeats: int = DEFAULT_REPEATS
    sample_bytes: int = 128_000_000
    num_secrets: int = 3200


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    settings = {"inputs": list(options.inputs), "sample_bytes": options.sample_bytes}
    clean = Subject(name=CLEANING, role=Role.OURS, task="cleaning:clean_corpus", settings=settings)
    plant = Subject(
        name=FOUND, role=Role.OURS, task="cleaning:find_planted", settings={"count": options.num_secrets}, repeats=1
    )
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        outcomes = measured([clean, plant], repeats=options.repeats, folder=Path(name), tell=tell)
    cleaned, planted = outcomes[CLEANING], outcomes[FOUND]
    seen, recall = cleaned.reports[0], planted.reports[0]
    rows = [
        row_of(cleaned, "all", unit="MB/s", left_out=seen["left_out"]),
        *[row_of(cleaned, key, name=name, unit="MB/s") for key, name in RULES.items()],
        Row(name=MEMORY, role=Role.CEILING, unit="MB/s", values=tuple(report["memory"] for report in cleaned.reports)),
        row_of(planted, "percent", unit="%", formats=recall["formats"]),
        row_of(planted, "worst_percent", name=f"{FOUND}, worst format", unit="%"),
        row_of(cleaned, "alarms_per_megabyte", name=ALARMS, unit="per MB", kinds=seen["kinds"]),
    ]
    by_name = {row.name: row for row in rows}
    ratios = [
        ratio_to("all rules after reading, one core", by_name[CLEANING], REQUIRED_MEGABYTES_PER_SECOND),
        ratio("all rules after reading to one pass over memory", by_name[CLEANING], by_name[MEMORY]),
        ratio_to("planted secrets found", by_name[FOUND], REQUIRED_PERCENT),
        ratio_to("false alarms", by_name[ALARMS], ALLOWED_ALARMS_PER_MEGABYTE, bound=Bound.AT_MOST),
    ]
    shown = {
        "corpus": [source.name for source in corpus_sources(options.inputs)],
        "documents": f"{seen['documents']}, {seen['megabytes']:.1f} MB, an even sample",
        "secrets": f"{options.num_secrets} in {len(recall['formats'])} formats",
        "repeats": options.repeats,
        "megabyte": "10^6 bytes of UTF-8",
    }
    return BenchResult(benchmark="hygiene", settings=shown, rows=rows, ratios=ratios)
