"""What a benchmark found: rows, and ratios between rows.

A row is the median of a subject's repeats, all of them beside it. A ratio names the two rows (or the row and the fixed
number) that it divides, so that a reader can do the division again; `required` is what the project promised, and `met`
says in so many words whether it was reached.
"""

from __future__ import annotations

import datetime
import json
import platform
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.hardware import probe

__all__ = [
    "BenchResult",
    "Bound",
    "Ratio",
    "Role",
    "Row",
    "completed",
    "fastest",
    "ratio",
    "ratio_to",
    "write_result_file",
]

PACKAGES = (
    "penstock",
    "gigatoken",
    "tokenizers",
    "numpy",
    "pyarrow",
    "torch",
    "jax",
    "grain",
    "tensorflow",
    "litdata",
    "mosaicml-streaming",
    "datasets",
    "transformers",
    "rensa",
)
# The same package under another name, where that is what is installed.
ALSO_CALLED = {"tensorflow": "tensorflow-cpu"}
SIGNIFICANT_DIGITS = 6


class Role(Enum):
    """Whose figure it is."""

    OURS = "ours"
    PEER = "peer"
    CEILING = "ceiling"


class Bound(Enum):
    """Which side of `required` is the good one."""

    AT_LEAST = "at least"
    AT_MOST = "at most"


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure.

    Attributes:
        name: unique in its result.
        values: one per repeat; none when it was skipped.
        skipped: why there is no value.
        details: anything else worth keeping, by name.
    """

    name: str
    role: Role
    unit: str
    values: tuple[float, ...] = ()
    skipped: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def value(self) -> float | None:
        """The median."""
        return _rounded(statistics.median(self.values)) if self.values else None

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        row = {"name": self.name, "value": self.value, "unit": self.unit, "role": self.role.value}
        if self.skipped is not None:
            return {**row, "skipped": self.skipped}
        return {**row, "values": [_rounded(value) for value in self.values], **self.details}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """One row's value over another's, or over a fixed number."""

    name: str
    of: str
    over: str
    of_value: float | None
    over_value: float | None
    required: float | None = None
    bound: Bound = Bound.AT_LEAST

    @property
    def value(self) -> float | None:
        """The quotient; None where a side has no value."""
        if self.of_value is None or not self.over_value:
            return None
        return _rounded(self.of_value / self.over_value)

    @property
    def met(self) -> bool | None:
        """Whether what is required was reached; None where nothing is, or where it couldn't be measured."""
        if self.required is None or self.value is None:
            return None
        return self.value >= self.required if self.bound is Bound.AT_LEAST else self.value <= self.required

    def as_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "name": self.name,
            "value": self.value,
            "required": self.required,
            "bound": self.bound.value,
            "met": self.met,
            "of": self.of,
            "over": self.over,
            "of_value": self.of_value,
            "over_value": self.over_value,
        }


@dataclass(frozen=True, kw_only=True)
class BenchResult:
    """What `run` of a benchmark returns; `completed` adds what is the same for all. `advice`: what the rows suggest."""

    benchmark: str
    settings: Mapping[str, Any]
    rows: Sequence[Row]
    ratios: Sequence[Ratio]
    advice: Sequence[str] = ()


def fastest(rows: Iterable[Row]) -> Row:
    """The row with the largest value; one without a value only if none has any."""
    return max(rows, key=lambda row: -1.0 if row.value is None else row.value)


def ratio(name: str, of: Row, over: Row, *, required: float | None = None, bound: Bound = Bound.AT_LEAST) -> Ratio:
    """The ratio of two rows."""
    return Ratio(
        name=name,
        of=of.name,
        over=over.name,
        of_value=of.value,
        over_value=over.value,
        required=required,
        bound=bound,
    )


def ratio_to(name: str, of: Row, target: float, *, bound: Bound = Bound.AT_LEAST) -> Ratio:
    """A row against a promised number in its own unit."""
    over = f"{target:g} {of.unit}"
    return Ratio(name=name, of=of.name, over=over, of_value=of.value, over_value=target, required=1.0, bound=bound)


def completed(result: BenchResult, *, command: str) -> dict[str, Any]:
    """The JSON object of a result file."""
    return {
        "benchmark": result.benchmark,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "machine": _machine(),
        "versions": _versions(),
        "settings": dict(result.settings),
        "results": [row.as_dict() for row in result.rows],
        "ratios": [each.as_dict() for each in result.ratios],
        **({"advice": list(result.advice)} if result.advice else {}),
    }


def write_result_file(result: Mapping[str, Any], folder: Path) -> Path:
    """Writes `FOLDER/<benchmark>.json`, whole or not at all."""
    path = folder / f"{result['benchmark']}.json"
    with fs.fail_as_disk_error("writing the result"):
        fs.make_folder(folder)
        fs.write_atomic(path, json.dumps(result, indent=2, ensure_ascii=False).encode() + b"\n")
    return path


def _machine() -> dict[str, Any]:
    """What the figures depend on, and nothing that names the machine."""
    hardware = probe()
    machine: dict[str, Any] = {
        "cpu": hardware.cpu_name,
        "cores": hardware.cpu_cores,
        "memory": f"{hardware.memory_bytes / 2**30:.0f} GiB",
        "platform": f"{platform.system()} {platform.machine()}",
    }
    if hardware.gpus:
        machine["gpus"] = [gpu.name for gpu in hardware.gpus]
    return machine


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        found[package] = _version(package) or _version(ALSO_CALLED.get(package, package)) or "not installed"
    return found


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
