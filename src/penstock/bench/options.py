"""Options of a benchmark: a frozen dataclass per benchmark, filled from the command line by field name.

Out as well: the command that would run it again, in which paths are reduced to their last part, because a result file
names no place of the machine it was made on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from penstock.errors import ConfigError, nearest_first
from penstock.hardware import default_workers, probe

__all__ = [
    "DEFAULT_REPEATS",
    "CorpusOptions",
    "command_line",
    "on_threads",
    "options_from",
    "resolved_workers",
    "thread_counts",
]

DEFAULT_REPEATS = 3

Options = TypeVar("Options")


@dataclasses.dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """What benchmarks over a corpus have in common.

    Attributes:
        inputs: the corpus; empty for the packages installed here and Python's library.
        tokenizer: for all sides; None trains 8,192 tokens on the corpus.
        repeats: rounds; the median counts.
        workers: of ours, threads of the ceiling, processes of the peers; None for every core.
        skip: subjects to leave out, by name or a word of it.
    """

    inputs: tuple[str, ...] = dataclasses.field(default=(), metadata={"flag": "input"})
    tokenizer: str | None = None
    repeats: int = DEFAULT_REPEATS
    workers: int | None = None
    skip: tuple[str, ...] = ()


def options_from(kind: type[Options], values: Mapping[str, Any]) -> Options:
    """An `Options` with the values given; None means the default.

    Raises:
        ConfigError: the benchmark has no such option, or it needs at least one measurement.
    """
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            raise ConfigError(f"unknown benchmark option {name!r}", hint=f"options: {nearest_first(name, known)}")
    repeatable = {field.name for field in dataclasses.fields(kind) if isinstance(field.default, tuple)}  # type: ignore[arg-type]
    given = {
        name: _as_declared(name, value, repeatable=name in repeatable)
        for name, value in values.items()
        if value is not None
    }
    options = kind(**given)
    for name in ("repeats", "workers", "num_batches", "batch_size", "seq_len", "sample_bytes", "steps"):
        value = getattr(options, name, None)
        for number in value if isinstance(value, tuple) else (value,):
            if number is not None and number < 1:
                raise ConfigError(f"--{name.replace('_', '-')} {number} is too small", hint="give 1 or more")
    return options


def _as_declared(name: str, value: Any, *, repeatable: bool) -> Any:
    """A value, or values, in the shape that the benchmark's options have."""
    values = tuple(value) if isinstance(value, list | tuple) else (value,)
    if repeatable:
        return values
    if len(values) != 1:
        raise ConfigError(
            f"--{name.replace('_', '-')} was given {len(values)} times, this benchmark takes one",
            hint="give it once",
        )
    return values[0]


def resolved_workers(workers: int | None) -> int:
    """The number of threads for everyone: as asked, else every core this process may use."""
    return workers if workers is not None else default_workers(probe())


def thread_counts(workers: int) -> list[int]:
    """Where ours stands beside the encoder alone: as many threads as asked, and one, which leaves the other cores to
    reading and writing."""
    return sorted({1, workers}, reverse=True)


def on_threads(name: str, threads: int) -> str:
    """The name of a subject on so many threads."""
    return f"{name}, {threads} thread{'s' if threads > 1 else ''}"


def command_line(benchmark: str, options: Any) -> str:
    """The command that runs a benchmark with these options."""
    words = ["penstock", "bench", benchmark]
    for field in dataclasses.fields(options):
        value = getattr(options, field.name)
        if value == field.default:
            continue
        flag = "--" + field.metadata.get("flag", field.name.replace("_", "-"))
        for item in value if isinstance(value, tuple) else (value,):
            words += [flag, _without_folder(item)]
    return " ".join(words)


def _without_folder(value: object) -> str:
    text = str(value)
    return Path(text).name if "/" in text else text
