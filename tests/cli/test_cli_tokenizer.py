"""`penstock tokenizer train`, typed as a command."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer as Reference


def test_train_writes_a_file_that_everyone_loads(penstock, corpus, tmp_path):
    facts = penstock("tokenizer", "train", corpus, "--vocab-size", 400, "--out", "own.json", "--json").json
    assert facts["vocab_size"] == 400
    assert 1.2 < facts["bytes_per_token"] < 4
    assert facts["held_out"]["documents"] > 0
    reference = Reference.from_file(str(tmp_path / "own.json"))
    assert reference.get_vocab_size() == 400
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "own.json"))
    assert fast.decode(fast("def main(): pass")["input_ids"]) == "def main(): pass"
    prepared = penstock("prepare", corpus, "--out", "s", "--tokenizer", "own.json", "--json").json
    assert prepared["tokenizer"]["digest"] == facts["digest"]


def test_the_same_input_gives_the_same_file_and_another_sample_another(penstock, corpus, tmp_path):
    common = ("tokenizer", "train", corpus, "--vocab-size", 350)
    penstock(*common, "--out", "one.json")
    penstock(*common, "--out", "two.json")
    facts = penstock(*common, "--out", "three.json", "--sample-bytes", 20_000, "--json").json
    one, two, three = ((tmp_path / f"{name}.json").read_bytes() for name in ("one", "two", "three"))
    assert one == two != three
    assert facts["trained_on"]["bytes"] < 60_000


def test_control_and_end_tokens(penstock, corpus, tmp_path):
    names = ["<|user|>", "<|assistant|>"]
    options = [word for name in names for word in ("--control", name)]
    done = penstock(
        "tokenizer", "train", corpus, "--vocab-size", 300, "--out", "t.json", "--end-token", "<|fin|>", *options
    )
    assert "--end-token '<|fin|>'" in done.err
    added = json.loads((tmp_path / "t.json").read_bytes())["added_tokens"]
    assert [(token["content"], token["id"]) for token in added] == [("<|fin|>", 297), (names[0], 298), (names[1], 299)]
    prepare = ["prepare", corpus, "--out", "s", "--tokenizer", "t.json", "--json"]
    assert "--end-token" in penstock(*prepare, expect=1).err
    assert penstock(*prepare, "--end-token", "<|fin|>").json["tokenizer"]["end_id"] == 297


def test_what_can_not_be_done_is_said(penstock, corpus, tmp_path):
    (tmp_path / "there.json").write_text("mine")
    (tmp_path / "empty").mkdir()
    for words, said in (
        ((corpus, "--out", "there.json"), "--force"),
        ((corpus, "--out", "empty"), "name a file"),
        ((corpus, "--out", "nowhere/t.json"), "doesn't exist"),
        ((corpus, "--out", "t.json", "--vocab-size", 100), "at least 257"),
        ((corpus, "--out", "t.json", "--control", ""), "without a name"),
        (("empty", "--out", "t.json"), "no documents"),
        (("missing", "--out", "t.json"), "missing"),
    ):
        assert said in penstock("tokenizer", "train", *words, expect=1).err
    assert (tmp_path / "there.json").read_text() == "mine"
    assert not (tmp_path / "t.json").exists()
    penstock("tokenizer", "train", corpus, "--out", "there.json", "--vocab-size", 300, "--force")
    assert (tmp_path / "there.json").read_text() != "mine"
