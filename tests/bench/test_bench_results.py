"""What every result promises: its shape, ratios that follow from its rows, and no trace of the machine's places."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import BENCHMARKS, run_benchmark, write_result
from penstock.errors import ConfigError

from .conftest import rows_by_name


@pytest.fixture(params=["prepare_result", "load_result"])
def result(request: pytest.FixtureRequest) -> dict[str, Any]:
    found: dict[str, Any] = request.getfixturevalue(request.param)
    return found


def test_a_result_says_what_was_run_on_what(result: dict[str, Any]) -> None:
    assert result["benchmark"] in BENCHMARKS
    assert result["command"].startswith(f"penstock bench {result['benchmark']} ")
    assert result["machine"].keys() >= {"cpu", "cores", "memory", "platform"}
    assert result["versions"].keys() >= {"python", "penstock", "gigatoken", "litdata", "datasets"}
    assert result["settings"]["repeats"] == 1
    assert result["settings"]["corpus"] == ["json"]


def test_every_row_has_a_value_or_a_reason(result: dict[str, Any]) -> None:
    for row in result["results"]:
        assert row["unit"]
        assert row["role"] in ("ours", "peer", "ceiling")
        if row["value"] is None:
            assert row["skipped"]
        else:
            assert row["value"] > 0 or (row["value"] == 0 and row["unit"] == "%")
            assert len(row["values"]) == 1
    assert {row["role"] for row in result["results"]} == {"ours", "peer", "ceiling"}


def test_ratios_follow_from_the_rows(result: dict[str, Any]) -> None:
    rows = rows_by_name(result)
    for ratio in result["ratios"]:
        of = rows[ratio["of"]]["value"]
        over = rows[ratio["over"]]["value"] if ratio["over"] in rows else float(ratio["over"].split()[0])
        if of is None or over is None:
            assert ratio["value"] is None
            assert ratio["met"] is None
            continue
        assert ratio["value"] == pytest.approx(of / over, rel=1e-5)
        if ratio["required"] is not None:
            enough = of / over >= ratio["required"]
            assert ratio["met"] is (enough if ratio["bound"] == "at least" else not enough)


def test_a_result_names_no_place_of_this_machine(result: dict[str, Any]) -> None:
    text = json.dumps(result)
    for place in (str(Path.home()), tempfile.gettempdir(), str(Path.cwd()), str(Path(json.__file__).parent)):
        assert f"{place}/" not in text


def test_a_result_file_holds_the_result(result: dict[str, Any], tmp_path: Path) -> None:
    path = write_result(result, tmp_path / "results")
    assert path == tmp_path / "results" / f"{result['benchmark']}.json"
    assert json.loads(path.read_bytes()) == result


def test_unknown_benchmarks_and_options_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="lode") as refused:
        run_benchmark("lode", {})
    assert "load" in refused.value.hint
    with pytest.raises(ConfigError, match="repeat") as refused:
        run_benchmark("prepare", {"repeat": 1})
    assert "repeats" in refused.value.hint
    with pytest.raises(ConfigError, match="--repeats 0"):
        run_benchmark("prepare", {"repeats": 0})
