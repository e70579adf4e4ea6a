"""Plans of listed spans: every token in some row, every label in exactly one, for any lengths; the arithmetic of each
policy; the cache."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock import pack
from penstock.errors import PlanError, StoreError
from penstock.pack import POLICIES, Plan, cache, make_plan, making, plan_of
from penstock.pack.spans import span_arrays
from penstock.store import Store

from .conftest import StoreOf
from .reference import Part, new_labels, parts_of

LENGTHS = st.lists(st.one_of(st.integers(1, 12), st.integers(20, 90)), min_size=1, max_size=50)
LISTED = [policy for policy in POLICIES if policy != "concat"]


def rows_of_parts(lengths: list[int], *, seq_len: int, overlap: int = 0, share_rows: bool) -> list[list[Part]]:
    arrays = span_arrays(
        np.arange(len(lengths)), np.array(lengths), seq_len=seq_len, stride=seq_len - overlap, share_rows=share_rows
    )
    columns = [arrays[name].tolist() for name in ("span_documents", "span_firsts", "span_lengths")]
    spans = list(zip(*columns, strict=True))
    borders = arrays["row_spans"].tolist()
    return [spans[begin:end] for begin, end in itertools.pairwise(borders)]


@given(lengths=LENGTHS, seq_len=st.integers(1, 40), data=st.data(), share_rows=st.booleans())
@example(lengths=[1], seq_len=1, data=None, share_rows=True)
@example(lengths=[40, 41, 42, 81, 82], seq_len=40, data=None, share_rows=True)
@settings(max_examples=200, deadline=None)
def test_parts_and_labels_are_those_of_the_reference(
    lengths: list[int], seq_len: int, data: st.DataObject | None, share_rows: bool
) -> None:
    overlap = data.draw(st.integers(0, seq_len - 1)) if data is not None and not share_rows else 0
    rows = rows_of_parts(lengths, seq_len=seq_len, overlap=overlap, share_rows=share_rows)
    parts = [part for row in rows for part in row]
    wanted = [
        part
        for document, length in enumerate(lengths)
        for part in parts_of(document, length, seq_len=seq_len, overlap=overlap)
    ]
    assert sorted(parts) == wanted
    assert all(0 < sum(length for _, _, length in row) <= seq_len + 1 for row in rows)
    tokens = {(document, first + i) for document, first, length in parts for i in range(length)}
    assert tokens == {(document, token) for document, length in enumerate(lengths) for token in range(length)}
    labels = Counter(label for part in parts for label in new_labels(part, overlap=overlap))
    assert labels == Counter((document, token) for document, length in enumerate(lengths) for token in range(1, length))
    # Canonical order: of the parts in a row, and of the rows by their first part.
    assert all(row == sorted(row) for row in rows)
    assert rows == sorted(rows)
    if not share_rows:
        assert all(len(row) == 1 for row in rows)


@pytest.mark.parametrize(("overlap", "rows"), [(0, 196), (128, 261), (256, 390)])
def test_the_windows_of_a_document_of_100_000_tokens(overlap: int, rows: int) -> None:
    made = rows_of_parts([100_000], seq_len=512, overlap=overlap, share_rows=False)
    assert len(made) == rows == 1 + -(-(100_000 - 512) // (512 - overlap))


@given(length=st.integers(1, 3000), seq_len=st.integers(1, 300), data=st.data())
@settings(max_examples=200, deadline=None)
def test_windows_number_as_the_formula_says_but_for_a_tail_of_one_token(
    length: int, seq_len: int, data: st.DataObject
) -> None:
    """1 + ceil((L - W) / (W - O)) counts windows of inputs; a tail of one token is the last label of the row before."""
    overlap = data.draw(st.integers(0, seq_len - 1))
    stride = seq_len - overlap
    formula = 1 if length <= seq_len else 1 + -(-(length - seq_len) // stride)
    tail_of_one = length > seq_len and (length - seq_len) % stride == 1 % stride
    rows = rows_of_parts([length], seq_len=seq_len, overlap=overlap, share_rows=False)
    assert len(rows) == formula - tail_of_one


def test_a_document_that_fills_a_row_is_not_split() -> None:
    assert rows_of_parts([9], seq_len=8, share_rows=True) == [[(0, 0, 9)]]
    assert rows_of_parts([10], seq_len=8, share_rows=True) == [[(0, 0, 9)], [(0, 8, 2)]]
    assert rows_of_parts([17], seq_len=8, share_rows=True) == [[(0, 0, 9)], [(0, 8, 9)]]
    assert rows_of_parts([4, 5, 9], seq_len=8, share_rows=True) == [[(0, 0, 4), (1, 0, 5)], [(2, 0, 9)]]


def figures_by_counting(plan: Plan) -> dict[str, int]:
    rows = np.arange(plan.num_rows)
    spans = plan.spans(rows)
    filled = np.bincount(spans.row, spans.length, minlength=plan.num_rows).astype(int)
    in_rows = Counter(document for document, _ in {*zip(spans.document.tolist(), spans.row.tolist(), strict=True)})
    padded = filled < plan.seq_len
    return {
        "rows": plan.num_rows,
        "waste_tokens": int((plan.seq_len + 1 - filled).sum()),
        "most_documents_in_a_row": int((np.diff(spans.starts) + padded).max()),
        "documents": len(in_rows),
        "repeated_tokens": int(spans.length.sum()) - plan.num_tokens,
    }


@pytest.mark.parametrize("policy", POLICIES)
def test_figures_are_those_of_the_spans(store_of: StoreOf, policy: str) -> None:
    lengths = [1 + (37 * number) % 60 for number in range(70)]
    with store_of(lengths, split="train=1") as store:
        for seq_len in (1, 2, 7, 16, 59, 60, 200):
            for overlap in (0, seq_len // 2) if policy == "windows" else (0,):
                plan = make_plan(store, policy=policy, seq_len=seq_len, overlap=overlap)
                figures = plan.describe()
                counted = figures_by_counting(plan)
                assert {name: figures[name] for name in counted} == counted
                assert figures["tokens"] == sum(lengths)
                spans = plan.spans(np.arange(plan.num_rows))
                later = {*spans.document[spans.first > 0].tolist()}
                assert figures["documents_split"] == len(later) or policy == "concat"
                # Stretches say the same tokens in the store's own terms.
                stretches = plan.stretches(np.arange(plan.num_rows), spans)
                assert int(stretches.length.sum()) == int(spans.length.sum())


@given(lengths=LENGTHS, per_unit=st.integers(1, 12), seq_len=st.integers(1, 40))
@example(lengths=[30, 31], per_unit=1, seq_len=30)
@example(lengths=[30, 31], per_unit=2, seq_len=60)
@example(lengths=[1, 1], per_unit=2, seq_len=1)
@settings(max_examples=30, deadline=None)
def test_whole_rows_are_those_of_one_stretch(
    store_of: StoreOf, lengths: list[int], per_unit: int, seq_len: int
) -> None:
    with store_of(lengths, split="train=1", per_unit=per_unit) as store:
        for policy in POLICIES if sum(lengths) > 1 else ():
            plan = make_plan(store, policy=policy, seq_len=seq_len)
            rows = np.arange(plan.num_rows)[::-1]
            spans = plan.spans(rows)
            stretches, whole = plan.stretches(rows), plan.whole(rows)
            for row in range(len(rows)):
                own = np.flatnonzero(stretches.row == row)
                is_whole = stretches.length[own].tolist() == [seq_len + 1]
                expected = (int(stretches.segment[own[0]]), int(stretches.offset[own[0]]))
                assert (whole.segment[row] >= 0) == is_whole
                assert not is_whole or (whole.segment[row], whole.offset[row]) == expected
                assert whole.is_undivided[row] == (spans.length[spans.row == row].tolist() == [seq_len + 1])


def test_documents_that_concat_splits(store_of: StoreOf) -> None:
    with store_of([4, 4, 1, 4], split="train=1") as store:
        # Rows read the tokens 0-4, 4-8, 8-12: each document's labels are in one row.
        assert make_plan(store, seq_len=4).describe()["documents_split"] == 0
        # 0-5, 5-10, 10-12: the second document (4-7) and the last (9-12) have labels in two.
        assert make_plan(store, seq_len=5).describe()["documents_split"] == 2
        assert make_plan(store, seq_len=12).describe()["documents_split"] == 0


@pytest.mark.parametrize("seq_len", [256, 1024, 4096])
def test_best_fit_wastes_less_than_one_percent_of_usual_lengths(seq_len: int) -> None:
    lengths = np.random.default_rng(seq_len).lognormal(6, 1.3, 20_000).astype(np.int64) + 1
    arrays = span_arrays(np.arange(20_000), lengths, seq_len=seq_len, stride=seq_len, share_rows=True)
    places = (len(arrays["row_spans"]) - 1) * (seq_len + 1)
    assert 0 <= 1 - arrays["span_lengths"].sum() / places < 0.01


def test_best_fit_needs_fewer_rows_than_padding(store: Store) -> None:
    for seq_len in (256, 1024):
        best_fit, padded = (make_plan(store, policy=policy, seq_len=seq_len) for policy in ("best-fit", "pad"))
        assert best_fit.num_rows < padded.num_rows
        assert best_fit.waste_tokens < padded.waste_tokens


def test_plans_of_equal_options_are_equal_and_others_are_not(store_of: StoreOf) -> None:
    with store_of([9] * 30, split="train=1,val=1") as store:
        base: dict[str, Any] = {"policy": "windows", "split": "train", "seq_len": 8, "overlap": 2}
        others: list[dict[str, Any]] = [
            {"policy": "pad", "overlap": 0},
            {"policy": "best-fit", "overlap": 0},
            {"policy": "concat", "overlap": 0},
            {"split": "val"},
            {"seq_len": 9},
            {"overlap": 3},
            {"overlap_loss": True},
            {"boundaries": False},
        ]
        plans = [make_plan(store, **base), *(make_plan(store, **{**base, **other}) for other in others)]
        assert len({plan.fingerprint for plan in plans}) == len(plans)
        for plan in plans:
            assert plan_of(store, plan.identity).identity == plan.identity


@pytest.mark.parametrize("policy", LISTED)
def test_what_cannot_be_is_refused_with_the_way_out(store_of: StoreOf, policy: str) -> None:
    with store_of([5, 6, 7], split="train=1,val=0") as store:
        for seq_len in (0, -3, 2**31):
            with pytest.raises(PlanError, match=str(seq_len)):
                make_plan(store, policy=policy, seq_len=seq_len)
        with pytest.raises(PlanError, match="val"):
            make_plan(store, policy=policy, split="val", seq_len=4)
        with pytest.raises(StoreError, match="nowhere"):
            make_plan(store, policy=policy, split="nowhere", seq_len=4)
        with pytest.raises(PlanError, match=r"4.*4" if policy == "windows" else policy):
            make_plan(store, policy=policy, seq_len=4, overlap=4)
        if policy != "windows":
            with pytest.raises(PlanError, match=policy):
                make_plan(store, policy=policy, seq_len=4, overlap_loss=True)
        with pytest.raises(PlanError, match="bestfit") as error:
            make_plan(store, policy="bestfit", seq_len=4)
        assert error.value.hint is not None
        assert error.value.hint.startswith("known: best-fit")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("seq_len", [1.5, math.nan, "128", None, True, 0, -4])
def test_a_length_that_is_no_whole_number_is_refused(store_of: StoreOf, policy: str, seq_len: Any) -> None:
    with store_of([3, 4]) as store, pytest.raises(PlanError, match=f"a row of {seq_len!r} tokens"):
        make_plan(store, policy=policy, seq_len=seq_len)


@pytest.mark.parametrize("overlap", [1.5, "2", None])
def test_an_overlap_that_is_no_whole_number_is_refused(store_of: StoreOf, overlap: Any) -> None:
    with store_of([3, 4]) as store, pytest.raises(PlanError, match=f"overlap by {overlap!r}"):
        make_plan(store, policy="windows", seq_len=4, overlap=overlap)


def test_some_documents_can_be_planned_apart(store_of: StoreOf) -> None:
    lengths = [5, 60, 7, 8, 9, 30, 2]
    with store_of(lengths, split="train=1") as store:
        for policy in POLICIES:
            chosen = np.array([1, 3, 6])
            plan = make_plan(store, policy=policy, seq_len=10, documents=chosen)
            assert {*plan.spans(np.arange(plan.num_rows)).document.tolist()} == {1, 3, 6}
            assert plan.num_tokens == sum(int(store.arrays["length"][number]) for number in chosen)


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache folder in which every plan is worth keeping."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(making, "SECONDS_WORTH_KEEPING", -1.0)
    return tmp_path / "cache" / "plans"


def assert_same_spans(one: Plan, other: Plan) -> None:
    rows = np.arange(one.num_rows)
    assert one.num_rows == other.num_rows
    for name in ("starts", "row", "place", "document", "first", "length"):
        assert getattr(one.spans(rows), name).tolist() == getattr(other.spans(rows), name).tolist(), name


def spans_files(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.spans"))


def test_a_kept_plan_is_used_again(store_of: StoreOf, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = [1 + (37 * number) % 60 for number in range(70)]
    with store_of(lengths, split="train=1") as store:
        first = make_plan(store, policy="best-fit", seq_len=16)
        assert len(spans_files(kept)) == 1
        monkeypatch.setattr("penstock.pack.spans.span_arrays", None)  # nothing is worked out a second time
        again = make_plan(store, policy="best-fit", seq_len=16, boundaries=False)
        assert_same_spans(first, again)
        assert again.identity["boundaries"] is False
        with pytest.raises(TypeError):
            make_plan(store, policy="best-fit", seq_len=17)


def test_a_kept_plan_of_another_store_is_not_found(store_of: StoreOf, kept: Path) -> None:
    with store_of([9, 20, 7], split="train=1") as one, store_of([9, 21, 7], split="train=1") as other:
        make_plan(one, policy="best-fit", seq_len=16)
        make_plan(other, policy="best-fit", seq_len=16)
        assert len(spans_files(kept)) == 2


def test_any_damage_to_a_kept_plan_is_found_and_mended(store_of: StoreOf, kept: Path) -> None:
    with store_of([9, 20, 7, 3, 33], split="train=1") as store:
        wanted = make_plan(store, policy="best-fit", seq_len=8)
        (path,) = spans_files(kept)
        whole = path.read_bytes()
        for place in range(len(whole)):
            damaged = bytearray(whole)
            damaged[place] ^= 1 << place % 8
            path.write_bytes(damaged)
            key = {"store": store.digest, "split": "train", "seq_len": 8, "stride": 8, "shared": True}
            found = cache.cached_spans(key, store)
            if found is not None:  # a bit of the header that says nothing: white space
                assert all(found[name].tolist() == getattr(wanted, name).tolist() for name in found)
        for size in range(0, len(whole), 5):
            path.write_bytes(whole[:size])
            assert cache.cached_spans(key, store) is None
        assert_same_spans(wanted, make_plan(store, policy="best-fit", seq_len=8))
        assert path.read_bytes() == whole


@pytest.mark.parametrize(
    "header",
    [b"", b"[]\n", b"{}\n", b"\xff\n", b"[" * 5000, b'{"row_spans": {"length": 99999999999999}}\n', b"null\n"],
)
def test_junk_in_the_cache_is_no_plan(store_of: StoreOf, kept: Path, header: bytes) -> None:
    with store_of([9, 20, 7], split="train=1") as store:
        wanted = make_plan(store, policy="pad", seq_len=8)
        (path,) = spans_files(kept)
        path.write_bytes(header)
        assert_same_spans(wanted, make_plan(store, policy="pad", seq_len=8))


def test_spans_that_are_whole_and_wrong_are_not_used(store_of: StoreOf, kept: Path) -> None:
    """Checksums find accidents; these files were written so."""
    with store_of([9, 20, 7], split="train=1") as store:
        wanted = make_plan(store, policy="pad", seq_len=8)
        (path,) = spans_files(kept)
        key = {"store": store.digest, "split": "train", "seq_len": 8, "stride": 8, "shared": False}
        good = cache.cached_spans(key, store)
        assert good is not None
        wrong: list[tuple[str, Any]] = [
            ("span_documents", [7] * len(good["span_documents"])),
            ("span_documents", [-1] * len(good["span_documents"])),
            ("span_lengths", [100] * len(good["span_lengths"])),
            ("span_lengths", [0] * len(good["span_lengths"])),
            ("span_firsts", [2**32 - 1] * len(good["span_firsts"])),
            ("row_spans", [0] * len(good["row_spans"])),
            ("row_spans", [0]),
            ("row_spans", [0, len(good["span_lengths"])]),
        ]
        for name, values in wrong:
            arrays = {**good, name: np.array(values, good[name].dtype)}
            header = {
                each: {"length": len(array), "checksum": cache.checksum_hex(array)} for each, array in arrays.items()
            }
            path.write_bytes(json.dumps(header).encode() + b"\n" + b"".join(a.tobytes() for a in arrays.values()))
            assert cache.cached_spans(key, store) is None, name
        assert_same_spans(wanted, make_plan(store, policy="pad", seq_len=8))


def test_a_cache_that_cannot_be_written_is_done_without(
    store_of: StoreOf, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept.parent.write_bytes(b"a file where the folder would be")
    with store_of([9, 20, 7], split="train=1") as store:
        plan = make_plan(store, policy="pad", seq_len=8)
        monkeypatch.setenv("PENSTOCK_CACHE", "off")
        assert_same_spans(plan, make_plan(store, policy="pad", seq_len=8))


def test_the_cache_is_held_under_its_limit(store_of: StoreOf, kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_of([9, 20, 7], split="train=1") as store:
        make_plan(store, policy="pad", seq_len=8)
        size = spans_files(kept)[0].stat().st_size
        monkeypatch.setattr(cache, "MOST_BYTES", 3 * size)
        for seq_len in range(8, 16):
            make_plan(store, policy="best-fit", seq_len=seq_len)
        assert sum(path.stat().st_size for path in spans_files(kept)) <= 3 * size
        assert {path.suffix for path in kept.iterdir()} <= {".spans", ""}  # no temporary file


def test_quick_plans_are_not_kept(store_of: StoreOf, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    with store_of([9, 20, 7], split="train=1") as store:
        for policy in pack.POLICIES:
            make_plan(store, policy=policy, seq_len=8)
    assert not list(tmp_path.rglob("*"))
