"""The benchmark of the rules over content, on the smallest corpus at hand."""

from __future__ import annotations

from penstock.bench import format_table, run_benchmark

from .conftest import JSON_PACKAGE, rows_by_name


def test_hygiene_measures_rules_and_counts_planted_secrets() -> None:
    result = run_benchmark("hygiene", {"inputs": [JSON_PACKAGE], "repeats": 2, "num_secrets": 64})
    rows = rows_by_name(result)
    rules = [
        "all rules after reading (Cleaning)",
        "is it text (while reading)",
        "minified",
        "generated, licence",
        "secrets",
        "one pass over memory",
    ]
    assert all(len(rows[name]["values"]) == 2 and rows[name]["value"] > 0 for name in rules)
    found = rows["planted secrets found"]
    assert found["value"] >= 95
    assert len(found["formats"]) >= 25
    assert rows["false alarms on published code"]["kinds"] == {}  # Python's json package holds no secret
    assert "MB/s" in format_table(result)
