"""Every example runs, on tiny data; where its framework isn't installed it is skipped."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
HERE = {"own_model", "data_loader"}
NEEDS = {
    "hugging_face_trainer": ["transformers", "accelerate"],
    "trl_sft": ["trl", "datasets"],
    "lightning_trainer": ["lightning"],
    "jax_training": ["jax"],
    "grain_pipeline": ["grain"],
    "tensorflow_keras": ["tensorflow"],
}
# Calls one example's main in a process of its own, once for each list of arguments, and prints what it returned.
RUN = """
import importlib.metadata, importlib.util, json, sys

def hide(package):
    for name in [name for name in sys.modules if name.partition(".")[0] == package]:
        del sys.modules[name]
    sys.modules[package] = None
    found = importlib.metadata.distribution

    def distribution(name):
        if name == package:
            raise importlib.metadata.PackageNotFoundError(name)
        return found(name)

    importlib.metadata.distribution = distribution

try:
    import torchvision
except ImportError:
    pass
except RuntimeError:  # built for another torch: it breaks whatever imports it, and no example needs it
    hide("torchvision")
spec = importlib.util.spec_from_file_location("example", sys.argv[1])
module = importlib.util.module_from_spec(spec)
sys.modules["example"] = module
spec.loader.exec_module(module)
print("\\n" + json.dumps([module.main(*arguments) for arguments in json.loads(sys.argv[2])]))
"""


def load(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name: str, *calls: list[Any]) -> list[Any]:
    """What an example's main returns, called with each list of arguments."""
    for package in NEEDS[name]:
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} isn't installed: pip install 'penstock[trainers,jax,tf]'")
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "JAX_PLATFORMS": "cpu",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(EXAMPLES / f"{name}.py"), json.dumps(calls)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    returned: list[Any] = json.loads(done.stdout.splitlines()[-1])
    return returned


def test_an_own_model_learns(store_path: Path, capsys):
    losses = load("own_model").main(str(store_path))
    assert losses[-1] < losses[0] - 0.5
    assert "'position': 160" in capsys.readouterr().out


def test_a_data_loader_gives_the_same_with_workers_and_goes_on(store_path: Path):
    example = load("data_loader")
    first, state = example.main(str(store_path))
    assert example.main(str(store_path), 2)[0] == first
    second, _ = example.main(str(store_path), 2, state)
    assert second not in (first, [])
    assert example.main(str(store_path), 0, state)[0] == second


@pytest.mark.parametrize("name", ["hugging_face_trainer", "lightning_trainer"])
def test_a_trainer_goes_on_as_if_never_stopped(store_path: Path, tmp_path: Path, name: str):
    """Six steps in one go and in two: the losses of the later steps are the same numbers."""
    runs = [(tmp_path / "whole", 6), (tmp_path / "parts", 3), (tmp_path / "parts", 6)]
    whole, before, after = run(name, *([str(store_path), str(folder), steps] for folder, steps in runs))
    assert sorted(whole) == ["1", "2", "3", "4", "5", "6"]
    assert {step: before[step] for step in "123"} == {step: whole[step] for step in "123"}
    assert {step: after[step] for step in "456"} == {step: whole[step] for step in "456"}
    assert whole["6"] < whole["1"]


def test_trl_trains_on_rows_as_they_are(store_path: Path, tmp_path: Path):
    (losses,) = run("trl_sft", [str(store_path), str(tmp_path / "run")])
    assert len(losses) == 6
    assert losses["6"] < losses["1"]


@pytest.mark.parametrize("name", ["jax_training", "tensorflow_keras"])
def test_other_frameworks_learn(store_path: Path, name: str):
    (losses,) = run(name, [str(store_path)])
    assert losses[-1] < losses[0] - 0.1


def test_grain_restores_its_own_state(store_path: Path):
    ((went_on, again),) = run("grain_pipeline", [str(store_path)])
    assert went_on == again


def test_every_example_is_tried_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == HERE | set(NEEDS)
