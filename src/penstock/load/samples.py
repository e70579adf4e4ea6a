"""A few documents of a store to look at: drawn by a seed, the same on every machine.

In: a store and a number. Out: the first lines of that many kept documents, by the keyed permutation that orders rows,
so that a larger number shows the same documents and more. Cost: the beginning of each document is read and decoded.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.load.order import permuted
from penstock.store import Store, document_origin
from penstock.tokenize import Tokenizer

__all__ = ["sample_documents"]

MOST_TOKENS = 512
MOST_LINES = 12


def sample_documents(store: Store, count: int, *, split: str | None = None, seed: int = 0) -> list[dict[str, Any]]:
    """At most `count` documents, in the order drawn: number, key, split, tokens and the first lines of text.

    Raises:
        StoreError: there is no such split.
    """
    kept = store.kept_documents(split)
    places = np.arange(min(count, len(kept)))
    tokenizer = store.tokenizer()
    return [
        _beginning(store, int(number), tokenizer)
        for number in kept[permuted(places, size=len(kept), seed=seed, pass_number=0)]
    ]


def _beginning(store: Store, document: int, tokenizer: Tokenizer) -> dict[str, Any]:
    origin = document_origin(store, document)
    tokens = store.document_tokens(document)
    begin = list(tokenizer.spec.begin_ids)
    first = len(begin) if tokens[: len(begin)].tolist() == begin else 0
    shown = tokens[first : min(first + MOST_TOKENS, len(tokens) - 1)]
    is_whole = first + len(shown) == len(tokens) - 1
    # A cut between two tokens may fall inside a character.
    text = tokenizer.decode(shown) if is_whole else tokenizer.decode(shown).rstrip("\N{REPLACEMENT CHARACTER}")
    lines = text.split("\n")
    return {
        "document": document,
        "key": origin.key,
        "split": origin.split,
        "language": origin.language,
        "tokens": origin.tokens,
        "text": "\n".join(lines[:MOST_LINES]),
        "is_whole": is_whole and len(lines) <= MOST_LINES,
    }
