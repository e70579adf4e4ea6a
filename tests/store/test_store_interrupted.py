"""SIGINT and SIGTERM end `penstock prepare` within 5 s, whatever it is doing, with a line that says how to go on."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.store import verify

from .commands import Commands
from .trials import Preparation, Trials, check_refusal, left_behind

pytestmark = pytest.mark.torture(lane="A", sample=True)

Preparations = dict[str, Preparation]
SECONDS_ALLOWED = 5.0
GIT = {
    "PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null",
    "GIT_AUTHOR_NAME": "A", "GIT_AUTHOR_EMAIL": "a@example.org", "GIT_AUTHOR_DATE": "1600000000 +0000",
    "GIT_COMMITTER_NAME": "A", "GIT_COMMITTER_EMAIL": "a@example.org", "GIT_COMMITTER_DATE": "1600000000 +0000",
}  # fmt: skip


def _table(folder: Path) -> str:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"text": f"Row {number} says something.\n" * 5}) + "\n" for number in range(80)))
    return str(path)


def _repository(folder: Path) -> str:
    repository = folder / "repository"
    repository.mkdir()
    for number in range(4):
        (repository / f"{number}.txt").write_text(f"File {number}.\n" * 30)
        for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-q", "-m", f"commit {number}"]):
            subprocess.run(["git", *arguments], cwd=repository, env=GIT, check=True)
    return f"git:{repository}"


@pytest.fixture(scope="module", params=["files, 1 worker", "files, 2 workers", "table", "git", "vocabulary"])
def interruptible(
    request: pytest.FixtureRequest, preparations: Preparations, commands: Commands, module_scratch: Path
) -> Preparation:
    """A preparation with its golden digest."""
    kind: str = request.param
    first = preparations["first"]
    folder = module_scratch / kind.replace(" ", "-").replace(",", "")
    folder.mkdir()
    inputs, options = first.inputs, (*first.options, "--workers", "1" if "1" in kind else "2")
    if kind == "table":
        inputs = (_table(folder),)
    elif kind == "git":
        inputs = (_repository(folder),)
    elif kind == "vocabulary":
        options = ("--vocab-size", "300", "--unit-bytes", "600", "--json", "--workers", "2")
    made = dataclasses.replace(first, folder=folder, inputs=inputs, options=options)
    answer = made.run()
    assert answer["status"] == 0, answer["stderr"]
    return dataclasses.replace(made, goldens=(json.loads(answer["stdout"])["digest"],))


def test_a_signal_at_any_time_ends_it_soon_and_says_how_to_go_on(
    interruptible: Preparation, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    preparation, chance, trials, slowest = interruptible, random.Random(5), Trials(), 0.0
    preparation.fresh()
    typical = preparation.run(count=False)["seconds"]
    while trials.count < scale(test=2, torture=60):
        number = chance.choice([signal.SIGINT, signal.SIGTERM])
        with trials.trial(f"{number.name}, trial {trials.count}"):
            preparation.fresh()
            after = chance.uniform(0.03, typical)  # before that, the fork is no command yet
            answer = preparation.run(signal=number, after=after, crowd=chance.random() < 0.5, count=False)
            if answer["status"] == 0 or answer["stdout"]:  # what it had to say was said; only the exit was met
                assert json.loads(answer["stdout"])["digest"] == preparation.goldens[-1]
                trials.note("done before")
            else:
                words = (f"error: interrupted by {number.name}", "run the same command again")
                check_refusal(answer, *words, status=128 + number)
                assert answer["seconds_to_end"] < SECONDS_ALLOWED
                slowest = max(slowest, answer["seconds_to_end"])
                trials.note("interrupted")
            preparation.check_versions()
            preparation.check_rerun()
    torture_figures(
        lane="A", case="SIGINT or SIGTERM at random times: files, tables, git, vocabulary", trials=trials.count,
        failures=len(trials.failures), random=True, slowest_end_seconds=round(slowest, 2), **trials.seen,
    )  # fmt: skip
    assert trials.failures == []


def test_a_kill_leaves_no_process_and_no_folder(
    interruptible: Preparation, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    """The programs that it started (git, the trainer) end too, and the next run removes what they had written."""
    preparation, chance, trials = interruptible, random.Random(6), Trials()
    preparation.fresh()
    typical = preparation.run(count=False)["seconds"]
    while trials.count < scale(test=1, torture=40):
        with trials.trial(f"trial {trials.count}"):
            preparation.fresh()
            answer = preparation.run(signal=signal.SIGKILL, after=chance.uniform(0.03, typical), count=False)
            assert answer["left"] == []
            preparation.check_versions()
            preparation.check_rerun()
    torture_figures(
        lane="A", case="SIGKILL at random times: tables, git, vocabulary", trials=trials.count,
        failures=len(trials.failures), random=True,
    )  # fmt: skip
    assert trials.failures == []


@pytest.mark.parametrize("twice", [False, True], ids=["in the end", "at a second signal"])
def test_a_clean_up_that_hangs_is_left(preparations: Preparations, twice: bool):
    preparation = preparations["first"]
    preparation.fresh()
    operations = [operation for operation, _, _ in preparation.run("--workers", 2)["operations"]]
    preparation.fresh()
    answer = preparation.run("--workers", 2, interrupt_at=operations.index("link") + 1, twice=twice)
    check_refusal(answer, "error: interrupted by SIGTERM", "run the same command", status=128 + signal.SIGTERM)
    assert preparation.check_versions() == 0
    assert (preparation.store / "lock").exists(), "nothing hung"
    preparation.check_rerun("--workers", 2)


def test_a_signal_that_comes_twice_at_once_is_one(preparations: Preparations):
    """`timeout` sends its signal to the command and then to the group: that is no wish to end without cleaning up."""
    preparation = preparations["first"]
    preparation.fresh()
    operations = [operation for operation, _, _ in preparation.run("--workers", 2)["operations"]]
    preparation.fresh()
    answer = preparation.run("--workers", 2, interrupt_at=operations.index("link") + 1, echo=True)
    check_refusal(answer, "error: interrupted by SIGTERM", status=128 + signal.SIGTERM)
    assert not (preparation.store / "lock").exists()
    preparation.check_rerun("--workers", 2)


def test_the_real_command_on_the_standard_library(tmp_path: Path):
    """Not a fork: `python -m penstock`, stopped once a unit is finished."""
    store = tmp_path / "store"
    command = [sys.executable, "-m", "penstock", "prepare", "stdlib:", "--out", str(store), "--unit-bytes", "200000"]
    command += ["--vocab-size", "512", "--include", "*.py", "--workers", "2", "--json"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True) as process:
        while process.poll() is None and not (store.exists() and any(store.glob("work/*.arrow"))):
            time.sleep(0.01)
        os.killpg(process.pid, signal.SIGINT)
        signalled = time.monotonic()
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert time.monotonic() - signalled < SECONDS_ALLOWED
    assert errors.splitlines()[0] == "error: interrupted by SIGINT"
    assert "run the same command again" in errors
    finished = len(list(store.glob("work/*.arrow")))
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["units_taken_over"] >= finished > 0
    assert verify(store) == []
    assert left_behind(store) == set()
