"""What a SentencePiece-like tokenizer does to ASCII words before its model sees them.

In: the encoder part of a tokenizer.json for which `cuts` has a rule. Out: which bytes reach the model as they are, and
what the white space before a word becomes; None where a step isn't understood. Normal forms and the removal of accents
leave ASCII alone; character maps are asked about each character; spaces and line ends are given to the tokenizer's own
normalizer and pre-tokenizer, with a letter after them. That is enough, because none of the steps that are accepted here
treats a printable character by what stands beside it, but for replacing given strings, and words with those are told.
"""

from __future__ import annotations

import string
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.tokenize.cuts import SPACE, pipeline_with, sequence_members

__all__ = ["BLANKS", "WordRules", "word_rules"]

BLANKS = b" \t\n\r"
PRINTABLE = bytes(range(0x21, 0x7F))
_LEAVE_ASCII = {"NFC", "NFD", "NFKC", "NFKD", "StripAccents", "Lowercase", "Nmt", "Precompiled", "Strip", "Prepend"}
_CHANGE_LINE_ENDS = {"Nmt", "Precompiled", "Strip"}


@dataclass(frozen=True, kw_only=True)
class WordRules:
    """How the text of one word comes to the model.

    Attributes:
        kept: the bytes that words may be made of; each reaches the model as it is.
        lowers: whether capitals become small letters on the way.
        replaced: what must not be in a word, in small letters, because something else is put in its place.
        probe: a word on which an answer of `parts_before` can be tried.
        parts_before: blanks -> what the model sees of them before a word, part by part, the last one with the word;
            a space stands for the mark of one. None where it can't be told.
    """

    kept: bytes
    lowers: bool
    replaced: tuple[bytes, ...]
    probe: bytes
    parts_before: Callable[[bytes], list[bytes] | None]


def word_rules(encoder: dict[str, Any]) -> WordRules | None:
    """The rules of this encoder, if all of its steps are understood."""
    steps = sequence_members(encoder.get("normalizer"), "normalizers")
    replaced: list[bytes] = []
    for step in steps:
        if step.get("type") == "Replace":
            text = _replaced_text(step)
            if text is None:
                return None
            replaced += [text.lower()] if text else []
        elif step.get("type") not in _LEAVE_ASCII or not _leaves_printable_ascii(step):
            return None
    kinds = {step.get("type") for step in steps}
    letters = [letter.encode() for letter in string.ascii_lowercase if letter.encode() not in replaced]
    if not letters:
        return None
    return WordRules(
        kept=PRINTABLE if kinds & _CHANGE_LINE_ENDS else PRINTABLE + BLANKS[1:],
        lowers="Lowercase" in kinds,
        replaced=tuple(replaced),
        probe=letters[0],
        parts_before=_parts_before(encoder, letters[0].decode()),
    )


def _replaced_text(step: dict[str, Any]) -> bytes | None:
    """The printable text that a step replaces, nothing where it is about spaces only; None where it can't be told."""
    pattern = step.get("pattern") or {}
    if "Regex" in pattern:
        return b"" if pattern["Regex"] in (" {2,}", rf"\A +|[ {SPACE}]+\z") else None
    text = str(pattern.get("String", ""))
    if text == " ":
        return b""
    return text.encode() if text and text.isascii() and not text.encode().translate(None, PRINTABLE) else None


def _leaves_printable_ascii(step: dict[str, Any]) -> bool:
    if step.get("type") not in ("Nmt", "Precompiled"):
        return True
    normalizer = pipeline_with(normalizer=step).normalizer
    return all(normalizer.normalize_str(chr(byte)) == chr(byte) for byte in PRINTABLE)


def _parts_before(encoder: dict[str, Any], letter: str) -> Callable[[bytes], list[bytes] | None]:
    pipeline = pipeline_with(normalizer=encoder.get("normalizer"), pre_tokenizer=encoder.get("pre_tokenizer"))
    marks = f"{SPACE}\t\n\r"

    def parts_before(blanks: bytes) -> list[bytes] | None:
        text = blanks.decode() + letter
        if pipeline.normalizer is not None:
            text = pipeline.normalizer.normalize_str(text)
        parts = [text]
        if pipeline.pre_tokenizer is not None:
            parts = [part for part, _ in pipeline.pre_tokenizer.pre_tokenize_str(text)]
        if not parts or not parts[-1].endswith(letter):
            return None
        parts[-1] = parts[-1].removesuffix(letter)
        if any(part.strip(marks) for part in parts):
            return None
        return [part.replace(SPACE, " ").encode() for part in parts]

    return parts_before
