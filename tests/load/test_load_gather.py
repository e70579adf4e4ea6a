"""Rows of a plan against the slow reference: tokens, labels that count, borders."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.load import copying
from penstock.load.gather import Gatherer, StretchBuffer
from penstock.pack import Plan, plan_concat

from .conftest import SMALL_STORE_NAMES, Sample
from .reference import Reference, assert_batch_equals

Samples = Callable[[str], Sample]

ROW_LENGTHS = st.integers(1, 64)


def gathered(plan: Plan, rows: list[int]):
    """One batch: by slices, by Arrow, and taken whole with the broken rows by slices and by Arrow, whichever would be
    chosen for so few rows."""
    gatherer = Gatherer(plan)
    buffers = []
    for few_stretches, most_broken, few_broken in ((2**60, 0, 0), (0, -1, 0), (0, 0.99, 2**60), (0, 0.99, 0)):
        buffer = gatherer.new_buffer(num_batches=1, batch_rows=len(rows))
        # What a new buffer holds must not matter: the loader's are full of an earlier batch.
        buffer.tokens.fill(77)
        buffer.loss_mask.fill(True)
        buffer.cu_seqlens.fill(77)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(copying, "FEW_STRETCHES", few_stretches)
            patch.setattr(copying, "MOST_BROKEN", most_broken)
            patch.setattr(copying, "FEW_BROKEN", few_broken)
            gatherer.fill(np.array([rows]), buffer)
        buffers.append(one_batch(buffer, 0))
    for buffer in buffers[1:]:
        np.testing.assert_array_equal(buffers[0].tokens, buffer.tokens)
    return buffers[0]


def one_batch(buffer: StretchBuffer, number: int) -> StretchBuffer:
    """The same arrays without their first axis."""
    return StretchBuffer(buffer.tokens[number], buffer.loss_mask[number], buffer.cu_seqlens[number])


@pytest.mark.parametrize("name", SMALL_STORE_NAMES)
@given(data=st.data(), seq_len=ROW_LENGTHS, boundaries=st.booleans(), split=st.sampled_from(["train", "val", "test"]))
@settings(max_examples=25, deadline=None)
def test_rows_equal_the_reference(
    sample: Samples, name: str, data: st.DataObject, seq_len: int, boundaries: bool, split: str
) -> None:
    one = sample(name)
    plan = plan_concat(one.store, split=split, seq_len=seq_len, boundaries=boundaries)
    reference = one.splits[split]
    assert plan.num_rows == reference.num_rows(seq_len)
    numbers = st.integers(0, plan.num_rows - 1)
    rows = [*data.draw(st.lists(numbers, min_size=1, max_size=12), label="rows"), plan.num_rows - 1, 0]
    expected = [reference.row(row, seq_len, boundaries=boundaries) for row in rows]
    assert_batch_equals(gathered(plan, rows), expected)


@pytest.mark.parametrize("name", SMALL_STORE_NAMES)
@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("seq_len", [1, 2, 7, 64])
def test_all_rows_of_a_plan_equal_the_reference(sample: Samples, name: str, boundaries: bool, seq_len: int) -> None:
    one = sample(name)
    for split, reference in one.splits.items():
        plan = plan_concat(one.store, split=split, seq_len=seq_len, boundaries=boundaries)
        expected = reference.rows(seq_len, boundaries=boundaries)
        assert_batch_equals(gathered(plan, list(range(plan.num_rows))), expected)


@given(seq_len=st.one_of(st.integers(900, 3000), st.integers(30_000, 110_000), st.integers(233_000, 240_000)))
@example(seq_len=32_768)
@example(seq_len=65_536)
@settings(max_examples=6, deadline=None)
def test_rows_over_several_blocks_equal_the_reference(sample: Samples, seq_len: int) -> None:
    one = sample("blocks")
    plan = plan_concat(one.store, seq_len=seq_len)
    for row in {0, plan.num_rows // 2, plan.num_rows - 1}:
        assert_batch_equals(gathered(plan, [row]), [one.train.row(row, seq_len)])


@given(
    seq_len=ROW_LENGTHS,
    boundaries=st.booleans(),
    rows_per_batch=st.integers(1, 9),
    name=st.sampled_from(SMALL_STORE_NAMES),
)
@settings(max_examples=25, deadline=None)
def test_a_stretch_gives_the_same_rows_in_any_cut(
    sample: Samples, seq_len: int, boundaries: bool, rows_per_batch: int, name: str
) -> None:
    """Stretches of 3, 1 and 2 batches into one reused buffer: nothing is left over from the stretch before."""
    one = sample(name)
    plan = plan_concat(one.store, seq_len=seq_len, boundaries=boundaries)
    gatherer = Gatherer(plan)
    order = np.resize(np.random.default_rng(seq_len).permutation(plan.num_rows), (6, rows_per_batch))
    buffer = gatherer.new_buffer(num_batches=3, batch_rows=rows_per_batch)
    for stretch in (order[:3], order[3:4], order[4:]):
        gatherer.fill(stretch, buffer)
        for number, rows in enumerate(stretch.tolist()):
            expected = [one.train.row(row, seq_len, boundaries=boundaries) for row in rows]
            assert_batch_equals(one_batch(buffer, number), expected)


@pytest.mark.parametrize("name", SMALL_STORE_NAMES)
@given(seq_len=ROW_LENGTHS)
@settings(max_examples=10, deadline=None)
def test_every_label_is_counted_once_per_pass(sample: Samples, name: str, seq_len: int) -> None:
    """Without borders and loss runs each token but the first is a label that counts, once; padding never is."""
    one = sample(name)
    for split, reference in one.splits.items():
        plan = plan_concat(one.store, split=split, seq_len=seq_len, boundaries=False)
        buffer = gathered(plan, list(range(plan.num_rows)))
        wanted = [token for token, carries in zip(reference.stream, reference.carries_loss, strict=True) if carries]
        if reference.carries_loss[0]:
            wanted = wanted[1:]
        assert buffer.tokens[:, 1:][buffer.loss_mask].tolist() == wanted


@pytest.mark.parametrize("name", SMALL_STORE_NAMES)
@given(seq_len=ROW_LENGTHS)
@settings(max_examples=10, deadline=None)
def test_with_boundaries_the_first_token_of_a_document_is_no_label_and_its_end_is(
    sample: Samples, name: str, seq_len: int
) -> None:
    one = sample(name)
    plan = plan_concat(one.store, seq_len=seq_len, boundaries=True)
    buffer = gathered(plan, list(range(plan.num_rows)))
    end_id = one.train.pad_id
    # The input is an end token: whatever follows is another document or padding.
    assert not buffer.loss_mask[buffer.tokens[:, :-1] == end_id].any()
    # Every document longer than one token teaches its end, once.
    ends = (buffer.tokens[:, 1:] == end_id) & buffer.loss_mask
    assert int(ends.sum()) == sum(len(document.tokens) > 1 for document in one.train.documents)


@given(seq_len=ROW_LENGTHS, boundaries=st.booleans(), num_rows=st.integers(1, 20))
@settings(max_examples=20, deadline=None)
def test_borders_have_a_fixed_size_and_ascend(sample: Samples, seq_len: int, boundaries: bool, num_rows: int) -> None:
    one = sample("letters")
    plan = plan_concat(one.store, split="test", seq_len=seq_len, boundaries=boundaries)
    gatherer = Gatherer(plan)
    sizes = set()
    for first in range(plan.num_rows):
        buffer = gatherer.new_buffer(num_batches=1, batch_rows=num_rows)
        gatherer.fill((first + np.arange(num_rows))[None] % plan.num_rows, buffer)
        borders = buffer.cu_seqlens[0]
        sizes.add(borders.shape)
        assert borders.dtype == np.int32
        assert borders[0] == 0
        assert borders[-1] == num_rows * seq_len
        steps = np.diff(borders)
        real = int((borders < num_rows * seq_len).sum())
        assert (steps[:real] > 0).all()
        assert (steps[real:] == 0).all()
        # Documents never join rows: each row's start is a border.
        assert set(range(0, num_rows * seq_len, seq_len)) <= set(borders.tolist())
    assert len(sizes) == 1


@pytest.mark.parametrize("boundaries", [True, False])
def test_a_split_that_fills_its_rows_exactly_has_no_padding(sample: Samples, boundaries: bool) -> None:
    one = sample("letters")
    reference = one.splits["test"]
    labels = len(reference.stream) - 1
    for seq_len in [n for n in range(1, labels + 1) if labels % n == 0]:
        plan = plan_concat(one.store, split="test", seq_len=seq_len, boundaries=boundaries)
        assert plan.waste_tokens == 0
        buffer = gathered(plan, [plan.num_rows - 1])
        assert buffer.tokens[0, -1] == reference.stream[-1]
        assert buffer.loss_mask[0, -1]  # the last label is the last document's end
        assert_batch_equals(buffer, [reference.row(plan.num_rows - 1, seq_len, boundaries=boundaries)])


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("longer_by", [-2, -1, 0, 1, 500])
def test_a_row_about_as_long_as_the_split(sample: Samples, boundaries: bool, longer_by: int) -> None:
    one = sample("parts")
    reference = one.splits["val"]
    seq_len = len(reference.stream) + longer_by
    plan = plan_concat(one.store, split="val", seq_len=seq_len, boundaries=boundaries)
    rows = list(range(plan.num_rows))
    assert len(rows) == (2 if longer_by == -2 else 1)
    assert_batch_equals(gathered(plan, rows), reference.rows(seq_len, boundaries=boundaries))


def test_loss_runs_are_there_to_be_found(sample: Samples) -> None:
    """The sample of parts exercises what it should: runs in all places, documents of one token, rows without loss."""
    one = sample("parts")
    assert len(one.store.arrays["loss_documents"])
    everything = [document for reference in one.splits.values() for document in reference.documents]
    assert any(len(document.tokens) == 1 for document in everything)
    assert any(not document.carries_loss[0] and document.carries_loss[-1] for document in everything)
    assert any(document.carries_loss[0] and not all(document.carries_loss) for document in everything)
    assert any(not any(row.mask) for row in one.splits["test"].rows(16))


def test_the_reference_on_a_stream_that_can_be_checked_by_eye() -> None:
    from .reference import ReferenceDocument, border_list

    first = ReferenceDocument("a", [1, 2, 9], [True, True, True])
    second = ReferenceDocument("b", [3, 9], [False, True])
    reference = Reference([first, second], pad_id=9)
    rows = reference.rows(3)
    assert [row.tokens for row in rows] == [[1, 2, 9, 3], [3, 9, 9, 9]]
    assert [row.mask for row in rows] == [[True, True, False], [True, False, False]]
    assert [row.labels for row in rows] == [[2, 9, -100], [9, -100, -100]]
    assert [row.documents for row in rows] == [[0, 0, 0], [1, 1, -1]]
    assert border_list(rows) == [0, 3, 5]
    assert [row.mask for row in reference.rows(3, boundaries=False)] == [[True, True, False], [True, False, False]]
    assert border_list(reference.rows(3, boundaries=False)) == [0, 3]
