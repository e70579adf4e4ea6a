"""Ids equal those of `tokenizers` with the same tokens dropped, text comes back from ids, and controls stay text.

Here for the vocabulary that is trained by default; test_equality_families.py does it for every family.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenize import Tokenizer, load_tokenizer

from .conftest import ids_of, random_texts, reference_ids

# Ordinary text with, now and then, the very strings that must not become controls.
any_text = st.one_of(
    st.text(max_size=80),
    st.lists(st.sampled_from(["<|endoftext|>", "<|", "|>", "endoftext", " ", "\n", "é", "🙂", "\0"]), max_size=12).map(
        "".join
    ),
)


def control_spellings(tokenizer: Tokenizer) -> list[bytes]:
    names = list(tokenizer.spec.control_tokens)
    assert names, "a tokenizer has at least its end token"
    forms = ["{0}", " {0}", "{0} ", "x{0}x", "{0}{0}", "\n{0}\n", "<{0}>", "{0}1", "é{0}"]
    return [form.format(name).encode() for name in names for form in forms]


def assert_equal_to_the_reference(tokenizer: Tokenizer, texts: list[bytes]) -> None:
    ours, theirs = ids_of(tokenizer, texts), reference_ids(tokenizer)(texts)
    differing = [text for text, mine, other in zip(texts, ours, theirs, strict=True) if mine != other]
    assert differing == []


def assert_text_never_reaches_a_control(tokenizer: Tokenizer, texts: list[bytes]) -> None:
    ids, _ = tokenizer.encode(texts)
    controls = {*tokenizer.spec.control_tokens.values(), tokenizer.end_id, *tokenizer.spec.begin_ids}
    assert not controls & set(ids.tolist())


@settings(deadline=None)
@given(any_text)
def test_text_comes_back_from_its_ids(tokenizer: Tokenizer, text: str):
    ids, offsets = tokenizer.encode([text.encode()])
    assert offsets.tolist() == [0, ids.size]
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_byte_lengths()[ids].sum() == len(text.encode())


@settings(max_examples=60, deadline=None)
@given(st.lists(any_text, max_size=8))
def test_a_batch_is_its_texts_one_by_one(tokenizer: Tokenizer, batch: list[str]):
    texts = [text.encode() for text in batch]
    assert ids_of(tokenizer, texts) == [ids_of(tokenizer, [text])[0] for text in texts]


def test_the_trained_vocabulary_equals_the_reference(tokenizer: Tokenizer, texts: list[bytes]):
    assert tokenizer.engine.name == "gigatoken"
    cases = texts + random_texts(1, 6000) + control_spellings(tokenizer)
    assert_equal_to_the_reference(tokenizer, cases)
    assert_text_never_reaches_a_control(tokenizer, cases)


def test_every_code_point_equals_the_reference(tokenizer: Tokenizer):
    """Alone, and between letters and digits, where it decides how text is split. Unassigned ones included."""
    points = [chr(number) for number in range(0x110000) if not 0xD800 <= number < 0xE000]
    blocks = ["".join(f"a{point}1 {point}" for point in points[start : start + 64]) for start in range(0, 0x3400, 64)]
    blocks += ["".join(points[start : start + 512]) for start in range(0x3400, len(points), 512)][::8]
    assert_equal_to_the_reference(tokenizer, [block.encode() for block in blocks])


@pytest.mark.parametrize("unit", ["a", " ", "\n", "ab", "é", "🙂", "1", "-", "\r\n", "<|endoftext|>", "\t \n"])
def test_long_runs_equal_the_reference(tokenizer: Tokenizer, unit: str):
    lengths = [1, 2, 63, 64, 65, 255, 256, 257, 1023, 4097]
    assert_equal_to_the_reference(tokenizer, [(unit * length).encode() for length in lengths])


def test_the_rank_file_of_gpt2_gives_the_ids_of_its_tokenizer_json(shared_tokenizers: Path, texts: list[bytes]):
    ranks = load_tokenizer(str(shared_tokenizers / "r50k_base.tiktoken"))
    published = load_tokenizer(str(shared_tokenizers / "gpt2.tokenizer.json"))
    cases = texts + random_texts(3, 4000) + control_spellings(published)
    assert ids_of(ranks, cases) == ids_of(published, cases)
    assert (ranks.end_id, ranks.vocab_size, ranks.dtype) == (published.end_id, published.vocab_size, published.dtype)
    assert ranks.end_id == 50256
    assert ids_of(published, [b"Hello world"]) == [[15496, 995]]


@pytest.mark.parametrize("engine", ["gigatoken", "tokenizers"])
def test_threads_that_encode_at_once_get_what_one_gets(tokenizer_file: Path, texts: list[bytes], engine: str):
    tokenizer = load_tokenizer(str(tokenizer_file))
    if engine == "tokenizers":
        from penstock.tokenize.engines import EngineChoice, ReferenceEngine

        choice = EngineChoice(name=engine, reason="asked for", build=ReferenceEngine)
        tokenizer = Tokenizer(tokenizer.spec, origin="test", engine=choice)
        texts = texts[:60]
    cases = texts + random_texts(4, 500)
    alone = reference_ids(tokenizer)(cases)
    results: dict[int, list[list[int]]] = {}
    together = threading.Barrier(4)

    def work(number: int) -> None:
        together.wait()
        results[number] = ids_of(tokenizer, cases)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tokenizer.engine.name == engine
    assert [results.get(number) == alone for number in range(4)] == [True] * 4
