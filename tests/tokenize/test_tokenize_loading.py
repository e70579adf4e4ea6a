"""`--tokenizer` values: files, folders, rank files, and everything that is none of them."""

from __future__ import annotations

import base64
import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, processors

from penstock.errors import TokenizerError
from penstock.tokenize import Tokenizer, TokenizerSpec, load_tokenizer
from penstock.tokenize.specification import byte_of_character, character_of_byte

from .conftest import BYTE_LETTERS, END, byte_level, ids_of


def rank_lines(count: int) -> list[bytes]:
    tokens = [bytes([byte]) for byte in range(256)] + [number.to_bytes(4, "big") for number in range(count - 256)]
    return [base64.b64encode(token) + b" %d" % rank for rank, token in enumerate(tokens)]


WHOLE = json.loads(byte_level([("a", "b")]).to_str())

TEMPLATE = json.loads(processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)]).__getstate__())

NOT_TOKENIZERS = {
    "empty.json": b"",
    "random.json": random.Random(0).randbytes(500),
    "list.json": b"[]",
    "text.json": b'"tokenizer"',
    "number.json": b"1e999",
    "no-model.json": b'{"version": "1.0"}',
    "model-is-text.json": b'{"model": "BPE"}',
    "no-vocabulary.json": b'{"model": {"type": "BPE"}}',
    "vocabulary-is-text.json": b'{"model": {"type": "BPE", "vocab": "abc"}}',
    "ids-are-text.json": b'{"model": {"type": "BPE", "vocab": {"a": "0"}, "merges": []}}',
    "truncated.json": json.dumps(WHOLE).encode()[:-40],
    "deep.json": b"[" * 100_000,
    "added-without-id.json": json.dumps({**WHOLE, "added_tokens": [{"content": END}]}).encode(),
    "added-is-text.json": json.dumps({**WHOLE, "added_tokens": END}).encode(),
    "bad-post-processor.json": json.dumps({**WHOLE, "post_processor": {"type": "Nonsense"}}).encode(),
    "post-processor-that-panics.json": json.dumps(
        {**WHOLE, "post_processor": {**TEMPLATE, "special_tokens": {}}}
    ).encode(),
    "odd-post-processor.json": json.dumps({**WHOLE, "post_processor": "TemplateProcessing"}).encode(),
    "utf16.json": json.dumps(WHOLE).encode("utf-16")[:-1],
    "r50k_base.tiktoken": b"\n".join([*rank_lines(300), b"not base64 at all"]),
    "cl100k_base.tiktoken": b"\n".join([*rank_lines(300), b"YWI= ten"]),
    "o200k_base.tiktoken": b"",
    "my_own.tiktoken": b"\n".join(rank_lines(300)),
}


@pytest.mark.parametrize("name", NOT_TOKENIZERS)
def test_what_is_no_tokenizer_is_refused_by_name_with_a_way_out(tmp_path: Path, name: str):
    (tmp_path / name).write_bytes(NOT_TOKENIZERS[name])
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(str(tmp_path / name))
    assert name in raised.value.message
    assert raised.value.hint


@pytest.mark.parametrize("lines", [257, 50_000])
def test_a_rank_file_that_was_cut_short_is_refused(tmp_path: Path, lines: int):
    """Every line is well formed; a vocabulary half as large would give other ids without a word."""
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"\n".join(rank_lines(lines)))
    with pytest.raises(TokenizerError, match=str(lines)):
        load_tokenizer(str(path))


def test_a_bad_line_of_a_rank_file_is_named(tmp_path: Path):
    path = tmp_path / "r50k_base.tiktoken"
    path.write_bytes(b"\n".join([*rank_lines(300), b"x", b"YQ== 1"]))
    with pytest.raises(TokenizerError, match="line 301"):
        load_tokenizer(str(path))


def test_an_unknown_rank_file_lists_the_known_names_nearest_first(tmp_path: Path):
    path = tmp_path / "cl100k_bas.tiktoken"
    path.write_bytes(b"\n".join(rank_lines(300)))
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(str(path))
    listed = [raised.value.hint.index(name) for name in ("cl100k_base", "o200k_base", "r50k_base")]
    assert listed[0] == min(listed)


def test_missing_paths_and_folders_without_a_tokenizer_are_refused(tmp_path: Path):
    for value in (str(tmp_path / "nowhere.json"), str(tmp_path), ""):
        with pytest.raises(TokenizerError) as raised:
            load_tokenizer(value)
        assert raised.value.hint


def test_a_pipe_is_no_tokenizer_and_is_there(tmp_path: Path):
    os.mkfifo(tmp_path / "tokenizer.json")
    with pytest.raises(TokenizerError, match="neither a file nor a folder"):
        load_tokenizer(str(tmp_path / "tokenizer.json"))


def damaged(data: st.DataObject, value: Any) -> Any:
    """A copy of a JSON value with one thing in it replaced, somewhere."""
    wrong: Any = data.draw(st.sampled_from([None, True, -1, 0, 1.5, "", "x", [], {}, [[]], {"type": "x"}, [None]]))
    if isinstance(value, dict) and value and data.draw(st.booleans()):
        key = data.draw(st.sampled_from(sorted(value)[:40]))
        return {**value, key: damaged(data, value[key])}
    if isinstance(value, list) and value and data.draw(st.booleans()):
        place = data.draw(st.integers(0, len(value) - 1))
        return [*value[:place], damaged(data, value[place]), *value[place + 1 :]]
    return wrong


def fuzzed_base() -> dict[str, Any]:
    reference = byte_level([("a", "b")], added=[AddedToken("<s>", special=True), AddedToken("FOO", special=False)])
    reference.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 258)])
    content: dict[str, Any] = json.loads(reference.to_str())
    return content


BASE = fuzzed_base()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_a_damaged_tokenizer_loads_or_is_refused_never_anything_else(data: st.DataObject):
    content = damaged(data, BASE)
    try:
        spec = TokenizerSpec.from_json(json.dumps(content).encode(), origin="damaged")
        tokenizer = Tokenizer(spec, origin="damaged")
        ids, _ = tokenizer.encode([b"ab <s> FOO"])
    except TokenizerError:
        return
    assert not set(ids.tolist()) & set(spec.control_tokens.values())
    assert ids.size == 0 or int(ids.max()) < spec.vocab_size
    assert isinstance(spec.keeps_bytes, bool)


def test_a_file_and_its_folder_are_the_same_tokenizer(tmp_path: Path, tokenizer: Tokenizer, tokenizer_file: Path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer_file.read_bytes())
    from_file, from_folder = load_tokenizer(str(tokenizer_file)), load_tokenizer(str(tmp_path))
    assert from_file.digest == from_folder.digest == tokenizer.digest
    text = [b"def main():\n    return 1\n"]
    assert ids_of(from_file, text) == ids_of(from_folder, text) == ids_of(tokenizer, text)


@pytest.mark.parametrize(
    ("config", "end"),
    [
        ({"eos_token": "<|im_end|>"}, "<|im_end|>"),
        ({"eos_token": {"content": "<|im_end|>", "special": True}}, "<|im_end|>"),
        ({"eos_token": None}, END),
        ({}, END),
    ],
)
def test_a_folder_s_config_names_the_end_token(tmp_path: Path, config: dict[str, Any], end: str):
    reference = byte_level(added=[AddedToken("<|im_end|>", special=True)])
    (tmp_path / "tokenizer.json").write_text(reference.to_str())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(str(tmp_path)).end_id == reference.token_to_id(end)
    assert load_tokenizer(str(tmp_path), end_token=END).end_id == reference.token_to_id(END), "what is asked for wins"


@pytest.mark.parametrize("config", [b"", b"[]", b"{", b'{"eos_token": "<nowhere>"}', b"[" * 100_000])
def test_a_config_that_can_not_be_used_is_refused(tmp_path: Path, config: bytes):
    (tmp_path / "tokenizer.json").write_text(byte_level().to_str())
    (tmp_path / "tokenizer_config.json").write_bytes(config)
    with pytest.raises(TokenizerError):
        load_tokenizer(str(tmp_path))


def test_the_byte_alphabet_is_that_of_tokenizers():
    assert sorted(character_of_byte) == BYTE_LETTERS
    assert [byte_of_character[character] for character in character_of_byte] == list(range(256))
    # The published order: visible Latin-1 for itself, the rest counted up from 256.
    assert (character_of_byte[ord("a")], character_of_byte[ord(" ")], character_of_byte[ord("\n")]) == ("a", "Ġ", "Ċ")
