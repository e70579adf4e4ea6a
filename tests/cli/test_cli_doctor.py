"""`penstock doctor` for machines that aren't here, and for runs."""

from __future__ import annotations

import json
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import _run
from penstock.hardware import PROFILE_NAMES


def doctor(*words: object) -> tuple[int, str, str]:
    out, err = StringIO(), StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = _run(["doctor", *map(str, words)], debug=False)
    return code, out.getvalue(), err.getvalue()


def choices(*words: object) -> dict[str, str]:
    code, out, err = doctor(*words, "--json")
    assert code == 0, err
    return {one["name"]: one["value"] for one in json.loads(out)["training"]["choices"]}


@pytest.mark.parametrize("name", PROFILE_NAMES)
def test_every_profile_says_what_it_would_choose(name):
    code, out, _ = doctor("--profile", name)
    assert code == 0
    assert "micro_batch_rows" in out
    assert choices("--profile", name)["device"] == ("cpu" if name.startswith("cpu") else "cuda")


def test_a_size_names_its_card():
    assert choices("--profile", "24GB") == choices("--profile", "gpu-24gb")


def test_settings_change_the_answer():
    large = choices("--profile", "gpu-141gb", "--set", "model.preset=xlarge", "--set", "seq_len=2048")
    assert large != choices("--profile", "gpu-141gb")
    assert choices("--profile", "gpu-24gb", "--set", "compile=off")["compile"] == "off"


@pytest.mark.parametrize(
    "words",
    [
        ("--profile", "gpu-7gb"),
        ("--profile", "x", "--json"),
        ("--set", "nonsense=1"),
        ("--set", "model.pretrained=x"),
        ("--run", "nothing"),
        ("--run", "x", "--profile", "cpu-2"),
    ],
)
def test_what_is_unknown_is_one_line(words):
    code, out, err = doctor(*words)
    assert code == 1
    assert out == ""
    assert [line.split(":")[0] for line in err.strip().splitlines()] == ["error", "hint"]


def test_a_run_is_accounted_for(tmp_path: Path):
    def written(*records: dict[str, Any]) -> Path:
        text = "".join(json.dumps({"time": number, **record}) + "\n" for number, record in enumerate(records))
        (tmp_path / "records.jsonl").write_text(text)
        return tmp_path

    steps = [{"kind": "step", "step": n, "seconds": 1.0, "data_seconds": 0.4, "tokens": 8} for n in range(1, 9)]
    code, out, err = doctor("--run", written({"kind": "start"}, *steps))
    assert code == 0, err
    assert "waiting for data" in out
    assert "prefetch_batches" in out
    code, _, err = doctor("--run", written({"kind": "start"}))
    assert code == 1
    assert "no step yet" in err
