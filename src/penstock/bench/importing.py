"""`bench import`: what `import penstock` adds to starting Python, beside numpy.

Fresh processes, interleaved, byte code cached by a first round that isn't counted.
"""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass

from penstock.bench.processes import Tell
from penstock.bench.result import BenchResult, Role, Row, ratio

__all__ = ["Options", "run"]

NOTHING = "python -c pass"
NUMPY = "import numpy"
OURS = "import penstock"
PROGRAMS = {NOTHING: ("pass", Role.CEILING), NUMPY: (NUMPY, Role.PEER), OURS: (OURS, Role.OURS)}


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of the benchmark."""

    repeats: int = 10


def run(options: Options, tell: Tell) -> BenchResult:
    """Measures everything and compares."""
    milliseconds: dict[str, list[float]] = {name: [] for name in PROGRAMS}
    for number in range(options.repeats + 1):
        tell(f"import: {number} of {options.repeats}")
        for name, (program, _) in PROGRAMS.items():
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            if number:
                milliseconds[name].append(1000 * (time.perf_counter() - started))
    rows = {
        name: Row(name=name, role=role, unit="ms", values=tuple(milliseconds[name]))
        for name, (_, role) in PROGRAMS.items()
    }
    ratios = [
        ratio("import penstock to starting Python", rows[OURS], rows[NOTHING]),
        ratio("import penstock to import numpy", rows[OURS], rows[NUMPY]),
    ]
    settings = {"repeats": options.repeats, "note": "each figure includes starting Python; less is better"}
    return BenchResult(benchmark="import", settings=settings, rows=list(rows.values()), ratios=ratios)
