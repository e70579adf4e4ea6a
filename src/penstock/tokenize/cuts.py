"""Where a text can be cut so that the pieces' ids, joined, are the text's ids.

In: the encoder part of a tokenizer.json. Out: a pattern whose matches are the pieces, or None where no rule here proves
that cutting is safe. Pieces joined are the text. Every cut lies between two printable ASCII characters, or between one
and a space: normal forms, accent stripping and character maps work on one character and its marks, and no mark is
ASCII, so no normalizer sees across a cut. What remains is the splitter, for which each rule gives its reason.

Three families have rules. GPT-2's pattern behind or before Digits and Punctuation (StarCoder, Falcon): a letter never
shares a token with what follows it unless that is a letter, digits and marks likewise, and of the white space before a
word all but the last character is a token of its own. Splitters that drop white space (BERT, Whitespace,
WhitespaceSplit). And SentencePiece's, where each space begins a word.
"""

from __future__ import annotations

import json
import re
from typing import Any

__all__ = ["SPACE", "cut_pattern", "pipeline_with", "sequence_members"]

SPACE = "▁"
_MARKS = rb"!-/:-@\[-`{-~"
_FORMS = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents"}


def cut_pattern(encoder: dict[str, Any]) -> re.Pattern[bytes] | None:
    """The pattern of pieces for this encoder, if one is known to be safe."""
    if encoder.get("added_tokens"):  # they may hold anything, cuts included
        return None
    for rule in (_byte_level, _white_space, _sentencepiece):
        pattern = rule(encoder)
        if pattern is not None:
            return re.compile(pattern)
    return None


def _glued(blanks: bytes) -> bytes:
    """A stretch that holds something other than printable ASCII and `blanks`, up to a word's end before a blank."""
    return rb"[^!-~]*+[!-~]*+(?:[^!-~" + blanks + rb"][^!-~]*+[!-~]*+)*+"


def _byte_level(encoder: dict[str, Any]) -> bytes | None:
    if not _normalizer_types(encoder) <= {"NFC", "NFD", "NFKC", "NFKD"} or encoder["model"].get("type") != "BPE":
        return None
    splitters = sequence_members(encoder.get("pre_tokenizer"), "pretokenizers")
    places = [place for place, splitter in enumerate(splitters) if splitter.get("type") == "ByteLevel"]
    if len(places) != 1:
        return None
    byte_level, before, after = splitters[places[0]], splitters[: places[0]], splitters[places[0] + 1 :]
    if byte_level.get("add_prefix_space", True) or not byte_level.get("use_regex", True):
        return None
    # What comes after sees single tokens of the pattern, whose ends include all our cuts.
    if not all(map(_cuts_runs, before)) or not all(s.get("type") == "Split" or _cuts_runs(s) for s in after):
        return None
    blank, other = rb"[ \t\n\r]", rb"(?![^ -~\t\n\r])"
    return b"|".join(
        [
            # Blanks before a word, but for the last one. Before digits and marks they may be one token, so stay whole.
            blank + rb"+(?=" + blank + rb"[A-Za-z])",
            blank + rb"?[A-Za-z]++" + other,
            blank + rb"*+[0-9]++" + other,
            # An apostrophe may begin 's or 'll: letters after it stay with it.
            blank + rb"*+[" + _MARKS + rb"]++(?:(?<!')|(?![A-Za-z]))" + other,
            blank + rb"*+[" + _MARKS + rb"]++[A-Za-z]++" + other,
            _glued(rb" \t\n\r"),
        ]
    )


def _cuts_runs(splitter: dict[str, Any]) -> bool:
    """Whether a splitter only sets digits or marks apart, which never joins what the pattern parts."""
    kind = splitter.get("type")
    return kind == "Digits" or (kind == "Punctuation" and splitter.get("behavior") in ("Isolated", "Contiguous"))


def _white_space(encoder: dict[str, Any]) -> bytes | None:
    if not _normalizer_types(encoder) <= {*_FORMS, "BertNormalizer"}:
        return None
    runs = {
        "BertPreTokenizer": [rb"[A-Za-z0-9]", rb"[" + _MARKS + rb"]"],
        "Whitespace": [rb"\w", rb"[!-/:-@\[-^`{-~]"],
        "WhitespaceSplit": [rb"[!-~]"],
    }
    splitters = sequence_members(encoder.get("pre_tokenizer"), "pretokenizers")
    if len(splitters) != 1 or splitters[0].get("type") not in runs:
        return None
    other = rb"(?![^ -~\t\n\r])"
    words = [rb" ?" + run + rb"++" + other for run in runs[splitters[0]["type"]]]
    return b"|".join([*words, rb"[ \t\n\r]++(?=[!-~])", _glued(rb" \t\n\r")])


def _sentencepiece(encoder: dict[str, Any]) -> bytes | None:
    """Words that begin with a space; a word alone must get the mark that its space gives it, and no second one."""
    steps = sequence_members(encoder.get("normalizer"), "normalizers")
    splitters = sequence_members(encoder.get("pre_tokenizer"), "pretokenizers")
    if not all(map(_stays_in_a_word, steps)) or len(splitters) > 1:
        return None
    marks_first = any(step.get("type") == "Prepend" for step in steps)
    if marks_first != any(map(_strips_left, steps)):  # " word" would get a second mark, or lose its only one
        return None
    splitter = splitters[0] if splitters else {}
    if splitter.get("type") == "Metaspace":
        safe = splitter.get("replacement") == SPACE and splitter.get("split", True) and not marks_first
    else:
        replaces = bool(steps) and steps[-1].get("pattern") == {"String": " "} and steps[-1].get("content") == SPACE
        splits = splitter.get("pattern") == {"String": SPACE} and splitter.get("behavior") == "MergedWithNext"
        safe = replaces and ((splits and not splitter.get("invert")) or (not splitters and _merges_no_words(encoder)))
    if not safe:
        return None
    blanks = _blanks(steps[0]) if steps else b""
    # Where line ends stay line ends they belong to the word before them, unless `Strip` would take them from its end.
    ends = b"" if blanks or any(step.get("type") == "Strip" for step in steps) else rb"\t\n\r"
    word = rb"[!-~" + ends + rb"]"
    return rb" *+" + word + rb"++(?![^ " + blanks + rb"!-~" + ends + rb"])|" + _glued(b" " + blanks)


def _stays_in_a_word(step: dict[str, Any]) -> bool:
    """Whether a normalizer does the same to a word with its spaces as to the whole text."""
    kind = step.get("type")
    if kind in _FORMS or kind in ("Precompiled", "Nmt"):
        return True
    if kind == "Strip":
        # A piece ends with a printable character or with the text. It may begin with any white space, which goes too.
        return not step.get("strip_left", True)
    if kind == "Prepend":
        return step.get("prepend") == SPACE
    if kind != "Replace":
        return False
    pattern = step.get("pattern") or {}
    if "String" in pattern:
        # A cut lies before a space, so that only a text with one inside or at its end could lie across it.
        return " " not in pattern["String"] or (pattern["String"] == " " and step.get("content") == SPACE)
    return pattern.get("Regex") in (" {2,}", rf"\A +|[ {SPACE}]+\z")


def _strips_left(step: dict[str, Any]) -> bool:
    return str((step.get("pattern") or {}).get("Regex", "")).startswith(r"\A +")


def _merges_no_words(encoder: dict[str, Any]) -> bool:
    """Whether no token of a BPE model has a mark of space after anything else: then no merge crosses a cut."""
    model = encoder["model"]
    return (
        model.get("type") == "BPE"
        and SPACE in model["vocab"]
        and not any(SPACE in token.lstrip(SPACE) for token in model["vocab"])
    )


def _blanks(step: dict[str, Any]) -> bytes:
    r"""Which of \t \n \r the first normalizer turns into a space."""
    if step.get("type") not in ("Precompiled", "Nmt"):
        return b""
    normalizer = pipeline_with(normalizer=step).normalizer
    escapes = {"\t": rb"\t", "\n": rb"\n", "\r": rb"\r"}
    return b"".join(escape for blank, escape in escapes.items() if normalizer.normalize_str(f"x{blank}y") == "x y")


def pipeline_with(**parts: Any) -> Any:
    """A `tokenizers.Tokenizer` with these parts of a tokenizer.json and an empty model, to be asked about them."""
    from tokenizers import Tokenizer, models

    empty = json.loads(Tokenizer(models.BPE()).to_str())
    return Tokenizer.from_str(json.dumps(empty | parts))


def _normalizer_types(encoder: dict[str, Any]) -> set[Any]:
    return {step.get("type") for step in sequence_members(encoder.get("normalizer"), "normalizers")}


def sequence_members(part: Any, name: str) -> list[dict[str, Any]]:
    """A normalizer or pre-tokenizer as the flat list of its members, which are under `name`."""
    if not isinstance(part, dict):
        return []
    return [inner for member in part[name] for inner in sequence_members(member, name)] if name in part else [part]
