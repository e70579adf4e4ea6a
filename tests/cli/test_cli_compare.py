"""`penstock compare` on runs that were really trained: the same seed holds, an absurd learning rate doesn't.

Commands run inside this process: starting torch a dozen times would take a minute.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path

import pytest

from penstock.cli import _run

SETTINGS = {
    "model.num_layers": 1,
    "model.num_heads": 2,
    "model.hidden_size": 16,
    "model.feed_forward_size": 32,
    "seq_len": 32,
    "batch_rows": 4,
    "steps": 12,
    "learning_rate": 0.01,
    "eval_every_steps": 6,
    "eval_rows": 8,
    "sample_tokens": 0,
    "device": "cpu",
}


@dataclass
class Done:
    code: int
    out: str
    err: str


def command(folder: Path, *arguments: object) -> Done:
    """A command as typed in a folder."""
    out, err = StringIO(), StringIO()
    with chdir(folder), redirect_stdout(out), redirect_stderr(err):
        code = _run(list(map(str, arguments)), debug=False)
    return Done(code, out.getvalue(), err.getvalue())


def train(folder: Path, out: str, *, data: str = "store", **changes: object) -> None:
    """`data` may be several stores, with a space between them."""
    settings = {**SETTINGS, **{name.replace("__", "."): value for name, value in changes.items()}}
    words = [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    stores = [word for store in data.split() for word in ("--data", store)]
    done = command(folder, "train", *stores, "--out", out, *words)
    assert done.code == 0, done.err


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with two vocabularies, and three runs: a, the same again, and one that learns too fast."""
    folder = tmp_path_factory.mktemp("compare")
    chance = random.Random(3)
    words = ["".join(chance.choices("abcdefgh", k=chance.randint(2, 6))) for _ in range(50)]
    (folder / "texts").mkdir()
    for number in range(120):
        (folder / "texts" / f"{number:03d}.txt").write_text(" ".join(chance.choices(words, k=60)) + f" {number}\n")
    for store, vocabulary in (("store", 300), ("wider", 400)):
        done = command(
            folder, "prepare", "texts", "--out", store, "--vocab-size", vocabulary, "--split", "train=80,val=20"
        )
        assert done.code == 0, done.err
    train(folder, "first")
    train(folder, "again")
    train(folder, "absurd", learning_rate=20)
    train(folder, "wider-run", data="wider")
    return folder


def test_the_same_seed_holds(runs):
    done = command(runs, "compare", "first", "again", "--json", "--html", "page.html")
    assert done.code == 0, done.err
    found = json.loads(done.out)
    assert found["held"] is True
    assert found["quality"]["difference"] == 0
    assert found["quality"]["evaluated"] == "by the runs"
    assert found["settings"] == []
    assert found["speed"]["tokens_per_second"]["after"] > 0
    assert "Content-Security-Policy" in (runs / "page.html").read_text()


def test_an_absurd_learning_rate_does_not(runs):
    done = command(runs, "compare", "first", "absurd")
    assert done.code == 1
    assert done.out.startswith("quality not held")
    assert "learning_rate" in done.out
    assert not done.err, "a verdict is no error"


def test_another_tokenizer_compares_by_bits_per_byte_of_the_same_documents(runs):
    done = command(runs, "compare", "first", "wider-run", "--json", "--threshold", 100)
    assert done.code == 0, done.err
    quality = json.loads(done.out)["quality"]
    assert quality["evaluated"] == "again"
    assert quality["tokenizers_differ"] is True
    assert quality["documents"] > 5


def test_scoring_again_agrees_with_the_run(runs):
    """All rows of the split in one run's own evaluation, and once more on the same documents beside another length."""
    train(runs, "all-rows", eval_rows="null")
    train(runs, "shorter", eval_rows="null", seq_len=16, model__max_positions=32)
    own = command(runs, "compare", "all-rows", "all-rows", "--json")
    again = command(runs, "compare", "all-rows", "shorter", "--json", "--threshold", 100)
    assert json.loads(again.out)["quality"]["evaluated"] == "again"
    before = [json.loads(done.out)["quality"]["before"] for done in (own, again)]
    assert before[0] == pytest.approx(before[1], rel=1e-5)


def test_runs_over_several_stores_are_scored_on_what_all_of_these_hold_out(runs):
    (runs / "more").mkdir()
    for number in range(60):
        (runs / "more" / f"{number}.txt").write_text(f"and once upon another time {number} " * 9)
    (tokenizer,) = (runs / "store" / "tokenizers").iterdir()
    done = command(
        runs, "prepare", "more", "--out", "second", "--tokenizer", tokenizer, "--split", "train=80,val=20", "--json"
    )
    assert done.code == 0, done.err
    held_out = json.loads(done.out)["splits"]["val"]["documents"]
    train(runs, "mixed", data="store second", eval_rows="null")
    train(runs, "mixed-short", data="store second", eval_rows="null", seq_len=16, model__max_positions=32)
    own, again = (
        json.loads(command(runs, "compare", "mixed", other, "--json", "--threshold", 100).out)["quality"]
        for other in ("mixed", "mixed-short")
    )
    alone = json.loads(command(runs, "compare", "first", "wider-run", "--json", "--threshold", 100).out)["quality"]
    assert again["evaluated"] == "again"
    assert again["documents"] == alone["documents"] + held_out
    assert own["before"] == pytest.approx(again["before"], rel=1e-5)
    train(runs, "first-all-rows", eval_rows="null")
    other = json.loads(command(runs, "compare", "first-all-rows", "mixed", "--json", "--threshold", 100).out)
    assert other["quality"]["evaluated"] == "again"  # the first store is the same, what both hold out is not


def test_the_hint_is_of_what_is_wrong(runs, tmp_path):
    """Nothing that both hold out, and a store that isn't there any more: the one can't be put back, the other can."""
    (tmp_path / "others").mkdir()
    for number in range(40):
        (tmp_path / "others" / f"{number}.txt").write_text(f"once upon a time {number} " * 9)
    done = command(tmp_path, "prepare", "others", "--out", "others-store", "--vocab-size", 300)
    assert done.code == 0, done.err
    train(tmp_path, "others-run", data=str(tmp_path / "others-store"))
    nothing_common = command(runs, "compare", "first", tmp_path / "others-run")
    assert "no document of val in common" in nothing_common.err
    assert "back where it was" not in nothing_common.err
    assert "the same input" in nothing_common.err
    (tmp_path / "others-store").rename(tmp_path / "elsewhere")
    gone = command(runs, "compare", "first", tmp_path / "others-run")
    assert "hint: put that back where it was" in gone.err


def test_what_cannot_be_compared_is_one_line(runs, tmp_path):
    (tmp_path / "junk").mkdir()
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "records.jsonl").write_bytes(b"\x00\xff not a record\n")
    shutil.copytree(runs / "wider-run", tmp_path / "moved" / "wider-run")
    cases = [
        (runs, ("first", tmp_path / "nothing")),
        (runs, ("first", tmp_path / "junk")),
        (runs, (tmp_path / "torn", "first")),
        (runs, ("first", "again", "--threshold", "-1")),
        (runs, ("first", "again", "--seeds", "absurd")),
        (tmp_path / "moved", (runs / "first", "wider-run")),  # its store isn't below this folder
    ]
    for folder, words in cases:
        done = command(folder, "compare", *words)
        lines = done.err.strip().splitlines()
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], done.err
        assert done.code == 1
        assert done.out == ""


def test_threads_spin_briefly_while_runs_are_scored_again(tmp_path, monkeypatch):
    """Set before anything could import PyTorch: here nothing does, because there are no runs."""
    for name in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY"):
        monkeypatch.delenv(name, raising=False)
    assert command(tmp_path, "compare", "one", "other").code == 1
    assert os.environ["GOMP_SPINCOUNT"] == "3000"
