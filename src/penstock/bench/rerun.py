"""`bench rerun`: what preparing again takes, and what cleaning and looking for copies cost.

60,000 files of real code are prepared, prepared again unchanged, with one file touched, and with 1 % of them changed;
the digest after that must be a fresh build's, or there is no result. Then the corpus is prepared bare (no rule over
content, no copies looked for), by default (all rules, secrets redacted, exact copies) and with near copies.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.bench.corpus import corpus_sources, tokenizer_path
from penstock.bench.options import CorpusOptions, resolved_workers
from penstock.bench.prepare import NO_RULES
from penstock.bench.processes import Subject, Tell, measured, row_of, run_own
from penstock.bench.result import BenchResult, Bound, Role, ratio

__all__ = ["Options", "run"]

LEAST_OF_BARE = 0.7
MOST_OF_FIRST = 0.1
SERIES = "a first run"
RUNS = {
    "unchanged_seconds": "the same again, nothing changed",
    "touched_seconds": "one file touched, not changed",
    "changed_seconds": "1 % of the files changed",
    "fresh_seconds": "those prepared afresh",
}
BARE, DEFAULT, NEAR = "prepare, no rules, no copies looked for", "prepare, the default", "prepare, near copies too"
MODES: dict[str, dict[str, Any]] = {
    BARE: NO_RULES,
    DEFAULT: {},
    NEAR: {"dedup": "near"},
}


@dataclass(frozen=True, kw_only=True)
class Options(CorpusOptions):
    """Options of the benchmark.

    Attributes:
        files: how many are made of the corpus.
        share: of them that change.
    """

    files: int = 60_000
    share: float = 0.01


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    workers = resolved_workers(options.workers)
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        path, tokenizer = tokenizer_path(options.tokenizer, options.inputs, folder)
        tell(f"writing {options.files} files")
        made = run_own(
            "rerunning:make_folder_of_files",
            {"inputs": list(options.inputs), "count": options.files, "out": str(folder / "files")},
            folder=folder,
        )
        common = {"tokenizer": str(path), "workers": workers, "out": str(folder / "out")}
        series = Subject(
            name=SERIES,
            role=Role.OURS,
            task="rerunning:prepare_change_prepare",
            settings={**common, "folder": str(folder / "files"), "share": options.share},
        )
        modes = [
            Subject(
                name=mode,
                role=Role.CEILING if mode == BARE else Role.OURS,
                task="preparing:prepare_store",
                settings={**common, "inputs": list(options.inputs), "choices": choices},
            )
            for mode, choices in MODES.items()
        ]
        outcomes = measured([series, *modes], repeats=options.repeats, folder=folder, skip=options.skip, tell=tell)
    first = row_of(outcomes[SERIES], "first_seconds", unit="s")
    reruns = {key: row_of(outcomes[SERIES], key, name=name, unit="s") for key, name in RUNS.items()}
    rates = {mode: row_of(outcomes[mode], "megabytes_per_second", unit="MB/s") for mode in MODES}
    ratios = [
        ratio(
            "1 % changed to a first run",
            reruns["changed_seconds"],
            first,
            required=MOST_OF_FIRST,
            bound=Bound.AT_MOST,
        ),
        ratio("nothing changed to a first run", reruns["unchanged_seconds"], first),
        ratio("the default to bare", rates[DEFAULT], rates[BARE], required=LEAST_OF_BARE),
        ratio("near copies to the default", rates[NEAR], rates[DEFAULT]),
    ]
    settings = {
        "corpus": [source.name for source in corpus_sources(options.inputs)],
        "files": f"{made['files']}, {made['bytes'] / 1e6:.0f} MB",
        "tokenizer": f"{tokenizer.vocab_size} ids, digest {tokenizer.digest[:12]}",
        "workers": workers,
        "repeats": options.repeats,
        "page_cache": "warm",
    }
    rows = [first, *reruns.values(), *rates.values()]
    return BenchResult(benchmark="rerun", settings=settings, rows=rows, ratios=ratios)
