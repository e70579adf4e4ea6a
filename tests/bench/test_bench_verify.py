"""`bench verify`: a store checked, beside its ceilings."""

from __future__ import annotations

from typing import Any

from penstock.bench import run_benchmark
from penstock.bench.verify import CHECKSUM, OURS, QUICK, READING

from .conftest import rows_by_name


def test_verify_is_measured_beside_its_ceilings(corpus_options: dict[str, Any]) -> None:
    result = run_benchmark("verify", corpus_options)
    rows = rows_by_name(result)
    assert {rows[name]["unit"] for name in (OURS, CHECKSUM, READING)} == {"MB/s"}
    assert all(rows[name]["value"] > 0 for name in (OURS, QUICK, CHECKSUM, READING))
    assert [ratio["over"] for ratio in result["ratios"]] == ["1000 MB/s", CHECKSUM, READING, "0.3 GB"]
