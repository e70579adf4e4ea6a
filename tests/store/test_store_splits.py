"""Which split a document is in and which copies go, against a slow reference and on real stores."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError
from penstock.sources import sources_from_inputs
from penstock.store import PrepareOptions, open_store, prepare, verify
from penstock.store.index import exclusion_reasons
from penstock.store.layout import REASONS
from penstock.store.splits import DEFAULT_SPLIT, MAX_SPLITS, group_hash, parse_split, split_numbers

from .samples import MemorySource, build, document, files

TOP = 2**64 - 1


def names(shares: dict[str, float], *hashes: int) -> list[str]:
    return [list(shares)[number] for number in split_numbers(np.array(hashes, np.uint64), shares)]


# Copies


def slow_reasons(contents: list[int], splits: list[int], *, drop_duplicates: bool) -> list[str]:
    """The rule as the design says it, one document at a time."""
    most_protected = {
        content: max(s for c, s in zip(contents, splits, strict=True) if c == content) for content in contents
    }
    seen = set()
    reasons = []
    for content, split in zip(contents, splits, strict=True):
        if split != most_protected[content]:
            reasons.append("copy-across-splits")
        elif drop_duplicates and content in seen:
            reasons.append("duplicate")
        else:
            seen.add(content)
            reasons.append("kept")
    return reasons


def hashes_of(contents: list[int]) -> np.ndarray:
    """[documents, 4]; two contents differ in one word only, and in which one depends on the pair."""
    rows = [[content // 3 % 3, content % 3, 7, content // 9] for content in contents]
    return np.array(rows, np.uint64).reshape(-1, 4)


@settings(max_examples=300, deadline=None)
@given(documents=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 3)), max_size=40), drop_duplicates=st.booleans())
def test_exclusion_follows_the_rule(documents, drop_duplicates):
    contents, splits = [content for content, _ in documents], [split for _, split in documents]
    numbers = exclusion_reasons(hashes_of(contents), np.array(splits, np.uint8), drop_duplicates=drop_duplicates)
    assert [REASONS[number] for number in numbers] == slow_reasons(contents, splits, drop_duplicates=drop_duplicates)
    kept = defaultdict(list)
    for content, split, number in zip(contents, splits, numbers, strict=True):
        if REASONS[number] == "kept":
            kept[content].append(split)
    assert set(kept) == set(contents)  # no content is lost
    assert all(len(set(where)) == 1 for where in kept.values())  # none is in two splits
    assert not drop_duplicates or all(len(where) == 1 for where in kept.values())


@pytest.mark.parametrize("dedup", ["exact", "off"])
def test_copies_in_a_real_store(scratch, dedup):
    """Forty documents of five contents: every content is in one split, the most protected it was ever placed in."""
    texts = [b"content %d" % (number % 5) for number in range(40)]
    source = MemorySource([document(f"{number:02}", text) for number, text in enumerate(texts)])
    build(scratch / "store", source, dedup=dedup)
    with open_store(scratch / "store") as store:
        splits = store.arrays["split"].tolist()
        expected = slow_reasons([number % 5 for number in range(40)], splits, drop_duplicates=dedup == "exact")
        assert [REASONS[number] for number in store.arrays["reason"]] == expected
        assert len(set(splits)) == 3
        kept = store.kept_documents().tolist()
        assert len(kept) == 5 if dedup == "exact" else len(kept) > 5
        assert sum(len(store.kept_documents(name)) for name in store.manifest.splits) == len(kept)
        skipped = store.manifest.counts["skipped"]
        assert sum(skipped.values()) + len(kept) == 40
        assert skipped == {name: expected.count(name) for name in REASONS[1:] if name in expected}
    assert verify(scratch / "store") == []


# Splits


def test_shares_are_met_in_expectation():
    shares = parse_split(DEFAULT_SPLIT)
    hashes = np.array([group_hash(b"group %d" % number, seed=3) for number in range(100_000)], np.uint64)
    achieved = np.bincount(split_numbers(hashes, shares), minlength=3) / len(hashes)
    assert np.abs(achieved - list(shares.values())).max() < 0.01
    assert np.abs(achieved - list(shares.values())).max() > 0  # drawn, not dealt out


@settings(max_examples=200, deadline=None)
@given(
    shares=st.lists(st.floats(0, 1e9) | st.integers(0, 3), min_size=1, max_size=8).filter(lambda s: sum(s) > 0),
    hashes=st.lists(st.integers(0, TOP), min_size=1, max_size=20),
)
def test_a_split_is_where_the_hash_falls_among_the_shares(shares, hashes):
    parsed = parse_split(",".join(f"s{number}={share!r}" for number, share in enumerate(shares)))
    assert sum(parsed.values()) == pytest.approx(1)
    numbers = split_numbers(np.array([0, TOP, *hashes], np.uint64), parsed)
    values = list(parsed.values())
    for number, value in zip(numbers.tolist(), [0, TOP, *hashes], strict=True):
        assert values[number] > 0
        below = sum(values[:number])
        assert below - 1e-9 <= value / 2**64 <= below + values[number] + 1e-9
    together = split_numbers(np.array(sorted(hashes), np.uint64), parsed)
    assert (np.diff(together.astype(int)) >= 0).all()


def test_a_split_without_a_share_gets_nothing_and_one_with_all_gets_all():
    hashes = [0, 1, 2**63, TOP - 1, TOP]
    assert names(parse_split("train=100"), *hashes) == ["train"] * 5
    assert names(parse_split("train=100,val=0,test=0"), *hashes) == ["train"] * 5
    assert names(parse_split("train=0,val=100,test=0"), *hashes) == ["val"] * 5
    assert names(parse_split("train=0,val=0,test=100"), *hashes) == ["test"] * 5
    assert names(parse_split("a=1,b=0,c=1"), *hashes) == ["a", "a", "c", "c", "c"]
    thirds = ",".join(f"s{number}=0.1" for number in range(10)) + ",none=0"  # ten tenths add up to less than one
    assert names(parse_split(thirds), TOP) == ["s9"]


@pytest.mark.parametrize(
    "text",
    [
        "", ",", "train", "train=", "train=x", "=5", "train=nan,val=1", "train=inf", "train=-1,val=2", "train=0",
        "train=0,val=0", "train=1,train=2", "a b=1", "1=1", "train=1,,val=2", "train=1e308,val=1e308", "train=1;val=2",
        "../x=1",
    ],
)  # fmt: skip
def test_a_split_that_makes_no_sense_is_refused(scratch, corpus, text):
    with pytest.raises(ConfigError) as caught:
        parse_split(text)
    assert DEFAULT_SPLIT in caught.value.hint
    with pytest.raises(ConfigError):
        build(scratch / "store", files(corpus), split=text)
    assert not (scratch / "store").exists()


def test_more_splits_than_fit_their_array_are_refused():
    assert len(parse_split(",".join(f"s{number}=1" for number in range(MAX_SPLITS)))) == MAX_SPLITS
    with pytest.raises(ConfigError, match=str(MAX_SPLITS + 1)):
        parse_split(",".join(f"s{number}=1" for number in range(MAX_SPLITS + 1)))


def splits_by_key(path) -> dict[bytes, str]:
    with open_store(path) as store:
        keys = store.provenance()["key"].to_pylist()
        return {key: store.manifest.splits[number] for key, number in zip(keys, store.arrays["split"], strict=True)}


def test_a_thousand_more_files_move_no_document(scratch, corpus):
    build(scratch / "store", files(corpus))
    before = splits_by_key(scratch / "store")
    assert len(set(before.values())) == 3
    for number in range(1000):
        (corpus / f"part{number % 3}" / f"added-{number}.txt").write_text(f"added {number}")
    build(scratch / "store", files(corpus), unit_bytes=4000)
    after = splits_by_key(scratch / "store")
    assert len(after) == len(before) + 1000
    assert {key: after[key] for key in before} == before
    counted = np.unique(list(after.values()), return_counts=True)
    assert dict(zip(*(values.tolist() for values in counted), strict=True))["train"] == pytest.approx(600, abs=60)


def test_documents_of_a_group_are_never_parted(scratch):
    documents = [document(f"{n:03}", b"text %d" % n, group=f"group {n % 21}") for n in range(210)]
    build(scratch / "store", MemorySource(documents))
    groups = defaultdict(set)
    for key, split in splits_by_key(scratch / "store").items():
        groups[int(key) % 21].add(split)
    assert all(len(found) == 1 for found in groups.values())
    assert len(set.union(*groups.values())) > 1


def test_the_seed_deals_anew(scratch, corpus):
    first = build(scratch / "first", files(corpus)) and splits_by_key(scratch / "first")
    second = build(scratch / "second", files(corpus), seed=7) and splits_by_key(scratch / "second")
    assert first.keys() == second.keys()
    assert first != second


# Splits that the data came with


def test_sources_named_after_splits_are_them(tmp_path):
    for name, texts in {"train": ["a b c", "d e f", "in two"], "val": ["g h", "in two"], "test": ["k l"]}.items():
        lines = "".join(f'{{"text": "{text}"}}\n' for text in texts)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    words = [f"{name}={tmp_path / name}.jsonl" for name in ("train", "val", "test")]
    prepare(sources_from_inputs(words), tmp_path / "store", options=PrepareOptions(split_by="source", vocab_size=300))
    with open_store(tmp_path / "store") as store:
        assert {name: one["documents"] for name, one in store.manifest.counts["splits"].items()} == {
            "train": 2,
            "val": 2,
            "test": 1,
        }
        assert store.manifest.counts["skipped"] == {"copy-across-splits": 1}
    assert verify(tmp_path / "store") == []


def test_a_source_named_after_no_split_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "a"}\n')
    with pytest.raises(ConfigError, match=r"a\.jsonl.*train, val, test"):
        prepare(
            sources_from_inputs([str(tmp_path / "a.jsonl")]),
            tmp_path / "store",
            options=PrepareOptions(split_by="source"),
        )
    assert not (tmp_path / "store").exists()
