"""A writer killed with SIGKILL before any change of the disk: rerun the same command and nothing shows.

The kills are real and happen in a process of their own (writer.py); the reruns happen here.
"""

from __future__ import annotations

import os
import shutil
import signal
import time
from pathlib import Path

import pytest

from penstock.store import open_store, verify

from .samples import (
    FOLDERS,
    GOLDEN_FILES,
    GOLDEN_UPDATED,
    HOUR_NS,
    FailAt,
    aged_files,
    build,
    bytes_tokenizer,
    contents,
    files,
    spread,
    stray_files,
    without_cache,
)

pytestmark = pytest.mark.torture(lane="A", sample=True)


def assert_as_if_nothing_had_happened(store: Path, digest: str) -> None:
    with open_store(store) as opened:
        assert opened.digest == digest
    assert verify(store) == []
    assert stray_files(store) == set()  # no lock, no temporary file, no record of work, no orphaned segment
    assert sorted(path.name for path in store.iterdir()) == sorted(FOLDERS)


@pytest.fixture
def operations(scratch, corpus, monkeypatch) -> list[str]:
    """The changes of the disk that a prepare of the corpus makes."""
    counting = FailAt(0)
    monkeypatch.setattr("penstock.fs.before_operation", counting)
    build(scratch / "counted", files(corpus))
    monkeypatch.undo()
    assert len(counting.operations) > 100
    return counting.operations


@pytest.fixture
def num_operations(operations) -> int:
    return len(operations)


def test_a_kill_at_any_operation_then_a_rerun_gives_the_golden_digest(scratch, corpus, writer, num_operations):
    committed = 0
    for kill_at in spread(24, over=num_operations):
        store = scratch / f"killed-{kill_at}"
        assert writer.order(corpus=corpus, out=store, kill_at=kill_at) == {"signal": signal.SIGKILL}
        committed += (store / "manifests" / "000001.json").exists()
        result = build(store, files(corpus))
        assert result.manifest.version == 1
        assert_as_if_nothing_had_happened(store, GOLDEN_FILES)
        shutil.rmtree(store)
    assert 0 < committed < 24, "the kills should have hit both sides of the commit"


def test_a_kill_during_recovery_is_recovered_from(scratch, corpus, writer, num_operations):
    for kill_at in spread(5, over=num_operations):
        store = scratch / f"killed-{kill_at}"
        assert writer.order(corpus=corpus, out=store, aged=True, kill_at=kill_at)["signal"] == signal.SIGKILL
        for again_at in (2, 9, 16, 23):  # each of these reruns gets a little further, some by taking over
            answer = writer.order(corpus=corpus, out=store, aged=True, kill_at=again_at)
            assert answer["signal"] == signal.SIGKILL or answer["operations"] < again_at
        build(store, aged_files(corpus))
        assert_as_if_nothing_had_happened(store, GOLDEN_FILES)


def test_a_killed_update_leaves_the_old_version_as_it_was(scratch, corpus, updated_corpus, built, writer, monkeypatch):
    counting = FailAt(0)
    monkeypatch.setattr("penstock.fs.before_operation", counting)
    build(shutil.copytree(built, scratch / "counted"), files(updated_corpus))
    monkeypatch.undo()
    before = without_cache(built)
    for kill_at in spread(12, over=len(counting.operations)):
        store = shutil.copytree(built, scratch / f"killed-{kill_at}")
        assert writer.order(corpus=updated_corpus, out=store, kill_at=kill_at)["signal"] == signal.SIGKILL
        with open_store(store, version=1) as old:
            assert old.digest == GOLDEN_FILES
        found = contents(store)
        assert {name: found.get(name) for name in before} == before
        assert build(store, files(updated_corpus)).manifest.version == 2
        assert_as_if_nothing_had_happened(store, GOLDEN_UPDATED)
        found = contents(store)
        assert {name: found.get(name) for name in before} == before
        shutil.rmtree(store)


class TestTakingOver:
    """Units that the killed run finished are not done again, if their input is surely the same."""

    @pytest.fixture
    def killed(self, scratch, corpus, writer, num_operations) -> Path:
        store = scratch / "killed"
        # Six tenths through: most units are finished, nothing is committed.
        answer = writer.order(corpus=corpus, out=store, aged=True, kill_at=num_operations * 6 // 10)
        assert answer["signal"] == signal.SIGKILL
        assert not list((store / "manifests").iterdir())
        return store

    def test_finished_units_are_taken_over(self, killed, corpus, monkeypatch):
        finished = len(list((killed / "work").glob("*.arrow")))
        counting = FailAt(0)
        monkeypatch.setattr("penstock.fs.before_operation", counting)
        result = build(killed, aged_files(corpus))
        assert result.units_taken_over == finished > 1
        written = counting.operations.count("write")
        monkeypatch.undo()
        assert_as_if_nothing_had_happened(killed, GOLDEN_FILES)
        monkeypatch.setattr("penstock.fs.before_operation", counting)
        counting.operations.clear()
        build(killed.with_name("fresh"), aged_files(corpus))
        assert counting.operations.count("write") == written + 3 * result.units_taken_over

    def test_a_file_that_changed_in_between_is_read_again(self, killed, corpus):
        whole = shutil.copytree(killed, killed.with_name("whole"))
        unchanged = build(whole, aged_files(corpus)).units_taken_over
        target = corpus / "part0" / "3.txt"
        facts = target.stat()
        target.write_bytes(target.read_bytes().replace(b"says", b"SAYS"))  # same size, same time of change
        os.utime(target, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        result = build(killed, aged_files(corpus))
        assert result.units_taken_over == unchanged - 1
        assert_as_if_nothing_had_happened(killed, build(killed.with_name("fresh"), files(corpus)).manifest.digest)
        assert result.manifest.digest != GOLDEN_FILES

    def test_a_file_that_changed_a_moment_before_it_was_read_is_read_again(
        self, scratch, corpus, writer, num_operations
    ):
        """Its time stamp can't tell whether it changed once more while it was being read."""
        fresh_ns = time.time_ns() + 2 * HOUR_NS  # the stamps of `aged_files` are taken an hour back
        os.utime(corpus / "copy.txt", ns=(fresh_ns, fresh_ns))  # in the first unit
        store = scratch / "killed"
        writer.order(corpus=corpus, out=store, aged=True, kill_at=num_operations * 6 // 10)
        finished = len(list((store / "work").glob("*.arrow")))
        assert finished > 1
        assert build(store, aged_files(corpus)).units_taken_over == finished - 1
        assert_as_if_nothing_had_happened(store, GOLDEN_FILES)

    def test_what_the_walk_leaves_out_is_counted_anew(self, killed, corpus):
        (corpus / "part0" / ".hidden-too").write_text("not for training either")
        result = build(killed, aged_files(corpus))
        assert result.units_taken_over > 0
        fresh = build(killed.with_name("fresh"), aged_files(corpus))
        assert result.manifest.counts == fresh.manifest.counts
        assert result.manifest.counts["skipped"]["hidden"] == 2
        assert result.manifest.skipped_examples == fresh.manifest.skipped_examples

    @pytest.mark.parametrize(
        ("folder", "ending", "harm"),
        [
            ("segments", ".tokens", lambda data: data[:-1]),
            ("segments", ".blocks", lambda data: data[:-1]),
            ("work", ".arrow", lambda data: b"\0" + data[1:]),
            # What the death of the system may leave of a file that wasn't flushed.
            ("work", ".arrow", lambda data: b""),
            ("work", ".arrow", lambda data: bytes(len(data))),
            ("work", ".arrow", lambda data: data[: len(data) // 2]),
            ("work", ".arrow", lambda data: data[:8] + bytes(len(data) - 8)),
        ],
        ids=["tokens", "blocks", "record", "record-empty", "record-zeros", "record-cut", "record-zeros-behind"],
    )
    def test_a_unit_whose_files_were_harmed_in_between_is_done_again(self, killed, corpus, folder, ending, harm):
        path = min(path for path in (killed / folder).iterdir() if path.suffix == ending)
        whole = shutil.copytree(killed, killed.with_name("whole"))
        unchanged = build(whole, aged_files(corpus)).units_taken_over
        path.write_bytes(harm(path.read_bytes()))
        assert build(killed, aged_files(corpus)).units_taken_over == unchanged - 1
        assert_as_if_nothing_had_happened(killed, GOLDEN_FILES)

    def test_another_tokenizer_takes_nothing_over_and_leaves_nothing_behind(self, killed, corpus):
        other = bytes_tokenizer(controls={"<|endoftext|>": 256})
        result = build(killed, aged_files(corpus), tokenizer=other)
        assert result.units_taken_over == 0
        assert verify(killed) == []
        assert stray_files(killed) == set()


def test_a_tokenizer_of_a_killed_run_is_no_leftover_of_the_next(scratch, corpus, writer, operations):
    store = scratch / "killed"
    commit = operations.index("link") + 1  # the tokenizer's copy is there, the manifest that would name it isn't
    assert writer.order(corpus=corpus, out=store, kill_at=commit)["signal"] == signal.SIGKILL
    assert len(list((store / "tokenizers").glob("*/tokenizer.json"))) == 1
    assert not list((store / "manifests").glob("*.json"))
    build(store, files(corpus), tokenizer=bytes_tokenizer(controls={"<|endoftext|>": 256}))
    assert stray_files(store) == set()


def test_update_corpus_changes_what_it_says(corpus, updated_corpus):
    """The premise of the tests above."""
    old, new = contents(corpus), contents(updated_corpus)
    assert set(new) - set(old) == {"part2/new.txt"}
    assert set(old) - set(new) == {"part0/6.txt"}
    assert [name for name in old.keys() & new.keys() if old[name] != new[name]] == ["part1/4.txt"]
