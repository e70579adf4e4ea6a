"""The torture runner: figures come from what tests said, failures are never left out, pages from result files alone."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType

import pytest

RUNNER = Path(__file__).parents[2] / "benchmarks" / "torture.py"

REPORT = """<testsuites><testsuite>
<testcase name="test_one_thing[a]" time="1.5"/>
<testcase name="test_one_thing[b]" time="0.5"><failure message="no"/></testcase>
<testcase name="test_kills[1]" time="4"><properties><property name="torture" value='{first}'/></properties></testcase>
<testcase name="test_kills[2]" time="6"><properties><property name="torture" value='{second}'/></properties>
<failure message="no"/></testcase>
<testcase name="test_full_disk" time="0"><skipped message="mounting isn't permitted"/></testcase>
</testsuite></testsuites>"""


@pytest.fixture(scope="module")
def torture() -> ModuleType:
    spec = importlib.util.spec_from_file_location("torture", RUNNER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def report(tmp_path: Path) -> Path:
    figures = {"lane": "A", "case": "kills", "trials": 500, "failures": 0, "random": True, "met": 3, "slowest": 0.5}
    text = REPORT.format(first=json.dumps(figures), second=json.dumps({**figures, "trials": 100, "slowest": 0.7}))
    path = tmp_path / "report.xml"
    path.write_text(text)
    return path


def test_every_torture_test_is_in_a_lane(torture: ModuleType) -> None:
    for path in RUNNER.parents[1].glob("tests/**/*.py"):
        for place in re.finditer(r"pytest\.mark\.torture\b(.{0,10})", path.read_text(encoding="utf-8"), re.DOTALL):
            named = re.fullmatch(r"""\(lane=["'](.)["'].*""", place[1], re.DOTALL)
            assert named, f"{path.name}: {place[0]!r} names no lane"
            assert named[1] in torture.LANES


def test_cases_add_up_and_a_failed_test_is_a_failure(torture: ModuleType, report: Path) -> None:
    cases, skipped, tests = torture.read_report(report)
    by_name = {case["case"]: case for case in cases}
    assert by_name["one thing"] == {"case": "one thing", "trials": 2, "failures": 1, "seconds": 2.0}
    assert (by_name["kills"]["trials"], by_name["kills"]["failures"], by_name["kills"]["seconds"]) == (600, 1, 10.0)
    assert (by_name["kills"]["met"], by_name["kills"]["slowest"], by_name["kills"]["random"]) == (6, 0.7, True)
    assert skipped == ["full disk: mounting isn't permitted"]
    assert tests == 4


def test_the_page_has_a_line_for_each_case_and_a_bound_for_random_ones(torture: ModuleType) -> None:
    case = {"case": "kills | here", "trials": 1000, "failures": 0, "seconds": 9, "random": True, "workers": [1, 2]}
    machine = {"cpu": "some", "cores": 2, "memory": "1 GiB", "platform": "Linux"}
    result = {
        "created": "2026-01-01", "command": "make torture LANES=A", "machine": machine, "settings": {"scale": 1.0},
        "results": [case, {**case, "case": "other", "failures": 2}], "skipped": [], "ended": "failed", "seconds": 60.0,
    }  # fmt: skip
    page = torture.page("<!-- summary -->\n<!-- lanes -->", {"A": result})
    assert "| kills \\| here | 1,000 | 0 | 0.003 | workers: 1, 2 |" in page
    assert "| other | 1,000 | 2 |  | workers: 1, 2 |" in page, "no bound where there were failures"
    assert "| A. Killed while preparing | 2,000 | 2 | 1.0 | failed |" in page
    assert "Not run yet: `make torture LANES=B`." in page


def test_the_page_in_the_tree_is_rendered_from_the_results_in_the_tree(torture: ModuleType) -> None:
    root = RUNNER.parents[1]
    results = {
        lane: json.loads(path.read_bytes())
        for lane in torture.LANES
        if (path := root / "benchmarks" / "results" / f"torture-{lane}.json").exists()
    }
    template = RUNNER.with_name("reliability.template.md").read_text(encoding="utf-8")
    assert (root / "docs" / "reliability.md").read_text(encoding="utf-8") == torture.page(template, results)
