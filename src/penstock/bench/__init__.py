"""Our figures beside those of others, measured in one run.

    corpus -> [subjects, each in a fresh process, round after round] -> rows -> ratios -> result file -> pages

In: the name of a benchmark and its options. Out: one JSON-able object with the machine, the versions, the command, a
row per subject (the ceiling and the peers beside us) and the ratios between rows. A peer that isn't installed, or
fails, is a row without a value that says why. Importing this package imports none of what it measures.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, nearest_first

__all__ = ["BENCHMARKS", "format_table", "run_benchmark", "write_result"]

BENCHMARKS: Mapping[str, str] = {
    "prepare": "penstock.bench.prepare",
    "formats": "penstock.bench.formats",
    "plan": "penstock.bench.plan",
    "load": "penstock.bench.load",
    "verify": "penstock.bench.verify",
    "tokenize": "penstock.bench.tokenize",
    "refused": "penstock.bench.refused",
    "hygiene": "penstock.bench.hygiene",
    "near": "penstock.bench.near",
    "rerun": "penstock.bench.rerun",
    "train": "penstock.bench.train",
    "import": "penstock.bench.importing",
}
"""Name on the command line -> the module that holds its `Options` and `run`, imported when it is asked for."""


def run_benchmark(
    name: str, options: Mapping[str, Any], *, on_progress: Callable[[str], None] | None = None
) -> dict[str, Any]:
    """Runs one benchmark.

    Args:
        name: one of `BENCHMARKS`.
        options: values for the benchmark's `Options`, by field name; those left out have their defaults.
        on_progress: given a line before each measurement.

    Raises:
        ConfigError: an unknown benchmark or option.
        PenstockError: one of our own measurements failed.
    """
    if name not in BENCHMARKS:
        raise ConfigError(f"unknown benchmark {name!r}", hint=f"choose one of {nearest_first(name, BENCHMARKS)}")
    from penstock.bench.options import command_line, options_from
    from penstock.bench.result import completed

    module = import_module(BENCHMARKS[name])
    chosen = options_from(module.Options, options)
    result = module.run(chosen, on_progress or (lambda line: None))
    return completed(result, command=command_line(name, chosen))


def format_table(result: Mapping[str, Any]) -> str:
    """A result as text for a terminal."""
    from penstock.bench.render import terminal_table

    return terminal_table(result)


def write_result(result: Mapping[str, Any], folder: Path) -> Path:
    """Writes `FOLDER/<benchmark>.json` and returns its path."""
    from penstock.bench.result import write_result_file

    return write_result_file(result, folder)
