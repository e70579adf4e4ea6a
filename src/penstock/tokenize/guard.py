"""Which texts and tokenizers gigatoken may not have: those that it is known to encode otherwise than `tokenizers`.

In: a batch of UTF-8 texts. Out: the positions of the texts that only the reference may encode; almost always none.

Both engines split text by character category and some put it into normal form C, but from different editions of
Unicode: gigatoken 17 for both, `tokenizers` 16 for categories and 9 for normal form C. A character that only one of
them knows is a letter here and a symbol there, so the text around it is cut differently. The tables below hold every
such character, found by asking both engines about all 1,112,064 code points; tests/tokenize/test_tokenize_guard.py asks
again. With other versions of the engines than those asked, whatever Python's own tables leave unassigned counts too.

`reason_against_gigatoken` names what gigatoken loads without a word but reads otherwise than `tokenizers`; found by
encoding with thousands of random tokenizers (tests/tokenize/test_random_tokenizers.py).

ASCII is passed by `bytes.isascii`. Other texts are looked through a block at a time for the few first bytes that such
characters begin with, then for their second bytes, then for the characters themselves: 5-10 GB/s on Russian, Chinese
and Japanese, 1.5-3 on Korean, Hindi and text full of emoji. Memory: one copy of a batch's texts that aren't ASCII, and
the masks of one block.
"""

from __future__ import annotations

import json
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from functools import cache, reduce
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.tokenize.specification import TokenizerSpec

__all__ = ["CHECKED_VERSIONS", "Guard", "guarded_ranges", "reason_against_gigatoken"]

Ranges = list[tuple[int, int]]
"""First and last code point of each range."""

CHECKED_VERSIONS = {"gigatoken": "0.10", "tokenizers": "0.23"}
"""The versions whose tables were compared."""

LETTERS_AND_NUMBERS: Ranges = [
    (0x88F, 0x88F), (0xC5C, 0xC5C), (0xCDC, 0xCDC), (0xA7CE, 0xA7CF), (0xA7D2, 0xA7D2), (0xA7D4, 0xA7D4),
    (0xA7F1, 0xA7F1), (0x10940, 0x10959), (0x10EC5, 0x10EC7), (0x11DB0, 0x11DDB), (0x11DE0, 0x11DE9),
    (0x16EA0, 0x16EB8), (0x16EBB, 0x16ED3), (0x16FF2, 0x16FF6), (0x187F8, 0x187FF), (0x18D09, 0x18D1E),
    (0x18D80, 0x18DF2), (0x1E6C0, 0x1E6DE), (0x1E6E0, 0x1E6E2), (0x1E6E4, 0x1E6E5), (0x1E6E7, 0x1E6ED),
    (0x1E6F0, 0x1E6F4), (0x1E6FE, 0x1E6FF), (0x2B73A, 0x2B73F), (0x2CEA2, 0x2CEAD), (0x323B0, 0x33479),
]  # fmt: skip
MARKS: Ranges = [
    (0x1ACF, 0x1ADD), (0x1AE0, 0x1AEB), (0x10EFA, 0x10EFB), (0x11B60, 0x11B67), (0x1E6E3, 0x1E6E3), (0x1E6E6, 0x1E6E6),
    (0x1E6EE, 0x1E6EF), (0x1E6F5, 0x1E6F5),
]  # fmt: skip
PUNCTUATION_AND_SYMBOLS: Ranges = [
    (0x20C1, 0x20C1), (0x2B96, 0x2B96), (0xFBC3, 0xFBD2), (0xFD90, 0xFD91), (0xFDC8, 0xFDCE), (0x10ED0, 0x10ED8),
    (0x1CCFA, 0x1CCFC), (0x1CEBA, 0x1CED0), (0x1CEE0, 0x1CEF0), (0x1F6D8, 0x1F6D8), (0x1F777, 0x1F77A),
    (0x1F8D0, 0x1F8D8), (0x1FA54, 0x1FA57), (0x1FA8A, 0x1FA8A), (0x1FA8E, 0x1FA8E), (0x1FAC8, 0x1FAC8),
    (0x1FACD, 0x1FACD), (0x1FAEA, 0x1FAEA), (0x1FAEF, 0x1FAEF), (0x1FBFA, 0x1FBFA),
]  # fmt: skip
# Marks that normal form C moves, and second halves of what it composes, since Unicode 9.
COMPOSING: Ranges = [
    (0x7FD, 0x7FD), (0x897, 0x89F), (0x8CA, 0x8D3), (0x9FE, 0x9FE), (0xC3C, 0xC3C), (0xD3B, 0xD3C), (0xEBA, 0xEBA),
    (0x1715, 0x1715), (0x1ABF, 0x1ADD), (0x1AE0, 0x1AEB), (0x1DF6, 0x1DFA), (0xA82C, 0xA82C), (0x10D24, 0x10D27),
    (0x10D69, 0x10D6D), (0x10EAB, 0x10EAC), (0x10EFA, 0x10EFB), (0x10EFD, 0x10EFF), (0x10F46, 0x10F50),
    (0x10F82, 0x10F85), (0x11070, 0x11070), (0x1133B, 0x1133B), (0x113B8, 0x113B8), (0x113BB, 0x113BB),
    (0x113C2, 0x113C2), (0x113C5, 0x113C5), (0x113C7, 0x113C9), (0x113CE, 0x113D0), (0x1145E, 0x1145E),
    (0x11839, 0x1183A), (0x11930, 0x11930), (0x1193D, 0x1193E), (0x11943, 0x11943), (0x119E0, 0x119E0),
    (0x11A34, 0x11A34), (0x11A47, 0x11A47), (0x11A99, 0x11A99), (0x11D42, 0x11D42), (0x11D44, 0x11D45),
    (0x11D97, 0x11D97), (0x11F41, 0x11F42), (0x1611E, 0x16129), (0x1612F, 0x1612F), (0x16D67, 0x16D68),
    (0x16FF0, 0x16FF1), (0x1E08F, 0x1E08F), (0x1E130, 0x1E136), (0x1E2AE, 0x1E2AE), (0x1E2EC, 0x1E2EF),
    (0x1E4EC, 0x1E4EF), (0x1E5EE, 0x1E5EF), (0x1E6E3, 0x1E6E3), (0x1E6E6, 0x1E6E6), (0x1E6EE, 0x1E6EF),
    (0x1E6F5, 0x1E6F5),
]  # fmt: skip

# The masks of a block this size stay in a core's own cache.
BLOCK_BYTES = 128 * 2**10
LONGEST_CHARACTER = 4
EMOJI = "\U0001f600".encode()[:2]


class Guard:
    """Finds the texts that hold a character of some ranges, none of them ASCII."""

    def __init__(self, ranges: Ranges) -> None:
        self._firsts = np.array([first for first, _ in ranges], np.int64)
        self._lasts = np.array([last for _, last in ranges], np.int64)
        self._leads = [(lead, bytes([lead]), seconds) for lead, seconds in sorted(_beginnings(ranges).items())]

    @classmethod
    def for_tokenizer(cls, spec: TokenizerSpec, versions: dict[str, str | None]) -> Guard:
        """The guard that a tokenizer needs with these versions of the engines."""
        return cls(guarded_ranges(spec, versions))

    @property
    def num_characters(self) -> int:
        """How many characters it looks for."""
        return int((self._lasts - self._firsts + 1).sum())

    def guarded(self, texts: Sequence[bytes]) -> list[int]:
        """Positions of the texts that hold such a character, in order."""
        if not self._leads:
            return []
        others = [number for number, text in enumerate(texts) if not text.isascii()]
        if not others:
            return []
        joined = b"".join([texts[number] for number in others])  # one text alone isn't copied
        places = self._places(joined)
        if not places.size:
            return []
        ends = np.cumsum([len(texts[number]) for number in others])
        return [others[holder] for holder in np.unique(np.searchsorted(ends, places, side="right")).tolist()]

    def _places(self, joined: bytes) -> npt.NDArray[np.int64]:
        """Where such characters begin."""
        data = np.frombuffer(joined, np.uint8)
        found = [np.empty(0, np.int64)]
        for start in range(0, len(joined), BLOCK_BYTES):
            end = min(start + BLOCK_BYTES, len(joined) - 1)  # no such character is the last byte of a text
            for lead, byte, seconds in self._leads:
                first = joined.find(byte, start, end)  # `memchr`, far faster than a mask
                if first < 0:
                    continue
                places = first + _pairs(data[first : end + 1], lead, seconds)
                if places.size:
                    found.append(places[self._holds(_code_points(data, places))])
        return np.concatenate(found)

    def _holds(self, code_points: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        number = np.searchsorted(self._firsts, code_points, side="right") - 1
        return (number >= 0) & (code_points <= self._lasts[number])


def _beginnings(ranges: Ranges) -> dict[int, Ranges]:
    """First byte -> ranges of the second bytes that may follow it, in UTF-8."""
    pairs: dict[int, set[int]] = {}
    for first, last in ranges:
        # All characters of one 64 share every byte but the last; of the shortest, the second is the last.
        for number in {first, last, *range(first | 63, last, 64)} if first > 0x7FF else range(first, last + 1):
            lead, second = chr(number).encode()[:2]
            pairs.setdefault(lead, set()).add(second)
    return {lead: _merged((second, second) for second in seconds) for lead, seconds in pairs.items()}


def _pairs(data: npt.NDArray[np.uint8], lead: int, seconds: Ranges) -> npt.NDArray[np.int64]:
    """Where `lead` stands before a byte of these ranges; whole-block operations, since either may be everywhere."""
    mask, following = data[:-1] == lead, data[1:]
    if lead == EMOJI[0] and not any(low <= EMOJI[1] <= high for low, high in seconds):
        mask &= following != EMOJI[1]  # nearly all there is under this lead
        if not mask.any():
            return np.empty(0, np.int64)
    mask &= reduce(np.logical_or, (_between(following, low, high) for low, high in seconds))
    return np.flatnonzero(mask) if mask.any() else np.empty(0, np.int64)


def _between(data: npt.NDArray[np.uint8], low: int, high: int) -> npt.NDArray[np.bool_]:
    return data == low if low == high else data - np.uint8(low) <= high - low  # one that is lower wraps around


def _code_points(data: npt.NDArray[np.uint8], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The characters that begin at these places of UTF-8 text."""
    inside = np.minimum(places[:, None] + np.arange(LONGEST_CHARACTER), data.size - 1)
    first, second, third, fourth = data[inside].T.astype(np.int64) & np.array([[0xFF], [0x3F], [0x3F], [0x3F]])
    two = (first & 0x1F) << 6 | second
    three = (first & 0x0F) << 12 | second << 6 | third
    four = (first & 0x07) << 18 | second << 12 | third << 6 | fourth
    found: npt.NDArray[np.int64] = np.where(first < 0xE0, two, np.where(first < 0xF0, three, four))
    return found


def guarded_ranges(spec: TokenizerSpec, versions: dict[str, str | None]) -> Ranges:
    """The characters on which the engines may differ for this tokenizer."""
    splitter, normalizer = spec.encoder.get("pre_tokenizer"), spec.encoder.get("normalizer")
    written = json.dumps(splitter)
    ranges: Ranges = []
    if spec.is_byte_level or "\\p{" in written:
        ranges += LETTERS_AND_NUMBERS
        ranges += MARKS if "p{M}" in written else []
        ranges += PUNCTUATION_AND_SYMBOLS if "p{P}" in written or "p{S}" in written else []
    if normalizer is not None and "NF" in json.dumps(normalizer):
        ranges += COMPOSING
    if ranges and not _were_checked(versions):
        ranges += _unassigned_here()
    return _merged(ranges)


def reason_against_gigatoken(spec: TokenizerSpec) -> str | None:
    """What of this tokenizer gigatoken reads otherwise than `tokenizers`; the self-check's texts may not show it."""
    flags = ("lstrip", "rstrip", "single_word")
    if any(token.get(flag) for token in spec.encoder["added_tokens"] for flag in flags):
        return "gigatoken takes added tokens that strip spaces or stand for whole words otherwise"
    if _compete(spec):
        return "gigatoken looks for all added tokens at once, this tokenizer for the normalized ones last"
    model = spec.encoder["model"]
    if model.get("byte_fallback"):
        if model.get("ignore_merges"):
            return "gigatoken ignores ignore_merges beside byte_fallback"
        if any(step.get("type") not in ("Prepend", "Replace") for step in spec.normalizer_steps):
            return "gigatoken may apply this normalizer in another order"
        return None
    *splits, last = spec.pre_tokenizer_steps or [{}]
    if last.get("type") != "ByteLevel" or not all(map(_cuts_around_matches, splits)):
        return "gigatoken knows only patterns that cut around their matches, then bytes"
    if bool(splits) == last.get("use_regex", True):
        patterns = "a second pattern" if splits else "no pattern"
        return f"gigatoken splits by one pattern, whatever ByteLevel.use_regex says; this tokenizer has {patterns}"
    if last.get("add_prefix_space") and spec.kept_tokens:
        return "gigatoken may put a space between added tokens and text where this tokenizer doesn't"
    return None


def _compete(spec: TokenizerSpec) -> bool:
    """Whether an added token that is found in raw text can stand where a normalized one would be found."""
    kinds: dict[bool, list[str]] = {True: [], False: []}
    for token in spec.encoder["added_tokens"]:
        kinds[bool(token.get("normalized"))].append(token["content"])
    if spec.normalizer_steps and all(kinds.values()):
        return True  # which characters a normalized one matches isn't asked here
    return any(_overlap(raw, late) or _overlap(late, raw) for raw in kinds[False] for late in kinds[True])


def _overlap(left: str, right: str) -> bool:
    """Whether some text holds both with `left` not after `right`, sharing a character."""
    return any(right.startswith(left[start:]) or left.startswith(right, start) for start in range(len(left)))


def _cuts_around_matches(step: dict[str, Any]) -> bool:
    return step.get("type") == "Split" and step.get("behavior") == "Isolated" and not step.get("invert")


def _were_checked(versions: dict[str, str | None]) -> bool:
    return all((versions.get(name) or "").startswith(f"{version}.") for name, version in CHECKED_VERSIONS.items())


@cache
def _unassigned_here() -> Ranges:
    """What Python's tables leave open, but for the noncharacters, which stay so for ever."""
    numbers = (number for number in range(0x80, sys.maxunicode + 1) if number & 0xFFFE != 0xFFFE)
    return _merged(
        (number, number)
        for number in numbers
        if unicodedata.category(chr(number)) == "Cn" and not 0xFDD0 <= number <= 0xFDEF
    )


def _merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    merged: Ranges = []
    for first, last in sorted(ranges):
        if merged and first <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(last, merged[-1][1]))
        else:
            merged.append((first, last))
    return merged
