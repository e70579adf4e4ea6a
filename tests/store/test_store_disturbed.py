"""What others do while `penstock prepare` runs: a second one on the same store, readers, and changes of the input."""

from __future__ import annotations

import dataclasses
import json
import multiprocessing
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import PenstockError
from penstock.store import document_text, list_versions, open_store, verify

from . import samples
from .commands import Commands
from .trials import Preparation, Trials, check_refusal, left_behind

pytestmark = pytest.mark.torture(lane="A", sample=True)

Preparations = dict[str, Preparation]


# Two writers


@pytest.fixture(scope="module")
def other_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    started = Commands(tmp_path_factory.mktemp("other-commands"))
    try:
        yield started
    finally:
        started.close()


@pytest.mark.parametrize("name", ["first", "update"])
def test_the_second_of_two_is_refused_and_a_dead_holders_lock_is_taken_over(
    preparations: Preparations,
    other_commands: Commands,
    name: str,
    scale: Callable[..., int],
    torture_figures: Callable[..., None],
):
    first, trials, chance = preparations[name], Trials(), random.Random(name)
    second = dataclasses.replace(first, commands=other_commands)
    first.fresh()
    operations = [operation for operation, _, _ in first.run("--workers", 2)["operations"]]
    # Held where the lock is: after it was taken, before it is given back.
    locked, unlocked = operations.index("lock") + 2, len(operations)
    for _ in range(scale(test=1, torture=50)):
        with trials.trial(f"trial {trials.count}"):
            first.fresh()
            place = chance.randint(locked, unlocked)
            command = ("prepare", *first.inputs, "--out", first.store, *first.options, "--workers", 2)
            first.commands.start(*command, hold_at=place, after=3600, signal=signal.SIGKILL)
            held = first.commands.answer()
            refused = second.run("--workers", 2)
            holder = json.loads((first.store / "lock").read_text())["pid"]
            check_refusal(refused, f"process {holder} on", "is being written by", "wait for it to end, or stop it")
            assert held["holding"] == holder or _parent_of(held["holding"]) == holder
            first.check_versions()
            os.kill(holder, signal.SIGKILL)
            assert first.commands.answer()["status"] == -signal.SIGKILL
            second.check_rerun("--workers", 2)
    torture_figures(
        lane="A", case="two at once: the second refused, the killed first's lock taken over", trials=trials.count,
        failures=len(trials.failures),
    )  # fmt: skip
    assert trials.failures == []


def _parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


# Readers during commits


def test_a_reader_during_commits_has_a_whole_version(
    scratch: Path, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    """Version n says n in every document: a mix of two versions can't hide."""
    corpus, store, commits = scratch / "corpus", scratch / "store", scale(test=12, torture=500)
    corpus.mkdir()

    def commit(number: int) -> None:
        for name in range(3):
            (corpus / f"{name}.txt").write_text(f"version {number}, file {name}\n" * 20)
        assert samples.build(store, samples.files(corpus), workers=1).manifest.version == number

    commit(1)
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe()
    reader = context.Process(target=_read_until_told, args=(store, theirs))
    reader.start()
    theirs.close()
    try:
        for number in range(2, commits + 1):
            commit(number)
    finally:
        ours.send("enough")
        looks, versions, problems = ours.recv()
        reader.join()
    torture_figures(
        lane="A", case="a reader that opens and checks during commits", trials=looks, failures=len(problems),
        commits=commits, versions_met=versions,
    )  # fmt: skip
    assert problems == []
    assert versions > 1
    assert verify(store) == []
    assert left_behind(store) == set()


def _read_until_told(store: Path, connection: Any) -> None:
    looks, versions, problems, newest = 0, set(), [], 0
    while not connection.poll():
        looks += 1
        try:
            with open_store(store) as opened:
                tokenizer = opened.tokenizer()
                texts = [document_text(opened, number, tokenizer) for number in range(opened.num_documents)]
                expected = [f"version {opened.version}, file {name}\n" * 20 for name in range(3)]
                assert [text.removesuffix("<|endoftext|>") for text in texts] == expected
                assert opened.version >= newest, "versions went back"
                newest = opened.version
                versions.add(newest)
        except (AssertionError, PenstockError, OSError) as error:
            problems.append(f"look {looks}: {type(error).__name__}: {error}"[:1000])
    connection.send((looks, len(versions), problems[:20]))


# Inputs that change


def _rewrite(path: Path) -> None:
    path.write_text("Rewritten.\n" * 30)


def _rewrite_keeping_size_and_time(path: Path) -> None:
    facts = path.stat()
    path.write_bytes(path.read_bytes().replace(b"says", b"SAYS"))
    os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2 // 10 * 10)


def _remove(path: Path) -> None:
    path.unlink()


def _become_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside.txt").write_text("A file in a folder that was a file.\n")


def _become_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _become_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("/etc/passwd")


def _remove_folder(path: Path) -> None:
    shutil.rmtree(path.parent)


CHANGES = [
    _rewrite, _rewrite_keeping_size_and_time, _cut, _remove, _become_folder, _become_fifo, _become_link, _remove_folder,
]  # fmt: skip


@pytest.mark.parametrize("change", CHANGES, ids=[change.__name__.strip("_").replace("_", " ") for change in CHANGES])
def test_a_file_that_changes_during_the_run_is_read_whole_or_counted(
    preparations: Preparations,
    scratch: Path,
    change: Callable[[Path], None],
    scale: Callable[..., int],
    torture_figures: Callable[..., None],
):
    """Held at some operation, an input is changed, and the run goes on; then again, as it is now."""
    trials, chance = Trials(), random.Random(change.__name__)
    names = [f"part{number % 3}/{number}.txt" for number in range(10)]
    for _ in range(scale(test=1, torture=25)):
        folder = scratch / str(trials.count)
        corpus = samples.write_corpus(folder / "corpus")
        moving = dataclasses.replace(preparations["first"], folder=folder, inputs=(str(corpus),))
        fresh = dataclasses.replace(moving, folder=folder / "fresh")
        with trials.trial(f"trial {trials.count}"):
            place, path = chance.randint(1, 100), corpus / chance.choice(names)
            old = {name: (corpus / name).read_text() for name in names}
            command = ("prepare", corpus, "--out", moving.store, *moving.options, "--workers", 2)
            moving.commands.start(*command, hold_at=place)
            assert "holding" in moving.commands.answer()
            change(path)
            moving.commands.send("go on")
            answer = moving.commands.answer()
            assert answer["status"] == 0, answer["stderr"]
            _check_whole_or_counted(moving.store, old, corpus, json.loads(answer["stdout"]))
            # The input rests: a rerun ends where a fresh build does.
            after = fresh.run("--workers", 1)
            assert after["status"] == 0, after["stderr"]
            again = moving.run("--workers", 2)
            assert again["status"] == 0, again["stderr"]
            assert json.loads(again["stdout"])["digest"] == json.loads(after["stdout"])["digest"]
            assert verify(moving.store) == []
            assert left_behind(moving.store) == set()
        shutil.rmtree(folder)
    torture_figures(
        lane="A", case="an input that changes during the run", trials=trials.count, failures=len(trials.failures),
        random=True, ways=[way.__name__.strip("_").replace("_", " ") for way in CHANGES],
    )  # fmt: skip
    assert trials.failures == []


def _check_whole_or_counted(store: Path, old: dict[str, str], corpus: Path, facts: dict[str, Any]) -> None:
    """Every file's text is what it was or what it is, to the last byte; the others are counted."""
    assert verify(store) == []
    with open_store(store) as opened:
        tokenizer = opened.tokenizer()
        keys = [key.decode() for key in opened.provenance()["key"].to_pylist()]
        texts = [document_text(opened, number, tokenizer).removesuffix("<|endoftext|>") for number in range(len(keys))]
    found = {key.removeprefix("corpus/"): text for key, text in zip(keys, texts, strict=True)}
    for name, text in found.items():
        now = corpus / name
        possible = {old.get(name), now.read_text(errors="replace") if now.is_file() and not now.is_symlink() else None}
        if name in old or name.endswith("inside.txt"):
            assert text in possible, f"{name} is neither what it was nor what it is"
    missing = [name for name in old if name not in found]
    counted = sum(count for reason, count in facts["skipped"].items() if reason not in ("empty", "binary", "hidden"))
    gone = [name for name in missing if not (corpus / name).is_file()]
    # Removed before the walk came by: there is no such file. Everything else that is missing has been counted.
    assert len(missing) - counted <= len(gone)


def test_inputs_that_never_rest(
    preparations: Preparations, scratch: Path, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    """Another process rewrites, removes and restores files all the time, at no particular moment."""
    trials, moving = Trials(), None
    for number in range(scale(test=2, torture=60)):
        folder = scratch / str(number)
        corpus = samples.write_corpus(folder / "corpus")
        moving = dataclasses.replace(preparations["first"], folder=folder, inputs=(str(corpus),))
        with trials.trial(f"trial {number}"):
            mover = multiprocessing.get_context("fork").Process(target=_keep_changing, args=(corpus, number))
            mover.start()
            try:
                answer = moving.run("--workers", 2, count=False)
            finally:
                mover.kill()
                mover.join()
            assert answer["status"] == 0, answer["stderr"]
            assert verify(moving.store) == []
            again, fresh = moving.run(), dataclasses.replace(moving, folder=folder / "fresh").run()
            assert [each["status"] for each in (again, fresh)] == [0, 0], again["stderr"] + fresh["stderr"]
            assert json.loads(again["stdout"])["digest"] == json.loads(fresh["stdout"])["digest"]
            assert left_behind(moving.store) == set()
            assert list_versions(moving.store)[0] == 1
        shutil.rmtree(folder)
    torture_figures(
        lane="A", case="inputs that never rest during the run", trials=trials.count, failures=len(trials.failures),
        random=True,
    )  # fmt: skip
    assert trials.failures == []


def _keep_changing(corpus: Path, seed: int) -> None:
    chance, names = random.Random(seed), [f"part{number % 3}/{number}.txt" for number in range(10)]
    # One file stays, so that there is always something to prepare.
    while True:
        path = corpus / chance.choice(names[1:])
        if path.exists() and chance.random() < 0.3:
            path.unlink()
        else:
            path.write_text(f"Now {time.monotonic_ns()}.\n" * chance.randint(0, 40))
