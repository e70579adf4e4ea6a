"""Inputs that didn't change aren't read again; whatever changed is, and the digest is that of a fresh build."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
from pathlib import Path

import pytest

from penstock import fs
from penstock.errors import ConfigError, DiskError
from penstock.sources import FilesSource, InputOptions, TableOptions, Unit, UnitText, sources_from_inputs
from penstock.sources.hygiene import CleaningOptions
from penstock.store import memory, open_store, preparation, prepare, verify

from .samples import BYTES, HOUR_NS, OPTIONS, build, files, update_corpus


@pytest.fixture(autouse=True)
def _old_files(monkeypatch):
    """Files of a test are younger than the clock's grain; here they are believed as if they were hours old."""
    monkeypatch.setattr(memory, "RACY_NANOSECONDS", -HOUR_NS)


class Watched(FilesSource):
    """Files that tell which of them were read."""

    def __init__(self, folder: Path) -> None:
        super().__init__(name="corpus", root=str(folder))
        self.paths: list[str] = []

    def read(self, unit: Unit, **more: object) -> UnitText:
        self.paths += [os.fsdecode(path) for path, _ in unit.items]
        return super().read(unit, **more)  # type: ignore[arg-type]


def read_by(store: Path, folder: Path, **changes: object) -> tuple[list[str], object]:
    source = Watched(folder)
    return source.paths, build(store, source, processes=False, **changes)


def test_nothing_is_read_where_nothing_changed(scratch, corpus):
    build(scratch / "store", files(corpus))
    paths, result = read_by(scratch / "store", corpus)
    assert paths == []
    assert not result.committed
    assert (result.documents_reused, result.manifest.version) == (11, 1)


def test_what_changed_is_read_and_nothing_else(scratch, corpus):
    build(scratch / "store", files(corpus))
    update_corpus(corpus)
    paths, result = read_by(scratch / "store", corpus)
    assert sorted(paths) == ["part1/4.txt", "part2/new.txt"]
    assert result.manifest.digest == build(scratch / "fresh", files(corpus)).manifest.digest
    assert result.manifest.counts == open_store(scratch / "fresh").manifest.counts
    assert verify(scratch / "store") == []


def test_a_new_file_that_is_left_out_unread_is_counted(scratch, corpus):
    build(scratch / "store", files(corpus))
    (corpus / ".hidden.txt").write_text("new")
    paths, result = read_by(scratch / "store", corpus)
    assert (paths, result.committed) == ([], True)
    assert result.manifest.counts == build(scratch / "fresh", files(corpus)).manifest.counts
    assert not read_by(scratch / "store", corpus)[1].committed


def test_a_memory_that_is_a_link_to_a_device_is_not_followed(scratch, corpus):
    build(scratch / "store", files(corpus))
    (remembered,) = (scratch / "store" / "cache").glob("*.arrow")
    remembered.unlink()
    remembered.symlink_to("/dev/zero")
    paths, result = read_by(scratch / "store", corpus)
    assert (len(paths), result.committed) == (13, False)  # 11 documents and 2 that are left out once read
    assert not remembered.is_symlink()


def test_a_touched_file_is_read_and_nothing_is_committed(scratch, corpus):
    build(scratch / "store", files(corpus))
    os.utime(corpus / "part0" / "3.txt", ns=(1, 1))
    paths, result = read_by(scratch / "store", corpus)
    assert (paths, result.committed) == (["part0/3.txt"], False)
    assert read_by(scratch / "store", corpus)[0] == []  # and remembered as it is now


def test_files_as_young_as_the_clock_is_coarse_are_read(scratch, corpus, monkeypatch):
    monkeypatch.setattr(memory, "RACY_NANOSECONDS", HOUR_NS)
    build(scratch / "store", files(corpus))
    paths, _ = read_by(scratch / "store", corpus)
    assert len(paths) == 13


def test_the_same_size_and_time_with_other_content_is_seen(scratch, corpus):
    """The change time can't be set by anybody: it gives away who put the old time back."""
    build(scratch / "store", files(corpus))
    path = corpus / "part0" / "3.txt"
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace(b"Document", b"document"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
    paths, result = read_by(scratch / "store", corpus)
    assert (paths, result.committed) == (["part0/3.txt"], True)


@pytest.mark.parametrize("seed", range(12))
def test_any_series_of_changes_ends_where_a_fresh_build_does(scratch, corpus, seed, monkeypatch):
    chance = random.Random(seed)
    workers = 1 + seed % 4  # with several, the walk is shared among processes
    monkeypatch.setattr(memory, "LEAST_FILES_PER_STRETCH", 1)
    for step in range(4):
        for _ in range(chance.randrange(1, 4)):
            _change(corpus, chance, step)
        unit_bytes = chance.choice([1, 300, 10**6])
        result = build(scratch / "store", files(corpus), unit_bytes=unit_bytes, workers=workers)
    fresh = build(scratch / "fresh", files(corpus))
    assert result.manifest.digest == fresh.manifest.digest
    assert result.manifest.counts == fresh.manifest.counts
    assert verify(scratch / "store") == []
    assert read_by(scratch / "store", corpus)[0] == []


class TestSharedWalk:
    """Where many files are remembered, several processes walk, and each begins with what it finds changed."""

    @pytest.fixture(autouse=True)
    def _few_files_are_many(self, monkeypatch):
        monkeypatch.setattr(memory, "LEAST_FILES_PER_STRETCH", 1)
        # Threads that other tests of this process left behind hold no lock that the walk needs.
        monkeypatch.setattr(preparation, "can_fork", lambda: True)

    def test_counts_as_if_one_process_had_walked(self, scratch, corpus):
        build(scratch / "store", files(corpus))
        shutil.copytree(scratch / "store", scratch / "copy")
        update_corpus(corpus)
        alone, shared = (
            build(scratch / name, files(corpus), workers=workers) for name, workers in (("store", 1), ("copy", 3))
        )
        assert shared.manifest.digest == alone.manifest.digest
        assert shared.manifest.counts == alone.manifest.counts
        assert shared.manifest.skipped_examples == alone.manifest.skipped_examples
        assert (shared.documents_reused, shared.units_taken_over) == (alone.documents_reused, 0)
        assert not build(scratch / "copy", files(corpus), workers=3).committed

    def test_more_than_a_unit_of_changes_in_each_stretch(self, scratch, corpus):
        build(scratch / "store", files(corpus))
        for path in corpus.rglob("*.txt"):
            path.write_bytes(path.read_bytes() + b"changed\n")
        result = build(scratch / "store", files(corpus), workers=2, unit_bytes=1)
        assert result.units > 4
        assert result.manifest.digest == build(scratch / "fresh", files(corpus)).manifest.digest

    def test_an_error_in_another_process_is_raised_and_nothing_is_committed(self, scratch, corpus, monkeypatch):
        build(scratch / "store", files(corpus))
        last = max(corpus.rglob("*.txt"), key=bytes)
        last.write_text("changed\n")
        here = os.getpid()

        def refuse(operation: str, path: str) -> None:
            if os.getpid() != here:
                raise OSError(errno.EIO, "Input/output error")

        monkeypatch.setattr(fs, "before_operation", refuse)
        with pytest.raises(DiskError, match="Input/output error"):
            build(scratch / "store", files(corpus), workers=2)
        monkeypatch.undo()
        assert open_store(scratch / "store").manifest.version == 1
        assert build(scratch / "store", files(corpus), workers=2).manifest.version == 2


def _change(corpus: Path, chance: random.Random, step: int) -> None:
    present = sorted(path for path in corpus.rglob("*") if path.is_file())
    chosen = chance.choice(present)
    kind = chance.choice(["edit", "add", "remove", "copy", "rename", "empty", "binary"])
    if kind == "edit":
        chosen.write_bytes(chosen.read_bytes() + b"more\n")
    elif kind == "add":
        (corpus / f"new{step}{chance.randrange(99)}.txt").write_text(f"text {chance.random()}\n")
    elif kind == "remove" and len(present) > 6:
        chosen.unlink()
    elif kind == "copy":
        (corpus / f"copy{step}").write_bytes(chosen.read_bytes())
    elif kind == "rename":
        chosen.rename(chosen.with_name(f"z{chance.randrange(99)}{chosen.name.lstrip('.')}"))
    elif kind in ("empty", "binary"):
        chosen.write_bytes(b"" if kind == "empty" else b"\0\1")


class TestWhatElseChanged:
    def test_options_of_a_source(self, scratch, corpus):
        build(scratch / "store", files(corpus))
        notes: list[str] = []
        source = Watched(corpus)
        prepare(
            [source],
            scratch / "store",
            tokenizer=BYTES,
            options=OPTIONS.__class__(**{**vars(OPTIONS), "cleaning": CleaningOptions(min_bytes=5)}),
            on_note=notes.append,
        )
        assert notes == ["cleaning of source 'corpus' differs: it is read again, new content is tokenised"]

    def test_ratios_read_nothing(self, scratch, corpus):
        build(scratch / "store", files(corpus))
        paths, result = read_by(scratch / "store", corpus, split="train=50,val=50")
        assert (paths, result.committed) == ([], True)
        assert result.manifest.digest == build(scratch / "new", files(corpus), split="train=50,val=50").manifest.digest

    def test_one_source_of_two(self, scratch, corpus):
        (scratch / "other").mkdir()
        (scratch / "other" / "a.txt").write_text("another source")
        other = files(scratch / "other", name="other")
        build(scratch / "store", files(corpus), other)
        source = Watched(corpus)
        result = build(scratch / "store", source, processes=False)
        assert (source.paths, result.committed, result.manifest.counts["documents"]) == ([], True, 10)

    def test_reread_reads_everything(self, scratch, corpus):
        build(scratch / "store", files(corpus))
        paths, result = read_by(scratch / "store", corpus, reread=True)
        assert (len(paths), result.committed) == (13, False)

    def test_a_damaged_memory_is_ignored_and_named(self, scratch, corpus):
        build(scratch / "store", files(corpus))
        (path,) = (scratch / "store" / "cache").iterdir()
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
        assert [problem.file for problem in verify(scratch / "store")] == [f"cache/{path.name}"]
        paths, result = read_by(scratch / "store", corpus)
        assert (len(paths), result.committed) == (13, False)
        assert verify(scratch / "store") == []


@pytest.mark.parametrize("cores", [0, 1, 2], ids=["threads", "processes", "processes that read ahead"])
def test_damaged_tokens_are_encoded_again_when_everything_is_read(scratch, corpus, monkeypatch, cores):
    monkeypatch.setattr(preparation, "available_cores", lambda: cores)
    build(scratch / "store", files(corpus))
    segments = sorted((scratch / "store" / "segments").glob("*.tokens"))
    assert len(segments) > 2
    for segment in segments:
        data = bytearray(segment.read_bytes())
        data[0] ^= 1
        segment.write_bytes(data)
    result = build(scratch / "store", files(corpus), reread=True, processes=cores > 0, workers=1)
    assert result.documents_repaired == result.manifest.num_documents
    assert result.committed
    with open_store(scratch / "store") as store:
        assert all(len(store.document_tokens(number)) for number in range(store.num_documents))


def test_tables_are_remembered_by_their_units(scratch):
    path = scratch / "rows.jsonl"
    rows = [json.dumps({"text": f"row {n} of a table"}) for n in range(40)]
    path.write_text("\n".join([*rows, "broken {"]) + "\n")

    def run() -> object:
        sources = sources_from_inputs([str(path)], options=InputOptions(tables=TableOptions()))
        return build(scratch / "store", *sources)

    first = run()
    again = run()
    assert (again.committed, again.units, again.documents_reused) == (False, 0, 40)
    path.write_text(path.read_text() + json.dumps({"text": "one more"}) + "\n")
    more = run()
    assert (more.committed, more.manifest.counts["documents"]) == (True, 41)
    assert more.manifest.counts["skipped"] == first.manifest.counts["skipped"]
    assert run().units == 0


def test_a_word_that_is_none(scratch, corpus):
    with pytest.raises(ConfigError, match="--split-by 'day'"):
        build(scratch / "store", files(corpus), split_by="day")
    assert not (scratch / "store").exists()
