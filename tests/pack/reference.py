"""The slow reference of packing: parts of documents and rows of parts, one token at a time."""

from __future__ import annotations

Part = tuple[int, int, int]
"""Document, first token, tokens."""


def parts_of(document: int, length: int, *, seq_len: int, overlap: int = 0) -> list[Part]:
    """A document read in parts of T + 1 tokens, until its last token has been read."""
    parts, first = [], 0
    while True:
        end = min(first + seq_len + 1, length)
        parts.append((document, first, end - first))
        if end == length:
            return parts
        first += seq_len - overlap


def new_labels(part: Part, *, overlap: int = 0) -> list[tuple[int, int]]:
    """The labels, as document and token, that a part counts: all but its first token and what the part before had."""
    document, first, length = part
    return [(document, token) for token in range(first + 1 + (overlap if first else 0), first + length)]
