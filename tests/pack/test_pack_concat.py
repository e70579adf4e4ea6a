"""`concat`: every token in some row, every label in exactly one, and figures that say what is there."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import PlanError, StoreError
from penstock.pack import Plan, plan_concat
from penstock.store import Store, document_origin

from .conftest import StoreOf, tokens_of

LENGTHS = st.lists(st.one_of(st.integers(1, 50), st.integers(200, 400)), min_size=2, max_size=40)
ROW_LENGTHS = range(1, 65)


def documents_of(store: Store, lengths: list[int], split: str) -> list[list[int]]:
    """Tokens of the kept documents of a split in the order of their keys, from what the source was given."""
    kept = []
    for number in range(store.num_documents):
        origin = document_origin(store, number)
        if origin.split == split and origin.status == "kept":
            name = int(origin.key.removeprefix("lengths/"))
            kept.append((name, tokens_of(name, lengths[name])))
    return [tokens for _, tokens in sorted(kept)]


def read_by_pieces(plan: Plan, row: int) -> list[int]:
    """A row's tokens, by nothing but the plan's arrays: from the row's first piece on."""
    start, count = plan.row_range(row)
    tokens: list[int] = []
    piece = int(plan.first_piece[row])
    while len(tokens) < count:
        position = start + len(tokens)
        assert plan.piece_starts[piece] <= position < plan.piece_starts[piece + 1]
        inside = position - int(plan.piece_starts[piece])
        length = min(int(plan.piece_starts[piece + 1]) - position, count - len(tokens))
        offset = int(plan.piece_offsets[piece]) + inside
        tokens += plan.store.read(int(plan.piece_segments[piece]), offset, length).tolist()
        piece += 1
    return tokens


def assert_plan_is_right(plan: Plan, documents: list[list[int]]) -> None:
    stream = [token for document in documents for token in document]
    owner = [number for number, document in enumerate(documents) for _ in document]
    row_length = plan.seq_len
    starts = range(0, len(stream) - 1, row_length)
    assert plan.num_tokens == len(stream)
    assert plan.num_rows == len(starts) == -(-(len(stream) - 1) // row_length)
    rows = [stream[start : start + row_length + 1] for start in starts]
    assert [read_by_pieces(plan, row) for row in range(plan.num_rows)] == rows
    # Positions of all rows' inputs, and the last label, that no token fills.
    assert plan.waste_tokens == row_length * len(rows) - sum(len(row) - 1 for row in rows)
    # Inputs and labels: each token but the first is the label of one row, each but the last an input.
    assert [token for row in rows for token in row[1:]] == stream[1:]
    assert [token for row in rows for token in row[:row_length]][: len(stream) - 1] == stream[:-1]
    assert plan.first_document[:-1].tolist() == [owner[start] for start in starts]
    past_the_end = starts[-1] + row_length >= len(stream)
    assert plan.first_document[-1] == (len(documents) if past_the_end else len(documents) - 1)
    sharing = [len(set(owner[start : start + row_length + 1])) for start in starts]
    sharing[-1] += past_the_end  # padding counts as one more
    assert plan.most_documents_in_a_row == max(sharing)


@given(lengths=LENGTHS, per_unit=st.integers(1, 12))
@example(lengths=[1] * 9, per_unit=2)
@example(lengths=[2, 1], per_unit=1)
@settings(max_examples=12, deadline=None)
def test_rows_of_any_documents_equal_a_cut_list(store_of: StoreOf, lengths: list[int], per_unit: int) -> None:
    with store_of(lengths, split="train=1", per_unit=per_unit) as store:
        documents = documents_of(store, lengths, "train")
        assert len(documents) == len(lengths)
        for row_length in (1, 2, 3, 5, 8, 13, 33, 64, sum(lengths) - 1, sum(lengths), sum(lengths) + 100):
            assert_plan_is_right(plan_concat(store, seq_len=row_length), documents)


def test_splits_that_interleave_give_rows_of_their_own_documents(store_of: StoreOf) -> None:
    lengths = [1 + (37 * number) % 50 for number in range(80)]
    with store_of(lengths, split="train=50,val=30,test=20", per_unit=9) as store:
        planned = 0
        for split in store.manifest.splits:
            documents = documents_of(store, lengths, split)
            for row_length in ROW_LENGTHS:
                plan = plan_concat(store, split=split, seq_len=row_length, boundaries=bool(row_length % 2))
                assert_plan_is_right(plan, documents)
            assert len(plan.piece_segments) > 3  # the split does lie in pieces
            planned += plan.num_tokens
        assert planned == sum(split["tokens"] for split in store.manifest.counts["splits"].values())


def test_rows_of_a_real_corpus_equal_its_documents(store: Store) -> None:
    for split in store.manifest.splits:
        documents = [store.document_tokens(number).tolist() for number in store.kept_documents(split).tolist()]
        assert documents
        for row_length in (100, 1024):
            assert_plan_is_right(plan_concat(store, split=split, seq_len=row_length), documents)


def test_neighbours_in_a_segment_are_one_piece(store_of: StoreOf) -> None:
    """What lies together is read together: a store of one split has as many pieces as segments, or fewer."""
    with store_of([5, 9, 20, 3, 8, 30, 2], per_unit=3) as store:
        plan = plan_concat(store, seq_len=4)
        assert len(store.manifest.segments) == 3
        assert len(plan.piece_segments) == 3


def test_labels_that_fill_the_rows_exactly_waste_nothing(store_of: StoreOf) -> None:
    with store_of([30, 31]) as store:
        for row_length in (1, 2, 3, 4, 5, 6, 10, 12, 15, 20, 30, 60):
            plan = plan_concat(store, seq_len=row_length)
            assert (plan.num_rows, plan.waste_tokens) == (60 // row_length, 0)
            assert plan.row_range(plan.num_rows - 1)[1] == row_length + 1
        one_more = plan_concat(store, seq_len=59)
        assert (one_more.num_rows, one_more.waste_tokens, one_more.row_range(1)) == (2, 58, (59, 2))


def test_a_row_longer_than_the_split_is_one_row(store_of: StoreOf) -> None:
    with store_of([3, 4]) as store:
        plan = plan_concat(store, seq_len=10**9)
        assert (plan.num_rows, plan.num_tokens, plan.waste_tokens) == (1, 7, 10**9 - 6)
        assert plan.row_range(0) == (0, 7)


@pytest.mark.parametrize("row_length", [0, -1, -1024, 2**31 - 1, 10**20])
def test_a_row_of_no_tokens_or_too_many_is_refused(store_of: StoreOf, row_length: int) -> None:
    with store_of([3, 4]) as store, pytest.raises(PlanError, match=str(row_length)):
        plan_concat(store, seq_len=row_length)


def test_a_split_too_small_for_a_row_is_refused(store_of: StoreOf) -> None:
    """One token has no label; two are the smallest row there is."""
    with store_of([1]) as store, pytest.raises(PlanError, match="train"):
        plan_concat(store, seq_len=8)
    with store_of([5, 5], split="train=1,val=0") as store, pytest.raises(PlanError, match="val"):
        plan_concat(store, split="val", seq_len=8)
    with store_of([2]) as store:
        assert plan_concat(store, seq_len=8).num_rows == 1
    with store_of([1, 1]) as store:
        assert plan_concat(store, seq_len=8).num_rows == 1


def test_an_unknown_split_is_refused_with_those_there_are(store_of: StoreOf) -> None:
    with store_of([3, 4], split="train=1,held-out=1") as store:
        with pytest.raises(StoreError, match="validation") as refusal:
            plan_concat(store, split="validation", seq_len=8)
        assert "train" in refusal.value.hint
        assert "held-out" in refusal.value.hint


def test_the_figures_add_up(store_of: StoreOf) -> None:
    with store_of([10, 20, 30]) as store:
        figures = plan_concat(store, seq_len=16).describe()
    assert (figures["rows"], figures["tokens"], figures["documents"]) == (4, 60, 3)
    assert figures["waste_tokens"] == 4 * 16 + 1 - 60
    assert figures["waste_percent"] == pytest.approx(100 * 5 / 64, abs=1e-4)


def test_the_identity_says_everything_that_decides_a_row(store_of: StoreOf) -> None:
    """Two plans have the same fingerprint exactly when their rows are the same for the same reasons."""
    lengths = [9] * 30
    with store_of(lengths, split="train=1,val=1") as store, store_of([8] * 30, split="train=1,val=1") as other:
        base: dict[str, Any] = {"split": "train", "seq_len": 8, "boundaries": True}
        plans = [
            plan_concat(store, **base),
            plan_concat(other, **base),
            plan_concat(store, **{**base, "split": "val"}),
            plan_concat(store, **{**base, "seq_len": 9}),
            plan_concat(store, **{**base, "boundaries": False}),
        ]
        assert len({plan.fingerprint for plan in plans}) == len(plans)
        again = plan_concat(store, **base)
        assert (again.fingerprint, again.identity) == (plans[0].fingerprint, plans[0].identity)
        for field in dataclasses.fields(Plan):
            assert np.array_equal(getattr(again, field.name), getattr(plans[0], field.name)), field.name
