"""The four example experts: ten steps each on the tiny base model, and a second start on prepared data."""

from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.app import app
from penstock.runlog import read_records

typer_testing = pytest.importorskip("typer.testing")
for package in ("torch", "transformers", "peft"):
    pytest.importorskip(package)

EXPERTS = Path(__file__).resolve().parents[2] / "examples" / "experts"
NAMES = ("json", "typescript", "neo4j", "sql")


def make() -> Any:
    spec = importlib.util.spec_from_file_location("make_experts", EXPERTS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples in a folder of their own, with the base model that `make.py` makes."""
    folder = tmp_path_factory.mktemp("experts")
    for name in NAMES:
        shutil.copytree(EXPERTS / name, folder / name)
    make().main(str(folder))
    return folder


def train(experts: Path, name: str, out: str, *arguments: str) -> tuple[list[dict[str, Any]], str]:
    """Ten steps in float32, which a CPU computes faster; the run's records and what was said."""
    words = ["train", str(experts / name / "manifest.json"), "--out", str(experts / "runs" / out), *arguments]
    settings = ["steps=10", "dtype=float32", "eval_rows=2", "sample_tokens=0", "checkpoint_every_steps=null"]
    answer = typer_testing.CliRunner().invoke(
        app, [*words, *(word for setting in settings for word in ("--set", setting))], catch_exceptions=False
    )
    assert answer.exit_code == 0, answer.output
    return read_records(experts / "runs" / out), answer.output


def trained(experts: Path, name: str) -> list[dict[str, Any]]:
    """The records of an expert's first run, made unless another test of this process has."""
    run = experts / "runs" / name
    return read_records(run) if run.exists() else train(experts, name, name)[0]


def phases(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [one["detail"] for one in records if one["kind"] == "phase" and one["name"].startswith("prepare")]


def test_the_data_is_what_the_generator_makes(tmp_path: Path) -> None:
    for path in make().make_data(tmp_path):
        assert path.read_text() == (EXPERTS / path.relative_to(tmp_path)).read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_expert_trains_ten_steps_and_its_log_lists_every_choice(experts: Path, name: str) -> None:
    records, said = train(experts, name, name, "--verbose")
    steps = [record for record in records if record["kind"] == "step"]
    assert [record["step"] for record in steps] == list(range(1, 11))
    assert steps[-1]["loss"] < steps[0]["loss"]
    choices = {record["name"]: record["value"] for record in records if record["kind"] == "choice"}
    assert {"dtype", "tf32", "attention", "optimizer", "compile", "activation_checkpointing", "packing"} <= set(choices)
    adapted = {
        record["key"]: (record["outcome"], record["detail"]) for record in records if record["kind"] == "adapted"
    }
    assert adapted["training.config.use_tf32"] == ("takes effect", "tf32=true")
    assert adapted["training.config.use_sdpa"] == ("takes effect", "attention='sdpa'")
    assert adapted["training.config.bf16"] == ("not applicable", "--set dtype=float32 comes before it")
    assert "training.config.use_tf32 = true: takes effect: tf32=true" in said
    config = json.loads((experts / "runs" / name / "config.json").read_text())
    assert config["model"]["adapter"]["kind"] == ("dora" if name == "typescript" else "lora")
    assert Path(config["model"]["pretrained"]).is_dir()
    assert all(detail["committed"] and detail["units"] for detail in phases(records))
    assert len(phases(records)) == (2 if name == "sql" else 1)


def test_the_tasks_are_mixed_by_weight(experts: Path) -> None:
    records = trained(experts, "sql")
    mixture = next(record["mixture"]["mix"] for record in records if record["kind"] == "data")
    assert {one["name"]: one["weight"] for one in mixture} == {"write": 2.0, "explain": 0.5}


def test_a_second_start_uses_the_prepared_data(experts: Path) -> None:
    (first,) = phases(trained(experts, "json"))
    records, said = train(experts, "json", "again")
    (second,) = phases(records)
    assert "nothing is tokenised again" in said
    assert (second["store"], second["digest"]) == (first["store"], first["digest"])
    assert not second["committed"]
    assert second["documents_reused"] == second["documents"] == first["documents"]


def test_changed_data_is_seen_and_a_damaged_store_is_made_anew(experts: Path) -> None:
    (before,) = phases(trained(experts, "neo4j"))
    path = experts / "neo4j" / "train.jsonl"
    text = path.read_text()
    path.write_text(
        text + json.dumps({"question": "Count all.", "schema": "()", "cypher": "MATCH (n) RETURN count(n)"})
    )
    (changed,) = phases(train(experts, "neo4j", "changed")[0])
    assert changed["committed"]
    assert changed["documents"] == before["documents"] + 1
    assert changed["documents_reused"] >= len((experts / "neo4j" / "valid.jsonl").read_text().splitlines())
    for tokens in Path(changed["store"]).glob("segments/*"):
        tokens.chmod(0o644)
        tokens.write_bytes(bytes(len(tokens.read_bytes())))
    (mended,) = phases(train(experts, "neo4j", "mended")[0])
    assert mended["was_damaged"]
    assert mended["digest"] == changed["digest"]


def test_a_manifest_without_its_data_gets_one_line(experts: Path) -> None:
    manifest = json.loads((experts / "json" / "manifest.json").read_text())
    manifest["training"]["dataset"]["path"] = "nowhere.jsonl"
    (experts / "json" / "wrong.json").write_text(json.dumps(manifest))
    answer = typer_testing.CliRunner().invoke(
        app, ["train", str(experts / "json" / "wrong.json"), "--out", str(experts / "runs" / "wrong")]
    )
    assert answer.exit_code != 0
    assert "nowhere.jsonl" in str(answer.exception)
