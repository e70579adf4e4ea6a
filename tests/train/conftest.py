"""A small real store (two hundred short documents, 320 tokens of vocabulary) and the smallest model worth training."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock import fs
from penstock.runlog import RunLog, latest_by_step, read_records
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.train import TrainConfig, TrainResult, load_config, train
from penstock.train.checkpoint import MODEL_NAME, OPTIMIZER_NAME, read_tensors

TINY_SETTINGS = [
    "model.num_layers=2",
    "model.num_heads=2",
    "model.hidden_size=32",
    "model.feed_forward_size=48",
    "seq_len=32",
    "batch_rows=4",
    "micro_batch_rows=2",
    "steps=8",
    "learning_rate=1e-2",
    "eval_every_steps=4",
    "eval_rows=8",
    "checkpoint_every_steps=4",
    "sample_tokens=4",
    "device=cpu",
]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small lose more to threads waiting for each other than they gain."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("train-data")
    chance = random.Random(7)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 7))) for _ in range(60)]
    for number in range(200):
        text = " ".join(chance.choices(words, k=chance.randint(3, 120)))
        path = folder / "texts" / f"{number:03d}.txt"
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{number} {text}\n")
    source = FilesSource(name="texts", root=str(folder / "texts"))
    prepare([source], folder / "store", options=PrepareOptions(vocab_size=320))
    return folder / "store"


@pytest.fixture
def store(store_path: Path) -> Iterator[Store]:
    with open_store(store_path) as opened:
        yield opened


def tiny_config(*overrides: str) -> TrainConfig:
    return load_config(None, [*TINY_SETTINGS, *overrides])


Train = Callable[..., TrainResult]


@pytest.fixture
def run_training(store: Store) -> Train:
    """Trains into a folder, with the settings of `tiny_config`."""

    def run(folder: Path, *overrides: str, **arguments: Any) -> TrainResult:
        with RunLog(folder) as log:
            return train(tiny_config(*overrides), store, folder, log, **arguments)

    return run


@pytest.fixture(scope="session")
def saved_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of a small pretrained model of a kind, such as llama."""
    from .small_models import save_small_model

    root = tmp_path_factory.mktemp("pretrained")

    def folder_of(kind: str) -> Path:
        if not (root / kind).exists():
            save_small_model(kind, root / kind)
        return root / kind

    return folder_of


@pytest.fixture
def set_before_operation() -> Iterator[Callable[[Callable[[str, str], None] | None], None]]:
    """Sets the seam of fs.py, and clears it after the test."""

    def set_seam(seam: Callable[[str, str], None] | None) -> None:
        fs.before_operation = seam

    yield set_seam
    fs.before_operation = None


RANKS = ["micro_batch_rows=1", "eval_rows=9"]  # nine rows don't go round: one rank gets a batch without targets
Order = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def order(store_path: Path) -> Iterator[Order]:
    """`order(run, size, settings…)`: what the ranks of ranks.py came to."""
    command = [sys.executable, str(Path(__file__).with_name("ranks.py"))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def run(folder: Path, size: int, *settings: str, **more: Any) -> dict[str, Any]:
            chosen = [*TINY_SETTINGS, *RANKS, *settings]
            task = {"store": str(store_path), "run": str(folder), "size": size, "settings": chosen, **more}
            process.stdin.write(json.dumps(task) + "\n")
            process.stdin.flush()
            answer: dict[str, Any] = json.loads(process.stdout.readline())
            assert answer["hung"] == 0
            return answer

        yield run
        process.stdin.close()


def losses(folder: Path) -> list[tuple[int, float]]:
    return [(record["step"], record["loss"]) for record in latest_by_step(read_records(folder), "step")]


def events(folder: Path) -> list[str]:
    return [record["message"] for record in read_records(folder) if record["kind"] == "event"]


def saved_tensors(checkpoint: Path) -> dict[str, torch.Tensor]:
    return {**read_tensors(checkpoint / MODEL_NAME), **read_tensors(checkpoint / OPTIMIZER_NAME)}


def assert_same_tensors(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> None:
    assert first.keys() == second.keys()
    assert [name for name in first if not torch.equal(first[name], second[name])] == []
