"""SIGKILL of a process that loads: no process and no shared memory is left, and a new one goes on from the state.

The loader itself has one thread and ordinary memory, so there is nothing it could leave. A DataLoader's workers are
PyTorch's: they look every five seconds whether their parent lives and end when it doesn't, and what they share has no
name in /dev/shm once it is open (PyTorch's file_descriptor strategy, the default on Linux).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock import fs
from penstock.load import Loader
from penstock.pack import plan_concat

from .conftest import Sample

Samples = Callable[[str], Sample]
pytestmark = [
    pytest.mark.torture(lane="D", sample=True),
    pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc"),
]

PATIENCE_SECONDS = 60
MARK = "PENSTOCK_TEST_KILLED"
SEQ_LEN, BATCH_ROWS, SEED = 16, 4, 3

LOAD = """
import json, sys
from penstock import fs
from penstock.load import Loader
from penstock.pack import plan_concat
from penstock.store import open_store

kind, path = sys.argv[1:]
plan = plan_concat(open_store(path), seq_len=16)
if kind == "loader":
    batches = Loader(plan, batch_rows=4, seed=3, prefetch_batches=8)
    state = batches.state_dict
else:
    from torch.utils.data import DataLoader
    from penstock.load.torch import RowStream

    stream = RowStream(plan, batch_rows=4, seed=3, batched=True)
    batches = DataLoader(stream, batch_size=None, num_workers=int(kind), prefetch_factor=4 if kind != "0" else None)
    state = lambda: stream.state_after(number)
for number, batch in enumerate(batches, 1):
    print(json.dumps(state()), flush=True)
"""


def marked_processes(mark: str) -> list[int]:
    """Processes that were started with the mark in their environment, their children among them."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                if f"{MARK}={mark}".encode() in (entry / "environ").read_bytes().split(b"\0"):
                    found.append(int(entry.name))
            except OSError:  # it ended, or is another user's
                continue
    return found


def shared_memory() -> set[str]:
    """Names in /dev/shm but for folders: other tests keep their files in some."""
    folder = Path("/dev/shm")
    return {entry.name for entry in folder.iterdir() if not entry.is_dir()} if folder.is_dir() else set()


@pytest.mark.parametrize("kind", ["loader", "0", "2"])
def test_nothing_is_left_and_the_state_goes_on(
    sample: Samples, kind: str, torture_figures: Callable[..., None], scale: Callable[..., int]
) -> None:
    if kind != "loader":
        pytest.importorskip("torch")
    one = sample("letters")
    trials, left = scale(test=1, torture=20), 0
    for trial in range(trials):
        left += not killed_cleanly(one, kind, f"{os.getpid()}-{kind}-{trial}", num_batches=5 + trial)
    torture_figures(lane="D", case=f"SIGKILL while loading ({kind})", trials=trials, failures=left)
    assert left == 0


def killed_cleanly(one: Sample, kind: str, mark: str, *, num_batches: int) -> bool:
    """Kills a loading process after some batches; whether nothing stayed behind. The state it told must go on."""
    before = shared_memory()
    child = subprocess.Popen(
        [sys.executable, "-c", LOAD, kind, str(one.path)],
        stdout=subprocess.PIPE,
        env=os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"},
        text=True,
    )
    assert child.stdout is not None
    with child, child.stdout:
        line = [child.stdout.readline() for _ in range(num_batches)][-1]
        running = marked_processes(mark)
        assert child.pid in running
        assert len(running) >= (1 if kind == "loader" else 1 + int(kind))
        child.send_signal(signal.SIGKILL)
    state = json.loads(line)
    assert state["position"] == num_batches * BATCH_ROWS
    with Loader(plan_concat(one.store, seq_len=SEQ_LEN), batch_rows=BATCH_ROWS, seed=SEED) as loader:
        loader.load_state_dict(state)
        assert next(loader).position == num_batches * BATCH_ROWS
    deadline = time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < deadline:
        if not marked_processes(mark) and not shared_memory() - before:
            return True
        time.sleep(0.1)  # nothing tells when a process that is no child of ours has ended
    return False


TINY = ["model.num_layers=1", "model.num_heads=2", "model.hidden_size=16", "model.feed_forward_size=16", "seq_len=16"]
TRAINING = ["batch_rows=4", "steps=1000000", "checkpoint_every_steps=2", "eval_every_steps=null", "device=cpu"]


def train_command(one: Sample, run: Path, *settings: str) -> list[str]:
    chosen = [word for setting in [*TINY, *TRAINING, *settings] for word in ("--set", setting)]
    return [sys.executable, "-m", "penstock", "train", "--data", str(one.path), "--out", str(run), *chosen]


def steps_of(run: Path) -> list[int]:
    """Steps recorded so far; the last line may be half written."""
    path = run / "records.jsonl"
    lines = path.read_bytes().split(b"\n")[:-1] if path.exists() else []
    records = [json.loads(line) for line in lines]
    return [record["step"] for record in records if record["kind"] == "step"]


def test_a_killed_training_leaves_nothing_that_the_next_start_does_not_remove(
    sample: Samples, tmp_path: Path, torture_figures: Callable[..., None], scale: Callable[..., int]
) -> None:
    """`penstock train` itself: no process, no shared memory; torn checkpoints are ignored, gone after the resume."""
    pytest.importorskip("torch")
    one = sample("letters")
    trials, left = scale(test=1, torture=10), 0
    for trial in range(trials):
        run, before, mark = tmp_path / f"run-{trial}", shared_memory(), f"{os.getpid()}-train-{trial}"
        environment = os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"}
        with (
            (tmp_path / "output").open("wb") as output,
            subprocess.Popen(
                train_command(one, run), env=environment, stdout=output, stderr=subprocess.STDOUT
            ) as child,
        ):
            deadline = time.monotonic() + 3 * PATIENCE_SECONDS
            while len(steps_of(run)) < 9 + trial and child.poll() is None and time.monotonic() < deadline:
                time.sleep(0.02)  # the child doesn't know that it is watched
            assert child.poll() is None, (tmp_path / "output").read_text()
            assert child.pid in marked_processes(mark)
            child.send_signal(signal.SIGKILL)
        done = steps_of(run)
        deadline = time.monotonic() + PATIENCE_SECONDS
        while (marked_processes(mark) or shared_memory() - before) and time.monotonic() < deadline:
            time.sleep(0.1)
        left += bool(marked_processes(mark) or shared_memory() - before)
        (run / "checkpoints" / fs.temporary_path(run / "step-00000999").name).mkdir()  # a save that was torn
        resumed = subprocess.run(
            [*train_command(one, run, "stop_after_steps=2"), "--resume"],
            env=environment,
            capture_output=True,
            text=True,
        )
        assert resumed.returncode == 130, resumed.stderr  # stopped as asked
        again = steps_of(run)[len(done) :]
        assert len(again) == 2
        assert again[0] in range(max(done) - 3, max(done) + 2)  # from a checkpoint of the last few steps
        left += bool([path for path in run.rglob("*") if fs.is_temporary(path) or path.name == "train.lock"])
        left += bool(marked_processes(mark) or shared_memory() - before)
    torture_figures(lane="D", case="SIGKILL of penstock train", trials=trials, failures=left)
    assert left == 0
