"""`penstock prune` and the runs that need a version."""

from __future__ import annotations

import json
import shutil

import pytest

from penstock.sources import sources_from_inputs
from penstock.store import PrepareOptions, list_versions, open_store, prepare


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A store of three versions."""
    folder = tmp_path_factory.mktemp("built")
    (folder / "texts").mkdir()
    for number in range(3):
        (folder / "texts" / f"{number}.txt").write_text(f"text number {number}\n" * 20)
        prepare(sources_from_inputs([str(folder / "texts")]), folder / "store", options=PrepareOptions(vocab_size=300))
    assert list_versions(folder / "store") == [1, 2, 3]
    return folder / "store"


@pytest.fixture
def store(built, tmp_path):
    return shutil.copytree(built, tmp_path / "store")


def write_run(folder, store, version, *, checkpoints=True, digest=None):
    folder.mkdir(parents=True)
    with open_store(store, version=version) as opened:
        digest = digest or opened.digest
    records = [
        {"kind": "start", "config": {"seq_len": 8, "batch_rows": 1, "seed": 0}},
        {"kind": "data", "store": str(store), "store_version": version, "digest": digest},
    ]
    (folder / "records.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    if checkpoints:
        (folder / "checkpoints").mkdir()


def test_a_version_that_a_run_needs_is_refused(penstock, tmp_path, store):
    write_run(tmp_path / "runs" / "first", store, 2)
    done = penstock("prune", store, expect=1)
    done.assert_one_error()
    assert "version 2 of" in done.err
    assert "runs/first" in done.err
    assert "--keep 2" in done.err
    assert list_versions(store) == [1, 2, 3]
    penstock("prune", store, "--keep", 2)  # as the hint says
    assert list_versions(store) == [2, 3]
    assert penstock("prune", store, "--runs", "elsewhere").err == ""
    assert list_versions(store) == [3]


def test_with_force_it_goes(penstock, tmp_path, store):
    write_run(tmp_path / "runs" / "first", store, 1)
    penstock("prune", store, "--force")
    assert list_versions(store) == [3]


def test_a_version_whose_manifest_is_damaged_goes_unless_a_run_names_it(penstock, tmp_path, store):
    write_run(tmp_path / "runs" / "of-another", store, 1, digest="0" * 64)
    records = tmp_path / "runs" / "of-another" / "records.jsonl"
    records.write_text(records.read_text().replace(str(store), "/elsewhere"))
    write_run(tmp_path / "runs" / "second", store, 2)
    manifest = store / "manifests" / "000002.json"
    manifest.write_bytes(manifest.read_bytes()[:-1])
    assert "runs/second" in penstock("prune", store, "--keep", 1, "--json", expect=1).err
    shutil.rmtree(tmp_path / "runs" / "second")
    (store / "manifests" / "000001.json").write_bytes(b"")
    penstock("prune", store)
    assert list_versions(store) == [3]
    penstock("verify", store)


def test_compacting_counts_the_version_that_it_commits(penstock, tmp_path, store):
    write_run(tmp_path / "runs" / "first", store, 2)
    assert "--keep 3" in penstock("prune", store, "--compact", "--keep", 2, expect=1).err
    assert list_versions(store) == [1, 2, 3]


def test_runs_that_need_nothing_are_no_hindrance(penstock, tmp_path, store):
    runs = tmp_path / "runs"
    write_run(runs / "latest", store, 3)
    write_run(runs / "no-checkpoint", store, 1, checkpoints=False)
    write_run(runs / "of-another-store", store, 1, digest="0" * 64)
    write_run(runs / "damaged", store, 1)
    (runs / "damaged" / "records.jsonl").write_bytes(b"\xff\n")
    (runs / "a-file").write_text("")
    done = penstock("prune", store)
    assert "damaged" in done.err
    assert list_versions(store) == [3]
