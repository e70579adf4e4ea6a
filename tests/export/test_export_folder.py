"""The output appears whole or not at all: kills, full disks, damage, and folders that aren't ours to replace."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import fs
from penstock.errors import (
    ConfigError,
    DamagedStoreError,
    DiskError,
    MissingExtraError,
    PenstockError,
    StoreBusyError,
    StoreError,
)
from penstock.export import FORMATS, ExportOptions, export_store
from penstock.store import open_store

from .reference import contents


class FailAt:
    """For `fs.before_operation`: answers operation number `at` with an error, once or from then on."""

    def __init__(self, at: int, code: int = errno.ENOSPC, *, for_ever: bool = False) -> None:
        self.at, self.code, self.for_ever = at, code, for_ever
        self.operations: list[str] = []

    def __call__(self, operation: str, path: str) -> None:
        self.operations.append(operation)
        if len(self.operations) == self.at or (self.for_ever and len(self.operations) > self.at):
            raise OSError(self.code, os.strerror(self.code))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def operations_of(store, out: Path, monkeypatch, **options) -> int:
    counting = FailAt(0)
    with monkeypatch.context() as patch:
        patch.setattr(fs, "before_operation", counting)
        export_store(store, out, options=ExportOptions(**options), force=out.exists())
    return len(counting.operations)


@pytest.mark.parametrize("output_format", FORMATS)
def test_an_error_at_any_operation_leaves_nothing(opened, tmp_path, monkeypatch, output_format):
    store = opened("parts")
    total = operations_of(store, tmp_path / "counted", monkeypatch, format=output_format)
    golden = contents(tmp_path / "counted")
    codes = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS]
    folder = tmp_path / "failed"
    folder.mkdir()
    for at in range(1, total + 1):
        fault = FailAt(at, codes[at % 4], for_ever=at % 3 == 0)
        with monkeypatch.context() as patch:
            patch.setattr(fs, "before_operation", fault)
            with pytest.raises((DiskError, StoreBusyError)) as raised:
                export_store(store, folder / "out", options=ExportOptions(format=output_format))
        assert str(folder) in raised.value.message
        assert fs.TEMPORARY_MARK not in raised.value.message
        if (folder / "out").exists():  # only the steps after the move may fail with the new one in place
            assert contents(folder / "out") == golden
            assert at > total - 3
        elif not fault.for_ever:
            assert [name for name in names(folder) if not name.endswith(".lock")] == []
        export_store(store, folder / "out", options=ExportOptions(format=output_format), force=True)
        assert contents(folder / "out") == golden
        assert names(folder) == ["out"]
        shutil.rmtree(folder / "out")


def test_an_error_while_replacing_keeps_the_old_export_or_has_the_new(opened, tmp_path, monkeypatch):
    old, new = opened("single"), opened("parts")
    options = ExportOptions(format="bin")
    export_store(old, tmp_path / "before", options=options)
    total = operations_of(new, shutil.copytree(tmp_path / "before", tmp_path / "counted"), monkeypatch, format="bin")
    before, after = contents(tmp_path / "before"), contents(tmp_path / "counted")
    folder = tmp_path / "failed"
    for at in range(1, total + 1):
        shutil.copytree(tmp_path / "before", folder / "out")
        with monkeypatch.context() as patch:
            patch.setattr(fs, "before_operation", FailAt(at))
            with pytest.raises((DiskError, StoreBusyError)):
                export_store(new, folder / "out", options=options, force=True)
        assert contents(folder / "out") in (before, after)
        export_store(new, folder / "out", options=options, force=True)
        assert contents(folder / "out") == after
        assert names(folder) == ["out"]
        shutil.rmtree(folder)


@pytest.mark.parametrize("replacing", [False, True])
def test_a_kill_at_any_operation_leaves_nothing_that_looks_whole(opened, store_paths, tmp_path, monkeypatch, replacing):
    store, options = opened("parts"), {"format": "chunks", "seq_len": 16, "shard_bytes": 2000, "split": "train"}
    base = tmp_path / "killed"
    base.mkdir()
    if replacing:
        export_store(opened("single"), base / "before", options=ExportOptions(format="bin"))
    counted = shutil.copytree(base / "before", tmp_path / "counted") if replacing else tmp_path / "counted"
    total = operations_of(store, counted, monkeypatch, **options)
    after, before = contents(counted), contents(base / "before") if replacing else None
    kills = sorted({1 + step * (total - 1) // 11 for step in range(12)} | set(range(max(1, total - 8), total + 1)))
    order = {"store": store.path, "out": base, "options": options, "force": replacing, "kills": kills}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("killed.py")],
        input=json.dumps(order, default=str) + "\n",
        capture_output=True,
        text=True,
        check=True,
    )
    assert json.loads(done.stdout) == [9] * len(kills)
    outcomes = set()
    for kill_at in kills:
        out = base / str(kill_at) / "out"
        if out.exists():
            outcome = "after" if contents(out) == after else "before"
            assert contents(out) in (after, before)
        else:
            outcome = "nothing"
        outcomes.add(outcome)
        export_store(store, out, options=ExportOptions(**options), force=True)
        assert contents(out) == after
        assert names(out.parent) == ["out"]
    assert {"after", "before" if replacing else "nothing"} <= outcomes


@pytest.mark.parametrize("output_format", FORMATS)
def test_a_damaged_store_is_found_and_nothing_is_left(store_paths, tmp_path, output_format):
    path = shutil.copytree(store_paths["plain"], tmp_path / "store")
    segment = max((path / "segments").glob("*.tokens"), key=lambda file: file.stat().st_size)
    data = bytearray(segment.read_bytes())
    data[len(data) // 2] ^= 1
    segment.write_bytes(data)
    folder = tmp_path / "outputs"
    folder.mkdir()
    with open_store(path) as store, pytest.raises(DamagedStoreError, match=segment.name):
        export_store(store, folder / "out", options=ExportOptions(format=output_format))
    assert names(folder) == []


def test_a_token_beyond_the_vocabulary_is_refused_never_wrapped(opened, tmp_path):
    store = opened("wide")
    store.manifest.tokenizer["vocab_size"] = 70_001  # the end token is 70,001
    for output_format in FORMATS:
        with pytest.raises(DamagedStoreError, match="70001"):
            export_store(store, tmp_path / "out", options=ExportOptions(format=output_format))
    assert names(tmp_path) == []


def test_a_split_name_that_leaves_the_folder_is_refused(opened, tmp_path):
    store = opened("plain")
    store.manifest.splits[0] = "../../stolen"
    with pytest.raises(StoreError, match="stolen"):
        export_store(store, tmp_path / "a" / "out", options=ExportOptions(format="bin"))
    assert names(tmp_path) == []


def test_only_an_earlier_export_is_replaced_and_only_on_request(opened, export, tmp_path):
    store = opened("single")
    export(store, format="bin")
    before = contents(tmp_path / "out")
    with pytest.raises(StoreError, match="earlier export") as raised:
        export(store, format="jsonl")
    assert "--force" in raised.value.hint
    assert contents(tmp_path / "out") == before
    export(store, format="jsonl", force=True)
    assert names(tmp_path / "out") == ["export.json", "test.jsonl", "train.jsonl", "val.jsonl"]
    assert names(tmp_path) == ["out"]


@pytest.mark.parametrize("manifest", [None, b"", b"[]", b"{}", b'{"format": "other"}', b"\xff" * 9, b"[" * 100_000])
def test_what_is_no_export_is_never_touched(opened, export, tmp_path, manifest):
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "thesis.txt").write_text("years of work")
    if manifest is not None:
        (folder / "export.json").write_bytes(manifest)
    before = contents(folder)
    with pytest.raises(StoreError, match="isn't an earlier export"):
        export(opened("single"), format="bin", force=True)
    assert contents(folder) == before


def test_a_file_or_a_link_in_the_place_is_refused(opened, export, tmp_path):
    store = opened("single")
    export(store, format="bin", out="real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("a file")
    for name in ("link", "file", "dangling"):
        with pytest.raises(StoreError, match="isn't an earlier export"):
            export(store, format="bin", out=name, force=True)
    assert (tmp_path / "file").read_text() == "a file"
    assert names(tmp_path) == ["dangling", "file", "link", "real"]


def test_an_empty_folder_is_filled(opened, export, tmp_path):
    (tmp_path / "out").mkdir()
    export(opened("single"), format="bin")
    assert "export.json" in names(tmp_path / "out")


def test_a_folder_inside_the_store_is_refused(store_paths, tmp_path):
    path = shutil.copytree(store_paths["single"], tmp_path / "store")
    before = contents(path)
    with open_store(path) as store:
        for out in (path, path / "export", path / "work" / ".." / "x"):
            with pytest.raises(StoreError, match="inside the store"):
                export_store(store, out, options=ExportOptions(format="bin"), force=True)
    assert contents(path) == before


def test_a_second_export_to_the_same_place_is_refused_while_the_first_runs(opened, tmp_path):
    with fs.FolderLock(tmp_path / "out.lock"), pytest.raises(StoreBusyError, match=str(os.getpid())):
        export_store(opened("single"), tmp_path / "out", options=ExportOptions(format="bin"))
    export_store(opened("single"), tmp_path / "out", options=ExportOptions(format="bin"))


def test_a_neighbour_that_only_looks_like_a_leftover_stays(opened, export, tmp_path):
    for name in ("out.tmp-notes", "other.tmp-12-0123abcd"):
        (tmp_path / name).mkdir()
    (tmp_path / "out.tmp-12-0123abcd").mkdir()
    export(opened("single"), format="bin")
    assert names(tmp_path) == ["other.tmp-12-0123abcd", "out", "out.tmp-notes"]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"format": "josnl"}, "jsonl"),
        ({"format": "arrow", "pack": "best"}, "concat"),
        ({"format": "chunks", "chunk_format": "pickle"}, "safetensors"),
        ({"format": "jsonl", "compress": "zip"}, "zst"),
        ({"format": "bin", "seq_len": 16}, "jsonl"),
        ({"format": "megatron", "text": True}, "jsonl"),
        ({"format": "arrow", "seq_len": 1}, "2 or more"),
        ({"format": "arrow", "seq_len": 8, "overlap": 8}, "0 to 7"),
        ({"format": "arrow", "seq_len": 8, "overlap": -1}, "0 to 7"),
        ({"format": "arrow", "overlap": 4}, "--seq-len"),
        ({"format": "arrow", "boundaries": False}, "--seq-len"),
        ({"format": "chunks", "shard_bytes": 0}, "positive"),
    ],
    ids=str,
)
def test_options_that_mean_nothing_are_refused_with_the_way_out(opened, tmp_path, options, told):
    with pytest.raises(ConfigError) as raised:
        export_store(opened("single"), tmp_path / "out", options=ExportOptions(**options))
    assert told in raised.value.hint
    assert names(tmp_path) == []


def test_an_unknown_split_is_refused(opened, export, tmp_path):
    with pytest.raises(PenstockError) as raised:
        export(opened("plain"), format="bin", split="dev")
    assert "train, val, test" in raised.value.hint
    assert names(tmp_path) == []


def test_pt_files_without_torch_name_what_to_install(opened, export, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingExtraError) as raised:
        export(opened("single"), format="chunks", chunk_format="pt")
    assert "penstock[torch]" in raised.value.hint
    assert names(tmp_path) == []


def test_progress_ends_at_the_total(opened, tmp_path):
    for output_format in FORMATS:
        seen: list[tuple[int, int, str]] = []
        store = opened("plain")
        export_store(
            store,
            tmp_path / output_format,
            options=ExportOptions(format=output_format),
            on_progress=lambda *state, seen=seen: seen.append(state),
        )
        assert seen[-1][:2] == (seen[-1][1], store.manifest.counts["tokens"] * 2)
        assert seen == sorted(seen, key=lambda state: state[0])
