"""Mixtures as a user types them: planned, trained on, resumed with other weights."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.load.mixed import MixedLoader
from penstock.pack.mixture import make_mixture
from penstock.report.steps import describe_step
from penstock.store import open_store

TINY = [
    "model.num_layers=1",
    "model.num_heads=2",
    "model.hidden_size=32",
    "model.feed_forward_size=48",
    "seq_len=32",
    "batch_rows=4",
    "eval_rows=4",
    "sample_tokens=4",
    "device=cpu",
]
SETTINGS = [part for setting in TINY for part in ("--set", setting)]


@pytest.fixture(scope="module")
def stores(tmp_path_factory):
    """Stores A (src and docs) and B of one tokenizer, and C of another."""
    folder = tmp_path_factory.mktemp("mixture")
    chance = random.Random(3)
    words = ["".join(chance.choices("abcdefgh", k=4)) for _ in range(50)]
    for name in ["a/src/%d.py", "a/docs/%d.md", "b/%d.txt", "c/%d.txt"]:
        for number in range(30):
            path = folder / (name % number)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(" ".join(chance.choices(words, k=60)))

    def prepare(*arguments):
        command = [sys.executable, "-m", "penstock", "prepare", *map(str, arguments)]
        subprocess.run(command, check=True, capture_output=True)

    prepare(folder / "a", "--out", folder / "A", "--vocab-size", 300)
    (tokenizer,) = (folder / "A" / "tokenizers").glob("*/tokenizer.json")
    prepare(folder / "b", "--out", folder / "B", "--tokenizer", tokenizer)
    prepare(folder / "c", "--out", folder / "C", "--vocab-size", 290)
    return folder


def records_of(run):
    return [json.loads(line) for line in (run / "records.jsonl").read_text().splitlines()]


def test_shares_are_printed(penstock, stores):
    command = ["plan", stores / "A", stores / "B", "--mix", "A:src/**=3", "--mix", "docs/**=0.3", "--mix", "B=2"]
    facts = penstock(*command, "--seq-len", 32, "--json").json
    mix = {one["name"]: one for one in facts["mix"]}
    assert {name: one["weight"] for name, one in mix.items()} == {"A:src/**": 3, "A:docs/**": 0.3, "B:rest": 2}
    assert sum(one["share"] for one in mix.values()) == pytest.approx(1)
    shown = penstock(*command, "--seq-len", 32).out
    for one in mix.values():
        assert f"{one['rows']:,}" in shown
        assert f"{one['share']:.2%}" in shown
        assert f"{one['waste_tokens']:,} (" in shown


def test_a_store_is_called_by_its_path_or_by_its_folder(penstock, stores):
    both = [stores / "A", stores / "B", "--seq-len", 32, "--json"]
    assert (
        penstock("plan", *both, "--mix", f"{stores / 'A'}=0.3").json["mix"]
        == penstock("plan", *both, "--mix", "A=0.3").json["mix"]
    )


@pytest.mark.parametrize(
    "options",
    [["--mix", "nowhere/**=2"], ["--mix", "src"], ["--mix", "**=0"], ["--temperature", 0], ["--epochs", "x=1"]],
)
def test_what_cannot_be_mixed_is_one_error(penstock, stores, options):
    penstock("plan", stores / "A", "--seq-len", 32, *options, expect=1).assert_one_error()


def test_two_tokenizers_are_one_error(penstock, stores):
    penstock("plan", stores / "A", stores / "C", expect=1).assert_one_error()


def test_train_on_a_mixture_and_go_on_with_other_weights(penstock, stores, tmp_path):
    run = tmp_path / "run"
    data = ["--data", stores / "A", "--data", stores / "B", "--out", run]
    penstock("train", *data, *SETTINGS, "--set", "steps=6", "--set", "stop_after_steps=3", "--mix", "A=0.3", expect=130)
    first = records_of(run)
    told = next(record for record in first if record["kind"] == "data")
    assert {one["name"]: one["weight"] for one in told["mixture"]["mix"]} == {"A": 0.3, "B": 1}
    assert [(one["name"], one["version"], one["documents"]) for one in told["stores"]] == [("A", 1, 60), ("B", 1, 30)]
    for name, one in zip("AB", told["stores"], strict=True):
        with open_store(stores / name) as store:
            assert (one["store"], one["digest"]) == (store.location, store.digest)
            assert one["tokens"] == one["statistics"]["tokens"] == store.manifest.counts["tokens"]
            assert one["splits"] == store.manifest.counts["splits"]
    page = (run / "report.html").read_text()
    assert "<summary>A, 60 documents" in page
    assert "<summary>B, 30 documents" in page
    shown = [record for record in first if record["kind"] == "rows"]
    assert [(record["source"], len(record["rows"])) for record in shown] == [("A", 2), ("B", 2)]
    assert "source B · row 0" in page
    assert "A=0.3" in next(r["value"] for r in first if r["kind"] == "choice" and r["name"] == "mixture")
    refused = penstock("train", *data, *SETTINGS, "--set", "steps=6", "--mix", "A:src/**=2", "--resume", expect=1)
    assert f"mixture: saved {told['mixture']['mixture']!r}" in refused.err
    penstock("train", *data, *SETTINGS, "--set", "steps=6", "--mix", "A=2", "--resume")
    steps = [record["step"] for record in records_of(run) if record["kind"] == "step"]
    assert steps == [1, 2, 3, 4, 5, 6]
    state = json.loads((run / "checkpoints" / "step-00000006" / "state.json").read_text())
    stages = state["loader"]["stages"]
    assert [(stage["start"], stage["weights"]) for stage in stages] == [(0, [0.3, 1.0]), (12, [2.0, 1.0])]
    assert sum(stages[1]["cursors"]) == 12
    shown = penstock("inspect", run, "--step", 5).out
    for row in assert_steps_are_the_loaders(run, stores):
        assert f"{row['source']}, pass {row['pass']}, row {row['row']}, {row['tokens']} tokens" in shown
    passage = ["inspect", run, "--find", (stores / "b" / "7.txt").read_text(), "--json"]
    penstock(*passage, expect=1).assert_one_error()  # not "nowhere", from a look at the first store alone
    assert penstock(*passage, "--data", stores / "B").json["found"] == 1
    assert penstock(*passage, "--data", stores / "A").json["found"] == 0
    penstock(*passage, "--data", stores / "C", expect=1).assert_one_error()


def test_a_resume_that_names_no_weights_keeps_those_of_the_last_start(penstock, stores, tmp_path):
    run = tmp_path / "run"
    data = ["--data", stores / "A", "--data", stores / "B", "--out", run]
    for number, mix in enumerate((["--mix", "A=0.3"], ["--mix", "A=5"], [])):
        more = ["--resume", *mix] if number else mix
        stop = ["--set", "stop_after_steps=2"] if number < 2 else []
        penstock("train", *data, *SETTINGS, "--set", "steps=6", *stop, *more, expect=130 if stop else 0)
    state = json.loads((run / "checkpoints" / "step-00000006" / "state.json").read_text())
    stages = [(stage["start"], stage["weights"]) for stage in state["loader"]["stages"]]
    assert stages == [(0, [0.3, 1.0]), (8, [5.0, 1.0])]
    told = [record for record in records_of(run) if record["kind"] == "data"][-1]
    assert {one["name"]: one["weight"] for one in told["mixture"]["mix"]} == {"A": 5, "B": 1}
    changes = [r["message"] for r in records_of(run) if r["kind"] == "event" and "weights change" in r["message"]]
    assert changes == ["weights change at position 8: A 0.3 to 5"]
    (run / "config.json").write_text("{")
    penstock("train", *data, *SETTINGS, "--set", "steps=6", "--resume", expect=1).assert_one_error()


def assert_steps_are_the_loaders(run, stores):
    """What `inspect --step` tells of every step is what a loader with those weights gives; the rows of step 5."""
    with open_store(stores / "A") as a, open_store(stores / "B") as b:
        mixture = make_mixture({"A": a, "B": b}, ["A=0.3"], seq_len=32)
        with MixedLoader(mixture, batch_rows=4, seed=42) as loader:
            for step in range(1, 7):
                if step == 4:
                    loader.change_weights({"A": 2.0})
                batch = next(loader)
                facts = describe_step(run, step)
                sources = [mixture.sources[number].name for number in batch.sources]
                assert [(row["source"], row["row"]) for row in facts["rows"]] == list(
                    zip(sources, batch.rows.tolist(), strict=True)
                )
                for row, tokens, source in zip(facts["rows"], batch.tokens, batch.sources, strict=True):
                    store = mixture.plans[source].store
                    pieces = [
                        store.document_tokens(one["document"])[one["document_start"] :][
                            : one["row_end"] - one["row_start"]
                        ].tolist()
                        for one in row["documents"]
                    ]
                    assert [token for piece in pieces for token in piece] == tokens[: row["tokens"]].tolist()
                    assert all(Path(one["file"]).is_file() for one in row["documents"])
                    folder = "a" if source == 0 else "b"
                    assert all(f"/{folder}/" in one["file"] for one in row["documents"])
    return describe_step(run, 5)["rows"]
