"""Pages come from result files alone, and say in words what wasn't reached."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from penstock.bench import format_table, write_result
from penstock.bench.render import page, short_table, with_short_table
from penstock.bench.result import BenchResult, Bound, Role, Row, completed, ratio, ratio_to

RUN_ALL = Path(__file__).parents[2] / "benchmarks" / "run_all.py"


@pytest.fixture
def result() -> dict[str, Any]:
    ours = Row(
        name="ours | here", role=Role.OURS, unit="MB/s", values=(90.0, 110.0, 100.0), details={"phases": {"walk": 0.5}}
    )
    ceiling = Row(name="the ceiling", role=Role.CEILING, unit="MB/s", values=(400.0,))
    peer = Row(name="the peer", role=Role.PEER, unit="MB/s", skipped="peer isn't installed")
    memory = Row(name="memory", role=Role.OURS, unit="GB", values=(1.5,))
    ratios = [
        ratio("to the ceiling", ours, ceiling, required=0.5),
        ratio("to the peer", ours, peer, required=50.0),
        ratio_to("to the limit", memory, 2.0, bound=Bound.AT_MOST),
        ratio("for the record", ceiling, ours),
    ]
    found = BenchResult(
        benchmark="prepare", settings={"corpus": ["some", "files"]}, rows=[ours, ceiling, peer, memory], ratios=ratios
    )
    return completed(found, command="penstock bench prepare --repeats 3")


@pytest.fixture
def run_all() -> ModuleType:
    spec = importlib.util.spec_from_file_location("run_all", RUN_ALL)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_ratios_are_judged_by_their_bound(result: dict[str, Any]) -> None:
    assert [(each["value"], each["met"]) for each in result["ratios"]] == [
        (0.25, False),
        (None, None),
        (0.75, True),
        (4.0, None),
    ]


def test_the_page_shows_each_figure_beside_its_ceiling(result: dict[str, Any]) -> None:
    lines = page([result]).splitlines()
    assert "| ours \\| here | 100 | 90 to 110 | MB/s | ours |" in lines
    assert "| the ceiling | 400 |  | MB/s | ceiling |" in lines
    assert "| the peer | skipped: peer isn't installed |  | MB/s | peer |" in lines
    assert "| to the ceiling: ours \\| here / the ceiling | 0.25 | at least 0.5 | NOT reached |" in lines
    assert "| to the peer: ours \\| here / the peer | - | at least 50 | not measured |" in lines
    assert "| to the limit: memory / 2 GB | 0.75 | at most 1 | reached |" in lines
    assert "| for the record: the ceiling / ours \\| here | 4 | - |  |" in lines
    text = "\n".join(lines)
    for fact in (result["command"], result["machine"]["cpu"], result["created"][:10], result["versions"]["numpy"]):
        assert fact in text


def test_the_page_begins_with_all_that_is_promised(result: dict[str, Any]) -> None:
    promises = page([result]).partition("## Raw files")[0]
    for line in (
        "| Raw files to a committed store | ours \\| here / the ceiling | 0.25 | at least 0.5 | NOT reached |",
        "| Raw files to a committed store | ours \\| here / the peer | - | at least 50 | not measured |",
        "| Raw files to a committed store | memory / 2 GB | 0.75 | at most 1 | reached |",
    ):
        assert line in promises
    assert "the ceiling / ours" not in promises


def test_the_short_table_holds_peers_and_what_is_not_reached(result: dict[str, Any]) -> None:
    table = short_table([result])
    assert "NOT reached" in table
    assert "ours \\| here / the peer" in table
    assert "memory / 2 GB" not in table
    assert "Of 3 promised figures 1 are reached" in table
    result["ratios"][1].update(value=60.0, met=True)
    table = short_table([result])
    assert "ours \\| here / the peer | 60 | at least 50 | reached" in table
    assert "Of 3 promised figures 2 are reached" in table


def test_the_readme_is_changed_between_its_markers_only(result: dict[str, Any]) -> None:
    text = "before\n<!-- benchmarks:start -->\nold\n<!-- benchmarks:end -->\nafter\n"
    rendered = with_short_table(text, [result])
    assert rendered.startswith("before\n<!-- benchmarks:start -->\n| | measured")
    assert rendered.endswith("<!-- benchmarks:end -->\nafter\n")
    assert "old" not in rendered
    assert with_short_table(rendered, [result]) == rendered
    assert with_short_table("no markers here", [result]) == "no markers here"
    assert with_short_table(text, []) == text


def test_the_terminal_table_has_a_line_per_row_and_ratio(result: dict[str, Any]) -> None:
    lines = format_table(result).splitlines()
    for row in result["results"]:
        assert sum(line.startswith(f"{row['name']} ") for line in lines) == 1
    assert any("NOT reached (at least 0.5)" in line for line in lines)


def test_run_all_renders_the_result_files_of_a_checkout(
    result: dict[str, Any], run_all: ModuleType, tmp_path: Path
) -> None:
    write_result(result, tmp_path / "benchmarks" / "results")
    (tmp_path / "README.md").write_text("<!-- benchmarks:start -->\n<!-- benchmarks:end -->\n")
    run_all.render(tmp_path)
    written = json.loads((tmp_path / "benchmarks" / "results" / "prepare.json").read_bytes())
    assert (tmp_path / "docs" / "benchmarks.md").read_text() == page([written])
    assert short_table([written]) in (tmp_path / "README.md").read_text()


def test_a_checkout_without_results_says_how_to_get_them(run_all: ModuleType, tmp_path: Path) -> None:
    run_all.render(tmp_path)
    assert "make bench" in (tmp_path / "docs" / "benchmarks.md").read_text()
