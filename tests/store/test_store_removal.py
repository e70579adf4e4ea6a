"""What is removed stays out, and with `prune` its bytes are gone; a failure on the way loses nothing."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from penstock.errors import ConfigError, DiskError, NotAStoreError, StoreError
from penstock.store import list_versions, open_store, prune, remove, verify

from .samples import FailAt, build, contents, files, stray_files, update_corpus, with_loss_runs

MARK = b"Document 7"


def tokens_on_disk(store) -> bytes:
    """The tokens of all segments as the text they are: one id is one byte."""
    return b"".join(
        np.frombuffer(data, "<u2").astype(np.uint8).tobytes()
        for name, data in contents(store).items()
        if name.endswith(".tokens")
    )


@pytest.fixture
def built(scratch, corpus):
    """All documents in one segment, so that removing one leaves dead tokens."""
    build(scratch / "store", files(corpus), unit_bytes=10**6)
    return scratch / "store"


class TestRemove:
    def test_by_pattern(self, built, corpus, scratch):
        done = remove(built, ["corpus/part1/*"])
        assert (done.documents, done.committed, done.manifest.version) == (3, True, 2)
        assert done.examples == [f"corpus/part1/{n}.txt" for n in (1, 4, 7)]
        assert done.manifest.counts["skipped"]["removed"] == 3
        assert done.manifest.counts["found"] == open_store(built, version=1).manifest.counts["found"]
        fresh = build(scratch / "fresh", files(corpus), block=("corpus/part1/*",))
        assert (done.manifest.digest, done.manifest.counts) == (fresh.manifest.digest, fresh.manifest.counts)
        assert verify(built) == []

    def test_by_content_wherever_it_is(self, built, corpus):
        with open_store(built) as store:
            content = store.provenance()["content_hash"][0].as_py().hex()  # copy.txt is part0/3.txt
        assert remove(built, [f"content:{content}"]).documents == 2
        (corpus / "another.txt").write_bytes((corpus / "copy.txt").read_bytes())
        result = build(built, files(corpus))
        assert result.manifest.counts["skipped"]["removed"] == 3

    def test_later_runs_honour_it_before_they_encode(self, built, corpus):
        remove(built, ["*7.txt"])
        prune(built, compact=True)
        (corpus / "part1" / "7.txt").write_bytes(MARK + b" is back, and changed")
        (corpus / "17.txt").write_bytes(MARK + b" under another name")
        result = build(built, files(corpus))
        assert result.manifest.options["blocklist"] == ["*7.txt"]
        assert result.manifest.counts["skipped"]["removed"] == 2
        assert MARK not in tokens_on_disk(built)

    def test_nothing_new_commits_nothing(self, built):
        assert remove(built, ["no/such"]).committed  # the rule itself is news
        assert not remove(built, ["no/such"]).committed
        assert list_versions(built) == [1, 2]

    def test_everything_is_refused(self, built):
        with pytest.raises(ConfigError, match="matches all 11"):
            remove(built, ["*"])
        assert list_versions(built) == [1]

    @pytest.mark.parametrize("rule", ["", " ", "!keep", "content:12", "content:" + "g" * 64])
    def test_rules_that_are_none(self, built, rule):
        with pytest.raises(ConfigError):
            remove(built, [rule])

    def test_no_store(self, scratch):
        with pytest.raises(NotAStoreError):
            remove(scratch / "nothing", ["a"])


class TestPrune:
    def test_old_versions_go_and_the_latest_is_as_it_was(self, built, corpus):
        update_corpus(corpus)
        build(built, files(corpus))
        digest = open_store(built).digest
        done = prune(built)
        assert (done.versions_removed, done.versions_left) == ([1], [2])
        assert done.bytes_after < done.bytes_before
        assert open_store(built).digest == digest
        assert verify(built) == []
        assert stray_files(built) == set()
        with pytest.raises(StoreError, match="no version 1"):
            open_store(built, version=1)

    def test_some_may_be_kept(self, built, corpus):
        for step in range(3):
            (corpus / "new.txt").write_text(f"step {step}")
            build(built, files(corpus))
        assert prune(built, keep=2).versions_left == [3, 4]
        assert verify(built) == []

    def test_compacting_takes_the_bytes_away_and_leaves_the_digest(self, built, corpus):
        remove(built, ["*7.txt"])
        assert MARK in tokens_on_disk(built)
        digest = open_store(built).digest
        kept = prune(built)
        assert kept.dead_bytes > 0
        assert MARK in tokens_on_disk(built)
        done = prune(built, compact=True)
        assert (done.compacted, done.dead_bytes) == (True, 0)
        assert MARK not in tokens_on_disk(built)
        assert open_store(built).digest == digest
        assert verify(built) == []
        assert stray_files(built) == set()
        assert not prune(built, compact=True).compacted
        assert not build(built, files(corpus)).committed

    def test_documents_with_loss_runs_survive(self, scratch):
        store = with_loss_runs(scratch / "store")
        digest = open_store(store).digest
        remove(store, ["memory/1"])
        assert open_store(store).digest != digest
        prune(store, compact=True)
        assert verify(store) == []

    def test_an_error_at_any_operation_loses_nothing(self, built, corpus, scratch, monkeypatch):
        remove(built, ["*7.txt"])
        digest = open_store(built).digest
        for at in range(1, 500):
            store = shutil.copytree(built, scratch / "failing")
            fault = FailAt(at, 28)
            monkeypatch.setattr("penstock.fs.before_operation", fault)
            try:
                prune(store, compact=True)
            except DiskError:
                pass
            finally:
                monkeypatch.undo()
            assert verify(store) == []
            assert open_store(store).digest == digest
            prune(store, compact=True)
            assert MARK not in tokens_on_disk(store)
            assert stray_files(store) == set()
            shutil.rmtree(store)
            if fault.failed is None:
                break
        assert at > 20

    @pytest.mark.parametrize("keep", [0, -1])
    def test_the_latest_always_stays(self, built, keep):
        with pytest.raises(ConfigError, match="--keep"):
            prune(built, keep=keep)


def test_a_damaged_older_manifest_stops_no_writer_and_nothing_it_may_name_goes(built, corpus):
    """It may be restored. Until then only `prune` takes it away, and with it what nobody else names."""
    update_corpus(corpus)
    build(built, files(corpus))
    manifest = built / "manifests" / "000001.json"
    whole = manifest.read_bytes()
    named = {name for name in contents(built) if name.startswith(("segments/", "index/"))}
    manifest.write_bytes(whole.replace(b"2", b"3", 1))
    assert remove(built, ["*7.txt"]).manifest.version == 3
    (corpus / "one-more.txt").write_text("One more.")
    assert build(built, files(corpus)).manifest.version == 4
    assert {problem.file for problem in verify(built)} == {"manifests/000001.json"}
    assert named <= contents(built).keys()
    manifest.write_bytes(whole)
    assert verify(built) == []
    manifest.write_bytes(whole.replace(b"2", b"3", 1))
    assert prune(built).versions_left == [4]
    assert verify(built) == []
    assert not named <= contents(built).keys()
