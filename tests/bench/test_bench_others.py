"""The small benchmarks: tokenize, import, train."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.bench import run_benchmark
from penstock.bench.train import OURS, PLAIN, SAME_BATCH
from penstock.errors import ConfigError

from .conftest import rows_by_name


def test_tokenize_measures_every_engine(corpus_options: dict[str, Any]) -> None:
    result = run_benchmark("tokenize", {**corpus_options, "workers": 2})
    rows = result["results"]
    assert {row["role"] for row in rows} == {"ours", "peer", "ceiling"}
    assert all(row["value"] > 0 and row["unit"] == "MB/s" for row in rows)


def test_refused_tokenizers_are_compared_family_by_family(corpus_options: dict[str, Any]) -> None:
    options = {"inputs": corpus_options["inputs"], "repeats": 1, "workers": 1, "vocab_size": 400, "skip": ["datasets"]}
    result = run_benchmark("refused", options)
    ours = [row for row in result["results"] if row["role"] == "ours"]
    assert [row["engine"] for row in ours] == ["tokenizers"] * 3
    assert all(row["value"] > 0 for row in ours)
    assert [ratio["required"] for ratio in result["ratios"]] == [1.5] * 3 + [None] * 3


def test_near_copies_are_measured_in_speed_and_in_what_is_found(corpus_options: dict[str, Any]) -> None:
    skip = ["rensa", "gigatoken", "alike", "equal", "inserted"]
    result = run_benchmark("near", {**corpus_options, "num_documents": 2000, "num_texts": 10, "skip": skip})
    rows = rows_by_name(result)
    assert rows["signatures"]["value"] > 0
    assert rows["staying of 2000 documents, each with a near copy"]["excluded"] == 1000
    assert [row["copies"] for row in rows.values() if "copies" in row] == [10] * 6
    assert rows["found, 1 % of lines replaced"]["value"] == 100
    assert rows["rensa, R-MinHash"]["skipped"]


def test_import_is_compared_with_starting_python() -> None:
    result = run_benchmark("import", {"repeats": 2})
    assert [len(row["values"]) for row in result["results"]] == [2, 2, 2]
    assert {ratio["of"] for ratio in result["ratios"]} == {"import penstock"}


def test_train_reports_its_wait_for_data(corpus_options: dict[str, Any]) -> None:
    pytest.importorskip("torch")
    skip = ["Trainer", "off", "product", "plain"]
    result = run_benchmark("train", {**corpus_options, "steps": 5, "batch_size": 2, "seq_len": 32, "skip": skip})
    rows = rows_by_name(result)
    assert rows[OURS]["value"] > 0
    assert rows[SAME_BATCH]["value"] > 0
    assert 0 <= rows[f"{OURS}, wait for data"]["value"] <= 100
    assert rows[PLAIN]["skipped"] == "left out with --skip"
    assert not any(ratio["required"] for ratio in result["ratios"]), "promises are about a GPU"


def test_train_refuses_a_run_that_leaves_nothing_to_time() -> None:
    with pytest.raises(ConfigError, match="--steps 2"):
        run_benchmark("train", {"steps": 2})
