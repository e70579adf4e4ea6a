"""The last lines of a run."""

from pathlib import Path
from typing import Any

from penstock.report import summary_lines

Records = list[dict[str, Any]]


def _line_with(lines: list[str], word: str) -> str:
    return next(line for line in lines if word in line)


def test_says_what_happened_how_fast_and_where_to_look(records: Records) -> None:
    lines = summary_lines(records, run_folder=Path("runs/demo"))
    steps = [record for record in records if record["kind"] == "step"]
    assert f"{steps[0]['loss']:.3f}" in lines[0]
    assert f"{steps[-1]['loss']:.3f}" in lines[0]
    assert "bits per byte" in lines[0]
    assert "53.4 MB/s" in _line_with(lines, "prepare")
    assert "34.2 k tokens/s" in _line_with(lines, "train ")
    assert any("runs/demo/report.html" in line for line in lines)
    assert any("runs/demo/checkpoints/step-000200" in line for line in lines)


def test_a_failure_comes_first(records: Records) -> None:
    cut = records[:14]
    cut.append({"kind": "phase", "time": 1, "name": "tune", "status": "failed", "seconds": 0.5, "detail": {}})
    cut.append({"kind": "end", "time": 2, "status": "failed", "message": "no memory left"})
    lines = summary_lines(cut)
    assert "Failed in phase tune" in lines[0]
    assert "no memory left" in lines[0]


def test_no_record_can_steer_the_terminal(records: Records) -> None:
    records.append(
        {"kind": "checkpoint", "time": 3, "step": 999, "path": "\x1b]0;owned\x07\x9b2J\u202egpj.exe\r\n$ rm"}
    )
    records.append({"kind": "end", "time": 4, "status": "failed", "message": "\x1b[2Jall is well"})
    text = "".join(summary_lines(records))
    assert text.isprintable()
    assert "\\u001b]0;owned\\u0007" in text
    assert "\\u202egpj.exe" in text


def test_an_empty_run_is_a_sentence() -> None:
    assert summary_lines([])[0] == "Nothing is recorded yet."
