"""Texts on which engines may differ, for the equality suite: UTF-8, and the same for the same seed."""

from __future__ import annotations

import json
import random
import unicodedata
from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from pathlib import Path

from penstock.tokenize import Tokenizer
from penstock.tokenize import guard as guard_module

EVERY_CODE_POINT = [number for number in range(0x110000) if not 0xD800 <= number < 0xE000]
QUOTES = ["'", "’", "‘", "ʼ", "＇", "`", "´", '"', "\u0301"]
ENDINGS = [
    "s",
    "S",
    "t",
    "T",
    "re",
    "RE",
    "rE",
    "ve",
    "m",
    "ll",
    "LL",
    "lL",
    "d",
    "D",
    "ſ",
    "K",
    "ﬆ",
    "İ",
    "ı",
    "sx",
    "",
]
SPACES = [
    *" \t\n\r\x0b\x0c\x1c\x1d\x1e\x1f\x85\xa0\u1680\u2000\u2003\u2009\u200a\u2028\u2029\u202f\u205f\u3000",
    *["\r\n", "  ", "    ", "\n\n", " \n", "\n ", "\u200b", "\u200c", "\u2060", "\ufeff", "\u180e"],
]
EMOJI = [
    "🙂", "👩", "\u200d", "👧", "❤", "\ufe0f", "\ufe0e", "👍", "🏽", "🏿", "🏳", "🌈", "🇩", "🇪", "🇫", "1", "\u20e3", "#",
    "🏴\U000e0067\U000e0062\U000e007f", "☺", "©", "‼", "🫨", "🪿",
]  # fmt: skip
CODE = [
    "def ", "return", "self", "(", ")", "[", "]", "{", "}", "    ", "\t", "\n", "\n\n", "==", "->", "=>", "//", "/*",
    "*/", "#", "0x1F", "1_000", "3.14", "1e-9", "_", "__init__", "camelCase", "HTTPServer", "\\n", "'", '"', '"""', ";",
    ",", ".", "...", "::", "&&", "||", "!", "?", "@", "$", "%d", "<html>", "</s", "x", "i", "I'm", " ", "  ",
    ":\n        ",
]  # fmt: skip
CJK = [(0x4E00, 0x4E80), (0x9FA0, 0x9FFF), (0x3040, 0x30FF), (0xAC00, 0xAC40), (0x3000, 0x3020), (0xFF00, 0xFF20)]
RIGHT_TO_LEFT = [(0x591, 0x5F4), (0x600, 0x6FF), (0x8A0, 0x8FF), (0xFB1D, 0xFB4F)]
INDIC_AND_THAI = [(0x900, 0x97F), (0x9BC, 0x9FE), (0xC00, 0xC7F), (0xD00, 0xD7F), (0xE00, 0xEFF)]
COMBINING = [(0x300, 0x36F), (0x1AB0, 0x1AEB), (0x1DC0, 0x1DFF), (0x20D0, 0x20F0)]


@cache
def characters_by_category() -> dict[str, list[str]]:
    """All that Python knows, by general category; what it doesn't know is under Cn."""
    found: dict[str, list[str]] = {}
    for number in EVERY_CODE_POINT:
        found.setdefault(unicodedata.category(chr(number)), []).append(chr(number))
    return found


def _of(ranges: Sequence[tuple[int, int]]) -> list[str]:
    return [chr(number) for first, last in ranges for number in range(first, last + 1)]


@cache
def alphabets() -> dict[str, list[str]]:
    categories = characters_by_category()
    guarded = [*guard_module.LETTERS_AND_NUMBERS[:-1], *guard_module.MARKS, *guard_module.COMPOSING]
    return {
        "ASCII": [*_of([(0x20, 0x7E)]), "\n", "\t", " ", " ", "e", "t"],
        "code": CODE,
        "contractions": [*QUOTES, *ENDINGS, " ", "a", "Z", "\n", "1"],
        "CJK": [*_of(CJK), "\U00020000", "\u1100", "\u1161", "\u11a8", " ", "a", "1", "\n"],
        "right to left": [*_of(RIGHT_TO_LEFT), " ", "\u200f", "1", "\n"],
        "Indic and Thai": [*_of(INDIC_AND_THAI), " ", "\u200d"],
        "emoji": [*EMOJI, " ", "a", "\n"],
        "combining": [*_of(COMBINING), *"aeoAEO 1\nq한가"],
        "spaces": [*SPACES, "a", "A", "1", ".", "汉"],
        "digits": [*categories["Nd"], *categories["Nl"], *categories["No"], *"0123456789" * 20, " ", ".", ",", "a"],
        "control": [*categories["Cc"], *categories["Cf"], "a", " ", "1", "\n", "\0"],
        "guarded": [*_of(guarded), *"aA1 .\n", "é", "\u0334", "\u0345", "\u0316", "\u0301", "汉", "🙂"],
    }


def random_texts(seed: int, count: int) -> list[bytes]:
    """From every alphabet in turn, from all categories alike, and from all of them mixed."""
    source = random.Random(seed)
    letters, categories = list(alphabets().values()), list(characters_by_category().values())
    texts = []
    for number in range(count):
        kind, length = number % (len(letters) + 2), source.randrange(1, 20)
        if kind < len(letters):
            text = "".join(source.choices(letters[kind], k=length))
        elif kind == len(letters):
            text = "".join(source.choice(source.choice(categories)) for _ in range(length))
        else:
            text = "".join(source.choice(source.choice(letters)) for _ in range(length))
        texts.append(text.encode())
    return texts


def control_texts(tokenizer: Tokenizer, seed: int, count: int) -> list[bytes]:
    """Names of control tokens, this vocabulary's and others', whole, cut, doubled, in capitals, beside any text."""
    source = random.Random(seed)
    names = [
        *tokenizer.spec.control_tokens,
        "<|endoftext|>",
        "<s>",
        "</s>",
        "[INST]",
        "[SEP]",
        "<|im_start|>",
        "<0x41>",
    ]
    others = ["", " ", "  ", "\n", "a", "1", "é", "汉", "🙂", "<", ">", "|", "<|", "|>", "\u200b", "\0", "▁", "Ġ"]

    def near_miss(name: str) -> str:
        place = source.randrange(len(name) + 1)
        return source.choice(
            [name, name, name, name[:place], name[place:], name.upper(), name[:place] + " " + name[place:],
             name[:place] + "\u200b" + name[place:], name.replace("|", "｜"), name.replace("<", "＜"), name + name]
        )  # fmt: skip

    def text() -> str:
        return "".join(near_miss(source.choice(names)) + source.choice(others) for _ in range(source.randrange(1, 4)))

    return [(source.choice(others) + text()).encode() for _ in range(count)]


def kept_token_texts(tokenizer: Tokenizer, seed: int, count: int) -> list[bytes]:
    """Added tokens that text does reach, beside each other and anything else."""
    source = random.Random(seed)
    names = list(tokenizer.spec.kept_tokens) or ["  ", "    "]
    others = ["", " ", "\n", "a", "def f():", "\t", "\u00a0", "é", "\r\n", "1"]
    return [
        "".join(source.choice(names) + source.choice(others) for _ in range(source.randrange(1, 5))).encode()
        for _ in range(count)
    ]


@cache
def modules() -> list[str]:
    paths = sorted(Path(json.__file__).parent.parent.glob("*.py"))
    return [path.read_text(errors="ignore") for path in paths if path.stat().st_size > 1000]


def corpus_texts(seed: int, count: int, *, longest: int = 80) -> list[bytes]:
    """Python's own library, cut at places that no splitter would choose."""
    source = random.Random(seed)
    texts = []
    for _ in range(count):
        module = source.choice(modules())
        start = source.randrange(len(module))
        texts.append(module[start : start + source.randrange(1, longest)].encode())
    return texts


@lru_cache(maxsize=16)  # each holds its tokenizer, and some tests make thousands
def spelt_tokens(tokenizer: Tokenizer) -> list[str]:
    """The vocabulary as text, as far as it is text."""
    if tokenizer.spec.is_byte_level:
        tokens = [data.decode(errors="ignore") for data in tokenizer.spec.token_bytes]
    else:
        vocabulary = tokenizer.spec.encoder["model"]["vocab"]
        tokens = [(entry if isinstance(entry, str) else entry[0]).replace("▁", " ") for entry in vocabulary]
    return [token for token in tokens if token and token not in tokenizer.spec.control_tokens]


def merge_texts(tokenizer: Tokenizer, seed: int, count: int) -> list[bytes]:
    """Tokens of the vocabulary glued together, so that merges compete at every border."""
    source, tokens = random.Random(seed), spelt_tokens(tokenizer)
    return ["".join(source.choices(tokens, k=source.randrange(1, 6))).encode() for _ in range(count)]


def code_point_text(number: int) -> bytes:
    """One code point alone among spaces, between letters, after a digit, doubled, and at the end."""
    point = chr(number)
    return f"a{point} {point}a A{point}a 1{point} {point}{point}\n{point}".encode()


RUN_UNITS = [
    "a",
    " ",
    "\n",
    "ab",
    "é",
    "汉",
    "🙂",
    "1",
    "-",
    "\r\n",
    "\t \n",
    "<|endoftext|>",
    "aA",
    "'s",
    "\u0301",
    " a",
]


def runs(lengths: Sequence[int], units: Sequence[str] = RUN_UNITS) -> Iterator[bytes]:
    """One unit again and again, alone and with something else at the ends."""
    for unit in units:
        for length in lengths:
            run = unit * (length // len(unit) or 1)
            yield run.encode()
            yield f"x{run}".encode()
            yield f"{run} y".encode()
