"""What templates learn of a tokenizer: its control tokens, its special tokens and its own chat templates."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken

from penstock.errors import TokenizerError
from penstock.sources import Document, Part, PartKind
from penstock.sources.records.templates import control_tokens_of
from penstock.tokenize import load_tokenizer, train_tokenizer
from penstock.tokenize.chat import template_vocabulary, tokenizer_folder
from penstock.tokenize.framed import needs_whole_documents

from .chat_families import FAMILIES, built, write_folder
from .conftest import byte_level, loaded


def test_a_folder_says_its_special_tokens_and_its_template(tmp_path: Path):
    folder = write_folder(tmp_path / "llama", "llama-3")
    vocabulary = template_vocabulary(load_tokenizer(str(folder)), folder=folder)
    assert vocabulary.end == "<|eot_id|>"
    assert dict(vocabulary.special_tokens) == FAMILIES["llama-3"].special
    assert dict(vocabulary.chat_templates) == {"default": FAMILIES["llama-3"].template}
    assert {"<|begin_of_text|>", "<|eot_id|>"} <= vocabulary.control_names
    beside = template_vocabulary(load_tokenizer(str(folder)), folder=folder / "tokenizer.json")
    assert beside == vocabulary
    assert tokenizer_folder(str(folder)) == folder


def test_template_files_come_before_the_config(tmp_path: Path):
    folder = write_folder(tmp_path / "qwen", "qwen-2.5")
    tokenizer = load_tokenizer(str(folder))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["chat_template"] = [{"name": "default", "template": "D"}, {"name": "rag", "template": "R"}, {"name": 5}, 7]
    config["bos_token"] = {"content": "<|im_start|>", "lstrip": False}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = template_vocabulary(tokenizer, folder=folder)
    assert dict(vocabulary.chat_templates) == {"default": "D", "rag": "R"}
    assert dict(vocabulary.special_tokens)["bos_token"] == "<|im_start|>"
    (folder / "chat_template.jinja").write_text("F")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("T")
    vocabulary = template_vocabulary(tokenizer, folder=folder)
    assert dict(vocabulary.chat_templates) == {"default": "F", "rag": "R", "tool_use": "T"}
    assert template_vocabulary(tokenizer).chat_templates == ()


@pytest.mark.parametrize("junk", [b"{", b"[]", b"\xff\xfe", b"[" * 100_000])
def test_junk_beside_a_tokenizer_is_named(tmp_path: Path, junk: bytes):
    folder = write_folder(tmp_path / "qwen", "qwen-2.5")
    tokenizer = load_tokenizer(str(folder))
    (folder / "tokenizer_config.json").write_bytes(junk)
    with pytest.raises(TokenizerError, match="tokenizer_config"):
        template_vocabulary(tokenizer, folder=folder)
    (folder / "tokenizer_config.json").unlink()
    (folder / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(TokenizerError, match="chat_template"):
        template_vocabulary(tokenizer, folder=folder)


def test_a_trained_vocabulary_takes_the_control_tokens_of_a_template():
    names = control_tokens_of("chatml")
    tokenizer = train_tokenizer([b"some words to learn from " * 50], vocab_size=280, control_tokens=names)
    assert tokenizer.vocab_size <= 280
    assert set(tokenizer.spec.control_tokens) == {"<|endoftext|>", *names}
    ids, _ = tokenizer.encode([b"<|im_start|>some words<|im_end|>"])
    assert not set(ids.tolist()) & set(tokenizer.spec.control_tokens.values())
    plain = train_tokenizer([b"some words to learn from " * 50], vocab_size=280 - len(names))
    assert plain.encode([b"some words"])[0].tolist() == tokenizer.encode([b"some words"])[0].tolist()
    with pytest.raises(TokenizerError, match="too small"):
        train_tokenizer([b"x"], vocab_size=258, control_tokens=names)


def framed(*parts: Part) -> Document:
    return Document(key=b"k", group=b"k", path=b"", byte_start=0, byte_end=0, parts=parts, framed=True)


def control(name: str, *, loss: bool = False) -> Part:
    return Part(data=name.encode(), kind=PartKind.CONTROL, loss=loss)


def test_tokens_that_take_the_spaces_beside_them_do_so_here_too():
    """With every flag, the ids are those of `tokenizers` for the same text; spaces of content are no exception."""
    flags = [
        AddedToken("<|l|>", special=True, normalized=False, lstrip=True),
        AddedToken("<|r|>", special=True, normalized=False, rstrip=True),
        AddedToken("<|n|>", special=True, normalized=True),
        AddedToken("<|e|>", special=True, normalized=False),
    ]
    reference = byte_level([("a", "b")], added=flags)
    tokenizer = loaded(reference, end_token="<|e|>")
    assert needs_whole_documents(tokenizer.spec)
    texts = ["ab  ", "  ab  ", "\n", "", " é ", "ab\U000f0000\U000f0001"]
    names = ["<|l|>", "<|r|>", "<|n|>", "<|l|>", "<|r|>", "<|e|>"]
    parts = [
        piece for text, name in zip(texts, names, strict=True) for piece in (Part(data=text.encode()), control(name))
    ]
    ids, runs = tokenizer.encode_document(framed(*parts))
    spelt = "".join(part.data.decode() for part in parts)
    assert ids.tolist() == reference.encode(spelt, add_special_tokens=False).ids
    assert runs is not None
    carries = np.zeros(ids.size, bool)
    for start, count in runs.tolist():
        carries[start : start + count] = True
    is_control = np.isin(ids, list(tokenizer.spec.control_tokens.values()))
    assert carries[:-1].tolist() == (~is_control[:-1]).tolist()
    assert carries[-1]


def test_a_control_that_is_not_there_is_refused_in_whole_documents_too(tmp_path: Path):
    tokenizer = load_tokenizer(str(write_folder(tmp_path / "gemma", "gemma")))
    assert needs_whole_documents(tokenizer.spec)
    with pytest.raises(TokenizerError, match="end_of_trun"):
        tokenizer.encode_document(framed(Part(data=b"a"), control("<end_of_trun>")))
    ids, _ = tokenizer.encode_document(framed())
    assert ids.tolist() == [tokenizer.end_id]
    assert built("gemma").token_to_id("<eos>") == tokenizer.end_id
