"""A row told in words: its documents, their places, its text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError
from penstock.load.rows import describe_row, rows_holding
from penstock.pack import make_plan, plan_concat
from penstock.tokenize import Tokenizer

from .conftest import ASSISTANT_ID, END_ID, WIDE_END_ID, WIDE_PAIR_ID, Sample
from .reference import Reference

Samples = Callable[[str], Sample]

NAMES = {
    END_ID: b"<|endoftext|>",
    ASSISTANT_ID: b"<|assistant|>",
    WIDE_PAIR_ID: b"ab",
    WIDE_END_ID: b"<|endoftext|>",
}

_tokenizers: dict[str, Tokenizer] = {}


def tokenizer_of(name: str, one: Sample) -> Tokenizer:
    if name not in _tokenizers:
        _tokenizers[name] = one.store.tokenizer()
    return _tokenizers[name]


def expected_documents(reference: Reference, first: int, last: int) -> list[dict[str, Any]]:
    """One entry per document with an input among the stream positions first .. last, last excluded."""
    entries: list[dict[str, Any]] = []
    for position in range(first, last):
        key = reference.documents[reference.owner[position]].key
        if not entries or entries[-1]["key"] != key:
            entries.append(
                {"key": key, "row_start": position - first, "document_start": reference.place[position], "text": b""}
            )
        token = reference.stream[position]
        entries[-1]["row_end"] = position - first + 1
        entries[-1]["text"] += NAMES.get(token) or bytes([token])
    return [{**entry, "text": entry["text"].decode("utf-8", "replace")} for entry in entries]


@given(
    name=st.sampled_from(["letters", "wide", "parts"]),
    split=st.sampled_from(["train", "val", "test"]),
    seq_len=st.integers(1, 64),
    boundaries=st.booleans(),
    data=st.data(),
)
@settings(max_examples=40, deadline=None)
def test_a_row_is_told_as_the_reference_has_it(
    sample: Samples, name: str, split: str, seq_len: int, boundaries: bool, data: st.DataObject
) -> None:
    one = sample(name)
    reference = one.splits[split]
    plan = plan_concat(one.store, split=split, seq_len=seq_len, boundaries=boundaries)
    last = plan.num_rows - 1
    row = data.draw(st.one_of(st.just(0), st.just(last), st.integers(0, last)), label="row")
    told = describe_row(plan, row, tokenizer_of(name, one))
    first, end = row * seq_len, min((row + 1) * seq_len, len(reference.stream))
    shown = [{name: entry[name] for name in entry if name not in ("document", "file")} for entry in told["documents"]]
    assert shown == expected_documents(reference, first, end)
    assert told["targets"] == sum(reference.row(row, seq_len, boundaries=boundaries).mask)
    assert (told["row"], told["split"], told["seq_len"], told["tokens"]) == (row, split, seq_len, end - first)


def test_a_row_names_the_files_it_came_from(sample: Samples) -> None:
    one = sample("letters")
    plan = plan_concat(one.store, seq_len=200)
    told = describe_row(plan, 1, tokenizer_of("letters", one))
    assert len(told["documents"]) > 1
    for entry in told["documents"]:
        assert entry["file"].endswith(entry["key"])
        stored = one.store.document_tokens(entry["document"]).tolist()
        begin = entry["document_start"]
        length = entry["row_end"] - entry["row_start"]
        at = 200 + entry["row_start"]
        assert stored[begin : begin + length] == one.train.stream[at : at + length]


@pytest.mark.parametrize("seq_len", [1, 16, 10_000])
def test_a_row_out_of_range_is_refused(sample: Samples, seq_len: int) -> None:
    one = sample("parts")
    plan = plan_concat(one.store, split="val", seq_len=seq_len)
    for row in (-1, plan.num_rows, plan.num_rows + 10**12):
        with pytest.raises(PlanError, match=str(row)):
            describe_row(plan, row, tokenizer_of("parts", one))


@pytest.mark.parametrize("policy", ["concat", "best-fit", "windows", "pad"])
@pytest.mark.parametrize("seq_len", [1, 7, 64, 10_000])
def test_the_rows_that_hold_some_tokens_are_those_that_show_them(
    sample: Samples, monkeypatch: pytest.MonkeyPatch, policy: str, seq_len: int
) -> None:
    monkeypatch.setattr("penstock.load.rows.ROWS_AT_ONCE", 13)
    one = sample("letters")
    plan = make_plan(
        one.store, policy=policy, split="val", seq_len=seq_len, overlap=min(3, seq_len - 1) * (policy == "windows")
    )
    tokenizer = tokenizer_of("letters", one)
    told = [describe_row(plan, row, tokenizer)["documents"] for row in range(min(plan.num_rows, 300))]
    lengths = one.store.arrays["length"]
    stretches = [
        (document, first, last)
        for document in plan.documents[:6].tolist()
        for first, last in [(0, 0), (0, int(lengths[document]) - 1), (int(lengths[document]) // 2,) * 2]
    ]
    found = rows_holding(plan, stretches)
    for (document, first, last), rows in zip(stretches, found, strict=True):
        shown = [
            row
            for row, documents in enumerate(told)
            for entry in documents
            if entry["document"] == document
            and entry["document_start"] <= last
            and entry["document_start"] + entry["row_end"] - entry["row_start"] > first
        ]
        assert [row for row in rows if row < len(told)] == shown
    assert rows_holding(plan, []) == []
    assert rows_holding(plan, [(10**9, 0, 5)]) == [[]]
