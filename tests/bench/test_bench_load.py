"""`bench load` compares like with like, and goes on without the peers that aren't there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench import run_benchmark
from penstock.bench.load import LITDATA, NUMPY_WIRE, TORCH_DEMAND, TORCH_THREAD, WIRE_THREAD

from .conftest import rows_by_name


def test_first_and_later_passes_are_told_apart(load_result: dict[str, Any]) -> None:
    names = set(rows_by_name(load_result))
    for name in (TORCH_THREAD, TORCH_DEMAND, NUMPY_WIRE):
        assert {f"{name}, first pass", f"{name}, later passes"} <= names


def test_promises_are_judged_on_the_default_loader_against_the_best_litdata_row(load_result: dict[str, Any]) -> None:
    rows = rows_by_name(load_result)
    ratios = {each["name"]: each for each in load_result["ratios"]}
    for part in ("first pass", "later passes"):
        against_litdata = ratios[f"torch int64 to litdata, {part}"]
        values = [row["value"] for name, row in rows.items() if name.startswith(LITDATA) and name.endswith(part)]
        measured = [value for value in values if value is not None]
        assert against_litdata["of"] == f"{TORCH_THREAD}, {part}"
        assert against_litdata["over_value"] == (max(measured) if measured else None)
        assert ratios[f"wire batches to the promise, {part}"]["of"] == f"{WIRE_THREAD}, {part}"
        assert ratios[f"torch int64 on demand to litdata, {part}"]["required"] is None


def test_what_is_skipped_by_name_says_so(load_result: dict[str, Any]) -> None:
    with_workers = [row for row in load_result["results"] if "2 workers" in row["name"]]
    assert with_workers
    assert all(row["skipped"] == "left out with --skip" for row in with_workers)


def test_a_missing_peer_is_a_row_with_the_reason(
    corpus_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A litdata that can't be found, for the fresh processes: the import system's own answer, ahead of the real one."""
    absent = "raise ModuleNotFoundError(\"No module named 'litdata'\", name='litdata')\n"
    (tmp_path / "litdata.py").write_text(absent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run_benchmark(
        "load", {**corpus_options, "batch_size": 4, "seq_len": 64, "skip": ["datasets", "demand", "labels"]}
    )
    rows = rows_by_name(result)
    litdata = [row for name, row in rows.items() if name.startswith(LITDATA)]
    assert litdata
    assert all(row["value"] is None and "litdata isn't installed" in row["skipped"] for row in litdata)
    assert rows[f"{NUMPY_WIRE}, first pass"]["value"] > 0
    ratio = next(each for each in result["ratios"] if each["name"] == "torch int64 to litdata, first pass")
    assert ratio["value"] is None
    assert ratio["met"] is None


def test_a_peer_that_fails_is_a_row_with_its_last_words(
    corpus_options: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "litdata.py").write_text("raise RuntimeError('no luck in ' + __file__)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run_benchmark("load", {**corpus_options, "batch_size": 4, "seq_len": 64, "skip": ["datasets", "penstock"]})
    reasons = {row["skipped"] for row in result["results"] if row["name"].startswith(LITDATA)}
    assert reasons == {"RuntimeError: no luck in litdata.py"}
