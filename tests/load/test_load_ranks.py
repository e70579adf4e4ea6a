"""Ranks of rows: against a slow reference, and in the cache, where any damage is found and mended."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.load import ranks
from penstock.load.order import row_lengths
from penstock.load.ranks import DOCUMENT_LENGTH, ROW_LENGTH, row_ranks
from penstock.load.stream import StreamSettings
from penstock.pack import Plan, make_plan
from penstock.sources import sources_from_inputs
from penstock.store import PrepareOptions, document_origin, open_store, prepare

from .conftest import Sample, byte_tokenizer

Samples = Callable[[str], Sample]
POLICIES = ("concat", "best-fit", "windows", "pad")


def slow_means(plan: Plan, value_of: Callable[[int], float]) -> list[float]:
    """Row by row and span by span."""
    means = []
    for row in range(plan.num_rows):
        spans = plan.spans(np.array([row]))
        pairs = list(zip(spans.document.tolist(), spans.length.tolist(), strict=True))
        total = sum(length for _, length in pairs)
        means.append(math.fsum(length * value_of(document) for document, length in pairs) / total)
    return means


@pytest.mark.parametrize("policy", POLICIES)
def test_lengths_of_documents_and_rows(sample: Samples, policy: str) -> None:
    store = sample("letters").store
    plan = make_plan(store, policy=policy, seq_len=24)
    found = row_ranks(plan, DOCUMENT_LENGTH)
    np.testing.assert_allclose(found, slow_means(plan, lambda one: float(store.arrays["length"][one])), rtol=1e-12)
    assert row_ranks(plan, ROW_LENGTH).tolist() == row_lengths(plan).tolist()


def test_facts_that_are_numbers_or_times_and_rows_without_one_last(tmp_path: Path) -> None:
    values = ['"2024-05-01"', '"2023-01-31T12:00:00+00:00"', "1.5e9", "null", '"no date"', "true", '"17"', "1e400"]
    lines = [f'{{"text": "text number {n} {"x" * n}", "Größe": {value}}}' for n, value in enumerate(values * 3)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n")
    prepare(
        sources_from_inputs([str(tmp_path / "rows.jsonl")]),
        tmp_path / "store",
        tokenizer=byte_tokenizer(),
        options=PrepareOptions(split="train=1"),
    )
    with open_store(tmp_path / "store") as store:
        plan = make_plan(store, policy="pad", seq_len=64)
        documents = plan.spans(np.arange(plan.num_rows)).document
        found = dict(zip(documents.tolist(), row_ranks(plan, "Größe").tolist(), strict=True))
        known = {"2024-05-01": 1714521600.0, "2023-01-31T12:00:00+00:00": 1675166400.0, "17": 17.0, 1.5e9: 1.5e9}
        known |= {True: 1.0}
        for document, rank in found.items():
            value = document_origin(store, document).facts.get("Größe")
            assert rank == known[value] if value in known else rank > max(known.values()), value
        with pytest.raises(ConfigError, match="'Grösse'") as caught:
            row_ranks(plan, "Grösse")
        assert "Größe" in caught.value.hint


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which all ranks are worth keeping."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(ranks, "SECONDS_WORTH_KEEPING", -1.0)
    return tmp_path / "cache" / "plans"


@pytest.mark.parametrize("by", [ROW_LENGTH, DOCUMENT_LENGTH])
def test_kept_ranks_are_used_again_and_any_damage_is_mended(
    sample: Samples, kept: Path, by: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(sample("parts").store, policy="pad", split="val", seq_len=24)
    wanted = row_ranks(plan, by)
    (path,) = kept.glob("*.ranks")
    whole = path.read_bytes()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        assert row_ranks(plan, by).tolist() == wanted.tolist()
    for size in range(0, len(whole), 31):
        path.write_bytes(whole[:size])
        assert row_ranks(plan, by).tolist() == wanted.tolist()
    assert path.read_bytes() == whole
    monkeypatch.setattr(ranks, "row_lengths", None)  # nothing is worked out a second time
    monkeypatch.setattr(ranks, "_means", None)
    again = row_ranks(plan, by)
    assert (again.tolist(), again.dtype) == (wanted.tolist(), wanted.dtype)
    with pytest.raises(TypeError):
        row_ranks(make_plan(plan.store, policy="pad", split="val", seq_len=25), by)


def test_an_order_is_the_same_with_and_without_the_cache(
    sample: Samples, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = make_plan(sample("letters").store, policy="pad", seq_len=24)
    for name in ("group-by-length", "curriculum"):
        settings = StreamSettings(order=name)
        orders = [settings.options(plan, seed=3, batch_rows=4)["order"] for _ in range(2)]  # made, then read
        monkeypatch.setenv("PENSTOCK_CACHE", "off")
        orders.append(settings.options(plan, seed=3, batch_rows=4)["order"])
        monkeypatch.setenv("PENSTOCK_CACHE", str(kept.parent))
        assert len({str(order.identity) for order in orders}) == 1
        assert len({tuple(order.rows_at(0, 3 * plan.num_rows).tolist()) for order in orders}) == 1


def test_quick_ranks_are_not_kept(sample: Samples, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    row_ranks(make_plan(sample("letters").store, policy="pad", seq_len=24), DOCUMENT_LENGTH)
    assert not list(tmp_path.rglob("*.ranks"))
