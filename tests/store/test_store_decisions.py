"""Splits by time, near copies, and the disk that is too small: what a version decides over the whole."""

from __future__ import annotations

import dataclasses
import json
import random
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError, DiskError
from penstock.sources import Document, sources_from_inputs
from penstock.store import estimate_store, open_store, remove, verify
from penstock.store.blocklist import Blocklist
from penstock.store.decisions import Decisions, TimeSplit, times_of
from penstock.store.promises import broken_promises, read_document_columns
from penstock.store.space import SpaceGuard

from .samples import BYTES, OPTIONS, MemorySource, build, document, files


def dated(number: int, time: object) -> Document:
    made = document(f"memory/{number:03d}", f"document {number:03d} of some length".encode())
    return dataclasses.replace(made, facts=json.dumps({"time": time}) if time is not None else "")


DAYS = [dated(n, f"2025-01-{n + 1:02d}T12:00:00+00:00") for n in range(20)]


def splits_of(store) -> dict[str, str]:
    names = store.manifest.splits
    keys = store.provenance()["key"].to_pylist()
    return {key.decode(): names[split] for key, split in zip(keys, store.arrays["split"].tolist(), strict=True)}


class TestTime:
    def test_the_oldest_are_the_first_split(self, scratch):
        build(scratch / "store", MemorySource(DAYS), split_by="time", split="train=80,val=10,test=10")
        with open_store(scratch / "store") as store:
            found = list(splits_of(store).values())
            assert found == ["train"] * 16 + ["val"] * 2 + ["test"] * 2
            cuts = store.manifest.options["split_by_time"]["cuts"]
        assert cuts == [["val", "2025-01-17T12:00:00+00:00"], ["test", "2025-01-19T12:00:00+00:00"]]
        assert verify(scratch / "store") == []

    def test_cuts_are_recorded_so_that_nothing_moves(self, scratch):
        build(scratch / "store", MemorySource(DAYS), split_by="time")
        before = splits_of(open_store(scratch / "store"))
        later = [dated(n, f"2025-02-{n - 19:02d}") for n in range(20, 45)]
        build(scratch / "store", MemorySource([*DAYS, *later]), split_by="time")
        after = splits_of(open_store(scratch / "store"))
        assert {key: after[key] for key in before} == before
        assert {after[key.key.decode()] for key in later} == {"test"}

    def test_cuts_may_be_given(self, scratch):
        chosen = {"split_by": "time", "split_at": "val=2025-01-10,test=2025-01-15"}
        build(scratch / "store", MemorySource(DAYS), **chosen)
        found = list(splits_of(open_store(scratch / "store")).values())
        assert found == ["train"] * 9 + ["val"] * 5 + ["test"] * 6

    def test_documents_without_a_time_are_in_the_least_protected(self, scratch):
        build(scratch / "store", MemorySource([*DAYS, dated(50, None), dated(51, "soon")]), split_by="time")
        found = splits_of(open_store(scratch / "store"))
        assert (found["memory/050"], found["memory/051"]) == ("train", "train")

    @pytest.mark.parametrize(
        "changes",
        [
            {"split_at": "val=2025-01-10"},
            {"split_at": "test=2025-01-10,val=2025-01-11"},
            {"split_at": "val=2025-01-11,test=2025-01-10"},
            {"split_at": "val=soon,test=later"},
            {"split_at": "val=1e30,test=1e31"},
        ],
    )
    def test_cuts_that_are_none(self, scratch, changes):
        with pytest.raises(ConfigError, match="--split-at"):
            build(scratch / "store", MemorySource(DAYS), split_by="time", **changes)

    def test_no_times_at_all(self, scratch, corpus):
        with pytest.raises(ConfigError, match="no document has a fact 'time'"):
            build(scratch / "store", files(corpus), split_by="time")

    def test_times_are_dates_or_numbers(self):
        facts = [
            '{"time":"2025-01-01"}',
            '{"time":1735689600}',
            '{"time":1735689600000}',
            '{"time":"1735689600000000"}',
            '{"time":1735689600000000000}',
            "",
            '{"time":true}',
            '{"time":[1]}',
            '{"a":1}',
        ]
        found = times_of(facts, "time")
        assert found[:5].tolist() == [1735689600.0] * 5
        assert np.isnan(found[5:]).all()

    @pytest.mark.parametrize(
        "value", ["1" + "0" * 400, "1e30", "-9e10", '"0001-01-01T00:00:00+14:00"', '"9999-12-31T23:59:59-12:00"']
    )
    def test_what_no_calendar_has_is_no_time(self, value):
        assert np.isnan(times_of([f'{{"time":{value}}}'], "time")).all()

    @pytest.mark.parametrize("time", ["0001-01-01", "9999-12-31T23:59:59", 1_735_689_600_000_000_000])
    def test_cuts_at_the_ends_of_the_calendar_are_recorded_and_read_back(self, time):
        times = times_of([json.dumps({"time": time})] * 4, "time")
        drawn = TimeSplit(fact="time").drawn(times, np.ones(4), {"a": 0.5, "b": 0.5})
        recorded = Decisions.from_recorded(
            {"split": [["a", "0.5"], ["b", "0.5"]], "seed": 0, "dedup": "off", "split_by_time": drawn.options()},
            blocklist=Blocklist([]),
        )
        assert recorded.time == drawn

    def test_a_name_beyond_ascii_is_found_however_it_is_written(self):
        facts = ['{"Größe":1700000000}', '{"Gr\\u00f6\\u00dfe":5}', '{"x":1}']
        found = times_of(facts, "Größe")
        assert found[:2].tolist() == [1.7e9, 5.0]
        assert np.isnan(found[2])

    def test_documents_of_one_moment_are_never_parted(self):
        times = np.repeat([1.0, 2.0, 3.0], 10)
        drawn = TimeSplit(fact="time").drawn(times, np.ones(30), {"a": 0.5, "b": 0.5})
        assert [len(set(drawn.splits(times)[times == moment].tolist())) for moment in (1.0, 2.0, 3.0)] == [1, 1, 1]


def code(seed: int, lines: int = 120) -> list[str]:
    chance = random.Random(seed)
    words = [f"name{chance.randrange(500)}" for _ in range(200)]
    return [f"    {chance.choice(words)} = {chance.choice(words)}({chance.randrange(99)})" for _ in range(lines)]


def near_copy(lines: list[str], *, share: float, seed: int) -> list[str]:
    chance = random.Random(seed)
    chosen = set(chance.sample(range(len(lines)), round(share * len(lines))))
    return [
        f"    changed{chance.randrange(99)} = {number}" if number in chosen else line
        for number, line in enumerate(lines)
    ]


class TestNear:
    @pytest.fixture
    def planted(self, scratch):
        """Forty files, each with a copy under another name, a near copy and one in a fork of the folder."""
        for number in range(40):
            lines = code(number)
            for name, text in {
                f"a/{number}.py": lines,
                f"b/other{number}.py": lines,
                f"c/near{number}.py": near_copy(lines, share=0.05, seed=number),
                f"fork/a/{number}.py": lines,
            }.items():
                path = scratch / "planted" / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text("\n".join(text) + "\n")
        return scratch / "planted"

    def test_copies_and_near_copies_are_in_one_split_only(self, scratch, planted):
        result = build(scratch / "store", files(planted), dedup="near")
        counts = result.manifest.counts
        assert counts["documents"] == 40
        assert sum(counts["skipped"][reason] for reason in ("duplicate", "near-duplicate", "copy-across-splits")) == 120
        assert counts["near"]["excluded"] == 40
        assert verify(scratch / "store") == []

    def test_adding_files_moves_nothing(self, scratch, planted):
        build(scratch / "store", files(planted), dedup="near")
        before = splits_of(open_store(scratch / "store"))
        for number in range(200):
            (planted / f"more{number}.py").write_text("\n".join(code(1000 + number, 40)))
        result = build(scratch / "store", files(planted), dedup="near")
        after = splits_of(open_store(scratch / "store"))
        assert {key: after[key] for key in before} == before
        assert result.manifest.digest == build(scratch / "fresh", files(planted), dedup="near").manifest.digest

    def test_from_exact_to_near_and_back(self, scratch, planted):
        exact = build(scratch / "store", files(planted)).manifest
        near = build(scratch / "store", files(planted), dedup="near").manifest
        assert near.digest == build(scratch / "fresh", files(planted), dedup="near").manifest.digest
        assert build(scratch / "store", files(planted)).manifest.digest == exact.digest
        assert verify(scratch / "store") == []

    def test_the_threshold_is_part_of_the_digest(self, scratch, planted):
        one = build(scratch / "one", files(planted), dedup="near").manifest
        other = build(scratch / "other", files(planted), dedup="near", near_threshold=0.95).manifest
        assert one.digest != other.digest
        assert other.counts["near"]["excluded"] < one.counts["near"]["excluded"]

    def test_near_copies_across_splits_are_a_leak(self, scratch, planted):
        """At 0.99 the near copies stay, some in other splits: a store that promised 0.7 would be lying."""
        build(scratch / "store", files(planted), dedup="near", near_threshold=0.99)
        assert verify(scratch / "store") == []
        with open_store(scratch / "store") as store:
            columns = read_document_columns(store)
            assert not [kind for kind, _ in broken_promises(store, columns, BYTES) if kind == "leak"]
            store.manifest.options["near"]["threshold"] = 0.7
            leaks = [detail for kind, detail in broken_promises(store, columns, BYTES) if kind == "leak"]
        assert leaks
        assert "are near copies (0." in leaks[0]

    @pytest.mark.parametrize("threshold", [0.0, 0.5, 1.5, -1.0])
    def test_thresholds_that_are_none(self, scratch, corpus, threshold):
        with pytest.raises(ConfigError, match="--near-threshold"):
            build(scratch / "store", files(corpus), dedup="near", near_threshold=threshold)


class TestSpace:
    def test_the_rest_that_cannot_fit_ends_the_run(self, scratch):
        guard = SpaceGuard(scratch, free=lambda path: 1000)
        guard.done(input_bytes=500, written_bytes=400, documents=0, left_bytes=None)
        guard.done(input_bytes=500, written_bytes=400, documents=0, left_bytes=1000)
        assert guard.expected_bytes == 1600
        with pytest.raises(DiskError, match="1,000 bytes left, about 1,6"):
            guard.done(input_bytes=0, written_bytes=0, documents=0, left_bytes=2000)

    def test_a_run_stops_and_goes_on_when_there_is_room(self, scratch, corpus, monkeypatch):
        monkeypatch.setattr("penstock.store.space.free_bytes", lambda path: 10)
        monkeypatch.setattr(SpaceGuard.__init__, "__kwdefaults__", {"free": lambda path: 10})
        with pytest.raises(DiskError, match="10 bytes left"):
            build(scratch / "store", files(corpus), unit_bytes=1)
        monkeypatch.undo()
        result = build(scratch / "store", files(corpus), unit_bytes=1)
        assert result.committed
        assert verify(scratch / "store") == []

    @pytest.mark.parametrize("dedup", ["exact", "near"])
    @pytest.mark.parametrize("kind", ["files", "short rows", "rows with facts"])
    def test_an_estimate_is_near_the_truth(self, scratch, kind, dedup):
        """Within a fifth of what then lies on the disk, also where most of that isn't tokens."""
        chance = random.Random(3)
        inputs = scratch / "corpus"
        if kind == "files":
            inputs.mkdir()
            for number in range(200):
                (inputs / f"{number}.py").write_text("\n".join(code(number, lines=9)))
        else:
            inputs = scratch / "corpus.jsonl"
            rows = [{"text": f"Row {number}."} for number in range(2000)]
            if kind == "rows with facts":
                rows = [{**row, "url": f"https://example.org/{chance.random()}"} for row in rows]
            inputs.write_text("".join(json.dumps(row) + "\n" for row in rows))
        source = sources_from_inputs([f"corpus={inputs}"])[0]
        changes: dict[str, Any] = {"dedup": dedup, "block": ("corpus/1*.py",), "unit_bytes": 50_000}
        options = dataclasses.replace(OPTIONS, **changes)
        estimated = estimate_store([source], scratch / "store", tokenizer=BYTES, options=options)
        manifest = build(scratch / "store", source, **changes).manifest
        assert (estimated.documents, estimated.fits) == (manifest.num_documents, True)
        assert estimated.tokens == sum(entry.tokens for entry in manifest.segments)
        on_disk = sum(path.stat().st_size for path in (scratch / "store").rglob("*") if path.is_file())
        assert estimated.store_bytes == pytest.approx(on_disk, rel=0.2)

    def test_an_estimate_leaves_out_what_was_removed(self, scratch, corpus):
        found = build(scratch / "store", files(corpus)).manifest.num_documents
        removed = remove(scratch / "store", ["part1/"]).documents
        assert 0 < removed < found
        estimated = estimate_store([files(corpus)], scratch / "store", tokenizer=BYTES, options=OPTIONS)
        assert estimated.documents == found - removed
