"""Runs the lanes of faults, damage and attacks; writes benchmarks/results/torture-LANE.json and docs/reliability.md.

    python benchmarks/torture.py [LANES] [--scale SHARE] [--results FOLDER]
    python benchmarks/torture.py --render-only

LANES are letters (ABC); none: all of them. A lane is one run of pytest over the tests that are marked with its letter.
A test says what it tried through the fixture `torture_figures`; one that says nothing counts as one trial. A lane that
fails, or takes longer than an hour (`--limit`, for a machine that does other work too), doesn't stop the others; the
exit status says so. `--scale 0.05` runs a twentieth of the numbers, to see that a lane works; its file says so.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench.render import machine_line, table_line
from penstock.bench.result import BenchResult, completed, write_result_file

ROOT = Path(__file__).resolve().parent.parent
LANES = {
    "A": "Killed while preparing",
    "B": "Errors of the disk",
    "C": "Damage",
    "D": "Resume of the loader",
    "E": "Training stopped and resumed",
    "F": "Hostile repositories and files",
    "G": "Data is never code",
    "H": "Tokenizer equality",
    "I": "Hygiene",
    "J": "Page and network",
}
LIMIT_SECONDS = 3600.0
NO_TESTS = 5  # pytest's exit status

Case = dict[str, Any]


def main() -> int:
    arguments = _arguments()
    failed = False
    for lane in [] if arguments.render_only else LANES:
        if lane in (arguments.lanes or LANES):
            failed |= not _run_lane(lane, arguments)
    render(ROOT)
    return 1 if failed else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("lanes", nargs="*", help=f"letters of {''.join(LANES)} (default: all)")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full numbers (default: 1)")
    parser.add_argument(
        "--processes", type=int, default=2, help="of tests, where they may run side by side (default: 2)"
    )
    parser.add_argument(
        "--limit", type=float, default=LIMIT_SECONDS, help=f"seconds for a lane (default: {LIMIT_SECONDS:.0f})"
    )
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results", help="where the files go")
    parser.add_argument("--render-only", action="store_true", help="run nothing, render the result files")
    arguments = parser.parse_args()
    arguments.lanes = "".join(arguments.lanes).upper()
    if unknown := sorted(set(arguments.lanes) - set(LANES)):
        parser.error(f"no lane {', '.join(unknown)}; there are {''.join(LANES)}")
    return arguments


def _run_lane(lane: str, arguments: argparse.Namespace) -> bool:
    """Runs a lane, writes its file, and says whether all went well."""
    print(f"lane {lane}: {LANES[lane]}", flush=True)
    started, used = time.perf_counter(), _processor_seconds()
    with tempfile.TemporaryDirectory(prefix="penstock-torture-") as folder:
        report = Path(folder, "report.xml")
        status = _pytest(lane, report, arguments)
        cases, skipped, tests = read_report(report) if report.exists() else ([], [], 0)
    if status == NO_TESTS:
        print(f"lane {lane}: no tests yet\n", flush=True)
        return True
    command = f"make torture LANES={lane}" if arguments.scale == 1 else f"benchmarks/torture.py {lane}"
    settings = {"lane": lane, "scale": arguments.scale, "processes": _processes(lane, arguments)}
    frame = completed(BenchResult(benchmark=f"torture-{lane}", settings=settings, rows=[], ratios=[]), command=command)
    result = {
        **frame,
        "results": cases,
        "tests": tests,
        "skipped": skipped,
        "ended": _ending(status, arguments.limit),
        "seconds": round(time.perf_counter() - started, 1),
        "processor_seconds": round(_processor_seconds() - used, 1),
    }
    path = write_result_file(result, arguments.results)
    failures = sum(case["failures"] for case in cases)
    print(f"lane {lane}: {result['ended']}, {failures} failures, {result['seconds']:.0f} s; written to {path.name}\n")
    return status == 0 and failures == 0


def _processor_seconds() -> float:
    """Of all the tests that have ended: what a lane takes where it had to wait for other work."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _processes(lane: str, arguments: argparse.Namespace) -> int:
    # A browser is shared by its tests, so lane J has one process.
    return 1 if lane == "J" else arguments.processes


def _pytest(lane: str, report: Path, arguments: argparse.Namespace) -> int:
    """The exit status of a lane's tests; negative where a signal, or we, ended them."""
    command = [sys.executable, "-m", "pytest", "--torture", lane, "--torture-scale", str(arguments.scale)]
    command += ["--durations=10", f"--junit-xml={report}", "-o", "junit_family=xunit1"]
    if (processes := _processes(lane, arguments)) > 1:
        command += ["-n", str(processes)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=ROOT, env=environment, start_new_session=True) as process:
        try:
            return process.wait(timeout=arguments.limit)
        except BaseException as error:
            os.killpg(process.pid, signal.SIGKILL)
            if isinstance(error, subprocess.TimeoutExpired):
                return -signal.SIGALRM
            raise


def _ending(status: int, limit: float) -> str:
    if status == -signal.SIGALRM:
        return f"stopped after {limit:.0f} s"
    return {0: "passed", 1: "failed"}.get(status, f"ended with status {status}")


def read_report(path: Path) -> tuple[list[Case], list[str], int]:
    """What the tests said of themselves in pytest's XML: cases, reasons of skipped tests, number of tests run."""
    cases: dict[str, Case] = {}
    skipped: list[str] = []
    tests = 0
    for test in ElementTree.parse(path).iter("testcase"):
        if (reason := test.find("skipped")) is not None:
            skipped.append(f"{_words(test)}: {reason.get('message', '')}")
            continue
        tests += 1
        failed = test.find("failure") is not None or test.find("error") is not None
        told = [json.loads(each.get("value", "")) for each in test.iter("property") if each.get("name") == "torture"]
        told = told or [{"case": _words(test), "trials": 1, "failures": 0}]
        if failed and not any(figures["failures"] for figures in told):
            told[0]["failures"] = 1
        for figures in told:
            _add(cases, figures, seconds=float(test.get("time", 0)) / len(told))
    return list(cases.values()), sorted(set(skipped)), tests


def _words(test: ElementTree.Element) -> str:
    """A test's name as a sentence, without its parameters."""
    return re.sub(r"\[.*", "", test.get("name", "")).removeprefix("test_").replace("_", " ")


def _add(cases: dict[str, Case], figures: Case, *, seconds: float) -> None:
    """Adds up the tests of one case: counts are summed, of measures the largest counts, of words the first."""
    known = cases.setdefault(figures["case"], {"case": figures["case"], "trials": 0, "failures": 0, "seconds": 0.0})
    known["seconds"] = round(known["seconds"] + seconds, 1)
    for name, value in figures.items():
        if isinstance(value, bool | str | list) or name not in known:
            known.setdefault(name, value)
        else:
            known[name] = max(known[name], value) if isinstance(value, float) else known[name] + value
    known.pop("lane", None)


def render(root: Path) -> None:
    """Renders the result files of a checkout into docs/reliability.md."""
    template = Path(__file__).with_name("reliability.template.md").read_text(encoding="utf-8")
    files = {lane: root / "benchmarks" / "results" / f"torture-{lane}.json" for lane in LANES}
    results = {lane: json.loads(file.read_bytes()) for lane, file in files.items() if file.exists()}
    fs.make_folder(root / "docs")
    fs.write_atomic(root / "docs" / "reliability.md", page(template, results).encode())


def page(template: str, results: dict[str, Any]) -> str:
    """docs/reliability.md, whole: the template with the tables at their marks."""
    sections = [_section(lane, results.get(lane)) for lane in LANES]
    filled = template.replace("<!-- summary -->", "\n".join(_summary(results)))
    return filled.replace("<!-- lanes -->", "\n\n".join(sections)).rstrip() + "\n"


def _summary(results: dict[str, Any]) -> list[str]:
    lines = ["| lane | trials | failures | minutes | |", "|---|--:|--:|--:|---|"]
    for lane, title in LANES.items():
        if (result := results.get(lane)) is None:
            lines.append(table_line(f"{lane}. {title}", "-", "-", "-", "not run yet"))
            continue
        trials, failures = (sum(case[key] for case in result["results"]) for key in ("trials", "failures"))
        share = "" if result["settings"]["scale"] == 1 else f", at {result['settings']['scale']:.0%} of the numbers"
        state = result["ended"] + share
        minutes = f"{result['seconds'] / 60:.1f}"
        lines.append(table_line(f"{lane}. {title}", f"{trials:,}", f"{failures:,}", minutes, state))
    return lines


def _section(lane: str, result: Any) -> str:
    lines = [f"### {lane}. {LANES[lane]}", ""]
    if result is None:
        return "\n".join([*lines, f"Not run yet: `make torture LANES={lane}`."])
    lines += ["| case | trials | failures | below, with 95 % | |", "|---|--:|--:|--:|---|"]
    for case in sorted(result["results"], key=lambda case: -case["trials"]):
        lines.append(
            table_line(case["case"], f"{case['trials']:,}", f"{case['failures']:,}", _bound(case), _details(case))
        )
    lines += [f"\nSkipped: {reason}." for reason in result["skipped"]]
    share = "" if result["settings"]["scale"] == 1 else f" at {result['settings']['scale']:.0%} of the full numbers"
    date = f"{result['created'][:10]}, {machine_line(result)}"
    return "\n".join([*lines, "", f"{date}, {_time_taken(result)}{share}. `{result['command']}`"])


def _time_taken(result: Any) -> str:
    processor = result.get("processor_seconds")
    return f"{result['seconds']:.0f} s" + (f" ({processor:.0f} s of a core)" if processor is not None else "")


def _bound(case: Case) -> str:
    """What N random trials without a failure say: fewer than 3 in N. Exhaustive cases need no such bound."""
    if case.get("random") and not case["failures"]:
        return f"{3 / case['trials']:.2g}"
    return "all there are" if case.get("exhaustive") else ""


def _details(case: Case) -> str:
    known = ("case", "trials", "failures", "seconds", "random", "exhaustive")
    return "; ".join(f"{key.replace('_', ' ')}: {_plain(value)}" for key, value in case.items() if key not in known)


def _plain(value: object) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


if __name__ == "__main__":
    sys.exit(main())
