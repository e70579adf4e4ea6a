"""`bench load` compares like with like, and goes on without the peers that aren't there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.bench import format_table, run_benchmark
from penstock.bench.load_subjects import (
    LITDATA,
    MEMORY_WIRE,
    NUMPY_WIRE,
    RESUME,
    TORCH_DEMAND,
    TORCH_THREAD,
    WIRE_BEST_FIT,
    WIRE_THREAD,
    Data,
    of_size,
    rate_subjects,
)
from penstock.bench.render import page
from penstock.errors import ConfigError, NotAStoreError

from .conftest import rows_by_name

SMALL: dict[str, Any] = {"batch_size": 4, "seq_len": 64, "repeats": 1}
OTHERS = ["penstock", "streaming", "Grain", "TensorFlow", "gather", "memory", RESUME]


def test_first_and_later_passes_are_told_apart(load_result: dict[str, Any]) -> None:
    rows = rows_by_name(load_result)
    for name in (WIRE_THREAD, WIRE_BEST_FIT, TORCH_THREAD, TORCH_DEMAND, NUMPY_WIRE):
        for part in ("first pass", "later passes"):
            row = rows[f"{of_size(name, 4)}, {part}"]
            assert row["value"] > 0
            assert row["first_batch_ms"][0] > 0


def test_every_promise_of_the_issue_is_judged(load_result: dict[str, Any]) -> None:
    judged = {each["name"]: each for each in load_result["ratios"] if each["required"] is not None}
    limits = {name: (each["over"], each["bound"]) for name, each in judged.items()}
    assert limits["concat on the wire, to the promise"] == ("500 M tokens/s", "at least")
    assert limits["best-fit on the wire, to the promise"] == ("300 M tokens/s", "at least")
    assert limits["concat on the wire, first pass, to the promise"] == ("350 M tokens/s", "at least")
    assert limits["best-fit on the wire, first pass, to the promise"] == ("210 M tokens/s", "at least")
    assert limits["tokens, labels and positions to the promise"] == ("150 M tokens/s", "at least")
    assert limits["resume to the limit"] == ("50 ms", "at most")
    assert limits["open and first batch to the limit"] == ("1 s", "at most")
    assert judged["tokens, labels and positions to the best peer"]["required"] == 2
    assert judged["wire to the best peer"]["required"] == 5
    assert judged["concat on the wire, to the promise"]["of"] == f"{of_size(WIRE_THREAD, 4)}, later passes"


def test_what_was_not_measured_is_not_reached_either(load_result: dict[str, Any]) -> None:
    judged = {each["name"]: each for each in load_result["ratios"]}
    for name in ("wire to the best peer", "open and first batch to the limit"):
        assert judged[name]["value"] is None
        assert judged[name]["met"] is None


def test_single_figures_are_there(load_result: dict[str, Any]) -> None:
    rows = rows_by_name(load_result)
    assert rows[RESUME]["unit"] == "ms"
    assert rows[f"{RESUME}, opening store and plan included"]["value"] > rows[RESUME]["value"]
    assert rows[f"{of_size(MEMORY_WIRE, 4)}, estimated"]["value"] > 0
    assert rows[f"{of_size(MEMORY_WIRE, 4)}, measured"]["mapped_bytes"][0] >= 0
    assert 0.2 < rows["shuffle, penstock, distance of neighbours"]["value"] < 0.45


def test_advice_stands_below_the_tables(load_result: dict[str, Any]) -> None:
    assert any("4 x 64" in line for line in load_result["advice"])
    assert all(line in format_table(load_result) for line in load_result["advice"])
    assert all(f"- {line}" in page([load_result]) for line in load_result["advice"])


def test_what_is_skipped_by_name_says_so(load_result: dict[str, Any]) -> None:
    rows = [row for row in load_result["results"] if row["name"].startswith(LITDATA)]
    assert rows
    assert all(row["skipped"] == "left out with --skip" for row in rows)


def test_a_name_that_nobody_has_is_refused(store_folder: str) -> None:
    with pytest.raises(ConfigError, match="litdta") as refused:
        run_benchmark("load", {**SMALL, "store": store_folder, "skip": ["litdta"]})
    assert "litdata" in refused.value.hint


def test_a_store_that_is_not_there_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(NotAStoreError, match="nowhere"):
        run_benchmark("load", {**SMALL, "store": str(tmp_path / "nowhere")})


def test_only_load_takes_several_batch_sizes() -> None:
    with pytest.raises(ConfigError, match="2 times"):
        run_benchmark("train", {"batch_size": [2, 4]})
    with pytest.raises(ConfigError, match="--batch-size 0"):
        run_benchmark("load", {"batch_size": [4, 0]})


def test_every_subject_takes_part_at_every_batch_size(tmp_path: Path) -> None:
    data = Data.pretended(tmp_path, seq_len=1024, batch_sizes=(256, 512, 1024))
    subjects = {size: rate_subjects(data, size) for size in data.batch_sizes}
    for size, own in subjects.items():
        assert {subject.name.removesuffix(f", batch {size}") for subject in own} == {
            subject.name.removesuffix(", batch 256") for subject in subjects[256]
        }
        assert {subject.settings["timing"]["batch_size"] for subject in own} == {size}


def test_a_missing_peer_is_a_row_with_the_reason_and_the_best_of_the_others_counts(
    store_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A litdata that can't be found, for the fresh processes: the import system's own answer, ahead of the real one."""
    absent = "raise ModuleNotFoundError(\"No module named 'litdata'\", name='litdata')\n"
    (tmp_path / "litdata.py").write_text(absent)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run_benchmark("load", {**SMALL, "store": store_folder, "skip": OTHERS})
    rows = rows_by_name(result)
    litdata = [row for name, row in rows.items() if name.startswith(LITDATA)]
    assert litdata
    assert all(row["value"] is None and "litdata isn't installed" in row["skipped"] for row in litdata)
    ratios = {each["name"]: each for each in result["ratios"]}
    assert ratios["torch int64 to litdata"]["over_value"] is None
    whole = [row["value"] for name, row in rows.items() if name.startswith("datasets") and "labels" in name]
    assert len(whole) == 2
    assert ratios["tokens, labels and positions to the best peer"]["over_value"] == max(whole)


def test_a_peer_that_fails_is_a_row_with_its_last_words(
    store_folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "litdata.py").write_text("raise RuntimeError('no luck in ' + __file__)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    result = run_benchmark("load", {**SMALL, "store": store_folder, "skip": [*OTHERS, "datasets"]})
    reasons = {row["skipped"] for row in result["results"] if row["name"].startswith(LITDATA)}
    assert reasons == {"RuntimeError: no luck in litdata.py"}
