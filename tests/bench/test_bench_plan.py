"""`bench plan`: every policy measured on drawn and on real lengths, and judged by what was promised."""

from __future__ import annotations

from typing import Any

from penstock.bench import run_benchmark

from .conftest import rows_by_name


def test_policies_are_planned_and_loaded(corpus_options: dict[str, Any]) -> None:
    small = {
        "num_documents": 2000,
        "seq_len": 64,
        "batch_size": 4,
        "num_batches": 3,
        "skip": ["concat", "windows", "pad, wire batches"],
    }
    result = run_benchmark("plan", {**corpus_options, **small})
    rows = rows_by_name(result)
    for policy in ("best-fit", "pad"):
        assert rows[f"{policy}, drawn lengths, time"]["value"] > 0
        assert rows[f"{policy}, real documents, rows"]["value"] > 0
    assert rows["best-fit, wire batches, later passes"]["value"] > 0
    assert "skipped" in rows["pad, wire batches, first pass"]
    assert rows["best-fit, drawn lengths, waste"]["value"] < rows["pad, drawn lengths, waste"]["value"]
    judged = {each["name"]: each for each in result["ratios"]}
    assert judged["time of a best-fit plan to the limit"]["bound"] == "at most"
    assert judged["waste of best-fit to the limit"]["of_value"] == rows["best-fit, real documents, waste"]["value"]
