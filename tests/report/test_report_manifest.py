"""The manifest: the keys others rely on, for whole, cut and bent records."""

import json
import math
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.report import build_manifest, summary_lines, write_manifest
from penstock.report.page import render_page
from penstock.report.run import Run

Records = list[dict[str, Any]]


def test_a_completed_run_has_every_key(records: Records) -> None:
    manifest = build_manifest(records)
    assert manifest["status"] == "completed"
    assert manifest["failed_phase"] is None
    assert manifest["execution_timestamp"] == "2025-10-09T08:53:20+00:00"
    assert manifest["total_execution_time_seconds"] == 71.25
    assert manifest["command"] == "penstock run --repo '/data/some repo' --out runs/demo --verbose"
    assert manifest["hardware"]["cpu_cores"] == 16
    assert manifest["choices"][3]["name"] == "micro_batch_rows"
    assert set(manifest["choices"][3]) == {"name", "value", "reason"}
    assert manifest["store"]["version"] == 1
    assert manifest["store"]["bytes"] == 33_120_448
    assert manifest["store"]["splits"]["val"]["tokens"] == 951_012
    assert manifest["store"]["skipped"]["copy"] == 1_204
    assert manifest["phase_results"]["prepare"]["duration_seconds"] == 0.62
    assert manifest["phase_results"]["prepare"]["documents"] == 12_431
    assert manifest["files"] == {
        "records": "records.jsonl",
        "checkpoint": "checkpoints/step-000200",
        "best_checkpoint": None,
        "report": "report.html",
    }


def test_training_parameters_are_those_used_not_those_asked_for(records: Records) -> None:
    parameters = build_manifest(records)["training_parameters"]
    assert parameters["batch_size"] == 8, (
        "the rows that went through the card at once, chosen as the config left it open"
    )
    assert parameters["batch_size"] * parameters["gradient_accumulation_steps"] == parameters["batch_rows"] == 16
    assert parameters["seed"] == 42, "only the config has it"
    assert parameters["parameters"] == 10_900_000, "only the train phase has it"
    assert parameters["num_sequences"] == 1100, "the train phase calls it train_rows"
    assert (parameters["total_steps"], parameters["steps_done"], parameters["warmup_steps"]) == (200, 200, 20)


def test_the_manifest_lists_every_store(records: Records, mixed_records: Records) -> None:
    one, several = build_manifest(records), build_manifest(mixed_records)
    assert [store["name"] for store in one["stores"]] == ["store"]
    assert one["mixture"] is None
    assert several["store"]["digest"] == several["stores"][0]["digest"] == one["store"]["digest"]
    assert several["stores"][1] == {
        "name": "books",
        "path": "stores/books",
        "version": 3,
        "digest": "77aa",
        "documents": 1_210,
        "tokens": 5_365_488,
    }
    assert [(source["name"], source["weight"], source["share"]) for source in several["mixture"]] == [
        ("code", 0.5, 0.3),
        ("books:new/**", 3, 0.1),
        ("books:rest", 1, 0.6),
    ]


def test_training_report_is_derived_from_the_steps(records: Records) -> None:
    report = build_manifest(records)["training_report"]
    steps = [record for record in records if record["kind"] == "step"]
    history = report["learning_rate"]["history"]
    assert len(history) == 200
    assert history[:5] == sorted(set(history[:5])), "warm-up rises step by step"
    assert report["training"]["first_train_loss"] == steps[0]["loss"]
    assert report["training"]["final_train_loss"] == steps[-1]["loss"]
    assert report["training"]["final_val_bits_per_byte"] == pytest.approx(report["training"]["final_val_loss"] / 2.42)
    assert len(report["training"]["evaluations"]) == 8
    assert report["gradients"]["norm_max"] == max(step["grad_norm"] for step in steps)
    assert report["hardware"]["collection_interval_seconds"] == 5
    assert report["hardware"]["samples"] == 9
    assert report["hardware"]["peak_memory_mb"] == 3198
    assert report["hardware"]["peak_gpu_memory_mb"] == 9198
    assert report["hardware"]["mean_cpu_percent"] == 31.5
    assert report["hardware"]["device"] == "cuda (NVIDIA H200)"
    seconds = sum(step["seconds"] for step in steps)
    tokens = sum(step["tokens"] for step in steps)
    assert report["timing"]["tokens_per_second"] == pytest.approx(tokens / seconds)
    stall = 100 * sum(step["data_seconds"] for step in steps) / seconds
    assert report["timing"]["data_stall_percent"] == pytest.approx(stall)
    assert report["timing"]["step_seconds_p95"] == sorted(step["seconds"] for step in steps)[189]


def test_one_epoch_summary_for_each_pass(records: Records) -> None:
    epochs = build_manifest(records)["training_report"]["training"]["epoch_summaries"]
    # 200 steps of 16 rows over 1,100 rows: two whole passes and 1,000 rows of a third.
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert [epoch["complete"] for epoch in epochs] == [True, True, False]
    assert epochs[0]["last_step"] + 1 == epochs[1]["first_step"]
    assert epochs[0]["mean_train_loss"] > epochs[1]["mean_train_loss"] > epochs[2]["mean_train_loss"]
    steps = [record for record in records if record["kind"] == "step"]
    assert sum(epoch["tokens"] for epoch in epochs) == sum(step["tokens"] for step in steps)


def test_a_killed_run_is_interrupted(records: Records) -> None:
    manifest = build_manifest(records[:80])
    assert manifest["status"] == "interrupted"
    assert 0 < manifest["training_parameters"]["steps_done"] < 200


def test_a_failed_run_names_the_phase(records: Records) -> None:
    cut = records[:80]
    cut.append({"kind": "phase", "time": 1, "name": "train", "status": "failed", "seconds": 3.0, "detail": {}})
    cut.append({"kind": "end", "time": 2, "status": "failed", "message": "loss is not finite at step 61"})
    manifest = build_manifest(cut)
    assert (manifest["status"], manifest["failed_phase"]) == ("failed", "train")
    assert manifest["message"] == "loss is not finite at step 61"
    assert manifest["phase_results"]["train"]["status"] == "failed"


def test_a_resumed_run_counts_each_step_once_and_forgets_the_earlier_end(records: Records) -> None:
    killed, resumed = records[:100], [dict(record) for record in records]
    for record in resumed:
        record["time"] += 10_000
    resumed = [record for record in resumed if record.get("step", 999) > 50 or record["kind"] != "step"]
    once, twice = build_manifest(records), build_manifest([*killed, *resumed])
    assert twice["training_parameters"]["steps_done"] == 200
    assert twice["num_starts"] == 2
    assert len(twice["training_report"]["learning_rate"]["history"]) == 200
    assert twice["total_execution_time_seconds"] < 10_000, "the pause between the two isn't execution"
    assert twice["choices"] == once["choices"]
    assert build_manifest([*records, *killed])["status"] == "interrupted", "started again after its end, then killed"


def test_values_that_are_not_finite_become_null(records: Records, run_of: Callable[[Records], Path]) -> None:
    for record in records:
        if record["kind"] == "step" and record["step"] in (7, 200):
            record["loss"], record["grad_norm"] = math.nan, math.inf
    records.insert(1, {"kind": "choice", "time": 1, "name": "x", "value": [math.nan, {"y": -math.inf}], "reason": ""})
    path = write_manifest(run_of(records))
    manifest = json.loads(path.read_text(), parse_constant=pytest.fail)
    assert manifest["choices"][0]["value"] == [None, {"y": None}]
    assert manifest["training_report"]["training"]["final_train_loss"] is not None, "the last finite one"
    assert manifest["training_report"]["gradients"]["steps_without_finite_loss"] == 2


def test_no_records_still_give_a_manifest() -> None:
    manifest = build_manifest([])
    assert manifest["status"] == "interrupted"
    assert manifest["store"] is None
    assert manifest["training_report"]["timing"]["tokens_per_second"] is None


def test_lone_surrogates_of_file_names_are_kept(run_of: Callable[[Records], Path]) -> None:
    name = "caf\udce9.py"
    path = write_manifest(run_of([{"kind": "checkpoint", "time": 1, "step": 1, "path": name}]))
    assert json.loads(path.read_text())["files"]["checkpoint"] == name


def test_a_folder_without_records_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"records\.jsonl"):
        write_manifest(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_line_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.jsonl").write_bytes(b'{"kind": "start"\n')
    with pytest.raises(InputError, match="line 1 of"):
        write_manifest(tmp_path)


_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**400),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
FIELD_NAMES = """time name status seconds detail step loss tokens position split rows documents text splits skipped
    config hardware gpu gpus memory_bytes value reason message command path bytes bits_per_byte learning_rate
    data_seconds store stores mixture mix name weight share version"""
KINDS = "start phase choice data rows step evaluation checkpoint sample hardware event end train other"
_bent_record = st.builds(
    lambda kind, fields: {**fields, "kind": kind},
    st.sampled_from(KINDS.split()),
    st.dictionaries(st.sampled_from(FIELD_NAMES.split()), _anything, max_size=8),
)


@given(st.lists(_bent_record, max_size=8))
def test_records_of_any_shape_give_manifest_page_and_summary(records: Records) -> None:
    json.dumps(build_manifest(records), allow_nan=False)
    render_page(Run.from_records(records), name="run").encode()
    categories = {unicodedata.category(character) for line in summary_lines(records) for character in line}
    assert not categories & {"Cc", "Cs", "Zl", "Zp"}


def test_a_run_that_records_every_tenth_step_counts_all_steps(records: Records) -> None:
    sparse = [record for record in records if record["kind"] != "step" or record["step"] % 10 == 0]
    manifest = build_manifest(sparse)
    assert manifest["training_parameters"]["steps_done"] == 200
    assert manifest["training_report"]["training"]["tokens"] == 1_634_400, "as the training phase counted"
    killed = build_manifest([record for record in sparse if record["kind"] not in ("phase", "end")])
    assert killed["training_report"]["training"]["tokens"] is None, "a tenth of the tokens would be a wrong number"
