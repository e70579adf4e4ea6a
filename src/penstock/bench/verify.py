"""`bench verify`: a store checked on one core, against a promised rate and against what no check can do without.

Ours is all that `penstock verify` does: checksums of every file, each document's tokens hashed, the digest, leaks. The
ceilings are one pass of the block checksum over the same tokens in memory, and reading their files.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from penstock.bench.corpus import corpus_sources
from penstock.bench.options import DEFAULT_REPEATS
from penstock.bench.processes import Subject, Tell, measured, row_of
from penstock.bench.result import BenchResult, Bound, Role, ratio, ratio_to
from penstock.bench.stores import store_path
from penstock.errors import DamagedStoreError

__all__ = ["Options", "run"]

REQUIRED_RATE = 1000.0
MEMORY_LIMIT_GB = 0.3

OURS = "penstock verify, one core"
QUICK = "penstock verify --quick"
CHECKSUM = "block checksums, tokens in memory"
READING = "reading the files of tokens"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark.

    Attributes:
        store: an existing store; None prepares the corpus into a temporary one.
        inputs: the corpus; empty for the packages installed here and Python's library.
        tokenizer: for the corpus; None trains 8,192 tokens on it.
        repeats: rounds; the median counts.
        skip: subjects to leave out, by name or a word of it.
    """

    store: str | None = None
    inputs: tuple[str, ...] = field(default=(), metadata={"flag": "input"})
    tokenizer: str | None = None
    repeats: int = DEFAULT_REPEATS
    skip: tuple[str, ...] = ()


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        store = store_path(options.store, inputs=options.inputs, tokenizer=options.tokenizer, folder=folder, tell=tell)
        outcomes = measured(_subjects(store), repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    ours, quick = outcomes[OURS], outcomes[QUICK]
    if any(report["problems"] for report in [*ours.reports, *quick.reports]):
        raise DamagedStoreError(
            f"{Path(store).name} isn't whole; a benchmark of checking it says nothing", hint="penstock verify STORE"
        )
    rate = row_of(ours, "megabytes_per_second", unit="MB/s")
    processor_rate = row_of(
        ours, "megabytes_per_processor_second", name="the same, per second of processor time", unit="MB/s"
    )
    seconds = row_of(quick, "seconds", unit="s")
    checksum = row_of(outcomes[CHECKSUM], "megabytes_per_second", unit="MB/s")
    reading = row_of(outcomes[READING], "megabytes_per_second", unit="MB/s")
    memory = row_of(ours, "peak_memory_bytes", name=f"{OURS}, peak memory", unit="GB", scale=1e-9)
    ratios = [
        ratio_to("verify to the promise", rate, REQUIRED_RATE),
        ratio("verify to the block checksums alone", rate, checksum),
        ratio("verify to reading alone", rate, reading),
        ratio_to("memory to the limit", memory, MEMORY_LIMIT_GB, bound=Bound.AT_MOST),
    ]
    settings = {
        "corpus": [source.name for source in corpus_sources(options.inputs)] if not options.store else "a given store",
        "tokens": f"{ours.reports[0]['tokens_megabytes']:.0f} MB" if ours.reports else "unknown",
        "repeats": options.repeats,
        "page_cache": "warm",
        "megabyte": "10^6 bytes of tokens, as stored",
    }
    rows = [rate, processor_rate, checksum, reading, seconds, memory]
    return BenchResult(benchmark="verify", settings=settings, rows=rows, ratios=ratios)


def _subjects(store: str) -> list[Subject]:
    def subject(name: str, role: Role, task: str, **settings: object) -> Subject:
        return Subject(name=name, role=role, task=f"verifying:{task}", settings={"store": store, **settings})

    return [
        subject(OURS, Role.OURS, "verify_store", quick=False),
        subject(CHECKSUM, Role.CEILING, "checksum_in_memory"),
        subject(READING, Role.CEILING, "read_files"),
        subject(QUICK, Role.OURS, "verify_store", quick=True),
    ]
