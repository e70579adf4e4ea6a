"""Every family of tokenizers gives, text for text, the ids that `tokenizers` gives with the same tokens dropped.

Here 10^5 texts in all; `make torture LANES=H` runs 10^6 per family and every code point, and writes its figures to
benchmarks/results/torture-H.json. The engine is asserted too: falling back would make the comparison empty.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import gigatoken
import numpy as np
import pytest

from penstock.tokenize import Tokenizer

from . import equality_cases as cases
from .conftest import ids_of
from .families import BUILT_HERE, FAMILIES, Oracle, built, published

TEXTS_PER_CALL = 1000
TORTURE_TEXTS = 10**6
FAMILY_NUMBER = {name: number for number, name in enumerate(FAMILIES)}
Texts = Iterable[bytes]


@pytest.fixture
def tokenizer(family: str, request: pytest.FixtureRequest) -> Tokenizer:
    """The family's tokenizer, run by the engine it should be run by."""
    file = FAMILIES[family].file
    found = published(request.getfixturevalue("shared_tokenizers") / file) if file else built(family)
    assert found.engine.name == FAMILIES[family].engine, found.engine.reason
    return found


every_family = pytest.mark.parametrize("family", FAMILIES)
built_family = pytest.mark.parametrize("family", BUILT_HERE)
# r50k is GPT-2's vocabulary once more: test_tokenize_equality.py compares the two, the torture run this one too.
published_family = pytest.mark.parametrize("family", ["GPT-2", "cl100k", "o200k"])


def differing_texts(tokenizer: Tokenizer, oracle: Oracle, texts: Sequence[bytes]) -> list[bytes]:
    ids, offsets = tokenizer.encode(texts)
    true_ids, true_offsets = oracle.encode(texts)
    if np.array_equal(offsets, true_offsets) and np.array_equal(ids, true_ids):
        return []
    borders = zip(itertools.pairwise(offsets), itertools.pairwise(true_offsets), strict=True)
    return [
        text
        for text, ((start, end), (true_start, true_end)) in zip(texts, borders, strict=True)
        if not np.array_equal(ids[start:end], true_ids[true_start:true_end])
    ]


def compare(tokenizer: Tokenizer, oracle: Oracle, texts: Texts) -> tuple[int, list[bytes]]:
    """How many texts there were, and those that got other ids; in calls of a thousand texts."""
    count, differing = 0, []
    for batch in batches(texts):
        differing += differing_texts(tokenizer, oracle, batch)
        count += len(batch)
    return count, differing


def assert_equal(tokenizer: Tokenizer, oracle: Oracle, texts: Texts) -> int:
    """How many texts there were."""
    count, differing = compare(tokenizer, oracle, texts)
    assert differing == []
    return count


def batches(texts: Texts) -> Iterator[list[bytes]]:
    iterator = iter(texts)
    while batch := list(itertools.islice(iterator, TEXTS_PER_CALL)):
        yield batch


def texts_of_all_kinds(tokenizer: Tokenizer, seed: int, count: int) -> Iterator[bytes]:
    """Half random, the rest from the corpus, the vocabulary's own tokens, and names of control and kept tokens."""
    for start in range(0, count, TEXTS_PER_CALL):
        size, place = min(TEXTS_PER_CALL, count - start), seed * 1_000_003 + start
        shares: list[tuple[float, Callable[[int, int], list[bytes]]]] = [
            (0.2, cases.corpus_texts),
            (0.15, lambda place, share: cases.merge_texts(tokenizer, place, share)),
            (0.1, lambda place, share: cases.control_texts(tokenizer, place, share)),
            (0.05, lambda place, share: cases.kept_token_texts(tokenizer, place, share)),
        ]
        texts = [text for part, make in shares for text in make(place, int(size * part))]
        yield from texts
        yield from cases.random_texts(place, size - len(texts))


def assert_a_sample_is_equal(family: str, tokenizer: Tokenizer) -> int:
    oracle, number = Oracle(tokenizer), FAMILY_NUMBER[family]
    count = assert_equal(tokenizer, oracle, texts_of_all_kinds(tokenizer, number, 4500))
    sample = cases.EVERY_CODE_POINT[number * 31 :: 503]  # another sample for each family
    count += assert_equal(tokenizer, oracle, map(cases.code_point_text, sample))
    units = cases.RUN_UNITS[number % 4 :: 4]
    return count + assert_equal(tokenizer, oracle, cases.runs([1, 2, 63, 64, 65, 257, 1025], units))


@built_family
def test_a_family_equals_the_reference(family: str, tokenizer: Tokenizer):
    assert assert_a_sample_is_equal(family, tokenizer) > 10**5 / 15


@built_family
def test_text_of_a_family_reaches_no_control(family: str, tokenizer: Tokenizer):
    count = 10_000 if tokenizer.engine.name == "gigatoken" else 1_000
    assert texts_with_controls(tokenizer, cases.control_texts(tokenizer, 11, count)) == []


@published_family
def test_a_published_vocabulary(family: str, tokenizer: Tokenizer, shared_tokenizers: Path, texts: list[bytes]):
    """All of it in one test, because loading the file is most of the cost."""
    assert assert_a_sample_is_equal(family, tokenizer) > 10**5 / 15
    assert texts_with_controls(tokenizer, cases.control_texts(tokenizer, 11, 10_000)) == []
    assert tokenizer.dtype == np.dtype("<u4" if tokenizer.vocab_size > 65_535 else "<u2")
    some = texts + cases.random_texts(31, 500)
    for text, ids in zip(some, ids_of(tokenizer, some), strict=True):
        assert tokenizer.decode(ids).encode() == text
    if (file := FAMILIES[family].file).endswith(".tiktoken"):
        # A second opinion on the conversion to a tokenizer.json: another program's own reader of rank files.
        splitter = file.partition("_")[0]
        peer = gigatoken.Tokenizer.from_tiktoken(shared_tokenizers / file, pretokenizer=splitter, special_tokens={})
        assert ids_of(tokenizer, texts) == peer.encode_batch(texts, parallel=False).to_list()


def texts_with_controls(tokenizer: Tokenizer, texts: Texts) -> list[bytes]:
    spec = tokenizer.spec
    controls = {*spec.control_tokens.values(), spec.end_id, *spec.begin_ids} - {spec.unknown_id}
    found = []
    for batch in batches(texts):
        ids, offsets = tokenizer.encode(batch)
        places = np.flatnonzero(np.isin(ids, list(controls)))
        found += [batch[holder] for holder in np.searchsorted(offsets, places, side="right") - 1]
    return found


@built_family
def test_a_batch_is_its_texts_one_by_one(family: str, tokenizer: Tokenizer):
    texts = list(texts_of_all_kinds(tokenizer, 21, 80))
    texts += [b"", b"", b"a", b"", "\U00010940".encode(), b"", "a\U00010940".encode(), b" ", b"\n", b""]
    alone = [ids_of(tokenizer, [text])[0] for text in texts]
    assert ids_of(tokenizer, texts) == alone
    assert ids_of(tokenizer, texts[::-1]) == alone[::-1]
    assert ids_of(tokenizer, [b""] * 3) == [[], [], []]
    for size in (2, 3, 7):
        parts = [ids_of(tokenizer, texts[start : start + size]) for start in range(0, len(texts), size)]
        assert [ids for part in parts for ids in part] == alone


def test_a_text_keeps_its_ids_whatever_stands_beside_it_in_a_large_batch():
    """Calls of 4 MiB, as `prepare` makes them, with texts right at their borders."""
    tokenizer = built("Llama-3")
    small = list(texts_of_all_kinds(tokenizer, 22, 1000))
    alone = ids_of(tokenizer, small)
    large = [("word and číslo 123 汉字\n" * 60_000).encode(), b"x" * (4 * 2**20 - 1), b"", b"y" * 2**20]
    large_alone = [ids_of(tokenizer, [text])[0] for text in large]
    for place in (0, 1, 500, 999, 1000):
        batch = small[:place] + large + small[place:]
        assert ids_of(tokenizer, batch) == alone[:place] + large_alone + alone[place:]


@pytest.mark.parametrize("family", ["Llama-3", "Llama-2", "StarCoder"])
def test_very_long_words_equal_the_reference(family: str, tokenizer: Tokenizer):
    assert_equal(tokenizer, Oracle(tokenizer), cases.runs([100_000], ["a", " ", "aA", "汉"]))


@pytest.mark.torture(lane="H")
@every_family
def test_a_million_texts_of_a_family_and_every_code_point(
    family: str, tokenizer: Tokenizer, torture_figures: Callable[..., None]
):
    oracle, number = Oracle(tokenizer), 1000 + FAMILY_NUMBER[family]
    points = cases.EVERY_CODE_POINT
    kinds: dict[str, Texts] = {
        "texts": texts_of_all_kinds(tokenizer, number, TORTURE_TEXTS),
        "code points alone": (chr(point).encode() for point in points),
        "code points beside others": map(cases.code_point_text, points),
        "long runs": cases.runs([1, 2, 63, 64, 65, 255, 256, 257, 1023, 4097, 100_000]),
    }
    compared = {kind: compare(tokenizer, oracle, texts) for kind, texts in kinds.items()}
    spelt = (text for seed in range(100) for text in cases.control_texts(tokenizer, seed, TORTURE_TEXTS // 100))
    with_controls = texts_with_controls(tokenizer, spelt)
    figures = {
        "engine": tokenizer.engine.name,
        **{kind: count for kind, (count, _) in compared.items()},
        "control names spelt": TORTURE_TEXTS,
    }
    failures = sum(len(differing) for _, differing in compared.values()) + len(with_controls)
    trials = sum(count for count, _ in compared.values()) + TORTURE_TEXTS
    torture_figures(lane="H", case=f"texts of {family}", trials=trials, failures=failures, **figures)
    assert {kind: differing[:5] for kind, (_, differing) in compared.items() if differing} == {}
    assert with_controls[:5] == []
