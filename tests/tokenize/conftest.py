"""Small tokenizers of every shape, built with `tokenizers`, and texts that tell engines apart.

This folder has no __init__.py: as a package it would take the name of the standard library's `tokenize`.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, models, pre_tokenizers
from tokenizers import Tokenizer as Reference

from penstock.tokenize import Tokenizer, TokenizerSpec

BYTE_LETTERS = sorted(pre_tokenizers.ByteLevel.alphabet())
END = "<|endoftext|>"


def byte_level(
    merges: Sequence[tuple[str, str]] = (),
    *,
    pre_tokenizer: Any = None,
    added: Sequence[AddedToken] = (),
    **model: Any,
) -> Reference:
    """A byte-level BPE tokenizer: 256 bytes, the merges, then the added tokens, `<|endoftext|>` first."""
    vocabulary = {letter: number for number, letter in enumerate(BYTE_LETTERS)}
    for left, right in merges:
        vocabulary.setdefault(left + right, len(vocabulary))
    tokenizer = Reference(models.BPE(vocab=vocabulary, merges=list(merges), **model))
    tokenizer.pre_tokenizer = pre_tokenizer or pre_tokenizers.ByteLevel(add_prefix_space=False)
    for token in [AddedToken(END, special=True, normalized=False), *added]:
        (tokenizer.add_special_tokens if token.special else tokenizer.add_tokens)([token])
    return tokenizer


def loaded(tokenizer: Reference, *, end_token: str | None = None) -> Tokenizer:
    spec = TokenizerSpec.from_json(tokenizer.to_str().encode(), origin="built here", end_token=end_token)
    return Tokenizer(spec, origin="built here")


def reference_ids(tokenizer: Tokenizer) -> Callable[[Sequence[bytes]], list[list[int]]]:
    """`tokenizers` over the same file, with the same tokens dropped: written here from the file, not from our spec.

    It numbers added tokens anew once some are dropped, so ids are looked up by token in the file.
    """
    content = json.loads(tokenizer.spec.source_json)
    vocabulary, added = content["model"]["vocab"], content["added_tokens"]
    known = dict(vocabulary) if isinstance(vocabulary, dict) else {piece: n for n, (piece, _) in enumerate(vocabulary)}
    known.update({token["content"]: token["id"] for token in added})
    content["added_tokens"] = [token for token in added if token["content"] not in tokenizer.spec.control_tokens]
    content["post_processor"] = None
    reference = Reference.from_str(json.dumps(content))

    def encode(texts: Sequence[bytes]) -> list[list[int]]:
        encodings = reference.encode_batch([text.decode() for text in texts], add_special_tokens=False)
        given = {number for encoding in encodings for number in encoding.ids}
        meant = {number: known[reference.id_to_token(number)] for number in given}
        return [[meant[number] for number in encoding.ids] for encoding in encodings]

    return encode


def ids_of(tokenizer: Tokenizer, texts: Sequence[bytes]) -> list[list[int]]:
    ids, offsets = tokenizer.encode(texts)
    assert ids.dtype == np.uint32
    assert offsets.dtype == np.int64
    assert (int(offsets[0]), int(offsets[-1]), offsets.size) == (0, ids.size, len(texts) + 1)
    return [ids[start:end].tolist() for start, end in itertools.pairwise(offsets)]


FRAGMENTS = [
    " ", "  ", "   ", "\n", "\n\n", "\r\n", "\t", "'s", "'S", "'ll", "'RE", "’s", "a", "the", "The", "THE", "word",
    "I'm", "1", "12", "123", "1234", "١٢", "②", "½", "_", "__init__", "->", "==", "//", "/*", ".", "...", ",", "!",
    "?!", "é", "e\u0301", "ß", "ſ", "İ", "ǅ", "汉", "字", "日本", "한", "ไท", "हि", "ع", "א",
    "🙂", "👩\u200d👩\u200d👧", "\u200b", "\u200d", "\ufeff", "\u00a0", "\u2028", "\u3000", "\u0300", "\u1100",
    "\ua9bd", "\x00", "\x01", "\x1b", "\x7f", "\x85", "\ue000", "\U0010ffff", "\U0001d518", "Ġ", "Ċ", "▁", "##",
    "<|", "|>", "<s>", "</s>", "[INST]", "<|endoftext|>", "<|im_start|>",
]  # fmt: skip


def random_texts(seed: int, count: int) -> list[bytes]:
    """Half adversarial (fragments glued together), half random code points of every plane."""
    source = random.Random(seed)

    def character() -> str:
        top = source.choice([0x80, 0x800, 0x3000, 0xD800, 0x10000, 0x20000, 0x110000])
        number = source.randrange(top)
        return "?" if 0xD800 <= number < 0xE000 else chr(number)

    glued = ["".join(source.choices(FRAGMENTS, k=source.randrange(1, 25))) for _ in range(count // 2)]
    drawn = ["".join(character() for _ in range(source.randrange(1, 30))) for _ in range(count - count // 2)]
    return [text.encode() for text in glued + drawn]


def corpus_texts(corpus: Path) -> list[bytes]:
    """The corpus whole, and cut at places that no splitter would choose."""
    whole = [path.read_bytes() for path in sorted(corpus.rglob("*")) if path.suffix in (".py", ".txt")]
    pieces = [
        text[start : start + 997].decode(errors="ignore").encode()
        for text in whole
        for start in range(0, len(text), 997)
    ]
    return whole + pieces


@pytest.fixture(scope="session")
def texts(corpus: Path) -> list[bytes]:
    return corpus_texts(corpus)
