"""The choice of engine: the fast one only where it agrees, and no tokenizer whose text reaches a control."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from penstock.errors import TokenizerError
from penstock.tokenize import Tokenizer, TokenizerSpec

from .conftest import END, byte_level, ids_of, loaded, random_texts, reference_ids

HELLO = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "hello"), ("1", "2"), ("12", "3")]
UNSPLIT = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TEXTS = [b"", b"hello hello 123 1234", b"q x q", b"a  FOO  b xFOOx", *random_texts(5, 300)]


def with_end(tokenizer: Reference, pre_tokenizer: Any = None) -> Reference:
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([AddedToken(END, special=True, normalized=False)])
    return tokenizer


def word_piece() -> Reference:
    words = ["[UNK]", "hello", "he", "##llo", "1", "##2", "##3", "q", "x", "[", "]", "<", ">"]
    model = models.WordPiece({word: number for number, word in enumerate(words)}, unk_token="[UNK]")
    return with_end(Reference(model), pre_tokenizers.BertPreTokenizer())


def unigram() -> Reference:
    pieces = [
        ("<unk>", 0.0),
        ("hello", -1.0),
        ("he", -2.0),
        ("llo", -2.0),
        *((letter, -5.0) for letter in "helo 123qx"),
    ]
    return with_end(Reference(models.Unigram(pieces, unk_id=0)))


def word_level_with_the_unknown_last() -> Reference:
    """Its unknown token is special and has the highest id of the model: text reaches it, and may."""
    tokenizer = Reference(models.WordLevel({"hello": 0, "q": 1, END: 2, "[UNK]": 3}, unk_token="[UNK]"))
    tokenizer = with_end(tokenizer)
    tokenizer.add_special_tokens([AddedToken("[UNK]", special=True, normalized=False)])
    return tokenizer


def lower_case() -> Reference:
    tokenizer = byte_level(HELLO)
    tokenizer.normalizer = normalizers.Lowercase()
    return tokenizer


def digits() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


SLOW = {
    "digits": lambda: byte_level(HELLO, pre_tokenizer=digits()),
    "another pattern": lambda: byte_level(
        HELLO, pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\d|\D+"), "isolated"), UNSPLIT])
    ),
    "no splitting at all": lambda: byte_level([("q", "Ġ")], pre_tokenizer=UNSPLIT),
    "an added token only as a whole word": lambda: byte_level(
        added=[AddedToken("FOO", single_word=True, normalized=False, special=False)]
    ),
    "an added token that takes spaces with it": lambda: byte_level(
        added=[AddedToken("FOO", lstrip=True, rstrip=True, normalized=False, special=False)]
    ),
    "lower case": lower_case,
    "word piece": word_piece,
    "unigram": unigram,
    "word level": word_level_with_the_unknown_last,
}


@pytest.mark.parametrize("shape", SLOW)
def test_what_the_fast_engine_refuses_or_gets_wrong_runs_on_the_reference(shape: str):
    tokenizer = loaded(SLOW[shape]())
    assert tokenizer.engine.name == "tokenizers"
    assert "gigatoken" in tokenizer.engine.reason
    assert tokenizer.describe_engine()["reason"] == tokenizer.engine.reason
    assert ids_of(tokenizer, TEXTS) == reference_ids(tokenizer)(TEXTS)


FAST = {
    "bytes only": byte_level,
    "merges": lambda: byte_level(HELLO),
    "prefix space": lambda: byte_level(HELLO, pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)),
    "kept tokens": lambda: byte_level(HELLO, added=[AddedToken("FOO", normalized=False, special=False)]),
}


@pytest.mark.parametrize("shape", FAST)
def test_what_the_fast_engine_gets_right_runs_on_it(shape: str):
    tokenizer = loaded(FAST[shape]())
    assert tokenizer.engine.name == "gigatoken", tokenizer.engine.reason
    assert ids_of(tokenizer, TEXTS) == reference_ids(tokenizer)(TEXTS)


def spelt(name: str) -> list[tuple[str, str]]:
    """Merges that build a name letter by letter."""
    return [(name[:cut], name[cut]) for cut in range(1, len(name))]


def control(name: str) -> AddedToken:
    return AddedToken(name, special=True, normalized=False)


REACHABLE = {
    "merges spell it": lambda: byte_level(spelt("STOP"), added=[control("STOP")]),
    "a whole pretoken is taken as it is": lambda: byte_level(
        spelt("STOP"), added=[control("STOP")], ignore_merges=True
    ),
    "only a text that is nothing else": lambda: with_end(
        Reference(models.WordLevel({"a": 0, "b c": 1, "[UNK]": 2, "STOP": 3}, unk_token="[UNK]")),
        pre_tokenizers.Split(Regex(r"\z"), "isolated"),
    ),
    "a name that holds `unk`": lambda: byte_level(spelt("chunk"), added=[control("chunk")]),
    "a unigram piece": lambda: with_end(
        Reference(models.Unigram([("<unk>", 0.0), ("STOP", -1.0)], unk_id=0)),
        pre_tokenizers.Split(Regex(r"\z"), "isolated"),
    ),
}


@pytest.mark.parametrize("shape", REACHABLE)
def test_a_tokenizer_whose_text_reaches_a_control_is_refused(shape: str):
    reference = REACHABLE[shape]()
    reference.add_special_tokens([control("STOP")])
    tokenizer = loaded(reference)
    name = "chunk" if "unk" in shape else "STOP"
    assert name in tokenizer.spec.control_tokens
    with pytest.raises(TokenizerError, match=name):
        tokenizer.encode([b"text"])


@pytest.mark.parametrize("splitter", [pre_tokenizers.Metaspace(), pre_tokenizers.Whitespace()])
def test_a_control_among_unigram_pieces_is_out_of_reach_where_no_space_gets_to_the_model(splitter: Any):
    pieces = [("<unk>", 0.0), ("STOP", 0.0), *((letter, -5.0) for letter in "▁STOPx")]
    reference = with_end(Reference(models.Unigram(pieces, unk_id=0)), splitter)
    reference.add_special_tokens([control("STOP")])
    tokenizer = loaded(reference)
    for text in (b"STOP", b" STOP", b"x STOP x", b"xSTOPx"):
        assert 1 not in ids_of(tokenizer, [text])[0]
    assert tokenizer.spec.control_tokens["STOP"] == 1
    assert "STOP" in tokenizer.decode([1, 6])


def test_the_last_of_many_controls_is_checked_like_the_first():
    many = [control(f"<|reserved_{number}|>") for number in range(100)]
    content = json.loads(byte_level(spelt("STOP"), added=[*many, control("STOP")]).to_str())
    content["added_tokens"].sort(key=lambda token: token["content"] == "STOP")
    spec = TokenizerSpec.from_json(json.dumps(content).encode(), origin="built here")
    assert list(spec.control_tokens)[-1] == "STOP"
    with pytest.raises(TokenizerError, match="STOP"):
        Tokenizer(spec, origin="built here").encode([b"text"])


def test_random_merges_are_refused_because_ids_would_differ_from_run_to_run():
    with pytest.raises(TokenizerError, match="dropout"):
        loaded(byte_level(HELLO, dropout=0.5))


def test_no_texts_give_no_ids():
    for tokenizer in (loaded(byte_level()), loaded(word_piece())):
        ids, offsets = tokenizer.encode([])
        assert (ids.size, offsets.tolist()) == (0, [0])
