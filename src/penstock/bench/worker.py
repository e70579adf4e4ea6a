"""The fresh process in which one subject is measured: `python -m penstock.bench.worker TASK SETTINGS RESULT`.

TASK is `module:function` inside penstock.bench; SETTINGS a JSON file with its keyword arguments; RESULT the file its
report is written to, because libraries print what they like. A package that isn't there is a report too: `missing`.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path

from penstock import fs
from penstock.errors import MissingExtraError

__all__ = ["main"]

# How to get what isn't in the extra `peers`. MosaicML's streaming pins torchvision, numpy and transformers.
INSTALLED_BY = {
    "torch": "penstock[torch]",
    "jax": "penstock[jax]",
    "grain": "penstock[jax]",
    "tensorflow": "penstock[tf]",
    "streaming": "mosaicml-streaming",
}


def main(task: str, settings: Path, result: Path) -> None:
    """Runs the task and writes what it returns."""
    module, _, function = task.partition(":")
    try:
        report = getattr(import_module(f"penstock.bench.{module}"), function)(**json.loads(settings.read_bytes()))
    except MissingExtraError as error:
        report = {"missing": f"{error.message}: {error.hint}"}
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package in ("", "penstock"):
            raise
        wanted = INSTALLED_BY.get(package, "penstock[peers]")
        report = {"missing": f"{package} isn't installed: pip install '{wanted}'"}
    fs.write_atomic(result, json.dumps(report).encode())


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
