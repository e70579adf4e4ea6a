"""Where a run's time went, and what is said about it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.report.idleness import idleness_of

from .conftest import completed_records


def records_with(**step: float) -> list[dict[str, Any]]:
    """A run of equal steps of a second each, told of in its records by their times."""
    start = completed_records()[0]
    choices = [
        {"kind": "choice", "name": name, "value": value}
        for name, value in (("device", "cuda"), ("micro_batch_rows", 64), ("seq_len", 1024))
    ]
    begin = start["time"]
    steps = [
        {"kind": "step", "step": n, "time": begin + n, "seconds": 1.0, "data_seconds": 0.001, "tokens": 9, **step}
        for n in range(1, 101)
    ]
    return [start, *choices, *steps, {"kind": "end", "time": begin + 100, "status": "completed"}]


def causes(records: list[dict[str, Any]]) -> list[str]:
    return [one.cause.split(":")[0] for one in idleness_of(records).advice]


def test_a_busy_run_gets_no_advice():
    found = idleness_of(records_with())
    assert found.advice == ()
    assert found.account.shares()["computing"] > 99


def test_waiting_for_data_is_named():
    found = idleness_of(records_with(data_seconds=0.3))
    assert [one.cause for one in found.advice] == ["waiting for data"]
    assert found.advice[0].percent == pytest.approx(30, abs=0.5)
    assert "prefetch_batches" in found.advice[0].change


@pytest.mark.parametrize(("kind", "cause"), [("checkpoint", "saving checkpoints"), ("evaluation", "evaluating")])
def test_saves_and_evaluations_are_named(kind, cause):
    records = records_with()
    begin = records[0]["time"]
    pause = {"kind": kind, "step": 50, "split": "val", "time": begin + 50, "seconds": 30.0}
    for record in records:
        if record["kind"] in ("step", "end") and record["time"] > begin + 50:
            record["time"] += 30
    assert causes([*records[:54], pause, *records[54:]]) == [cause]


def test_a_small_micro_batch_is_named_on_a_gpu_alone():
    records = records_with()
    next(one for one in records if one.get("name") == "micro_batch_rows")["value"] = 2
    assert causes(records) == ["small micro-batch"]
    next(one for one in records if one.get("name") == "device")["value"] = "cpu"
    assert causes(records) == []


def test_idle_units_and_uneven_steps_are_named():
    records = records_with()
    gpu = {"index": 0, "sm_active_percent": 30.0, "tensor_active_percent": 10.0}
    records.append({"kind": "hardware", "time": records[0]["time"] + 50, "gpu": [gpu]})
    for record in records:
        if record["kind"] == "step" and record["step"] % 10 == 0:
            record["seconds"] = 2.0
    assert "multiprocessors of the card idle while kernels run" in causes(records)
    assert "uneven steps" in causes(records)


def test_junk_records_are_accounted_for_without_a_failure():
    junk: list[Any] = [{"kind": "step", "step": "x"}, {"kind": "step", "step": 1, "seconds": "?"}, {"kind": 3}]
    found = idleness_of(junk)
    assert found.account.training_seconds is None
    assert sum(found.account.shares().values()) == 0
