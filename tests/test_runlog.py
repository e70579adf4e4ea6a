"""Records come back as written, through kills, failures and resumes."""

import errno
import math
import os
import signal
import subprocess
import sys

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock import fs
from penstock.errors import ConfigError, InputError
from penstock.runlog import RECORDS_NAME, RunLog, latest_by_step, read_records

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(fields=st.lists(st.dictionaries(st.sampled_from(["name", "value", "détail"]), json_values), max_size=5))
def test_records_come_back_as_written(tmp_path_factory, fields):
    folder = tmp_path_factory.mktemp("run") / "new" / "run"
    with RunLog(folder) as log:
        written = [log.append("choice", **some) for some in fields]
    assert read_records(folder) == written
    assert [{key: record[key] for key in some} for record, some in zip(written, fields, strict=True)] == fields
    assert all(record["kind"] == "choice" and record["time"] > 1.6e9 for record in written)


def test_a_non_finite_loss_is_kept(tmp_path):
    with RunLog(tmp_path) as log:
        log.append("step", step=1, loss=math.nan)
        log.append("step", step=2, loss=math.inf)
    first, second = read_records(tmp_path)
    assert math.isnan(first["loss"])
    assert second["loss"] == math.inf


def test_a_second_session_appends(tmp_path):
    for session in range(3):
        with RunLog(tmp_path) as log:
            log.append("start", session=session)
    assert [record["session"] for record in read_records(tmp_path)] == [0, 1, 2]


def test_a_run_without_records_has_none(tmp_path):
    assert read_records(tmp_path) == []
    RunLog(tmp_path).close()
    assert read_records(tmp_path) == []


def test_a_torn_tail_is_dropped_by_the_reader_and_cut_by_the_next_writer(tmp_path):
    with RunLog(tmp_path) as log:
        kept = [log.append("event", message="a\nb"), log.append("event", message="second")]
    path = tmp_path / RECORDS_NAME
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for length in range(first, len(whole)):
        path.write_bytes(whole[:length])
        assert read_records(tmp_path) == kept[:1]
        with RunLog(tmp_path) as log:
            added = log.append("event", message="after")
        assert read_records(tmp_path) == [kept[0], added]


def test_a_killed_writer_loses_no_record_it_had_written(tmp_path):
    code = """
import os, signal, sys
from pathlib import Path
from penstock.runlog import RunLog
log = RunLog(Path(sys.argv[1]))
for step in range(20): log.append("step", step=step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert [record["step"] for record in read_records(tmp_path)] == list(range(20))


@pytest.mark.parametrize("damage", [b'{"kind": "st', b"\0\0\0\0", b"[1, 2]", b"", b'{"a": ' * 100_000])
def test_a_damaged_line_is_named(tmp_path, damage):
    with RunLog(tmp_path) as log:
        log.append("event", message="first")
    path = tmp_path / RECORDS_NAME
    path.write_bytes(path.read_bytes() + damage + b"\n" + path.read_bytes())
    with pytest.raises(InputError) as caught:
        read_records(tmp_path)
    assert "line 2 " in caught.value.message
    assert str(path) in caught.value.message


def test_a_phase_is_timed_and_keeps_its_figures(tmp_path):
    with RunLog(tmp_path) as log, log.phase("tokenize") as detail:
        detail["tokens"] = 12
    [record] = read_records(tmp_path)
    assert (record["kind"], record["name"], record["status"]) == ("phase", "tokenize", "ok")
    assert record["detail"] == {"tokens": 12}
    assert 0 <= record["seconds"] < 60


@pytest.mark.parametrize("failure", [ConfigError("bad", hint="mend it"), KeyboardInterrupt(), SystemExit(3)])
def test_a_failed_phase_is_recorded_and_the_same_error_raised(tmp_path, failure):
    def fail(log: RunLog) -> None:
        with log, log.phase("train") as detail:
            detail["steps"] = 7
            raise failure

    with pytest.raises(type(failure)) as caught:
        fail(RunLog(tmp_path))
    assert caught.value is failure
    [record] = read_records(tmp_path)
    assert (record["status"], record["detail"]) == ("failed", {"steps": 7})


def test_a_full_disk_does_not_hide_why_a_phase_failed(tmp_path, monkeypatch):
    def refuse(operation: str, path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fail(log: RunLog) -> None:
        with log, log.phase("train"):
            monkeypatch.setattr(fs, "before_operation", refuse)
            raise failure

    failure = ConfigError("bad", hint="mend it")
    with pytest.raises(ConfigError) as caught:
        fail(RunLog(tmp_path))
    assert caught.value is failure


def test_a_full_disk_is_not_kept_quiet_when_nothing_else_failed(tmp_path, monkeypatch):
    def refuse(operation: str, path: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    log = RunLog(tmp_path)
    log.append("event", message="kept")
    monkeypatch.setattr(fs, "before_operation", refuse)
    with pytest.raises(OSError, match=RECORDS_NAME), log:
        pass
    with pytest.raises(OSError, match="descriptor"):
        log.append("event", message="after the close")
    monkeypatch.setattr(fs, "before_operation", None)
    assert [record["message"] for record in read_records(tmp_path)] == ["kept"]


def test_latest_by_step_takes_the_last_session_of_a_resumed_run(tmp_path):
    with RunLog(tmp_path) as log:
        for step in (1, 2, 3, 4):
            log.append("step", step=step, loss=10.0 - step, session=1)
        log.append("checkpoint", step=2, path="c2")
    with RunLog(tmp_path) as log:  # killed after 4, resumed from the checkpoint of 2
        for step in (3, 4, 5):
            log.append("step", step=step, loss=5.0 - step, session=2)
    steps = latest_by_step(read_records(tmp_path), "step")
    assert [(record["step"], record["session"]) for record in steps] == [(1, 1), (2, 1), (3, 2), (4, 2), (5, 2)]
    assert [record["path"] for record in latest_by_step(read_records(tmp_path), "checkpoint")] == ["c2"]
    assert latest_by_step(read_records(tmp_path), "sample") == []


def test_latest_by_step_keeps_every_split_and_prompt_of_a_step(tmp_path):
    with RunLog(tmp_path) as log:
        for loss in (3.0, 2.0):  # the second time after a resume
            for split in ("val", "test"):
                log.append("evaluation", step=10, split=split, loss=loss)
        for prompt in ("def", "class"):
            log.append("sample", step=10, prompt=prompt, text="…")
    records = read_records(tmp_path)
    assert [(r["split"], r["loss"]) for r in latest_by_step(records, "evaluation")] == [("val", 2.0), ("test", 2.0)]
    assert [r["prompt"] for r in latest_by_step(records, "sample")] == ["def", "class"]
