"""Rows of every policy against the slow reference; every label once; resume and ids written out."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.load import Loader, copying, materialise
from penstock.load.gather import Gatherer, StretchBuffer
from penstock.load.rows import describe_row
from penstock.pack import POLICIES, Plan, Stretches, make_plan
from penstock.store import open_store

from .conftest import SMALL_STORE_NAMES, Sample
from .reference import IGNORED, PADDING, Reference, ReferenceRow, assert_batch_equals, border_list, group_numbers

Samples = Callable[[str], Sample]
Options = dict[str, Any]

LISTED = [policy for policy in POLICIES if policy != "concat"]


@st.composite
def options_of_plans(draw: st.DrawFn) -> Options:
    policy = draw(st.sampled_from(LISTED))
    seq_len = draw(st.integers(1, 64))
    options: Options = {"policy": policy, "seq_len": seq_len, "boundaries": draw(st.booleans())}
    if policy == "windows":
        options |= {"overlap": draw(st.integers(0, seq_len - 1)), "overlap_loss": draw(st.booleans())}
    return options


def gathered(plan: Plan, rows: list[int]) -> StretchBuffer:
    gatherer = Gatherer(plan)
    buffer = gatherer.new_buffer(num_batches=1, batch_rows=len(rows))
    buffer.tokens.fill(77)
    buffer.loss_mask.fill(True)
    buffer.cu_seqlens.fill(77)
    gatherer.fill(np.array([rows]), buffer)
    return StretchBuffer(buffer.tokens[0], buffer.loss_mask[0], buffer.cu_seqlens[0])


def slow_row(reference: Reference, plan: Plan, row: int, options: Options) -> ReferenceRow:
    """A row, place by place: what stands there is (span, document, token), or nothing."""
    spans = plan.spans(np.array([row]))
    number_of = {int(stored): number for number, stored in enumerate(plan.documents)}
    columns = (spans.document.tolist(), spans.first.tolist(), spans.length.tolist())
    places: list[tuple[int, int, int] | None] = []
    for span, (document, first, length) in enumerate(zip(*columns, strict=True)):
        places += [(span, number_of[document], first + i) for i in range(length)]
    firsts = spans.first.tolist()
    assert len(places) <= plan.seq_len + 1
    places += [None] * (plan.seq_len + 1 - len(places))
    tokens = [reference.documents[p[1]].tokens[p[2]] if p else reference.pad_id for p in places]
    mask, documents = [], []
    for here, after in itertools.pairwise(places):
        counts = False
        if here is not None and after is not None:
            counts = reference.documents[after[1]].carries_loss[after[2]]
            if here[0] != after[0]:
                # Across a border a label counts only if asked for, and only where no row before had it.
                counts = counts and not options["boundaries"] and after[2] == 0
            elif firsts[here[0]] > 0 and not options.get("overlap_loss"):
                counts = counts and after[2] > firsts[here[0]] + options.get("overlap", 0)
        mask.append(counts)
        documents.append(0 if not options["boundaries"] else PADDING if here is None else here[0])
    return ReferenceRow(tokens, mask, documents)


@pytest.mark.parametrize("name", SMALL_STORE_NAMES)
@given(options=options_of_plans(), split=st.sampled_from(["train", "val", "test"]))
@settings(max_examples=15, deadline=None)
def test_all_rows_equal_the_reference(sample: Samples, name: str, options: Options, split: str) -> None:
    one = sample(name)
    plan = make_plan(one.store, split=split, **options)
    rows = list(range(plan.num_rows))
    expected = [slow_row(one.splits[split], plan, row, options) for row in rows]
    assert_batch_equals(gathered(plan, rows), expected)


@pytest.mark.parametrize("name", SMALL_STORE_NAMES)
@given(options=options_of_plans(), split=st.sampled_from(["train", "val", "test"]))
@settings(max_examples=20, deadline=None)
def test_every_label_counts_once_per_pass(sample: Samples, name: str, options: Options, split: str) -> None:
    """By the tokens alone: each token but a document's first is a label that counts, once, if it carries loss."""
    one = sample(name)
    options = {**options, "boundaries": True}
    options.pop("overlap_loss", None)
    buffer = gathered(plan := make_plan(one.store, split=split, **options), list(range(plan.num_rows)))
    wanted = Counter(
        token
        for document in one.splits[split].documents
        for token, carries in zip(document.tokens[1:], document.carries_loss[1:], strict=True)
        if carries
    )
    assert Counter(buffer.tokens[:, 1:][buffer.loss_mask].tolist()) == wanted


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seq_len", [900, 32_768, 65_536, 100_000])
def test_documents_of_several_blocks(sample: Samples, policy: str, seq_len: int) -> None:
    one = sample("blocks")
    plan = make_plan(one.store, policy=policy, seq_len=seq_len)
    spans = plan.spans(np.arange(plan.num_rows))
    for row in {0, plan.num_rows // 2, plan.num_rows - 1}:
        batch = gathered(plan, [row])
        for index in np.flatnonzero(spans.row == row).tolist():
            place, first, length = (int(values[index]) for values in (spans.place, spans.first, spans.length))
            tokens = one.store.document_tokens(int(spans.document[index]))
            assert batch.tokens[0, place : place + length].tolist() == tokens[first : first + length].tolist()
        assert int(batch.loss_mask.sum()) == int(
            (spans.length - (spans.length > 0))[spans.row == row].sum()
        )  # as many labels as tokens, but for each span's first


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ["letters", "grown", "wide"])
def test_rows_come_out_the_same_however_they_are_copied(
    sample: Samples, policy: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By slices; by Arrow with its short stretches by slices or token by token; from segments cut into many buffers;
    whole rows taken, the broken ones by slices or by Arrow."""
    plan = make_plan(sample(name).store, policy=policy, seq_len=48)
    rows = np.random.default_rng(1).permutation(plan.num_rows).tolist()
    monkeypatch.setattr(copying, "FEW_STRETCHES", 2**60)
    by_slices = gathered(plan, rows)
    monkeypatch.setattr(copying, "FEW_STRETCHES", 0)
    for many_inline, buffer_bytes, most_broken, few_broken in (
        (2**60, 2**30, -1, 0),
        (1, 2**30, -1, 0),
        (512, 256, -1, 0),
        (512, 2**30, 0.99, 2**60),
        (1, 256, 0.99, 0),
    ):
        monkeypatch.setattr(copying, "MANY_INLINE", many_inline)
        monkeypatch.setattr(copying, "BUFFER_BYTES", buffer_bytes)
        monkeypatch.setattr(copying, "MOST_BROKEN", most_broken)
        monkeypatch.setattr(copying, "FEW_BROKEN", few_broken)
        otherwise = gathered(plan, rows)
        for array in ("tokens", "loss_mask", "cu_seqlens"):
            np.testing.assert_array_equal(getattr(by_slices, array), getattr(otherwise, array))


def test_a_row_that_would_leave_its_segment_is_refused(sample: Samples) -> None:
    """Before and behind a map is memory of anybody's; nobody but the copier looks."""
    store = sample("letters").store
    copier = copying.TokenCopier(store, row_tokens=9)
    nothing = Stretches(*[np.empty(0, np.int64)] * 5)
    tokens = store.manifest.segments[0].tokens
    rows = np.zeros(copying.FEW_STRETCHES, np.int64)
    good = copier.gathered(copier.lay_out(rows, rows + tokens - 9, nothing, rows + 9), 0, len(rows))
    assert (good == store.read(0, tokens - 9, 9)).all()
    for first in (tokens - 8, -1):
        with pytest.raises(IndexError, match="begins before its segment or ends after it"):
            copier.lay_out(rows, rows + first, nothing, rows + 9)


def test_a_broken_row_is_taken_with_its_longest_stretch_where_there_is_room_around_it(sample: Samples) -> None:
    store = sample("letters").store
    copier = copying.TokenCopier(store, row_tokens=9)
    end = store.manifest.segments[0].tokens
    num_rows = 40 * 4
    segment, offset = np.zeros(num_rows, np.int64), np.arange(num_rows)
    segment[[3, 50, 99]] = -1
    # Row, place, segment, offset, length: room around both in row 3, around the shorter one in row 50, none in row 99.
    stretches = [(3, 0, 0, 20, 6), (3, 6, 0, 40, 3), (50, 0, 0, end - 5, 5), (50, 5, 0, 30, 4)]
    stretches += [(99, 0, 0, end - 5, 5), (99, 5, 0, 2, 4)]
    columns = np.array(stretches).T
    row_ends = np.full(num_rows, 9)
    layout = copier.lay_out(segment, offset, Stretches(*columns), row_ends)
    assert isinstance(layout.pieces.copies, copying.Slices)
    assert [length // store.dtype.itemsize for _, _, length, _ in layout.pieces.copies.copies] == [3, 5, 5, 4]
    rows = copier.gathered(layout, 0, num_rows)
    for row, expected in (
        (3, [store.read(0, 20, 6), store.read(0, 40, 3)]),
        (50, [store.read(0, end - 5, 5), store.read(0, 30, 4)]),
        (99, [store.read(0, end - 5, 5), store.read(0, 2, 4)]),
        (7, [store.read(0, 7, 9)]),
    ):
        assert rows[row].tolist() == np.concatenate(expected).tolist()


@pytest.mark.parametrize("most_broken", [0.99, -1])
def test_rows_stay_right_when_segments_are_opened_anew(
    sample: Samples, most_broken: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layout outlives the maps it was filled from: closed ones are mapped again, wherever there is room."""
    monkeypatch.setattr(copying, "MOST_BROKEN", most_broken)
    with open_store(sample("letters").store.path) as store:
        plan = make_plan(store, seq_len=8)
        gatherer = Gatherer(plan)
        rows = np.resize(np.arange(plan.num_rows), (1, 64))
        layout, buffer = gatherer.lay_out(rows), gatherer.new_buffer(num_batches=1, batch_rows=64)
        assert (layout.tokens.whole is not None) == (most_broken > 0)
        gatherer.fill_from(layout, 0, 1, buffer)
        first = buffer.tokens.copy()
        store.close()
        gatherer.fill_from(layout, 0, 1, buffer)
        np.testing.assert_array_equal(buffer.tokens, first)


@given(options=options_of_plans(), rows_per_batch=st.integers(1, 9), name=st.sampled_from(SMALL_STORE_NAMES))
@settings(max_examples=15, deadline=None)
def test_a_stretch_gives_the_same_rows_in_any_cut(
    sample: Samples, options: Options, rows_per_batch: int, name: str
) -> None:
    plan = make_plan(sample(name).store, **options)
    gatherer = Gatherer(plan)
    order = np.resize(np.random.default_rng(3).permutation(plan.num_rows), (6, rows_per_batch))
    buffer = gatherer.new_buffer(num_batches=3, batch_rows=rows_per_batch)
    for stretch in (order[:3], order[3:4], order[4:]):
        gatherer.fill(stretch, buffer)
        for number, rows in enumerate(stretch.tolist()):
            alone = gathered(plan, rows)
            assert buffer.tokens[number].tolist() == alone.tokens.tolist()
            assert buffer.loss_mask[number].tolist() == alone.loss_mask.tolist()
            assert buffer.cu_seqlens[number].tolist() == alone.cu_seqlens.tolist()


def taken(loader: Loader, count: int) -> list[tuple[list[int], int, int]]:
    batches = []
    for batch in (next(loader) for _ in range(count)):
        batches.append((batch.rows.tolist(), int(batch.tokens.sum()), int(batch.loss_mask.sum())))
    return batches


@pytest.mark.parametrize("policy", LISTED)
@pytest.mark.parametrize("prefetch_batches", [0, 3])
def test_a_loader_goes_on_from_every_state(sample: Samples, policy: str, prefetch_batches: int) -> None:
    """Three passes, saved at every step and restored at every state: the same sequence; each row once per pass."""
    options: Options = {"policy": policy, "seq_len": 40, "overlap": 9 if policy == "windows" else 0}
    plan = make_plan(sample("parts").store, split="val", **options)
    settings_: Options = {"batch_rows": 3, "seed": 8, "prefetch_batches": prefetch_batches}
    steps = 3 * -(-plan.num_rows // 3)
    states = []
    with Loader(plan, **settings_) as loader:
        whole = []
        for _ in range(steps):
            states.append(loader.state_dict())
            whole += taken(loader, 1)
    seen = [row for rows, _, _ in whole for row in rows]
    for start in range(0, len(seen) - plan.num_rows + 1, plan.num_rows):
        assert sorted(seen[start : start + plan.num_rows]) == list(range(plan.num_rows))
    with Loader(make_plan(sample("parts").store, split="val", **options), **settings_) as other:
        for step in range(0, steps, 2):
            other.load_state_dict(states[step])
            count = min(3, steps - step)
            assert taken(other, count) == whole[step : step + count]


@pytest.mark.parametrize("policy", LISTED)
def test_the_world_size_may_change(sample: Samples, policy: str) -> None:
    plan = make_plan(sample("letters").store, policy=policy, seq_len=24)
    position = 0
    alone = Loader(plan, batch_rows=8, seed=2, prefetch_batches=0)
    for world_size in (1, 2, 4, 8, 1):
        wanted = next(alone).rows.tolist()
        rows: list[int] = []
        for rank in range(world_size):
            loader = Loader(plan, batch_rows=8, seed=2, rank=rank, world_size=world_size, prefetch_batches=0)
            loader.load_state_dict({**loader.state_dict(), "position": position})
            rows += next(loader).rows.tolist()
        assert rows == wanted
        position += 8


@given(options=options_of_plans(), name=st.sampled_from(["letters", "parts"]), data=st.data())
@settings(max_examples=15, deadline=None)
def test_a_row_is_told_as_its_spans_are(sample: Samples, options: Options, name: str, data: st.DataObject) -> None:
    one = sample(name)
    plan = make_plan(one.store, **options)
    row = data.draw(st.integers(0, plan.num_rows - 1))
    told = describe_row(plan, row, one.store.tokenizer())
    expected = slow_row(one.train, plan, row, options)
    spans = plan.spans(np.array([row]))
    filled = min(int(spans.length.sum()), plan.seq_len)
    assert told["tokens"] == filled
    assert told["targets"] == sum(expected.mask)
    assert [entry["row_start"] for entry in told["documents"]] == [p for p in spans.place.tolist() if p < filled]
    assert told["documents"][-1]["row_end"] == filled
    for entry in told["documents"]:
        stored = one.store.document_tokens(entry["document"])
        length = entry["row_end"] - entry["row_start"]
        begin = entry["document_start"]
        assert stored[begin : begin + length].tolist() == expected.tokens[entry["row_start"] : entry["row_end"]]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("boundaries", [True, False])
def test_ids_written_out_are_those_of_the_reference(sample: Samples, policy: str, boundaries: bool) -> None:
    one = sample("parts")
    options: Options = {"policy": policy, "seq_len": 24, "boundaries": boundaries}
    plan = make_plan(one.store, **options)
    rows = list(range(min(plan.num_rows, 20)))
    expected = [
        one.train.row(row, 24, boundaries=boundaries) if policy == "concat" else slow_row(one.train, plan, row, options)
        for row in rows
    ]
    batch = gathered(plan, rows)
    documents, borders = group_numbers(expected), border_list(expected)
    positions = [place - max(b for b in borders if b <= place) for place in range(len(rows) * 24)]
    labels = [
        [token if counts else IGNORED for token, counts in zip(row.tokens[1:], row.mask, strict=True)]
        for row in expected
    ]
    shape = (len(rows), 24)
    assert materialise.document_ids(batch.cu_seqlens, shape).tolist() == documents
    assert materialise.position_ids(batch.cu_seqlens, shape).reshape(-1).tolist() == positions
    assert materialise.labels(batch.tokens, batch.loss_mask).tolist() == labels


def test_torch_writes_out_the_same(sample: Samples) -> None:
    torch = pytest.importorskip("torch")
    for name in ("letters", "wide"):
        plan = make_plan(sample(name).store, policy="best-fit", seq_len=24)
        batch = gathered(plan, list(range(min(plan.num_rows, 20))))
        shape = (len(batch.tokens), 24)
        borders = torch.from_numpy(batch.cu_seqlens)
        tokens, mask = torch.from_numpy(batch.tokens.astype(np.int64)), torch.from_numpy(batch.loss_mask)
        for ours, theirs in (
            (materialise.document_ids(batch.cu_seqlens, shape), materialise.torch_document_ids(borders, shape)),
            (materialise.position_ids(batch.cu_seqlens, shape), materialise.torch_position_ids(borders, shape)),
            (materialise.labels(batch.tokens, batch.loss_mask), materialise.torch_labels(tokens, mask)),
        ):
            assert theirs.dtype == torch.int64
            np.testing.assert_array_equal(ours, theirs.numpy())


def test_a_batch_too_large_for_its_borders_is_refused(sample: Samples) -> None:
    plan = make_plan(sample("letters").store, policy="pad", seq_len=2**20)
    with pytest.raises(ConfigError, match="4096 x 1048576"):
        Gatherer(plan).new_buffer(num_batches=1, batch_rows=4096)


def test_a_long_document_of_many_runs(sample: Samples) -> None:
    """Rows in the middle of the longest document with loss runs: only runs that touch the row are looked at."""
    one = sample("parts")
    longest = max(one.splits, key=lambda split: max(len(d.tokens) for d in one.splits[split].documents))
    for policy in POLICIES:
        options: Options = {"policy": policy, "seq_len": 7, "boundaries": True}
        plan = make_plan(one.store, split=longest, **options)
        buffer = gathered(plan, list(range(plan.num_rows)))
        wanted = sum(sum(document.carries_loss[1:]) for document in one.splits[longest].documents)
        assert int(buffer.loss_mask.sum()) == wanted
