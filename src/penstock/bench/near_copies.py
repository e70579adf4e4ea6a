"""Planted copies: how many of them are found, and whether what is found is alike.

In: real texts and a tokenizer. Each text gets copies in which a share of the lines is replaced, deleted or inserted
(lines of the other texts, at random places, from a fixed seed). Out: per share, how many copies are found, beside the
exact Jaccard similarity of the shingles; and how many of all pairs found are really that similar. Texts that are alike
to begin with count as found pairs like any other.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.bench.corpus import corpus_documents
from penstock.sources import STANDARD_LIBRARY
from penstock.store.near import NEAR_THRESHOLD, near_pairs
from penstock.store.signatures import SHINGLE_TOKENS, SIGNATURE_BINS, signatures
from penstock.tokenize import Tokenizer

__all__ = ["CHANGED_SHARES", "changed_copy", "measured_recall", "source_texts"]

CHANGED_SHARES = (0.01, 0.02, 0.05, 0.1, 0.15, 0.2)
MIN_LINES, MAX_BYTES = 20, 60_000
CLEARLY_BELOW = 0.1
COUNTED = (
    "copies",
    "found",
    "above_threshold",
    "found_above_threshold",
    "pairs_found",
    "pairs_above_threshold",
    "pairs_clearly_below",
)


def source_texts(count: int) -> list[str]:
    """So many modules of Python's library, from all over it, of 20 lines to 60 kB."""
    documents = [text for text in corpus_documents([STANDARD_LIBRARY]) if len(text) <= MAX_BYTES]
    texts = [text.decode() for text in documents if text.count(b"\n") >= MIN_LINES]
    return random.Random(0).sample(texts, min(count, len(texts)))  # noqa: S311  a sample, no secret


def changed_copy(text: str, share: float, *, lines: Sequence[str], seed: int, only_replace: bool = False) -> str:
    """The text with a share of its lines, at least one, replaced, deleted or preceded by one of `lines`.

    With `only_replace` every one is replaced, which spoils more shingles than the others do.
    """
    chance = random.Random(seed)  # noqa: S311
    own = text.splitlines(keepends=True)
    for place in sorted(chance.sample(range(len(own)), max(1, round(share * len(own)))), reverse=True):
        kind = 0 if only_replace else chance.randrange(3)
        own[place : place + (kind != 2)] = [] if kind == 1 else [chance.choice(lines)]
    return "".join(own)


def exact_similarity(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> float:
    """The Jaccard similarity of two sets of shingles."""
    common = len(np.intersect1d(left, right, assume_unique=True))
    return common / max(len(left) + len(right) - common, 1)


def measured_recall(
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    threshold: float = NEAR_THRESHOLD,
    shares: Sequence[float] = CHANGED_SHARES,
    copies: int = 1,
    **kind: bool,
) -> dict[str, Any]:
    """Figures per share of changed lines, and over all pairs.

    Args:
        tokenizer: whose ids are compared.
        texts: the originals.
        threshold: of near copies.
        shares: of lines changed.
        copies: of each text, per share.
        kind: of change, for `changed_copy`.
    """
    lines = [line for text in texts for line in text.splitlines(keepends=True)]
    rows = []
    for number, share in enumerate(shares):
        planted = [
            changed_copy(text, share, lines=lines, seed=(number * copies + again) * len(texts) + place, **kind)
            for again in range(copies)
            for place, text in enumerate(texts)
        ]
        rows.append({"changed": share, **_figures(tokenizer, texts, planted, threshold=threshold)})
    totals = {name: sum(row[name] for row in rows) for name in COUNTED}
    return {
        "threshold": threshold,
        **totals,
        "recall": totals["found_above_threshold"] / max(totals["above_threshold"], 1),
        "precision": totals["pairs_above_threshold"] / max(totals["pairs_found"], 1),
        "shares": rows,
    }


def _figures(tokenizer: Tokenizer, texts: Sequence[str], planted: Sequence[str], *, threshold: float) -> dict[str, Any]:
    tokens, starts = tokenizer.encode([text.encode() for text in (*texts, *planted)])
    borders = np.asarray(starts, np.int64)
    rows = signatures(tokens, borders)
    shingles = [_shingles(tokens[slice(*ends)]) for ends in itertools.pairwise(borders.tolist())]
    planted_pairs = [(number % len(texts), len(texts) + number) for number in range(len(planted))]
    exact = np.array([exact_similarity(shingles[left], shingles[right]) for left, right in planted_pairs])
    estimates = np.array([(rows[left] == rows[right]).mean() for left, right in planted_pairs])
    left, right, _ = near_pairs(rows, threshold=threshold)
    pairs = set(zip(left.tolist(), right.tolist(), strict=True))
    of_pairs = np.array([exact_similarity(shingles[left], shingles[right]) for left, right in sorted(pairs)])
    found = np.array([pair in pairs for pair in planted_pairs])
    return {
        "copies": len(planted),
        "found": int(found.sum()),
        "mean_similarity": float(exact.mean()),
        "estimate_error": float(np.sqrt(((estimates - exact) ** 2).mean())),
        "expected_error": float(np.sqrt((exact * (1 - exact) / SIGNATURE_BINS).mean())),
        "above_threshold": int((exact >= threshold).sum()),
        "found_above_threshold": int(found[exact >= threshold].sum()),
        "pairs_found": len(pairs),
        "pairs_above_threshold": int((of_pairs >= threshold).sum()),
        "pairs_clearly_below": int((of_pairs < threshold - CLEARLY_BELOW).sum()),
    }


def _shingles(tokens: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The set of a document's shingles, as 64-bit hashes that signatures don't use."""
    multipliers = np.random.Generator(np.random.PCG64(1)).integers(0, 2**64, SHINGLE_TOKENS, np.uint64)
    windows = np.lib.stride_tricks.sliding_window_view(tokens.astype(np.uint64), SHINGLE_TOKENS)
    return np.unique((windows * (multipliers | np.uint64(1))).sum(axis=1, dtype=np.uint64))
