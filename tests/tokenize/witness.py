"""A vocabulary that shows where text was split: it merges any two neighbouring characters unless a border is between.

One for each way of splitting that gigatoken knows, with both engines over it, to ask about single characters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import gigatoken
import numpy as np
from tokenizers import Tokenizer as Reference
from tokenizers import models, normalizers, pre_tokenizers

from penstock.tokenize import TokenizerSpec
from penstock.tokenize.loading import CL100K_PATTERN, O200K_PATTERN
from penstock.tokenize.specification import character_of_byte

from .families import DEEPSEEK_PATTERNS, QWEN2_PATTERN, split_by

SPLITTERS = {
    "GPT-2": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "cl100k": lambda: split_by(CL100K_PATTERN),
    "o200k": lambda: split_by(O200K_PATTERN),
    "Qwen2, normal form C": lambda: split_by(QWEN2_PATTERN),
    "DeepSeek-V3": lambda: split_by(*DEEPSEEK_PATTERNS),
}
CONTEXTS = ["a{0}", "{0}a", " {0}", "1{0}", "{0}{0}", "A{0}a"]
# A mark that moves does so before one of the lowest class or after one of the highest.
NORMAL_FORM_CONTEXTS = [*CONTEXTS, "b\u0345{0}", "b{0}\u0334"]


def contexts_of(splitter: str) -> list[str]:
    return NORMAL_FORM_CONTEXTS if "normal form" in splitter else CONTEXTS


class Witness:
    """Both engines, without the guard, over the witness vocabulary of one way of splitting."""

    def __init__(self, splitter: str) -> None:
        vocabulary = {letter: number for number, letter in enumerate(sorted(character_of_byte))}
        merges = [(character_of_byte[left], character_of_byte[right]) for left, right in _neighbours()]
        for left, right in merges:
            vocabulary.setdefault(left + right, len(vocabulary))
        self.reference = Reference(models.BPE(vocab=vocabulary, merges=merges))
        self.reference.pre_tokenizer = SPLITTERS[splitter]()
        if "normal form" in splitter:
            self.reference.normalizer = normalizers.NFC()
        self.fast = gigatoken.Tokenizer.from_json(self.reference.to_str())
        self.reference.add_special_tokens(["<|endoftext|>"])
        self.spec = TokenizerSpec.from_json(self.reference.to_str().encode(), origin="witness")

    def differing(self, texts: Sequence[str]) -> list[int]:
        """Positions of the texts that the engines encode differently."""
        encodings = self.reference.encode_batch_fast(list(texts), add_special_tokens=False)
        lengths = np.array([len(encoding) for encoding in encodings])
        theirs = np.concatenate([np.array(encoding.ids, np.uint32) for encoding in encodings])
        layout: Any = self.fast.encode_batch([text.encode() for text in texts], parallel=False).layout
        ours, offsets = np.asarray(layout.content.data), np.asarray(layout.offsets.data)
        if np.array_equal(np.diff(offsets), lengths) and np.array_equal(ours, theirs):
            return []
        borders = np.concatenate([[0], np.cumsum(lengths)])
        return [
            number
            for number in range(len(texts))
            if not np.array_equal(
                ours[offsets[number] : offsets[number + 1]], theirs[borders[number] : borders[number + 1]]
            )
        ]


def _neighbours() -> list[tuple[int, int]]:
    """Last byte of one character, first byte of the next: all that occur in the contexts."""
    leads, lasts, ascii_bytes = range(0xC2, 0xF5), range(0x80, 0xC0), range(0x80)
    pairs = [(left, right) for left in b"a 1Ab\n" for right in leads]
    pairs += [(left, right) for left in lasts for right in (*b"a 1A", *leads)]
    pairs += [(left, right) for left in ascii_bytes for right in ascii_bytes]
    return pairs
