"""What changed between versions: the same as a comparison document by document, and readable where a store is hurt."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import DamagedStoreError, NotAStoreError, StoreError
from penstock.store import open_store
from penstock.store.versions import diff_versions, log_versions

from .samples import MemorySource, build, bytes_tokenizer, contents, document, files, forged_array

KINDS = ("added", "removed", "changed", "moved", "split_changed")


def slow_diff(path, before: int, after: int) -> dict[str, set[str]]:
    """The slow reader: every document of both versions as a Python object."""
    sides = []
    for version in (before, after):
        with open_store(path, version=version) as store:
            rows = store.provenance().to_pylist()
            sides.append(
                {
                    row["key"].decode(): (
                        (row["content_hash"], row["token_hash"]),
                        store.manifest.reasons[store.arrays["reason"][number]],
                        store.manifest.splits[store.arrays["split"][number]],
                    )
                    for number, row in enumerate(rows)
                }
            )
    one, other = sides
    both = one.keys() & other.keys()
    return {
        "added": other.keys() - one.keys(),
        "removed": one.keys() - other.keys(),
        "changed": {key for key in both if one[key][0] != other[key][0]},
        "moved": {key for key in both if one[key][1] != other[key][1]},
        "split_changed": {key for key in both if one[key][2] != other[key][2]},
        "unchanged": {key for key in both if one[key] == other[key]},
    }


def assert_agrees(path, before: int, after: int):
    found, wanted = diff_versions(path, before, after, most=10**6), slow_diff(path, before, after)
    for kind in KINDS:
        change = getattr(found, kind)
        assert {one.key for one in change.shown} == wanted[kind], kind
        assert change.documents == len(wanted[kind]) == sum(change.kinds.values())
    assert found.unchanged == len(wanted["unchanged"])
    return found


corpora = st.dictionaries(st.sampled_from("abcdefgh"), st.sampled_from(["one", "two", "three", "four"]), min_size=1)


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(corpora, corpora, st.sampled_from(["exact", "off"]), st.integers(0, 1))
def test_the_same_as_a_comparison_document_by_document(scratch, before, after, dedup, seed):
    path = scratch / str(len(list(scratch.iterdir())))
    build(path, MemorySource([document(key, text.encode()) for key, text in before.items()]))
    second = build(
        path, MemorySource([document(key, text.encode()) for key, text in after.items()]), dedup=dedup, seed=seed
    )
    found = assert_agrees(path, 1, second.manifest.version)
    assert found.tokens_after - found.tokens_before == sum(
        change.tokens_after - change.tokens_before for change in (found.added, found.removed)
    ) + _kept_tokens_of_common(found)
    if not seed:
        assert found.split_changed.documents == 0


def _kept_tokens_of_common(found) -> int:
    """Tokens that documents of both versions gained or lost, each counted once though it may be changed and moved."""
    by_key = {one.key: one for change in (found.changed, found.moved) for one in change.shown}
    return sum(
        (one.tokens_after if one.status_after == "kept" else 0)
        - (one.tokens_before if one.status_before == "kept" else 0)
        for one in by_key.values()
    )


def test_files_changed_added_and_removed(scratch, corpus, updated_corpus):
    build(scratch / "store", files(corpus))
    build(scratch / "store", files(updated_corpus))
    found = assert_agrees(scratch / "store", 1, 2)
    assert [one.key for one in found.changed.shown] == ["corpus/part1/4.txt"]
    assert [one.key for one in found.added.shown] == ["corpus/part2/new.txt"]
    assert [one.key for one in found.removed.shown] == ["corpus/part0/6.txt"]
    assert (found.changed.kinds, found.differences) == ({"content": 1}, ())
    back = assert_agrees(scratch / "store", 2, 1)
    assert [one.key for one in back.added.shown] == ["corpus/part0/6.txt"]
    same = assert_agrees(scratch / "store", 2, 2)
    assert [getattr(same, kind).documents for kind in KINDS] == [0] * 5

    newest, oldest = log_versions(scratch / "store")
    assert (newest.version, newest.added, newest.removed, newest.changed) == (2, 1, 1, 1)
    assert (oldest.version, oldest.added, oldest.removed, oldest.changed) == (1, None, None, None)
    assert newest.differences == oldest.differences == ()
    with open_store(scratch / "store") as store:
        assert (newest.documents, newest.tokens) == tuple(
            store.manifest.counts[name] for name in ("documents", "tokens")
        )
        assert newest.digest == store.digest


def test_options_and_tokenizer_in_words(built, corpus):
    build(built, files(corpus), dedup="off", split="train=50,val=50")
    build(
        built,
        files(corpus),
        dedup="off",
        split="train=50,val=50",
        tokenizer=bytes_tokenizer(controls={"<|user|>": 256, "<|endoftext|>": 257}),
    )
    build(
        built, files(corpus), MemorySource([document("a", b"text")], name="more"), dedup="off", split="train=50,val=50"
    )
    found = assert_agrees(built, 1, 2)
    assert any("dedup was exact, is off" in line for line in found.differences)
    assert any("split was train 0.6" in line for line in found.differences)
    assert found.split_changed.documents
    assert all(way.endswith(("to train", "to val")) for way in found.split_changed.kinds)
    tokens_alone = assert_agrees(built, 2, 3)
    assert tokens_alone.changed.kinds == {"tokens alone": tokens_alone.changed.documents}
    assert [line.split(" ")[0] for line in tokens_alone.differences] == ["tokenizer"]
    more = log_versions(built)[0]
    assert (more.added, more.removed) == (1, 0)
    assert [line for line in more.differences if "source more" in line] == ["source more is new (memory)"]


def test_only_so_many_are_named(scratch, corpus):
    build(scratch / "store", MemorySource([document("a", b"a")]))
    build(scratch / "store", MemorySource([document(f"{number:03}", b"%d" % number) for number in range(50)]))
    found = diff_versions(scratch / "store", 1, 2, most=3)
    assert [one.key for one in found.added.shown] == ["000", "001", "002"]
    assert found.added.documents == 50
    assert diff_versions(scratch / "store", 1, 2, most=0).added.shown == ()


def test_names_that_are_no_text_come_back_printable(scratch):
    build(scratch / "store", MemorySource([document("a", b"a")]))
    odd = dataclasses.replace(document("a", b"b"), key=b"\x1b[31m\n\xff")
    build(scratch / "store", MemorySource([odd]))
    [one] = diff_versions(scratch / "store", 1, 2).added.shown
    assert one.key.isprintable()


def test_versions_that_are_not_there(built, scratch):
    for versions in ((1, 2), (0, 1), (-1, 1), (2**40, 1)):
        with pytest.raises(StoreError, match="no version") as caught:
            diff_versions(built, *versions)
        assert "versions: 1" in caught.value.hint
    for path in (scratch / "absent", scratch / "corpus"):
        with pytest.raises(NotAStoreError):
            log_versions(path)
        with pytest.raises(NotAStoreError):
            diff_versions(path, 1, 1)


def test_damage_is_listed_and_the_rest_is_told(built, updated_corpus, corpus):
    build(built, files(updated_corpus))
    build(built, files(corpus))
    manifest = built / "manifests" / "000002.json"
    whole = manifest.read_bytes()
    manifest.write_bytes(whole[:-40])
    before = contents(built)
    newest, middle, oldest = log_versions(built)
    assert middle.problem is not None
    assert "000002.json" in middle.problem
    assert (middle.documents, middle.digest, oldest.problem, newest.problem) == (None, None, None, None)
    assert (newest.added, newest.removed, newest.changed) == (0, 0, 0)  # against version 1, the last whole one
    with pytest.raises(DamagedStoreError):
        diff_versions(built, 1, 2)
    assert contents(built) == before

    manifest.write_bytes(whole)
    forged_array(built, "split", lambda array: array.__setitem__(0, 77), version=2)
    newest, middle, oldest = log_versions(built)
    assert middle.problem is not None
    assert middle.documents is not None
    assert newest.added is None
