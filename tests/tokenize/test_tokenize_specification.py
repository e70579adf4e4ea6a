"""What a tokenizer is: which added tokens text may reach, its digest, its width, its bytes."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from penstock.errors import TokenizerError
from penstock.hashing import digest_of
from penstock.tokenize import Tokenizer, TokenizerSpec, specification

from .conftest import BYTE_LETTERS, END, byte_level, ids_of, loaded
from .families import built
from .test_tokenize_engines import SLOW, UNSPLIT, unigram, word_piece

MERGES = [("a", "b"), ("c", "d"), ("ab", "cd")]


def spec_of(content: dict[str, Any], *, end_token: str | None = None) -> TokenizerSpec:
    return TokenizerSpec.from_json(json.dumps(content).encode(), origin="changed here", end_token=end_token)


def ordinary(name: str, **flags: Any) -> AddedToken:
    return AddedToken(name, special=False, normalized=False, **flags)


def content_of(tokenizer: Reference) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(tokenizer.to_str())
    return content


@pytest.mark.parametrize(
    "name",
    ["<|im_start|>", "<|fim_prefix|>", "[INST]", "[/INST]", "<s>", "</s>", "<think>", "</tool_call>", "<pad>",
     "<fim_middle>", "<repo_name>", "<file_sep>", "<｜User｜>", "<start_of_turn>", "<unused12>"],
)  # fmt: skip
def test_what_looks_like_a_control_is_one_even_if_it_is_not_marked(name: str):
    tokenizer = loaded(byte_level(added=[ordinary(name)]))
    assert set(tokenizer.spec.control_tokens) == {END, name}
    assert tokenizer.spec.kept_tokens == {}
    (ids,) = ids_of(tokenizer, [f"a{name} {name}".encode()])
    assert max(ids) < 256


@pytest.mark.parametrize("name", ["    ", "\t\t", "FOO", "<div>", "[a]", "<|", "hello world"])
def test_ordinary_added_tokens_are_kept_and_reached(name: str):
    tokenizer = loaded(byte_level(added=[ordinary(name)]))
    token = tokenizer.spec.kept_tokens[name]
    assert set(tokenizer.spec.control_tokens) == {END}
    (ids,) = ids_of(tokenizer, [f"a{name}b".encode()])
    assert ids == [ids[0], token, ids[-1]]
    assert tokenizer.decode(ids) == f"a{name}b"
    assert tokenizer.token_byte_lengths()[token] == len(name.encode())


def test_a_special_token_is_a_control_whatever_it_is_called():
    tokenizer = loaded(byte_level(added=[AddedToken("FOO", special=True, normalized=False)]))
    assert "FOO" in tokenizer.spec.control_tokens
    assert max(ids_of(tokenizer, [b"FOO xFOOx"])[0]) < 256


def test_an_end_token_named_by_the_user_can_not_be_spelt_by_text():
    """Also if the file calls it an ordinary added token: one literal in a document would cut the document."""
    reference = byte_level(added=[ordinary("THE END")])
    assert "THE END" in loaded(reference).spec.kept_tokens
    tokenizer = loaded(reference, end_token="THE END")
    assert tokenizer.end_id == reference.token_to_id("THE END")
    assert tokenizer.spec.kept_tokens == {}
    assert tokenizer.end_id not in ids_of(tokenizer, [b"THE END xTHE ENDx"])[0]


def test_an_end_token_that_is_only_in_the_model_is_a_control_and_refused_when_text_reaches_it():
    reference = Reference(models.WordLevel({"[UNK]": 0, "a": 1, "</s>": 2}, unk_token="[UNK]"))
    reference.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = loaded(reference)
    assert tokenizer.spec.control_tokens == {"</s>": 2}
    with pytest.raises(TokenizerError, match="</s>"):
        tokenizer.encode([b"a </s> a"])


def test_an_end_token_that_is_not_there_is_refused_with_those_that_are():
    with pytest.raises(TokenizerError) as raised:
        loaded(byte_level(), end_token="<nope>")
    assert "<nope>" in raised.value.message
    assert END in raised.value.hint


def test_a_tokenizer_without_a_known_end_token_asks_for_its_name():
    content = content_of(byte_level(added=[AddedToken("FIN", special=True)]))
    content["added_tokens"] = [token for token in content["added_tokens"] if token["content"] == "FIN"]
    with pytest.raises(TokenizerError) as raised:
        spec_of(content)
    assert "--end-token" in raised.value.hint
    assert "FIN" in raised.value.hint
    assert spec_of(content, end_token="FIN").end_id == content["added_tokens"][0]["id"]


def reordered(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: reordered(value[key]) for key in reversed(list(value))}
    return [reordered(item) for item in value] if isinstance(value, list) else value


def test_the_digest_is_blind_to_layout():
    content = content_of(byte_level(MERGES, added=[ordinary("FOO")]))
    digest = spec_of(content).digest
    assert spec_of(reordered(content)).digest == digest
    spaced = TokenizerSpec.from_json(json.dumps(content, indent=4, ensure_ascii=False).encode(), origin="elsewhere")
    assert spaced.digest == digest
    padded = {
        **content,
        "padding": None,
        "truncation": {"max_length": 4, "strategy": "LongestFirst", "stride": 0, "direction": "Right"},
    }
    assert spec_of(padded).digest == digest, "documents are never cut by the tokenizer's own truncation"


def changed_merge(content: dict[str, Any]) -> None:
    content["model"]["merges"].reverse()


def dropped_merge(content: dict[str, Any]) -> None:
    content["model"]["merges"].pop()


def renamed_control(content: dict[str, Any]) -> None:
    content["added_tokens"][1]["content"] = "<|other|>"


def moved_control(content: dict[str, Any]) -> None:
    content["added_tokens"][1]["id"] += 7


def kept_instead(content: dict[str, Any]) -> None:
    content["added_tokens"][2]["special"] = True


def other_splitter(content: dict[str, Any]) -> None:
    content["pre_tokenizer"]["use_regex"] = False


def normalised(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "NFC"}


@pytest.mark.parametrize(
    "change", [changed_merge, dropped_merge, renamed_control, moved_control, kept_instead, other_splitter, normalised]
)
def test_the_digest_sees_whatever_decides_ids(change: Callable[[dict[str, Any]], None]):
    reference = byte_level(MERGES, added=[AddedToken("<|user|>", special=True), ordinary("FOO")])
    content = content_of(reference)
    before = spec_of(content).digest
    change(content)
    assert spec_of(content).digest != before


def test_the_digest_sees_the_end_token():
    content = content_of(byte_level(added=[AddedToken("<|user|>", special=True)]))
    assert spec_of(content, end_token="<|user|>").digest != spec_of(content).digest
    assert spec_of(content, end_token=END).digest == spec_of(content).digest


@pytest.mark.parametrize(("size", "dtype"), [(65_535, "<u2"), (65_536, "<u4"), (200_000, "<u4")])
def test_a_vocabulary_above_65535_is_stored_in_four_bytes(size: int, dtype: str):
    content = content_of(byte_level())
    content["added_tokens"][0]["id"] = size - 1
    tokenizer = Tokenizer(spec_of(content), origin="test")
    assert (tokenizer.vocab_size, tokenizer.dtype) == (size, np.dtype(dtype))
    assert tokenizer.end_id == size - 1


KEEPS_BYTES = {
    "byte level": (lambda: byte_level(MERGES), True),
    "unsplit": (lambda: byte_level(MERGES, pre_tokenizer=UNSPLIT), True),
    "digits": (SLOW["digits"], True),
    "kept token": (lambda: byte_level(added=[ordinary("FOO")]), True),
    "prefix space": (lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(add_prefix_space=True)), False),
    "token that swallows spaces": (lambda: byte_level(added=[ordinary("FOO", lstrip=True)]), False),
    "spaces removed": (
        lambda: byte_level(pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), UNSPLIT])),
        False,
    ),
    "split removed": (
        lambda: byte_level(
            pre_tokenizer=pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(r"\s+"), "removed"), UNSPLIT])
        ),
        False,
    ),
    "prefixed subwords": (lambda: byte_level(continuing_subword_prefix="##"), False),
    "word piece": (word_piece, False),
    "unigram": (unigram, False),
}
PROBES = [b"a b", b" lead", b"ab  FOO  cd", b"e\xcc\x81", "é 🙂\n".encode(), b"1 23", b""]


@pytest.mark.parametrize("shape", KEEPS_BYTES)
def test_byte_exactness_is_claimed_only_where_it_holds(shape: str):
    build, claimed = KEEPS_BYTES[shape]
    tokenizer = loaded(build())
    assert tokenizer.spec.keeps_bytes is claimed
    assert tokenizer.describe()["byte_exact"] is claimed
    if tokenizer.spec.is_byte_level:
        table = tokenizer.spec.token_bytes
        exact = all(
            b"".join(table[token] for token in ids) == text
            for text, ids in zip(PROBES, ids_of(tokenizer, PROBES), strict=True)
        )
        assert exact is claimed
    else:
        with pytest.raises(TokenizerError, match="byte-level"):
            tokenizer.token_byte_lengths()


def test_a_normalizer_ends_byte_exactness():
    reference = byte_level()
    reference.normalizer = normalizers.NFC()
    assert not loaded(reference).spec.keeps_bytes


def test_a_vocabulary_that_lacks_a_byte_is_not_byte_exact():
    letters = [letter for letter in BYTE_LETTERS if letter != "Z"]
    reference = Reference(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.add_special_tokens([END])
    tokenizer = loaded(reference)
    assert tokenizer.decode(ids_of(tokenizer, [b"aZb"])[0]) == "ab"
    assert not tokenizer.spec.keeps_bytes


def test_control_tokens_stand_for_no_bytes(tokenizer: Tokenizer):
    lengths = tokenizer.token_byte_lengths()
    assert lengths.size == tokenizer.vocab_size
    assert np.flatnonzero(lengths == 0).tolist() == [tokenizer.end_id]
    assert tokenizer.decode([tokenizer.end_id]) == END


@settings(deadline=None)
@given(st.binary(max_size=40))
def test_half_characters_decode_to_the_replacement_character(tokenizer: Tokenizer, data: bytes):
    single_bytes = {entry: number for number, entry in enumerate(tokenizer.spec.token_bytes) if len(entry) == 1}
    assert tokenizer.decode([single_bytes[bytes([byte])] for byte in data]) == data.decode("utf-8", "replace")


def test_vocabularies_that_are_not_byte_level_decode_through_the_reference():
    tokenizer = loaded(word_piece())
    (ids,) = ids_of(tokenizer, [b"hello q x"])
    assert tokenizer.decode(ids) == "hello q x"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=20,
)  # fmt: skip


@given(st.dictionaries(st.text(max_size=6), JSON_VALUES, max_size=5))
@example({"a": "\ud800"})
@example({"z": 1, "é": 2, "😀": 3, "\uffff": 4, "": '\x00\x1f\x7f\u2028"\\/'})
@example({"a": 1.0, "b": [1e16, -2.5e-7]})
def test_the_quick_digest_is_the_canonical_one(value: dict[str, Any]):
    assert specification._digest(value) == digest_of(value)


@pytest.mark.parametrize("family", ["Qwen2", "Llama-2", "Gemma", "BERT", "T5"])
def test_estimated_bytes_of_tokens_add_up_to_about_the_text(family):
    tokenizer = built(family)
    text = "the cat sat on the mat and looked at the dog in the garden near the house " * 4
    ids, _ = tokenizer.encode([text.encode()])
    estimate = int(tokenizer.estimated_byte_lengths()[ids].sum())
    # WordPiece drops the spaces; SentencePiece may add one in front.
    assert 0.7 * len(text) <= estimate <= len(text) + 2
    if tokenizer.spec.is_byte_level:
        assert estimate == len(text)
