"""Words segmented here get the ids that `tokenizers` gives them, ties and rounding included.

Random vocabularies over few characters, so that segmentations compete at every place: 10^5 words here, 10^6 in
`make torture LANES=H`.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Reference

from penstock.tokenize import Tokenizer, TokenizerSpec, unigram
from penstock.tokenize.cuts import cut_pattern
from penstock.tokenize.engines import ReferenceEngine, RememberingEngine, UnigramEngine
from penstock.tokenize.unigram import UnigramWords, unigram_words

from .conftest import END, random_texts

ALPHABETS = ["ab", "abc=", "ab_.(", "aA]", "xyz09-", "ab\n\t"]
COLLAPSE = normalizers.Replace(Regex(" {2,}"), " ")
NORMALIZERS: list[list[Any]] = [
    [],
    [normalizers.NFKC()],
    [normalizers.Nmt(), normalizers.NFKC(), COLLAPSE],
    [normalizers.Nmt(), normalizers.Strip(left=False, right=True), normalizers.Replace(Regex(" {2,}"), "▁")],
    [normalizers.Lowercase(), COLLAPSE],
    [normalizers.Replace("ab", "x"), normalizers.NFD(), normalizers.StripAccents()],
    [normalizers.Replace("aa", "b"), normalizers.Lowercase()],
]
BLANKS = ["", " ", "  ", "     ", "\n", "\n    ", "\t", "\r\n", " \n "]


def drawn_scores(source: random.Random, count: int) -> list[float]:
    """Few values, so that many paths tie; or one per length of piece; or any, as in real vocabularies."""
    kind = source.randrange(3)
    if kind == 0:
        return [source.choice([-1.0, -2.0, -3.5, 0.0]) for _ in range(count)]
    if kind == 1:
        return [-float(source.randrange(1, 8)) / 10 for _ in range(count)]  # tenths have no exact sum
    return [-source.random() * 12 for _ in range(count)]


def drawn(seed: int) -> Reference:
    source = random.Random(seed)
    letters = [*source.choice(ALPHABETS), "▁"]
    words = ["".join(source.choices(letters, k=source.randrange(1, 7))) for _ in range(source.randrange(5, 120))]
    known = [letter for letter in letters if source.random() < 0.95]
    pieces = [*dict.fromkeys([*known, *words])]
    if source.random() < 0.2:
        pieces.append(source.choice(pieces))  # twice in the list: the last one counts
    if source.random() < 0.3:
        pieces += [f"<0x{byte:02X}>" for byte in range(256)]
    vocabulary = [("<unk>", 0.0), (END, 0.0), *zip(pieces, drawn_scores(source, len(pieces)), strict=True)]
    tokenizer = Reference(models.Unigram(vocabulary, unk_id=0, byte_fallback=source.random() < 0.3))
    steps = source.choice(NORMALIZERS)
    if steps:
        tokenizer.normalizer = normalizers.Sequence(steps)
    scheme = source.choice(["always", "first", "never"])
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens([END])
    return tokenizer


def spec_of(tokenizer: Reference) -> TokenizerSpec:
    return TokenizerSpec.from_json(tokenizer.to_str().encode(), origin="built here")


def words_over(source: random.Random, letters: Sequence[str], count: int) -> list[bytes]:
    """Words with blanks before them, some with characters that no vocabulary here has, some too long."""
    words = []
    for _ in range(count):
        length = source.choice([1, 2, 3, 4, 5, 6, 8, 10, 13, 20, source.choice([30, 63, 64, 65, 80])])
        odd = source.choices(["", "%", "é", " ", "<unk>", "\x7f"], [40, 1, 1, 1, 1, 1])[0]
        blanks = source.choice(BLANKS) if source.random() < 0.99 else " " * 70
        words.append((blanks + "".join(source.choices(letters, k=length)) + odd).encode())
    return words


def assert_equal_words(seed: int, count: int) -> Counter[str]:
    spec = spec_of(drawn(seed))
    reference = ReferenceEngine(spec)
    asked: Counter[str] = Counter()

    def encode_others(texts: Sequence[bytes]) -> Any:
        asked["by tokenizers"] += len(texts)
        return reference.encode(texts)

    words = unigram_words(spec.encoder, reference.loaded_model(), encode_others)
    assert words is not None
    source = random.Random(seed)
    letters = [letter for letter in ALPHABETS[source.randrange(len(ALPHABETS))] + "ab" if letter not in "\n\t"]
    texts = words_over(source, letters, count)
    ids, offsets = words.encode(texts)
    true_ids, true_offsets = reference.encode(texts)
    assert np.array_equal(offsets, true_offsets), f"seed {seed}"
    assert np.array_equal(ids, true_ids), f"seed {seed}"
    asked["words"] += count
    return asked


@pytest.mark.parametrize(
    "seeds", [range(25), pytest.param(range(1000, 1250), marks=pytest.mark.torture(lane="H"))], ids=["few", "many"]
)
def test_random_vocabularies_give_the_ids_of_the_reference(seeds: range, torture_figures: Callable[..., None]):
    figures = sum((assert_equal_words(seed, 4000) for seed in seeds), Counter())
    torture_figures(lane="H", case="Unigram words", trials=figures["words"], failures=0, random=True)
    assert figures["by tokenizers"] < 0.8 * figures["words"], "a comparison of the reference with itself shows nothing"


def words_of(tokenizer: Reference) -> tuple[UnigramWords, ReferenceEngine]:
    spec = spec_of(tokenizer)
    reference = ReferenceEngine(spec)
    words = unigram_words(spec.encoder, reference.loaded_model(), reference.encode)
    assert words is not None
    return words, reference


@settings(max_examples=200)
@given(pieces=st.lists(st.text("ab(] \n\t▁é", max_size=20).map(str.encode), max_size=30), seed=st.integers(0, 15))
def test_any_pieces(pieces: list[bytes], seed: int):
    words, reference = words_of(drawn(seed))
    assert [part.tolist() for part in words.encode(pieces)] == [part.tolist() for part in reference.encode(pieces)]


def test_chunks_and_forgotten_blanks_change_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unigram, "WORDS_PER_CHUNK", 7)
    monkeypatch.setattr(unigram, "MOST_LEADS", 2)
    words, reference = words_of(drawn(3))
    texts = words_over(random.Random(5), "abc", 300)
    for _ in range(2):
        assert np.array_equal(words.encode(texts)[0], reference.encode(texts)[0])
    assert len(words._leads) <= 2


def test_scores_are_those_that_the_reference_read():
    """It reads decimals to within one unit in the last place, and with the nearest floats some ties fall otherwise."""
    source = random.Random(2)
    pieces = ["▁", *"abcdefghij", *(left + right for left, right in itertools.product("abcdefghij", repeat=2))]
    vocabulary = [("<unk>", 0.0), (END, 0.0), *((piece, -source.random() * 12) for piece in pieces)]
    tokenizer = Reference(models.Unigram(vocabulary, unk_id=0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    spec = spec_of(tokenizer)
    reference = ReferenceEngine(spec)
    texts = [letter.encode() * count for letter in "abcdefghij" for count in range(1, 60)]
    expected = reference.encode(texts)[0].tolist()
    found = []
    for model in (reference.loaded_model(), spec.encoder["model"]):
        words = unigram_words(spec.encoder, model, reference.encode)
        assert words is not None
        found.append(words.encode(texts)[0].tolist())
    assert found[0] == expected
    assert found[1] != expected, "the reference reads decimals exactly now: the model needn't be asked for"


def test_the_engine_is_chosen_and_says_so():
    tokenizer = Tokenizer(spec_of(drawn(1)), origin="drawn")
    assert tokenizer.engine.build is UnigramEngine
    assert "segmented" in tokenizer.engine.reason
    texts = random_texts(3, 200)
    assert np.array_equal(tokenizer.encode(texts)[0], ReferenceEngine(tokenizer.spec).encode(texts)[0])


def test_the_self_check_puts_it_aside_when_its_ids_differ(monkeypatch: pytest.MonkeyPatch):
    make = unigram._trie

    def with_other_scores(*arguments: Any) -> Any:
        trie = make(*arguments)
        return dataclasses.replace(trie, score=np.where(np.isfinite(trie.score), -np.arange(trie.score.size), -np.inf))

    monkeypatch.setattr(unigram, "_trie", with_other_scores)
    assert Tokenizer(spec_of(drawn(1)), origin="drawn").engine.build is RememberingEngine


def without_unknown(content: dict[str, Any]) -> None:
    content["model"]["unk_id"] = None


def with_another_model_key(content: dict[str, Any]) -> None:
    content["model"]["nbest_size"] = 4


def with_another_regex(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"Regex": "a+"}, "content": "b"}


def with_a_replaced_line_end(content: dict[str, Any]) -> None:
    content["normalizer"] = {"type": "Replace", "pattern": {"String": "a\n"}, "content": "b"}


CHANGES = [without_unknown, with_another_model_key, with_another_regex, with_a_replaced_line_end]


@pytest.mark.parametrize("change", CHANGES)
def test_what_is_not_understood_is_left_to_the_reference(change: Callable[[dict[str, Any]], None]):
    content = json.loads(drawn(1).to_str())
    change(content)
    assert unigram_words(content, content["model"], lambda _texts: pytest.fail("asked")) is None


def test_a_vocabulary_that_needs_too_large_a_table_is_left_to_the_reference(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(unigram, "MOST_TABLE_ENTRIES", 128)
    spec = spec_of(drawn(1))
    assert cut_pattern(spec.encoder) is not None
    assert Tokenizer(spec, origin="drawn").engine.build is RememberingEngine
