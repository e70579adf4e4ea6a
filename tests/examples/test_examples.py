"""Every example runs, on tiny data."""

from __future__ import annotations

import importlib.util
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_an_own_model_learns(store_path: Path, capsys):
    losses = load("own_model").main(str(store_path))
    assert losses[-1] < losses[0] - 0.5
    assert "'position': 160" in capsys.readouterr().out


def test_every_example_is_tried_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {"own_model"}
