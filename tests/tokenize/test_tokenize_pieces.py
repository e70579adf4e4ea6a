"""Ids by remembered pieces are the ids of whole texts, for every family that has a rule, whatever the slices."""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Reference

from penstock.tokenize import Tokenizer, TokenizerSpec, pieces
from penstock.tokenize.cuts import cut_pattern
from penstock.tokenize.engines import ReferenceEngine, RememberingEngine, UnigramEngine
from penstock.tokenize.pieces import PieceMemory

from .conftest import BYTE_LETTERS, END, FRAGMENTS, byte_level, loaded, random_texts

GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
TRAINING = [
    "def main(self):\n    return 'don\\'t' + name  # 1234 it's\n",
    "The words, the WORDS... 3.14 汉字 café\n\n",
] * 30


def trained_bpe(splitter: Any, **options: Any) -> Reference:
    reference = Reference(models.BPE(**options))
    reference.pre_tokenizer = splitter
    trainer = trainers.BpeTrainer(
        vocab_size=450, special_tokens=[END], initial_alphabet=BYTE_LETTERS, show_progress=False
    )
    reference.train_from_iterator(TRAINING, trainer)
    return reference


def trained_word_piece(splitter: Any, normalizer: Any = None) -> Reference:
    reference = Reference(models.WordPiece(unk_token="[UNK]"))
    reference.pre_tokenizer = splitter
    if normalizer is not None:
        reference.normalizer = normalizer
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=["[UNK]", END], show_progress=False)
    reference.train_from_iterator(TRAINING, trainer)
    return reference


def trained_unigram(splitter: Any, *steps: Any) -> Reference:
    reference = Reference(models.Unigram())
    reference.pre_tokenizer = splitter
    if steps:
        reference.normalizer = normalizers.Sequence(list(steps))
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
    )
    reference.train_from_iterator(TRAINING, trainer)
    return reference


def sequence(*splitters: Any) -> Any:
    return pre_tokenizers.Sequence(list(splitters))


COLLAPSE = normalizers.Replace(Regex(" {2,}"), " ")
FAMILIES: dict[str, Callable[[], Reference]] = {
    "StarCoder": lambda: trained_bpe(sequence(pre_tokenizers.Digits(individual_digits=True), GPT2)),
    "digits in runs": lambda: trained_bpe(sequence(pre_tokenizers.Digits(individual_digits=False), GPT2)),
    "digits after": lambda: trained_bpe(sequence(GPT2, pre_tokenizers.Digits(individual_digits=True))),
    "Falcon": lambda: trained_bpe(
        sequence(
            pre_tokenizers.Punctuation("contiguous"),
            GPT2,
            pre_tokenizers.Digits(individual_digits=False),
            pre_tokenizers.Split(Regex("[0-9][0-9][0-9]"), "isolated"),
        )
    ),
    "marks one by one": lambda: trained_bpe(sequence(pre_tokenizers.Punctuation("isolated"), GPT2)),
    "BERT": lambda: trained_word_piece(pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer()),
    "BERT, cased": lambda: trained_word_piece(
        pre_tokenizers.BertPreTokenizer(), normalizers.BertNormalizer(lowercase=False, clean_text=False)
    ),
    "white space": lambda: trained_word_piece(pre_tokenizers.Whitespace(), normalizers.NFD()),
    "white space only": lambda: trained_word_piece(pre_tokenizers.WhitespaceSplit(), normalizers.NFKC()),
    "unigram": lambda: trained_unigram(pre_tokenizers.Metaspace()),
    "unigram, spaces collapsed": lambda: trained_unigram(pre_tokenizers.Metaspace(), normalizers.NFKC(), COLLAPSE),
    "unigram, prefix first": lambda: trained_unigram(pre_tokenizers.Metaspace(prepend_scheme="first"), COLLAPSE),
    "unigram, no prefix": lambda: trained_unigram(pre_tokenizers.Metaspace(prepend_scheme="never")),
    "unigram, like T5": lambda: trained_unigram(
        pre_tokenizers.Metaspace(),
        normalizers.Nmt(),
        normalizers.Strip(left=False, right=True),
        normalizers.Replace(Regex(" {2,}"), "▁"),
    ),
}
REFERENCES: dict[str, tuple[TokenizerSpec, ReferenceEngine, re.Pattern[bytes]]] = {}


def engine_of(family: str) -> tuple[TokenizerSpec, ReferenceEngine, re.Pattern[bytes]]:
    if family not in REFERENCES:
        spec = loaded(FAMILIES[family]()).spec
        pattern = cut_pattern(spec.encoder)
        assert pattern is not None, family
        REFERENCES[family] = spec, ReferenceEngine(spec), pattern
    return REFERENCES[family]


MARKS = ["\u0301", "\u0600", "\x0b", "\x0c", "½", "²", "'", "''", '"', "'s x", " 's", "1 2", "x ", "\n x", " \n", "_a"]
PARTS = [*FRAGMENTS, *MARKS]


@pytest.mark.parametrize("family", FAMILIES)
def test_pieces_joined_are_the_text_and_their_ids_the_text_s_ids(family: str, texts: list[bytes]):
    _, reference, pattern = engine_of(family)
    source = random.Random(11)
    glued = ["".join(source.choices(PARTS, k=source.randrange(1, 30))).encode() for _ in range(600)]
    everything = [b"", b" ", *glued, *random_texts(2, 200), *texts[:25]]
    assert all(b"".join(pattern.findall(text)) == text for text in everything)
    expected_ids, expected_offsets = reference.encode(everything)
    for slice_bytes in (pieces.SLICE_BYTES, 90):
        ids, offsets = PieceMemory(pattern, reference.encode, slice_bytes=slice_bytes).encode(everything)
        assert ids.dtype == np.uint32
        assert np.array_equal(offsets, expected_offsets)
        assert np.array_equal(ids, expected_ids)


@settings(max_examples=300)
@given(
    family=st.sampled_from(sorted(FAMILIES)),
    text=st.lists(st.one_of(st.sampled_from(PARTS), st.text(max_size=3)), max_size=20).map("".join),
)
def test_any_text(family: str, text: str):
    _, reference, pattern = engine_of(family)
    data = text.encode(errors="ignore")
    expected, _ = reference.encode([data])
    found, _ = PieceMemory(pattern, reference.encode, slice_bytes=40).encode([data])
    assert found.tolist() == expected.tolist()


@pytest.mark.parametrize(
    ("family", "engine"), [("StarCoder", RememberingEngine), ("BERT", RememberingEngine), ("unigram", UnigramEngine)]
)
def test_the_engine_that_remembers_is_chosen(family: str, engine: type[RememberingEngine]):
    spec, reference, _ = engine_of(family)
    tokenizer = Tokenizer(spec, origin=family)
    assert tokenizer.engine.build is engine
    assert "remembered" in tokenizer.engine.reason
    texts = [b"def f(x): return 12345", b"", b"the end"]
    assert tokenizer.encode(texts)[0].tolist() == reference.encode(texts)[0].tolist()


NO_RULE: dict[str, Callable[[], Reference]] = {
    "a kept token": lambda: byte_level(
        pre_tokenizer=sequence(pre_tokenizers.Digits(), GPT2), added=[AddedToken("FOO BAR", special=False)]
    ),
    "prefix space": lambda: byte_level(pre_tokenizer=sequence(pre_tokenizers.Digits(), pre_tokenizers.ByteLevel())),
    "no pattern": lambda: byte_level(pre_tokenizer=pre_tokenizers.ByteLevel(use_regex=False, add_prefix_space=False)),
    "another pattern first": lambda: byte_level(
        pre_tokenizer=sequence(pre_tokenizers.Split(Regex(r"\w+\s"), "isolated"), GPT2)
    ),
    "marks that join": lambda: byte_level(
        pre_tokenizer=sequence(pre_tokenizers.Punctuation("merged_with_previous"), GPT2)
    ),
    "words not split": lambda: trained_unigram(pre_tokenizers.Metaspace(split=False)),
    "a replacement with a space": lambda: trained_unigram(pre_tokenizers.Metaspace(), normalizers.Replace("a b", "c")),
    "stripped in front": lambda: trained_unigram(pre_tokenizers.Metaspace(), normalizers.Nmt(), normalizers.Strip()),
    "a second mark": lambda: trained_unigram(pre_tokenizers.Metaspace(), normalizers.Prepend("▁")),
}


@pytest.mark.parametrize("shape", NO_RULE)
def test_where_no_rule_holds_texts_are_encoded_whole(shape: str):
    content = json.loads(NO_RULE[shape]().to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["special"]]
    assert cut_pattern(content) is None


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch):
    _, reference, pattern = engine_of("StarCoder")
    monkeypatch.setattr(pieces, "MOST_PIECES", 50)
    memory = PieceMemory(pattern, reference.encode, slice_bytes=100)
    texts = random_texts(9, 300)
    assert memory.encode(texts)[0].tolist() == reference.encode(texts)[0].tolist()
    assert len(memory._numbers) <= 50 + 100
    monkeypatch.setattr(pieces, "MOST_BYTES", 10)
    assert memory.encode(texts)[0].tolist() == reference.encode(texts)[0].tolist()


@pytest.mark.parametrize("engine", [ReferenceEngine, RememberingEngine])
@pytest.mark.parametrize("used_before", [False, True])
@pytest.mark.parametrize("configured", [None, "true"])
def test_engines_work_in_forked_processes_without_threads(
    engine: Any,
    used_before: bool,
    configured: str | None,
    capfd: pytest.CaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    if configured:
        monkeypatch.setenv("TOKENIZERS_PARALLELISM", configured)
    spec, reference, _ = engine_of("StarCoder")
    texts = [b"some words 123 and more\n" * 50] * 40
    expected = reference.encode(texts)[0]
    built = engine(spec)
    if used_before:
        built.encode(texts)
    child = os.fork()
    if child == 0:  # no pytest in here: only the exit status comes back
        status = 3
        try:
            same = np.array_equal(built.encode(texts)[0], expected) and np.array_equal(
                engine(spec).encode(texts)[0], expected
            )
            status = 0 if same and len(os.listdir("/proc/self/task")) == 1 else 4
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert os.environ.get("TOKENIZERS_PARALLELISM") == configured
    captured = capfd.readouterr()
    assert "forked" not in captured.out + captured.err
