"""The rows of a step are those that training read, told from the records and the store alone."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import InputError, NotAStoreError, StoreError
from penstock.load import Loader
from penstock.pack import make_plan
from penstock.report.steps import describe_step, opened_stores, pinned_store, trained_on
from penstock.runlog import RunLog, read_records
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, open_store, prepare

CONFIG = {"seq_len": 48, "batch_rows": 5, "seed": 3, "steps": 1000, "document_boundaries": True}


@pytest.fixture
def data(tmp_path, store_path) -> Path:
    """A store that the test may change."""
    return shutil.copytree(store_path, tmp_path / "store")


def write_run(folder: Path, data: Path, *, steps: int = 3, config: dict[str, Any] = CONFIG, offset: int = 0) -> Path:
    """The records that a training run leaves."""
    with RunLog(folder) as log, open_store(data) as store:
        log.append("start", config=config)
        log.append("data", store=str(data), store_version=store.version, digest=store.digest)
        for step in range(1, steps + 1):
            log.append("step", step=step, position=step * config["batch_rows"] + offset)
    return folder


def commit_another_version(data: Path, tmp_path: Path) -> None:
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "one.txt").write_text("another text altogether\n" * 40)
    prepare([FilesSource(name="texts", root=str(tmp_path / "texts"))], data, options=PrepareOptions())


@pytest.mark.parametrize(
    "packing", [{}, {"pack": "concat"}, {"pack": "best-fit"}, {"pack": "windows", "overlap": 5}], ids=str
)
def test_the_rows_of_every_step_are_those_that_the_loader_gives(tmp_path, data, packing):
    run = write_run(tmp_path / "run", data, config={**CONFIG, **packing})
    with open_store(data) as store:
        policy, overlap = packing.get("pack", "concat"), packing.get("overlap", 0)
        plan = make_plan(store, policy=policy, seq_len=48, overlap=overlap)
        loader = Loader(plan, batch_rows=5, seed=3, prefetch_batches=0)
        last = plan.num_rows // 5 + 2  # into the second pass
        for step in range(1, last + 1):
            batch = next(loader)
            if step not in (1, 2, last - 2, last):
                continue
            facts = describe_step(run, step)
            assert facts["first_position"] == (step - 1) * 5
            for row, tokens in zip(facts["rows"], batch.tokens, strict=True):
                told = [
                    store.document_tokens(one["document"])[
                        one["document_start"] : one["document_start"] + one["row_end"] - one["row_start"]
                    ]
                    for one in row["documents"]
                ]
                assert [token for part in told for token in part.tolist()] == tokens[: row["tokens"]].tolist()
                for one in row["documents"]:
                    assert one["exact"]
                    piece = Path(one["file"]).read_bytes()[one["byte_start"] : one["byte_end"]]
                    assert piece.decode("utf-8", "replace") == one["text"].removesuffix("<|endoftext|>")
        assert facts["pass"] == 1


def test_a_step_says_whether_it_was_done(tmp_path, data):
    run = write_run(tmp_path / "run", data, steps=3)
    assert describe_step(run, 3)["is_done"]
    assert not describe_step(run, 4)["is_done"]
    for step in (0, -1, 1001, 10**9):
        with pytest.raises(InputError, match=str(step)) as caught:
            describe_step(run, step)
        assert "1 to 1000" in caught.value.hint


def test_a_newer_version_changes_nothing(tmp_path, data):
    run = write_run(tmp_path / "run", data)
    before = describe_step(run, 2)
    commit_another_version(data, tmp_path)
    assert describe_step(run, 2) == before
    with pinned_store(data, run) as store:
        assert store.version == 1
    with pinned_store(f"{data}@2", run) as store:
        assert store.version == 2  # asked for by name; the checkpoint refuses it
    with open_store(data) as store:
        assert store.version == 2


def test_a_start_that_was_refused_does_not_count(tmp_path, data):
    run = write_run(tmp_path / "run", data)
    commit_another_version(data, tmp_path)
    write_run(run, data, steps=0, config={**CONFIG, "seq_len": 16})
    facts = trained_on(read_records(run))
    assert facts is not None
    assert (facts.version, facts.seq_len, max(facts.positions)) == (1, 48, 3)


def test_a_store_that_moved(tmp_path, data):
    run = write_run(tmp_path / "run", data)
    before = describe_step(run, 1)
    moved = data.rename(tmp_path / "elsewhere")
    with pytest.raises(NotAStoreError, match="isn't there any more") as caught:
        describe_step(run, 1)
    assert "--data" in caught.value.hint
    assert describe_step(run, 1, data=str(moved)) == {**before, "store": str(moved)}
    with pytest.raises(NotAStoreError):
        describe_step(run, 1, data=str(tmp_path / "nowhere"))
    moved.rename(run / "store")  # as `penstock run` has it
    assert describe_step(run, 1)["digest"] == before["digest"]


def test_another_store_is_refused_with_both_digests(tmp_path, data):
    run = write_run(tmp_path / "run", data)
    with open_store(data) as store:
        digest = store.digest
    shutil.rmtree(data)
    commit_another_version(data, tmp_path)
    with open_store(data) as store:
        other = store.digest
    with pytest.raises(StoreError, match=digest) as caught, opened_stores(run):
        pass
    assert other in caught.value.message


def test_records_that_do_not_fit_are_refused(tmp_path, data):
    with pytest.raises(InputError, match="position"):
        describe_step(write_run(tmp_path / "other", data, offset=1), 2)
    (tmp_path / "empty").mkdir()
    with pytest.raises(InputError, match="no run"):
        describe_step(tmp_path / "empty", 1)
    with RunLog(tmp_path / "early") as log:
        log.append("start", config=CONFIG)
    with pytest.raises(InputError, match="trained on"):
        describe_step(tmp_path / "early", 1)
    with RunLog(tmp_path / "junk") as log:
        log.append("data", store=7, store_version="x", digest=None)
        log.append("step", step="x", position=None)
    with pytest.raises(InputError, match="trained on"):
        describe_step(tmp_path / "junk", 1)
