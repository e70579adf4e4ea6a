"""The characters that the engines know differently: all found, nothing else held back, and encoded by the reference."""

from __future__ import annotations

import json
import random
import unicodedata
from importlib.metadata import version

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.tokenize import Tokenizer
from penstock.tokenize import guard as guard_module
from penstock.tokenize.guard import BLOCK_BYTES, CHECKED_VERSIONS, Guard, guarded_ranges

from .conftest import FRAGMENTS, byte_level, ids_of, loaded, reference_ids
from .witness import CONTEXTS, SPLITTERS, Witness, contexts_of

INSTALLED = {name: version(name) for name in CHECKED_VERSIONS}
EVERY_CODE_POINT = [number for number in range(0x110000) if not 0xD800 <= number < 0xE000]
TABLES = {
    name: getattr(guard_module, name)
    for name in ("LETTERS_AND_NUMBERS", "MARKS", "PUNCTUATION_AND_SYMBOLS", "COMPOSING")
}


def members(ranges: list[tuple[int, int]]) -> set[int]:
    return {number for first, last in ranges for number in range(first, last + 1)}


def differing_code_points(witness: Witness, numbers: list[int], contexts: list[str]) -> set[int]:
    found: set[int] = set()
    for context in contexts:
        for start in range(0, len(numbers), 20_000):
            part = numbers[start : start + 20_000]
            found |= {part[place] for place in witness.differing([context.format(chr(number)) for number in part])}
    return found


def near_the_tables() -> list[int]:
    """All that the tables hold, what lies beside it, and a sample of the rest."""
    held = set().union(*map(members, TABLES.values()))
    beside = {number + step for number in held for step in (-2, -1, 1, 2)}
    long_ranges = set(range(0x323C0, 0x33470))  # one letter like the other; the ends stay
    return sorted((held | beside | set(EVERY_CODE_POINT[::997])) - long_ranges)


@pytest.mark.parametrize("splitter", SPLITTERS)
def test_the_tables_hold_what_the_engines_know_differently(splitter: str):
    """A new version of either engine shows here: recompute the tables from what is printed."""
    witness = Witness(splitter)
    numbers = near_the_tables()
    differing = differing_code_points(witness, numbers, contexts_of(splitter))
    guarded = members(guarded_ranges(witness.spec, INSTALLED)) & set(numbers)
    assert sorted(map(hex, differing - guarded)) == [], "the engines differ on these; the guard lets them through"
    # Halves of what normal form C composes differ only beside the other half.
    needless = guarded - differing - (members(guard_module.COMPOSING) if "normal form" in splitter else set())
    assert sorted(map(hex, needless)) == [], "the engines agree on these; the guard need not hold them back"


@pytest.mark.torture(lane="H")
@pytest.mark.parametrize("splitter", SPLITTERS)
def test_no_other_code_point_is_known_differently(splitter: str):
    witness = Witness(splitter)
    differing = differing_code_points(witness, EVERY_CODE_POINT, contexts_of(splitter))
    assert sorted(map(hex, differing - members(guarded_ranges(witness.spec, INSTALLED)))) == []


def test_the_tables_were_made_for_the_versions_in_use():
    found = {name: ".".join(number.split(".")[:2]) for name, number in INSTALLED.items()}
    assert found == CHECKED_VERSIONS, "run this file's torture test, correct the tables, then name the new versions"


COMPOSED_SINCE_UNICODE_9 = [
    "\U00011935\U00011930", "\U00011382\U000113c9", "\U00011384\U000113bb", "\U0001138b\U000113c2",
    "\U000113c2\U000113b8", "\U000113c2\U000113c5", "\U0001611e\U0001611f", "\U00016121\U00016120",
    "\U00016d63\U00016d67", "\U00016d69\U00016d68",
]  # fmt: skip


def test_pairs_that_only_one_engine_composes_are_held_back():
    witness = Witness("Qwen2, normal form C")
    assert len(witness.differing(COMPOSED_SINCE_UNICODE_9)) == len(COMPOSED_SINCE_UNICODE_9)
    guard = Guard.for_tokenizer(witness.spec, INSTALLED)
    texts = [pair.encode() for pair in COMPOSED_SINCE_UNICODE_9]
    assert guard.guarded(texts) == list(range(len(texts)))


@pytest.mark.parametrize("tables", [["LETTERS_AND_NUMBERS"], list(TABLES)])
def test_every_guarded_character_is_found_and_no_other(tables: list[str]):
    ranges = guard_module._merged(each for name in tables for each in TABLES[name])
    found = Guard(ranges).guarded([chr(number).encode() for number in EVERY_CODE_POINT])
    assert {EVERY_CODE_POINT[place] for place in found} == members(ranges)


RARE = "\U00010940"


@pytest.mark.parametrize("around", ["a", "é", "汉", "🙂", "\U00010900", "\U0001093f\U0001095a"])
def test_one_character_is_found_wherever_it_stands(around: str):
    guard = Guard(guard_module.LETTERS_AND_NUMBERS)
    width = len(around.encode())
    for before in (0, 1, BLOCK_BYTES // width - 2, BLOCK_BYTES // width - 1, BLOCK_BYTES // width, 2 * BLOCK_BYTES):
        for shift in range(4):
            text = ("a" * shift + around * before + RARE).encode()
            assert guard.guarded([text, text + around.encode()]) == [0, 1]
            assert guard.guarded([b"", around.encode(), text, b"", around.encode() * 3]) == [2]
            assert guard.guarded([text[: -len(RARE.encode())]]) == []


@settings(max_examples=300)
@given(st.lists(st.text(st.characters(codec="utf-8") | st.sampled_from([RARE, "\u088f", "\ua7d2", "é"])), max_size=6))
def test_the_guard_finds_what_a_look_at_each_character_finds(batch: list[str]):
    ranges = guard_module._merged(each for table in TABLES.values() for each in table)
    held = members(ranges)
    expected = [place for place, text in enumerate(batch) if any(ord(character) in held for character in text)]
    assert Guard(ranges).guarded([text.encode() for text in batch]) == expected


def test_a_character_cut_in_half_at_the_end_of_a_text_breaks_nothing():
    guard = Guard(guard_module.LETTERS_AND_NUMBERS)
    data = f"é{RARE}".encode()
    for length in range(len(data) + 1):
        assert guard.guarded([data[:length]]) in ([], [0])


def merging_tokenizer() -> Tokenizer:
    """Its ids tell whether `a`, `1` and a space were split from what follows."""
    leads = sorted({chr(number).encode()[0] for number in members(guard_module.LETTERS_AND_NUMBERS)})
    from penstock.tokenize.specification import character_of_byte

    return loaded(byte_level([(character_of_byte[left], character_of_byte[lead]) for left in b"a1 " for lead in leads]))


MERGING = merging_tokenizer()


def test_guarded_texts_get_the_ids_of_the_reference_among_others_that_need_none():
    tokenizer = merging_tokenizer()
    assert tokenizer.engine.name == "gigatoken"
    assert f"{len(members(guard_module.LETTERS_AND_NUMBERS)):,} characters" in tokenizer.engine.reason
    source = random.Random(3)
    held = [chr(number) for number in sorted(members(guard_module.LETTERS_AND_NUMBERS))]
    plain = ["", "a", " a1 ", "汉字", "🙂 a🙂", "x" * 50]
    for size in (1, 2, 7, 300):
        texts = [
            context.format(source.choice(held)) if source.random() < 0.3 else source.choice(plain)
            for context in source.choices(CONTEXTS, k=size)
        ]
        batch = [text.encode() for text in texts]
        assert ids_of(tokenizer, batch) == reference_ids(tokenizer)(batch)


@given(st.lists(st.sampled_from([*FRAGMENTS, "\u088f", "\U00010940", "\U0001f6d8", "word ", "x = 1\n"]), max_size=60))
def test_a_guarded_text_is_cut_around_what_is_guarded(fragments: list[str]):
    tokenizer = MERGING
    text = "".join(fragments).encode()
    assert ids_of(tokenizer, [text, b"between", text]) == reference_ids(tokenizer)([text, b"between", text])


def test_of_a_long_guarded_text_the_reference_gets_little():
    tokenizer = merging_tokenizer()
    engine = tokenizer._thread_engine()
    asked: list[bytes] = []
    whole = engine._reference.encode  # type: ignore[attr-defined]
    engine._reference.encode = lambda texts: asked.extend(texts) or whole(texts)  # type: ignore[attr-defined]
    text = b"def function(argument):\n    return 1\n" * 500
    text = text + "name = a\u088f1\n".encode() + text
    assert ids_of(tokenizer, [text]) == reference_ids(tokenizer)([text])
    assert 0 < sum(map(len, asked)) < 100


def test_without_the_guard_those_texts_differ():
    """The reason why it is there; when this fails, both engines have the same tables and the guard can go."""
    tokenizer = merging_tokenizer()
    texts = [f"a{chr(number)}".encode() for number in members(guard_module.LETTERS_AND_NUMBERS)][:200]
    engine = tokenizer._thread_engine()
    engine._guard = Guard([])  # type: ignore[attr-defined]
    assert ids_of(tokenizer, texts) != reference_ids(tokenizer)(texts)


def test_what_a_tokenizer_does_not_ask_about_is_not_held_back():
    letters = members(guard_module.LETTERS_AND_NUMBERS)
    assert members(guarded_ranges(Witness("GPT-2").spec, INSTALLED)) == letters
    assert members(guarded_ranges(Witness("o200k").spec, INSTALLED)) == letters | members(guard_module.MARKS)
    normal_form = members(guarded_ranges(Witness("Qwen2, normal form C").spec, INSTALLED))
    assert normal_form == letters | members(guard_module.COMPOSING)


def test_with_versions_that_nobody_compared_whatever_is_unassigned_is_held_back():
    unassigned = {number for number in EVERY_CODE_POINT if unicodedata.category(chr(number)) == "Cn"}
    noncharacters = {number for number in EVERY_CODE_POINT if number & 0xFFFE == 0xFFFE} | {*range(0xFDD0, 0xFDF0)}
    expected = (unassigned - noncharacters) | members(guard_module.LETTERS_AND_NUMBERS)
    spec = Witness("GPT-2").spec
    for versions in ({}, {**INSTALLED, "gigatoken": "0.11.0"}, {**INSTALLED, "tokenizers": None}):
        assert members(guarded_ranges(spec, versions)) == expected
    guard = Guard.for_tokenizer(spec, {})
    assert guard.guarded(["\u0378".encode(), b"a", "\u037a é 汉 🙂 \uffff".encode()]) == [0]


def test_the_guard_of_a_vocabulary_without_character_classes_is_empty():
    content = json.loads(byte_level().to_str())
    content["pre_tokenizer"] = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first", "split": False}
    content["normalizer"] = None
    from penstock.tokenize import TokenizerSpec

    spec = TokenizerSpec.from_json(json.dumps(content).encode(), origin="test")
    assert guarded_ranges(spec, INSTALLED) == []
    assert Guard([]).guarded([RARE.encode()]) == []
