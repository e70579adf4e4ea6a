"""Runs every benchmark, writes benchmarks/results/NAME.json, and renders docs/benchmarks.md and the README's table.

    python benchmarks/run_all.py [--tokenizer PATH] [--only NAME]... [--repeats N] [--kernel FOLDER]
    python benchmarks/run_all.py --render-only

Takes 30 to 40 minutes on two cores, and 6 GB of disk for the largest store of `load`. A benchmark that fails doesn't
stop the others; the exit status says so.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench import BENCHMARKS, format_table, run_benchmark, write_result
from penstock.bench.render import page, with_short_table
from penstock.errors import PenstockError

ROOT = Path(__file__).resolve().parent.parent
# What takes too long, or too much disk, to be anybody's default.
WHOLE: dict[str, dict[str, Any]] = {"load": {"batch_size": [256, 512, 1024], "large_tokens": 10**9}}
WITH_TOKENIZER = ("prepare", "formats", "load", "verify", "tokenize", "near", "rerun", "train")

# `prepare` once more, on the unpacked sources of a kernel (--kernel; Debian's package is linux-source).
ON_KERNEL = "prepare-kernel"

# Written by benchmarks/gpu_train.py on a machine with a GPU.
GPU_RESULTS = tuple(f"train-gpu-{section}" for section in ("124m", "350m", "1b", "lora", "start", "resume"))

# Written by benchmarks/release_history.py where a package index can be reached.
HISTORY_RESULTS = ("git-history",)


def main() -> int:
    arguments = _arguments()
    failed = False
    if not arguments.render_only:
        for name in arguments.only or [*BENCHMARKS, *([ON_KERNEL] if arguments.kernel else [])]:
            failed |= not _run(name, arguments)
    render(ROOT)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--tokenizer", help="tokenizer.json for all sides (default: 8,192 tokens trained on the corpus)"
    )
    parser.add_argument(
        "--only", action="append", choices=[*BENCHMARKS, ON_KERNEL], help="run this one (may be repeated)"
    )
    parser.add_argument("--kernel", type=Path, help=f"unpacked sources of a kernel, for {ON_KERNEL}")
    parser.add_argument("--repeats", type=int, help="rounds per benchmark (default: each benchmark's own)")
    parser.add_argument("--render-only", action="store_true", help="run nothing, render the result files")
    arguments = parser.parse_args()
    if ON_KERNEL in (arguments.only or ()) and arguments.kernel is None:
        parser.error(f"{ON_KERNEL} needs --kernel FOLDER")
    return arguments


def _run(name: str, arguments: argparse.Namespace) -> bool:
    options: dict[str, Any] = {"repeats": arguments.repeats, **WHOLE.get(name, {})}
    benchmark = name
    if name == ON_KERNEL:
        benchmark, options["inputs"] = "prepare", [f"linux={arguments.kernel}"]
    if benchmark in WITH_TOKENIZER:
        options["tokenizer"] = arguments.tokenizer
    try:
        result = run_benchmark(benchmark, options, on_progress=lambda line: print(f"{name}: {line}", file=sys.stderr))
        result["benchmark"] = name
        path = write_result(result, ROOT / "benchmarks" / "results")
    except PenstockError as error:
        print(f"error: bench {name}: {error.message}\nhint: {error.hint}", file=sys.stderr)
        return False
    print(format_table(result), f"written to {path.relative_to(ROOT)}", sep="\n", end="\n\n")
    return True


def render(root: Path) -> None:
    """Renders the result files of a checkout into its pages."""
    names = [*BENCHMARKS, ON_KERNEL, *HISTORY_RESULTS, *GPU_RESULTS]
    files = [root / "benchmarks" / "results" / f"{name}.json" for name in names]
    results = [json.loads(file.read_bytes()) for file in files if file.exists()]
    fs.make_folder(root / "docs")
    fs.write_atomic(root / "docs" / "benchmarks.md", page(results).encode())
    readme = root / "README.md"
    if readme.exists():
        text = readme.read_text()
        if (rendered := with_short_table(text, results)) != text:
            fs.write_atomic(readme, rendered.encode())


if __name__ == "__main__":
    sys.exit(main())
