"""Near copies: signatures against a slow twin, pairs and exclusions against brute force, recall on planted copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.bench.near_copies import measured_recall, source_texts
from penstock.errors import ConfigError
from penstock.store import near_choice
from penstock.store import signatures as module
from penstock.store.near import (
    MIN_NEAR_TOKENS,
    NEAR_THRESHOLD,
    SIGNATURE_BINS,
    cluster_figures,
    leaking_pairs,
    near_exclusions,
    near_pairs,
    signatures,
)
from penstock.tokenize import Tokenizer, load_tokenizer, train_tokenizer

SHARED_TOKENIZERS = Path(__file__).resolve().parents[3] / "shared" / "data" / "tokenizers"

MASK = 2**32 - 1
Rows = npt.NDArray[np.uint16]


def mixed(number: int) -> int:
    number ^= number >> 16
    number = number * 0x7FEB352D & MASK
    number ^= number >> 15
    number = number * 0x846CA68B & MASK
    return number ^ number >> 16


def shingle_hash(ids: Sequence[int]) -> int:
    first, second = (left * 0x9E3779B1 + right for left, right in (ids[:2], ids[2:4]))
    return mixed(((first * 0x85EBCA77 + second) * 0xC2B2AE3D + ids[4]) & MASK)


@cache
def asked_by(own: int) -> list[int]:
    return sorted(range(SIGNATURE_BINS), key=lambda other: (mixed((other * 128 + own) * 0x9E3779B1 & MASK), other))


def slow_signature(ids: Sequence[int]) -> list[int]:
    """One document's row, a shingle at a time."""
    if len(ids) < MIN_NEAR_TOKENS:
        return [0] * SIGNATURE_BINS
    bins: dict[int, int] = {}
    for start in range(len(ids) - 4):
        value = shingle_hash(ids[start : start + 5])
        bins[value >> 25] = min(bins.get(value >> 25, MASK), value)
    row = []
    for own in range(SIGNATURE_BINS):
        filled = own if own in bins else next(other for other in asked_by(own) if other in bins)
        row.append(max((bins[filled] * 0x27D4EB2F & MASK) >> 16, 1))
    return row


def flat(documents: Sequence[Sequence[int]], dtype: Any = np.uint16) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    ids = np.array([number for document in documents for number in document], dtype)
    return ids, np.cumsum([0, *map(len, documents)], dtype=np.int64)


DOCUMENTS = st.lists(
    st.one_of(
        st.lists(st.integers(0, 65535), max_size=60),
        st.lists(st.integers(0, 2), min_size=MIN_NEAR_TOKENS, max_size=200),
        st.integers(0, 65535).map(lambda number: [number] * 100),
        st.integers(0, 2**32).map(lambda seed: random.Random(seed).choices(range(65536), k=400)),
    ),
    max_size=6,
)


@given(DOCUMENTS)
@settings(max_examples=40)
def test_signatures_equal_those_of_a_slow_twin(documents: list[list[int]]) -> None:
    assert signatures(*flat(documents)).tolist() == [slow_signature(document) for document in documents]


@given(DOCUMENTS, st.integers(5, 300), st.integers(1, 4))
@settings(max_examples=60)
def test_a_signature_depends_on_its_document_alone(documents: list[list[int]], chunk: int, group: int) -> None:
    expected = signatures(*flat(documents))
    alone = [signatures(*flat([document]))[0].tolist() for document in documents]
    assert expected.tolist() == alone
    assert np.array_equal(signatures(*flat(documents, np.uint32)), expected)
    tokens, starts = flat([[1, 2, 3], *documents, [4]])
    assert np.array_equal(signatures(tokens, starts[1:-1]), expected)  # a stretch of a longer array
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "CHUNK_TOKENS", chunk)
        patch.setattr(module, "GROUP_DOCUMENTS", group)
        assert np.array_equal(signatures(*flat(documents)), expected)


def test_large_ids_are_not_cut_to_16_bits() -> None:
    large = np.arange(100_000, 100_100, dtype=np.uint32)
    starts = np.array([0, 100], np.int64)
    assert not np.array_equal(signatures(large, starts), signatures(large % 65536, starts))


def test_no_documents_no_signatures() -> None:
    assert signatures(np.empty(0, np.uint16), np.zeros(1, np.int64)).shape == (0, SIGNATURE_BINS)
    assert signatures(np.empty(0, np.uint16), np.zeros(4, np.int64)).shape == (3, SIGNATURE_BINS)


def resembling_rows(seed: int, *, count: int, families: int, change: float) -> Rows:
    """Rows in families: each takes a founder's numbers but for a random share, at most twice `change`."""
    chance = np.random.default_rng(seed)
    founders = chance.integers(1, 2**16, (families, SIGNATURE_BINS), np.uint16)
    rows = founders[chance.integers(0, families, count)]
    rows[chance.random(rows.shape) < chance.random((count, 1)) * 2 * change] = chance.integers(1, 2**16)
    noisy = chance.random(rows.shape) < chance.random((count, 1)) * change
    rows[noisy] = chance.integers(1, 2**16, int(noisy.sum()))
    rows[chance.random(count) < 0.05] = 0  # too short for a signature
    return rows


def similarity(left: Rows, right: Rows) -> float:
    return float((left == right).mean()) if left[0] and right[0] else 0.0


def slow_exclusions(rows: Rows, split: npt.NDArray[Any], eligible: npt.NDArray[Any], threshold: float) -> list[int]:
    """The document that stands for each, by the words of the docstring."""
    stands = list(range(len(rows)))
    staying: list[int] = []
    for number in sorted(np.flatnonzero(eligible).tolist(), key=lambda each: (-int(split[each]), each)):
        near = [other for other in staying if similarity(rows[number], rows[other]) >= threshold]
        if near:
            stands[number] = near[0]
        else:
            staying.append(number)
    return stands


CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**32),
        "count": st.integers(0, 40),
        "families": st.integers(1, 8),
        "change": st.floats(0, 0.4),
    }
)


@given(
    CASES,
    st.sampled_from([0.51, 0.6, 0.7, 0.8, 0.95, 1.0]),
    st.sampled_from([1, 3, 1000]),
    st.sampled_from([-1, 1 / 8]),
)
@settings(max_examples=60)
def test_exclusions_equal_brute_force(case: dict[str, Any], threshold: float, block: int, dense: float) -> None:
    rows = resembling_rows(**case)
    chance = np.random.default_rng(case["seed"])
    split, eligible = chance.integers(0, 3, len(rows)).astype(np.uint8), chance.random(len(rows)) < 0.9
    expected = slow_exclusions(rows, split, eligible, threshold)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(near_choice, "BLOCK_ROWS", block)
        patch.setattr(near_choice, "DENSE_SHARE", dense)
        excluded, representative = near_exclusions(rows, split, eligible, threshold=threshold)
    assert representative.tolist() == expected
    assert excluded.tolist() == [stands != number for number, stands in enumerate(expected)]
    assert leaking_pairs(rows, split, eligible & ~excluded, threshold=threshold) == []


@given(CASES, st.sampled_from([0.51, 0.6, 0.7, 0.8, 0.95, 1.0]))
@settings(max_examples=30)
def test_pairs_equal_brute_force(case: dict[str, Any], threshold: float) -> None:
    rows = resembling_rows(**case)
    split = np.random.default_rng(case["seed"]).integers(0, 3, len(rows)).astype(np.uint8)
    numbers = range(len(rows))
    similar = [(i, j, similarity(rows[i], rows[j])) for i in numbers for j in numbers if i < j]
    expected = [pair for pair in similar if pair[2] >= threshold]
    left, right, estimate = near_pairs(rows, threshold=threshold)
    assert list(zip(left.tolist(), right.tolist(), estimate.tolist(), strict=True)) == expected
    leaks = leaking_pairs(rows, split, np.ones(len(rows), np.bool_), threshold=threshold, most=10**6)
    assert leaks == [(i, j, value) for i, j, value in expected if split[i] != split[j]]
    some = leaking_pairs(rows, split, np.ones(len(rows), np.bool_), threshold=threshold, most=3)
    assert len(some) == min(3, len(leaks))
    assert set(some) <= set(leaks)


def test_the_most_protected_copy_stays_and_chains_are_not_followed() -> None:
    rows = np.arange(1, SIGNATURE_BINS + 1, dtype=np.uint16)[None].repeat(4, axis=0)
    rows[1, :30] = 1000
    rows[2, :60] = 1000  # near the second, not near the first
    rows[3] = rows[0]
    train = np.zeros(4, np.uint8)
    assert near_exclusions(rows, train, train == 0)[1].tolist() == [0, 0, 2, 0]
    split = np.array([0, 2, 0, 1], np.uint8)
    assert near_exclusions(rows, split, train == 0)[1].tolist() == [1, 1, 1, 1]


def test_an_ineligible_document_neither_goes_nor_stands_for_another() -> None:
    rows = np.full((3, SIGNATURE_BINS), 7, np.uint16)
    excluded, representative = near_exclusions(rows, np.zeros(3, np.uint8), np.array([False, True, True]))
    assert excluded.tolist() == [False, False, True]
    assert representative.tolist() == [0, 1, 1]


def test_leaks_are_found_where_one_was_made() -> None:
    rows = np.random.default_rng(5).integers(1, 2**16, (500, SIGNATURE_BINS), np.uint16)
    rows[400] = rows[20]
    rows[400, :12] = 1
    rows[401] = rows[21]  # a near copy in the same split, no leak
    split = np.zeros(500, np.uint8)
    split[400] = 2
    everything = np.ones(500, np.bool_)
    assert leaking_pairs(rows, split, everything) == [(20, 400, 116 / 128)]
    assert leaking_pairs(rows, split, everything, threshold=0.95) == []
    everything[20] = False
    assert leaking_pairs(rows, split, everything) == []


@pytest.mark.parametrize("shared_bins", [2, 40, SIGNATURE_BINS])
def test_a_bucket_with_everything_in_it_makes_few_comparisons(
    shared_bins: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal bands make n²/2 = 2·10^8 candidate pairs; so many must never be looked at."""
    rows = np.random.default_rng(1).integers(1, 2**16, (20_000, SIGNATURE_BINS), np.uint16)
    rows[:, :shared_bins] = 77
    compared = 0
    alike = near_choice._Staying.alike

    def counting(staying: Any, left: Any, right: Any) -> Any:
        nonlocal compared
        compared += len(left)
        return alike(staying, left, right)

    monkeypatch.setattr(near_choice._Staying, "alike", counting)
    excluded, representative = near_exclusions(rows, np.zeros(len(rows), np.uint8), np.ones(len(rows), np.bool_))
    assert excluded.sum() == (len(rows) - 1 if shared_bins == SIGNATURE_BINS else 0)
    assert (representative[excluded] == 0).all()
    assert compared < 10 * len(rows)


@pytest.mark.parametrize("threshold", [0.5, 0.0, 1.01, float("nan")])
def test_a_threshold_that_means_nothing_is_refused(threshold: float) -> None:
    rows = np.ones((2, SIGNATURE_BINS), np.uint16)
    with pytest.raises(ConfigError, match="threshold"):
        near_pairs(rows, threshold=threshold)


def test_cluster_figures_add_up() -> None:
    representative = np.array([0, 0, 0, 3, 3, 5, *[6] * 200])
    excluded = representative != np.arange(len(representative))
    figures = cluster_figures(representative, excluded)
    assert figures["clusters"] == 3
    assert figures["largest"] == 200
    assert figures["excluded"] == 2 + 1 + 199
    assert figures["sizes"] == {"1": 1, "2": 1, "3-5": 1, "6-10": 0, "11-100": 0, "more": 1}
    eligible = np.arange(len(representative)) != 5
    assert cluster_figures(representative, excluded, eligible=eligible)["sizes"]["1"] == 0
    empty = cluster_figures(np.empty(0, np.int64), np.empty(0, np.bool_))
    assert empty["clusters"] == empty["largest"] == 0


@pytest.fixture(scope="module")
def vocabulary() -> Tokenizer:
    """A real vocabulary where there is one."""
    real = SHARED_TOKENIZERS / "gpt2.tokenizer.json"
    if real.exists():
        return load_tokenizer(str(real))
    return train_tokenizer([text.encode() for text in source_texts(200)], vocab_size=4096)


def test_files_that_share_a_licence_are_near_copies_only_if_they_were_without_it(vocabulary: Tokenizer) -> None:
    texts = [text for text in source_texts(120) if len(text) > 4000]
    licence = "# " + texts[0][:1500].replace("\n", "\n# ") + "\n"
    found = []
    for header, threshold in ((licence, NEAR_THRESHOLD), ("", 0.51)):
        tokens, starts = vocabulary.encode([(header + text).encode() for text in texts])
        left, right, _ = near_pairs(signatures(tokens, np.asarray(starts, np.int64)), threshold=threshold)
        found.append(set(zip(left.tolist(), right.tolist(), strict=True)))
    assert found[0] <= found[1]
    assert len(found[1]) < len(texts) / 10


@pytest.mark.torture(lane="I")
@pytest.mark.parametrize("only_replace", [False, True])
def test_planted_copies_are_found(
    vocabulary: Tokenizer, only_replace: bool, scale: Callable[..., int], torture_figures: Callable[..., None]
) -> None:
    """240 copies of each kind here, 12,600 in torture."""
    figures = measured_recall(
        vocabulary,
        source_texts(scale(test=40, torture=700)),
        copies=scale(test=1, torture=3),
        only_replace=only_replace,
    )
    change = "replaced" if only_replace else "replaced, deleted or inserted"
    for row in figures["shares"]:
        torture_figures(
            lane="I",
            case=f"near copies, {100 * row['changed']:g} % of lines {change}",
            trials=row["copies"],
            failures=0 if row["changed"] > 0.05 or row["found"] > 0.99 * row["copies"] else 1,
            found=row["found"],
            mean_similarity=round(row["mean_similarity"], 3),
            **({"allowed": "1 %"} if row["changed"] <= 0.05 else {"allowed": "any: below the threshold or near it"}),
        )
    torture_figures(
        lane="I",
        case=f"near copies over the threshold, lines {change}",
        trials=figures["above_threshold"],
        failures=int(figures["found_above_threshold"] < 0.93 * figures["above_threshold"]),
        found=figures["found_above_threshold"],
        allowed="7 %: estimates are off by 0.04",
    )
    for row in figures["shares"]:
        assert row["changed"] > 0.05 or row["found"] > 0.99 * row["copies"]
        assert row["estimate_error"] < 1.5 * row["expected_error"]
    # Estimates are off by 0.04: a copy just above the threshold is found half the time, one just below as often.
    assert figures["recall"] > 0.93
    assert figures["precision"] > 0.9
    assert figures["pairs_clearly_below"] < 0.003 * figures["pairs_found"]
