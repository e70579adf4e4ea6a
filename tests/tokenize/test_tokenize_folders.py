"""Folders as they are published, read as transformers reads them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models, normalizers, pre_tokenizers, trainers

from penstock.errors import TokenizerError
from penstock.tokenize import load_tokenizer

from .conftest import ids_of, random_texts

ROBERTA_CONTROLS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]


def write_merges_folder(folder: Path, texts: list[bytes], controls: list[str]) -> Path:
    """vocab.json and merges.txt, as GPT-2 and RoBERTa publish theirs."""
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=controls,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    reference = Reference(models.BPE())
    reference.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    reference.train_from_iterator([text.decode() for text in texts[:20]], trainer)
    folder.mkdir(exist_ok=True)
    reference.model.save(str(folder))
    return folder


def write_word_piece_folder(folder: Path, texts: list[bytes]) -> Path:
    reference = Reference(models.WordPiece(unk_token="[UNK]"))
    reference.normalizer = normalizers.BertNormalizer()
    reference.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    reference.train_from_iterator([text.decode() for text in texts[:20]], trainer)
    folder.mkdir(exist_ok=True)
    reference.model.save(str(folder))
    return folder


@pytest.fixture
def plain_texts(texts: list[bytes]) -> list[bytes]:
    """No text spells a control: there, transformers makes the control and we don't."""
    whole = [*texts[:20], *random_texts(3, 200)]
    return [text for text in whole if b"<" not in text and b"[" not in text]


@pytest.mark.parametrize(("configured", "prefix_space"), [(False, False), (True, False), (True, True)])
def test_roberta_and_codebert(
    tmp_path: Path, texts: list[bytes], plain_texts: list[bytes], configured: bool, prefix_space: bool
):
    transformers = pytest.importorskip("transformers")
    folder = write_merges_folder(tmp_path, texts, ROBERTA_CONTROLS)
    if configured:
        config = {"tokenizer_class": "RobertaTokenizer", "add_prefix_space": prefix_space}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
    vocabulary = json.loads((folder / "vocab.json").read_bytes())
    merges = [tuple(line.split(" ")) for line in (folder / "merges.txt").read_text().split("\n")[1:] if line]
    theirs = transformers.RobertaTokenizerFast(vocab=vocabulary, merges=merges, add_prefix_space=prefix_space)
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.spec.begin_ids == (vocabulary["<s>"],)
    assert tokenizer.end_id == vocabulary["</s>"]
    assert set(tokenizer.spec.control_tokens) == set(ROBERTA_CONTROLS)
    for text, ids in zip(plain_texts, ids_of(tokenizer, plain_texts), strict=True):
        assert [vocabulary["<s>"], *ids, vocabulary["</s>"]] == theirs(text.decode())["input_ids"]


def test_gpt2_style(tmp_path: Path, texts: list[bytes], plain_texts: list[bytes]):
    transformers = pytest.importorskip("transformers")
    folder = write_merges_folder(tmp_path, texts, ["<|endoftext|>"])
    vocabulary = json.loads((folder / "vocab.json").read_bytes())
    merges = [tuple(line.split(" ")) for line in (folder / "merges.txt").read_text().split("\n")[1:] if line]
    theirs = transformers.GPT2TokenizerFast(vocab=vocabulary, merges=merges)
    tokenizer = load_tokenizer(str(folder))
    assert (tokenizer.spec.begin_ids, tokenizer.end_id) == ((), vocabulary["<|endoftext|>"])
    assert ids_of(tokenizer, plain_texts) == [theirs(text.decode())["input_ids"] for text in plain_texts]
    assert tokenizer.spec.keeps_bytes


@pytest.mark.parametrize("lower", [True, False])
def test_bert(tmp_path: Path, texts: list[bytes], plain_texts: list[bytes], lower: bool):
    transformers = pytest.importorskip("transformers")
    folder = write_word_piece_folder(tmp_path, texts)
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": lower}))
    words = (folder / "vocab.txt").read_text().split("\n")
    vocabulary = {word: number for number, word in enumerate(words) if word}
    theirs = transformers.BertTokenizerFast(vocab=vocabulary, do_lower_case=lower)
    tokenizer = load_tokenizer(str(folder))
    begin, end = vocabulary["[CLS]"], vocabulary["[SEP]"]
    assert (tokenizer.spec.begin_ids, tokenizer.end_id) == ((begin,), end)
    for text, ids in zip(plain_texts, ids_of(tokenizer, plain_texts), strict=True):
        assert [begin, *ids, end] == theirs(text.decode())["input_ids"]


def test_side_files_add_controls(tmp_path: Path, texts: list[bytes]):
    folder = write_merges_folder(tmp_path, texts, ["<|endoftext|>"])
    size = len(json.loads((folder / "vocab.json").read_bytes()))
    (folder / "added_tokens.json").write_text(json.dumps({"<fim>": size, "    ": size + 1}))
    (folder / "special_tokens_map.json").write_text(json.dumps({"additional_special_tokens": ["<fim>"]}))
    tokenizer = load_tokenizer(str(folder))
    assert tokenizer.spec.control_tokens == {"<|endoftext|>": 0, "<fim>": size}
    assert tokenizer.spec.kept_tokens == {"    ": size + 1}
    assert size not in ids_of(tokenizer, [b"a <fim> b"])[0]
    assert size + 1 in ids_of(tokenizer, [b"a     b"])[0]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("vocab.json", b"{}"),
        ("vocab.json", b"[]"),
        ("vocab.json", b'{"a": "b"}'),
        ("vocab.json", b"\xff"),
        ("merges.txt", b"#version: 0.2\na b c\n"),
        ("merges.txt", b"#version: 0.2\nnot known\n"),
        ("merges.txt", b"\xff\xfe"),
        ("special_tokens_map.json", b"[1"),
        ("added_tokens.json", b"3"),
        ("tokenizer_config.json", b"[" * 100_000),
    ],
)
def test_damaged_folders_are_refused_by_file(tmp_path: Path, texts: list[bytes], name: str, content: bytes):
    folder = write_merges_folder(tmp_path, texts, ["<|endoftext|>"])
    (folder / name).write_bytes(content)
    with pytest.raises(TokenizerError, match=name.replace(".", r"\.")):
        load_tokenizer(str(folder))


def test_a_word_piece_vocabulary_without_its_controls_is_refused(tmp_path: Path):
    (tmp_path / "vocab.txt").write_text("hello\nworld\n")
    with pytest.raises(TokenizerError, match="UNK"):
        load_tokenizer(str(tmp_path))
