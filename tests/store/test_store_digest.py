"""Same in, same out: the digest depends on content, tokenizer and options, and on nothing else."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil

import numpy as np
import pytest

from penstock.errors import StoreError
from penstock.sources import Part, PartKind
from penstock.store import list_versions, open_store, prepare, verify
from penstock.store.layout import REASONS

from .samples import (
    BYTES,
    END,
    FOLDERS,
    GOLDEN_CONVERSATION,
    GOLDEN_FILES,
    GOLDEN_UPDATED,
    OPTIONS,
    MemorySource,
    build,
    bytes_tokenizer,
    contents,
    document,
    files,
    stray_files,
    update_corpus,
    without_cache,
    write_corpus,
)


def tokens_by_key(store) -> dict[bytes, list[int]]:
    keys = store.provenance()["key"].to_pylist()
    return {key: store.document_tokens(number).tolist() for number, key in enumerate(keys)}


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("unit_bytes", [1, 300, 1000, 2**25])
def test_the_golden_digest_for_any_workers_and_units(scratch, corpus, workers, unit_bytes):
    result = build(scratch / "store", files(corpus), workers=workers, unit_bytes=unit_bytes)
    assert result.manifest.digest == GOLDEN_FILES
    assert result.units == {1: 12, 300: 8, 1000: 3, 2**25: 1}[unit_bytes]
    assert verify(scratch / "store") == []


def test_two_sources_in_either_order(scratch, corpus):
    (other := scratch / "other").mkdir()
    (other / "a.txt").write_text("another folder\n")
    (other / "copy.txt").write_bytes((corpus / "part1" / "4.txt").read_bytes())
    sources = [files(corpus), files(other, "other")]
    digests = set()
    for number, (order, unit_bytes) in enumerate(itertools.product([sources, sources[::-1]], [1, 1000])):
        result = build(scratch / f"store{number}", *order, unit_bytes=unit_bytes, workers=2)
        assert [source["name"] for source in result.manifest.sources] == ["corpus", "other"]
        digests.add(result.manifest.digest)
    assert len(digests) == 1
    assert GOLDEN_FILES not in digests


def test_the_store_holds_the_bytes_of_the_files(scratch, corpus):
    """The slow reference: a document is its file's bytes and one end token, whatever the text spells."""
    build(scratch / "store", files(corpus))
    documents = {
        f"corpus/{path.relative_to(corpus)}".encode(): [*path.read_bytes(), END]
        for path in corpus.rglob("*.txt")
        if path.stat().st_size
    }
    with open_store(scratch / "store") as store:
        assert tokens_by_key(store) == documents
        assert store.provenance()["key"].to_pylist() == sorted(documents)
        kept = store.kept_documents()
        assert store.manifest.counts["documents"] == len(kept) == 10
        assert store.manifest.counts["tokens"] == sum(len(store.document_tokens(int(number))) for number in kept)
        assert store.manifest.counts["found"] == 14
        assert store.manifest.counts["skipped"] == {"binary": 1, "copy-across-splits": 1, "empty": 1, "hidden": 1}


def test_what_lies_on_the_disk_is_what_the_manifests_name(scratch, corpus, updated_corpus):
    store = scratch / "store"
    build(store, files(corpus))
    assert stray_files(store) == set()
    assert sorted(path.name for path in store.iterdir()) == sorted(FOLDERS)
    assert list((store / "work").iterdir()) == []
    build(store, files(updated_corpus))
    assert stray_files(store) == set()
    assert list((store / "work").iterdir()) == []


def test_what_no_part_of_the_meaning_changes_no_digest(scratch, corpus):
    elsewhere = shutil.copytree(corpus, scratch / "moved" / "elsewhere")
    for path in elsewhere.rglob("*"):
        path.chmod(0o700)
    respelt = bytes_tokenizer(spelling=2)
    result = build(scratch / "store", files(elsewhere), tokenizer=respelt)
    assert result.manifest.digest == GOLDEN_FILES
    assert result.manifest.sources == [{"name": "corpus", "location": str(elsewhere)}]


@pytest.mark.parametrize(
    "changes",
    [
        {"seed": 1},
        {"dedup": "off"},
        {"split": "train=60,test=20,val=20"},
        {"split": "train=50,val=25,test=25"},
        {"tokenizer": bytes_tokenizer(controls={"<|endoftext|>": 256})},
        {"tokenizer": bytes_tokenizer(controls={"<|endoftext|>": 300, "<|user|>": 257})},
    ],
)
def test_what_changes_the_meaning_changes_the_digest(scratch, corpus, changes):
    assert build(scratch / "store", files(corpus), **changes).manifest.digest != GOLDEN_FILES
    assert verify(scratch / "store") == []


def test_the_name_of_a_source_is_part_of_the_keys(scratch, corpus):
    assert build(scratch / "store", files(corpus, "another")).manifest.digest != GOLDEN_FILES


# Built in steps


class TestIncremental:
    def test_an_update_is_a_fresh_build_and_the_old_version_stays(self, built, corpus, updated_corpus, scratch):
        with open_store(built) as store:
            before = tokens_by_key(store)
        result = build(built, files(updated_corpus))
        assert (result.manifest.version, result.manifest.digest) == (2, GOLDEN_UPDATED)
        assert result.committed
        assert result.documents_reused == 9  # eleven, less the changed and the removed one
        fresh = build(scratch / "fresh", files(updated_corpus))
        assert fresh.documents_reused == 0
        assert (fresh.manifest.version, fresh.manifest.digest) == (1, GOLDEN_UPDATED)
        assert result.manifest.counts == fresh.manifest.counts
        with open_store(built) as store, open_store(scratch / "fresh") as other:
            assert tokens_by_key(store) == tokens_by_key(other)
        for old in (open_store(f"{built}@1"), open_store(built, version=1)):
            with old:
                assert (old.version, old.digest) == (1, GOLDEN_FILES)
                assert tokens_by_key(old) == before
        assert verify(built) == []
        with pytest.raises(StoreError, match="no version 3"):
            open_store(f"{built}@3")

    def test_only_new_tokens_are_written(self, built, updated_corpus):
        segments = set((built / "segments").iterdir())
        build(built, files(updated_corpus))
        added = sum(path.stat().st_size for path in set((built / "segments").iterdir()) - segments)
        new = [updated_corpus / "part1" / "4.txt", updated_corpus / "part2" / "new.txt"]
        payload = sum(2 * (path.stat().st_size + 1) for path in new)
        assert added == payload + 8 * 2  # each in a unit and segment of its own, with one block each

    def test_a_rerun_without_change_commits_nothing_and_writes_nothing(self, built, corpus):
        before = without_cache(built)
        result = build(built, files(corpus))
        assert not result.committed
        assert (result.manifest.version, result.documents_reused) == (1, 11)
        assert without_cache(built) == before

    def test_going_back_is_a_new_version_with_the_old_digest(self, built, corpus, updated_corpus):
        build(built, files(updated_corpus))
        result = build(built, files(corpus))
        assert (result.manifest.version, result.manifest.digest) == (3, GOLDEN_FILES)
        assert list_versions(built) == [1, 2, 3]
        assert verify(built) == []
        assert stray_files(built) == set()

    def test_other_options_write_an_index_and_no_tokens(self, built, corpus):
        segments = {name: data for name, data in contents(built).items() if name.startswith("segments/")}
        result = build(built, files(corpus), dedup="off", split="all=1")
        assert (result.manifest.version, result.documents_reused) == (2, 11)
        assert {name: data for name, data in contents(built).items() if name.startswith("segments/")} == segments
        with open_store(built) as store:
            assert store.kept_documents("all").tolist() == list(range(11))

    def test_another_tokenizer_encodes_everything_again(self, built, corpus):
        wider = bytes_tokenizer(controls={"<|endoftext|>": 70_000})
        result = build(built, files(corpus), tokenizer=wider)
        assert (result.manifest.version, result.documents_reused) == (2, 0)
        with open_store(built) as new, open_store(built, version=1) as old:
            assert (new.dtype, old.dtype) == (np.dtype("<u4"), np.dtype("<u2"))
            for number in range(11):
                assert new.document_tokens(number)[:-1].tolist() == old.document_tokens(number)[:-1].tolist()
                assert (new.document_tokens(number)[-1], old.document_tokens(number)[-1]) == (70_000, 256)
        assert verify(built) == []

    def test_another_spelling_of_the_tokenizer_leaves_the_old_version_whole(self, built, updated_corpus):
        """Its digest is the same and its file isn't: both versions name their own."""
        result = build(built, files(updated_corpus), tokenizer=bytes_tokenizer(spelling=1))
        assert result.manifest.digest == GOLDEN_UPDATED
        assert result.documents_reused == 9
        assert verify(built) == []
        with open_store(built, version=1) as old:
            assert old.tokenizer().spec.source_json == BYTES.spec.source_json

    def test_without_a_tokenizer_a_store_keeps_its_own(self, built, updated_corpus):
        result = prepare([files(updated_corpus)], built, options=OPTIONS)
        assert (result.manifest.digest, result.documents_reused) == (GOLDEN_UPDATED, 9)

    def test_without_a_tokenizer_a_new_store_trains_the_same_one_whatever_the_units(self, scratch, corpus):
        digests = {
            prepare(
                [files(corpus)],
                scratch / f"store{unit_bytes}",
                options=dataclasses.replace(OPTIONS, vocab_size=300, unit_bytes=unit_bytes),
            ).manifest.digest
            for unit_bytes in (1, 2**20)
        }
        assert len(digests) == 1

    def test_damaged_tokens_are_not_taken_into_a_new_version(self, built, corpus, updated_corpus):
        with open_store(built) as store:
            segment = int(store.arrays["segment"][0])
            path = store.segment(segment).path
        path.write_bytes(bytes([path.read_bytes()[0] ^ 1]) + path.read_bytes()[1:])
        assert verify(built) != []
        build(built.with_name("fresh"), files(updated_corpus))
        result = build(built, files(updated_corpus))
        assert result.manifest.digest == GOLDEN_UPDATED
        assert result.documents_reused < 9
        with open_store(built) as store, open_store(built.with_name("fresh")) as fresh:
            assert tokens_by_key(store) == tokens_by_key(fresh)
        # Encoding a whole unit again gives the same segment, under the same name: the damage is mended as well.
        assert verify(built) == []

    def test_many_updates_in_a_row_agree_with_fresh_builds(self, scratch, corpus):
        for step in range(6):
            if step % 3 == 0:
                update_corpus(write_corpus(corpus))
            else:
                (corpus / f"step{step}.txt").write_text(f"step {step} " * step)
                (corpus / "part1" / "1.txt").write_text(f"again {step}")
            result = build(scratch / "store", files(corpus), unit_bytes=100 * (step + 1), workers=1 + step % 2)
            assert result.manifest.digest == build(scratch / f"fresh{step}", files(corpus)).manifest.digest
        assert verify(scratch / "store") == []
        assert stray_files(scratch / "store") == set()


# Documents of parts

CONVERSATION = [
    document("plain", b"no parts at all"),
    document("asked", Part(data=b"question? ", loss=False), b"answer."),
    document(
        "turns",
        Part(data=b"<|user|>", kind=PartKind.CONTROL, loss=False),
        Part(data=b"hello", loss=False),
        Part(data=b"<|endoftext|>", kind=PartKind.CONTROL),
        b"good day",
    ),
    document("whole", Part(data=b"<|user|>", kind=PartKind.CONTROL), b"hi"),
]


def loss_of(store, number: int) -> list[bool]:
    """Whether each token of a document carries loss, from the index as the format describes it."""
    length = int(store.arrays["length"][number])
    found = np.flatnonzero(store.arrays["loss_documents"] == number)
    if not len(found):
        return [True] * length
    [place] = found.tolist()
    start, end = (int(value) for value in store.arrays["loss_starts"][place : place + 2])
    carries = [False] * length
    for first, count in store.arrays["loss_runs"].reshape(-1, 2)[start:end].tolist():
        carries[first : first + count] = [True] * count
    return carries


class TestDocumentsOfParts:
    def test_tokens_and_loss_runs_come_back(self, scratch):
        result = build(scratch / "store", MemorySource(CONVERSATION))
        assert result.manifest.digest == GOLDEN_CONVERSATION
        with open_store(scratch / "store") as store:
            assert store.provenance()["key"].to_pylist() == [b"asked", b"plain", b"turns", b"whole"]
            asked, plain, turns, whole = (store.document_tokens(number).tolist() for number in range(4))
            assert asked == [*b"question? answer.", END]
            assert plain == [*b"no parts at all", END]
            assert turns == [257, *b"hello", 256, *b"good day", END]
            assert whole == [257, *b"hi", END]
            assert store.arrays["loss_documents"].tolist() == [0, 2]
            assert loss_of(store, 0) == [False] * 10 + [True] * 8
            assert loss_of(store, 1) == [True] * 16
            assert loss_of(store, 2) == [False] * 6 + [True] * 10
            assert loss_of(store, 3) == [True] * 4
        assert verify(scratch / "store") == []

    def test_the_digest_depends_on_the_loss_runs(self, scratch):
        loss = [dataclasses.replace(part, loss=True) for part in CONVERSATION[1].parts]
        changed = [*CONVERSATION[:1], document("asked", *loss), *CONVERSATION[2:]]
        assert build(scratch / "store", MemorySource(changed)).manifest.digest != GOLDEN_CONVERSATION

    @pytest.mark.parametrize("first", [CONVERSATION, CONVERSATION[:2], CONVERSATION[2:]])
    def test_built_in_steps(self, scratch, first):
        build(scratch / "store", MemorySource(first))
        result = build(scratch / "store", MemorySource(CONVERSATION))
        assert result.manifest.digest == GOLDEN_CONVERSATION
        assert verify(scratch / "store") == []

    def test_text_that_quotes_a_control_token_never_gets_it_from_an_older_version(self, scratch):
        """Both documents have the same bytes; only in one of them are the first eight a control token."""
        build(scratch / "store", MemorySource([CONVERSATION[3]]))
        quoting = [document("quoting", b"<|user|>hi")]
        result = build(scratch / "store", MemorySource(quoting))
        assert result.documents_reused == 0
        with open_store(scratch / "store") as store:
            assert store.document_tokens(0).tolist() == [*b"<|user|>hi", END]
        assert result.manifest.digest == build(scratch / "fresh", MemorySource(quoting)).manifest.digest

    def test_documents_without_loss_on_a_part_are_not_taken_for_plain_ones(self, scratch):
        build(scratch / "store", MemorySource([CONVERSATION[1]]))
        plain = [document("plain", b"question? answer.")]
        result = build(scratch / "store", MemorySource(plain))
        assert result.manifest.digest == build(scratch / "fresh", MemorySource(plain)).manifest.digest
        with open_store(scratch / "store") as store:
            assert len(store.arrays["loss_documents"]) == 0


def test_reasons_are_in_the_manifest_for_strangers(built):
    manifest = json.loads((built / "manifests" / "000001.json").read_bytes())
    assert manifest["reasons"] == list(REASONS)
