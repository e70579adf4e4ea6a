"""Where data came from and what became of it: `inspect --find`, `inspect RUN`, `log` and `diff`, in this process."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest

from penstock.cli import main
from penstock.sources import sources_from_inputs
from penstock.store import PrepareOptions
from penstock.store import prepare as prepare_store

from .conftest import Finished

TINY = [
    "--set=steps=6", "--set=batch_rows=4", "--set=seq_len=64", "--set=eval_rows=4", "--set=model.hidden_size=32",
    "--set=model.num_layers=1", "--set=model.feed_forward_size=64", "--set=sample_tokens=4",
]  # fmt: skip


@pytest.fixture
def folder(tmp_path) -> Path:
    (tmp_path / "texts").mkdir()
    for number in range(12):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"Text {number} holds a passage to find.\n" * (number + 3))
    return tmp_path / "texts"


@pytest.fixture
def penstock(tmp_path, monkeypatch, capsys):
    """As the fixture of that name that starts processes, at a tenth of the time."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(*arguments: object, expect: int | None = 0) -> Finished:
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            with pytest.raises(SystemExit) as ended:
                main([str(word) for word in arguments])
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        printed = capsys.readouterr()
        assert isinstance(ended.value.code, int)
        result = Finished(ended.value.code, printed.out, printed.err)
        if expect is not None:
            assert result.code == expect, result.err
        return result

    return run


@pytest.fixture
def prepare(tmp_path, tokenizer):
    """Commits a version of the store `s`."""

    def run(folder: Path, **options: Any) -> dict[str, Any]:
        sources = sources_from_inputs([str(folder)])
        manifest = prepare_store(
            sources, tmp_path / "s", tokenizer=tokenizer, options=PrepareOptions(**options)
        ).manifest
        return {"version": manifest.version, "digest": manifest.digest}

    return run


def test_a_passage_is_found_and_told(penstock, folder, prepare):
    prepare(folder)
    found = penstock("inspect", "s", "--find", "Text 7 holds", "--seq-len", 32, "--json").json
    assert (found["found"], found["matches"]) == (1, 10)
    [document] = found["shown"]
    assert document["key"] == "texts/7.txt"
    for place in document["places"]:
        assert Path(document["file"]).read_bytes()[place["byte_start"] : place["byte_end"]] == b"Text 7 holds"
    row = document["places"][0]["rows"][0]
    told = penstock("inspect", "s", "--row", row, "--seq-len", 32, "--split", document["split"], "--json").json
    assert document["document"] in [one["document"] for one in told["documents"]]
    shown = penstock("inspect", "s", "--find", "PASSAGE", "--ignore-case", "--most", 2)
    assert "in 12 documents" in shown.out
    assert "and 10 more documents" in shown.out
    assert shown.err == ""
    nothing = penstock("inspect", "s", "--find", "a zebra")
    assert nothing.out == "not found in 12 documents: a zebra\n"
    for words in (["--find", ""], ["--find", "a", "--token", 3], ["--step", 1]):
        penstock("inspect", "s", *words, expect=None).assert_one_error()


def test_what_is_found_cannot_drive_the_terminal(penstock, tmp_path, prepare):
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "\x1b[31m\nred.txt").write_text("before \x1b[2J find me \u202e after\n")
    prepare(tmp_path / "odd")
    for words in (["--find", "\x1b[2J find me"], ["--find", "not \x1b there"]):
        shown = penstock("inspect", "s", *words)
        assert "\x1b" not in shown.out + shown.err
        assert "\u202e" not in shown.out + shown.err


def test_versions_are_listed_and_compared(penstock, folder, prepare):
    prepare(folder)
    (folder / "3.txt").write_text("changed\n")
    (folder / "4.txt").unlink()
    (folder / "added.txt").write_text("added\n")
    prepare(folder)
    prepare(folder, split="train=50,val=50")
    listed = penstock("log", "s", "--json").json
    assert [one["version"] for one in listed["versions"]] == [3, 2, 1]
    assert [listed["versions"][1][name] for name in ("added", "removed", "changed")] == [1, 1, 1]
    shown = penstock("log", "s").out.splitlines()
    assert [line.split()[0] for line in shown[1:4]] == ["3", "2", "1"]
    assert any("version 3: split was train 0.85" in line for line in shown)
    found = penstock("diff", "s", 1, 2, "--json").json
    assert [found[name]["documents"] for name in ("added", "removed", "changed", "split_changed")] == [1, 1, 1, 0]
    out = penstock("diff", "s", 1, 2).out
    for key in ("texts/3.txt", "texts/4.txt", "texts/added.txt"):
        assert key in out
    penstock("diff", "s", 1, 9, expect=None).assert_one_error()
    penstock("log", "texts", expect=None).assert_one_error()


def test_a_run_goes_on_with_the_version_it_began_with(penstock, folder, prepare, tmp_path):
    first = prepare(folder)
    train = ["train", "--data", "s", "--out", "run", *TINY]
    penstock(*train, "--set", "stop_after_steps=3", expect=130)
    (folder / "added.txt").write_text("added since\n" * 50)
    second = prepare(folder)
    assert (first["version"], second["version"]) == (1, 2)
    assert "going on with version 1 of s; the newest is 2" in penstock(*train, "--resume").err
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_bytes())
    assert (manifest["status"], manifest["store"]["version"], manifest["store"]["digest"]) == (
        "completed",
        1,
        first["digest"],
    )
    # By name, another version is still refused, and leaves no trace in what the run was trained on.
    penstock(*[word if word != "s" else "s@2" for word in train], "--resume", expect=None).assert_one_error()

    step = penstock("inspect", "run", "--step", 6, "--json").json
    assert (step["version"], step["is_done"], len(step["rows"])) == (1, True, 4)
    assert "positions 20 to 23" in penstock("inspect", "run", "--step", 6).out
    about = penstock("inspect", "run")
    assert "6 of 6 recorded" in about.out
    assert first["digest"] in about.out
    assert penstock("inspect", "run", "--find", "added since", "--json").json["found"] == 0
    assert penstock("inspect", "s", "--find", "added since", "--json").json["found"] == 1
    shutil.move(tmp_path / "s", tmp_path / "moved")
    penstock("inspect", "run", "--step", 6, expect=None).assert_one_error()
    assert penstock("inspect", "run", "--step", 6, "--data", "moved", "--json").json["rows"] == step["rows"]


@pytest.mark.parametrize(
    "command",
    [["verify"], ["log"], ["diff", 1, 1], ["prune"], ["remove", "--match", "x"], ["prepare", "texts", "--out"]],
    ids=lambda words: words[0],
)
def test_what_takes_a_whole_store_refuses_a_version_of_it_and_names_the_store(penstock, prepare, folder, command):
    """Above all `prepare`: a store made at `s@1` would stand for version 1 of `s` from then on."""
    prepare(folder)
    words = [*command, "s@1"] if command[0] == "prepare" else [command[0], "s@1", *command[1:]]
    refused = penstock(*words, expect=1)
    assert refused.err.splitlines()[-1] == "hint: name the store: s"
    assert not Path("s@1").exists()


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[::-1]], ids=["cut", "other bytes"])
def test_a_damaged_copy_of_the_tokenizer_is_mended_by_naming_it(penstock, prepare, folder, tmp_path, damage):
    prepare(folder)
    (copy,) = (tmp_path / "s" / "tokenizers").glob("*/*")
    (tmp_path / "tokenizer.json").write_bytes(copy.read_bytes())
    copy.write_bytes(damage(copy.read_bytes()))
    refused = penstock("prepare", "texts", "--out", "s", expect=1)
    assert "--tokenizer" in refused.err.splitlines()[-1]
    penstock("prepare", "texts", "--out", "s", "--tokenizer", "tokenizer.json")
    penstock("verify", "s")


def test_a_damaged_cache_is_mended_as_verify_says(penstock, prepare, folder, tmp_path):
    prepare(folder)
    for file in (tmp_path / "s" / "cache").iterdir():
        file.write_bytes(file.read_bytes()[:-1])
    told = penstock("verify", "s", expect=1)
    assert "prepare again" in told.err.splitlines()[-1]
    penstock("prepare", "texts", "--out", "s")
    penstock("verify", "s")
