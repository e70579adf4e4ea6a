"""How steps follow from passes and tokens, and the summaries of passes."""

from __future__ import annotations

import json
import math
import string
from pathlib import Path
from typing import Any

import pytest

from penstock.errors import ResumeError
from penstock.runlog import RunLog, read_records
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.train import train
from penstock.train.length import run_length
from penstock.train.start import training_mixture, training_plan

from .conftest import Train, events, losses, tiny_config

FAST = ("steps=null", "eval_every_steps=null", "checkpoint_every_steps=null", "sample_tokens=0", "batch_rows=8")


@pytest.fixture(scope="module")
def store_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Some forty rows, so that a pass is a few steps."""
    folder = tmp_path_factory.mktemp("few-rows")
    (folder / "texts").mkdir()
    for number in range(48):
        (folder / "texts" / f"{number:02d}.txt").write_text(f"{number} some words of text " * (number % 5 + 2))
    source = FilesSource(name="texts", root=str(folder / "texts"))
    prepare([source], folder / "store", options=PrepareOptions(vocab_size=300))
    return folder / "store"


def of_kind(folder: Path, kind: str) -> list[dict[str, Any]]:
    return [record for record in read_records(folder) if record["kind"] == kind]


@pytest.mark.parametrize("epochs", [0.1, 0.5, 1, 1.5, 3])
def test_steps_are_the_ceiling_of_the_passes(store: Store, epochs: float) -> None:
    config = tiny_config("steps=null", f"epochs={epochs}", "batch_rows=7")
    plan = training_plan(config, store)
    length = run_length(config, plan)
    assert length.steps == math.ceil(plan.num_rows * epochs / 7)
    assert length.steps_per_epoch == math.ceil(plan.num_rows / 7)
    assert (length.epochs, length.rows_per_pass, length.tokens_per_pass) == (epochs, plan.num_rows, plan.num_tokens)


@pytest.mark.parametrize(
    ("passes_asked", "limits", "epochs"),
    [
        (0.5, [], 1),
        (2.5, [], 3),
        (3, [], 3),
        (0.5, ["min_epochs=3"], 3),
        (50, ["max_epochs=10"], 10),
        (5, ["min_epochs=3", "max_epochs=10"], 5),
    ],
)
def test_target_tokens_become_whole_passes_within_limits(
    store: Store, passes_asked: float, limits: list[str], epochs: int
) -> None:
    tokens = training_plan(tiny_config(), store).num_tokens
    config = tiny_config("steps=null", f"target_tokens={math.floor(passes_asked * tokens)}", *limits)
    assert run_length(config, training_plan(config, store)).epochs == epochs


def test_a_pass_of_a_mixture_is_its_epoch(store: Store) -> None:
    config = tiny_config("steps=null", "epochs=2", "mix=[0*.txt=3, 1*.txt=0.5]")
    mixture = training_mixture(config, {"texts": store})
    assert mixture is not None
    length = run_length(config, mixture)
    assert length.rows_per_pass == round(mixture.describe()["epoch_rows"]) != mixture.num_rows
    assert length.steps == math.ceil(2 * length.rows_per_pass / config.batch_rows)


def test_each_pass_is_summed_up(tmp_path: Path, run_training: Train) -> None:
    result = run_training(tmp_path, *FAST, "epochs=2.5")
    steps, epochs, evaluations = (of_kind(tmp_path, kind) for kind in ("step", "epoch", "evaluation"))
    (length,) = of_kind(tmp_path, "length")
    assert (length["steps"], length["epochs"]) == (result.steps, 2.5)
    assert [epoch["epoch"] for epoch in epochs] == [1, 2, 3]
    assert [epoch["complete"] for epoch in epochs] == [True, True, False]
    assert [epoch["first_step"] for epoch in epochs] == [1, epochs[0]["step"] + 1, epochs[1]["step"] + 1]
    assert epochs[-1]["step"] == result.steps
    for epoch in epochs:
        inside = [step for step in steps if epoch["first_step"] <= step["step"] <= epoch["step"]]
        tokens = sum(step["tokens"] for step in inside)
        assert epoch["tokens"] == tokens
        assert epoch["mean_train_loss"] == pytest.approx(sum(s["loss"] * s["tokens"] for s in inside) / tokens)
        assert epoch["seconds"] == pytest.approx(sum(step["seconds"] for step in inside), abs=1e-3)
        assert epoch["tokens_per_second"] == pytest.approx(tokens / epoch["seconds"], rel=1e-3)
        assert epoch["learning_rate"] == inside[-1]["learning_rate"]
        # A step belongs to the pass of its first row.
        first_rows = [step["position"] - 8 for step in inside]
        assert {row // length["rows_per_pass"] for row in first_rows} == {epoch["epoch"] - 1}
    # A run by passes is evaluated at the end of each, whatever eval_every_steps says.
    assert [record["step"] for record in evaluations] == [epoch["step"] for epoch in epochs]
    assert [record["loss"] for record in evaluations] == [epoch["val_loss"] for epoch in epochs]


def test_a_run_by_steps_has_summaries_too_and_no_more_evaluations(tmp_path: Path, run_training: Train) -> None:
    settings = [setting for setting in FAST if not setting.startswith("steps")]
    run_training(tmp_path, *settings, "steps=11", "log_every_steps=4")
    (length,) = of_kind(tmp_path, "length")
    passes = 11 * 8 / length["rows_per_pass"]
    assert len(of_kind(tmp_path, "epoch")) == math.ceil(passes) > 1
    assert sum(epoch["tokens"] for epoch in of_kind(tmp_path, "epoch")) > 0
    assert [record["step"] for record in of_kind(tmp_path, "evaluation")] == [11]


def test_rows_fewer_than_a_batch_end_several_passes_in_a_step(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path, "steps=1", "batch_rows=120", "sample_tokens=0")
    (length,) = of_kind(tmp_path, "length")
    epochs = of_kind(tmp_path, "epoch")
    assert [epoch["epoch"] for epoch in epochs if epoch["complete"]] == list(
        range(1, 120 // length["rows_per_pass"] + 1)
    )
    assert sum(epoch["tokens"] for epoch in epochs) == of_kind(tmp_path, "step")[0]["tokens"]


@pytest.mark.parametrize("stop", [1, 5, 6, 7])
def test_summaries_are_the_same_after_a_resume(tmp_path: Path, run_training: Train, stop: int) -> None:
    run_training(tmp_path / "whole", *FAST, "epochs=2")
    run_training(tmp_path / "cut", *FAST, "epochs=2", f"stop_after_steps={stop}")
    run_training(tmp_path / "cut", *FAST, "epochs=2", resume=True)
    timed = {"time", "seconds", "tokens_per_second"}
    whole, cut = (
        [{name: value for name, value in record.items() if name not in timed} for record in of_kind(folder, "epoch")]
        for folder in (tmp_path / "whole", tmp_path / "cut")
    )
    assert cut == whole
    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")


def test_passes_bind_a_run_as_steps_do(tmp_path: Path, run_training: Train) -> None:
    run_training(tmp_path, *FAST, "epochs=1", "stop_after_steps=1")
    with pytest.raises(ResumeError, match=r"epochs was 1\.0, is 2\.0"):
        run_training(tmp_path, *FAST, "epochs=2", resume=True)
    assert run_training(tmp_path, *FAST, "epochs=1", resume=True).status == "completed"


def test_a_checkpoint_from_before_a_key_goes_on_by_its_default(tmp_path: Path, run_training: Train) -> None:
    from penstock.hashing import digest_of

    run_training(tmp_path, "stop_after_steps=2")
    (path,) = (tmp_path / "checkpoints").glob("*/state.json")
    state = json.loads(path.read_bytes())
    for key in ("patience", "epochs", "schedule_power"):
        del state["settings"][key]
    for field in ("val_step", "best_step", "pass_nats"):
        del state["progress"][field]
    state["settings_digest"] = "older"
    del state["digest"]
    path.write_text(json.dumps({**state, "digest": digest_of(state)}))
    with pytest.raises(ResumeError, match="patience was None, is 3"):
        run_training(tmp_path, "patience=3", resume=True)
    assert run_training(tmp_path, resume=True).status == "completed"


@pytest.fixture(scope="module")
def other_store_path(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> Path:
    folder = tmp_path_factory.mktemp("other-data")
    (folder / "texts").mkdir()
    for number in range(60):
        (folder / "texts" / f"{number}.txt").write_text(f"{number} once upon a time " * (number % 7 + 4))
    with open_store(store_path) as first:
        source = FilesSource(name="texts", root=str(folder / "texts"))
        prepare([source], folder / "other", tokenizer=first.tokenizer(), options=PrepareOptions())
    return folder / "other"


@pytest.fixture(scope="module")
def bare_store_path(tmp_path_factory: pytest.TempPathFactory, store_path: Path) -> Path:
    """A store whose only targets are end tokens: each document is one token."""
    folder = tmp_path_factory.mktemp("bare-data")
    (folder / "texts").mkdir()
    for letter in string.ascii_letters + string.digits:
        (folder / "texts" / f"{ord(letter)}.txt").write_text(letter)
    with open_store(store_path) as first:
        source = FilesSource(name="texts", root=str(folder / "texts"))
        prepare([source], folder / "bare", tokenizer=first.tokenizer(), options=PrepareOptions())
    return folder / "bare"


@pytest.mark.parametrize("bare_first", [False, True])
def test_a_store_without_a_target_with_bytes_is_left_out_of_the_evaluation_alone(
    tmp_path: Path, store: Store, bare_store_path: Path, *, bare_first: bool
) -> None:
    config = tiny_config("eval_rows=null", "steps=3")
    with open_store(bare_store_path) as bare, RunLog(tmp_path / "mixed") as log:
        assert len(bare.kept_documents("val")) > 0
        stores = {"bare": bare, "one": store} if bare_first else {"one": store, "bare": bare}
        first = next(iter(stores.values()))
        result = train(config, first, tmp_path / "mixed", log, mixed_with=stores)
    one, both = of_kind(tmp_path / "mixed", "evaluation")
    assert (one["store"], "store" in both) == ("one", False)
    assert both["loss"] == one["loss"] == result.val_loss
    (event,) = [message for message in events(tmp_path / "mixed") if "no evaluation" in message]
    assert "bare" in event
    with open_store(bare_store_path) as bare, RunLog(tmp_path / "bare") as log:
        result = train(config, bare, tmp_path / "bare", log)
    assert result.val_loss is None
    assert of_kind(tmp_path / "bare", "evaluation") == []


def test_every_store_of_a_mixture_is_evaluated(tmp_path: Path, store: Store, other_store_path: Path) -> None:
    with open_store(other_store_path) as other, RunLog(tmp_path) as log:
        config = tiny_config("eval_rows=null", "steps=3")
        result = train(config, store, tmp_path, log, mixed_with={"one": store, "two": other})
    one, two, both = of_kind(tmp_path, "evaluation")
    assert (one["store"], two["store"], "store" in both) == ("one", "two", False)
    assert both["tokens"] == one["tokens"] + two["tokens"]
    mean = (one["loss"] * one["tokens"] + two["loss"] * two["tokens"]) / both["tokens"]
    assert both["loss"] == result.val_loss == pytest.approx(mean)
    assert one["loss"] != two["loss"]
