"""The slow reference: rows, labels and borders from plain lists of tokens, one position at a time.

A row of length T at number r reads the positions r * T .. r * T + T of the stream of all documents. Position p of a row
has token p as its input and token p + 1 as its label. Nothing here is shared with the code under test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

PADDING = -1
IGNORED = -100


@dataclass(frozen=True)
class ReferenceDocument:
    """A document as it must be in the store: its tokens, end token included, and which of them carry loss."""

    key: str
    tokens: list[int]
    carries_loss: list[bool]


@dataclass(frozen=True)
class ReferenceRow:
    """One row: [T + 1] tokens, [T] whether the label counts, [T] the document of each input."""

    tokens: list[int]
    mask: list[bool]
    documents: list[int]

    @property
    def labels(self) -> list[int]:
        return [token if counts else IGNORED for token, counts in zip(self.tokens[1:], self.mask, strict=True)]


class Reference:
    """The stream of one split's documents."""

    def __init__(self, documents: list[ReferenceDocument], *, pad_id: int) -> None:
        self.documents = documents
        self.pad_id = pad_id
        self.stream = [token for document in documents for token in document.tokens]
        self.carries_loss = [carries for document in documents for carries in document.carries_loss]
        self.owner = [number for number, document in enumerate(documents) for _ in document.tokens]
        self.place = [place for document in documents for place in range(len(document.tokens))]

    def num_rows(self, seq_len: int) -> int:
        return len(range(0, len(self.stream) - 1, seq_len))

    def rows(self, seq_len: int, *, boundaries: bool = True) -> list[ReferenceRow]:
        return [self.row(number, seq_len, boundaries=boundaries) for number in range(self.num_rows(seq_len))]

    def row(self, number: int, seq_len: int, *, boundaries: bool = True) -> ReferenceRow:
        length = len(self.stream)
        tokens, mask, documents = [], [], []
        for position in range(number * seq_len, (number + 1) * seq_len + 1):
            tokens.append(self.stream[position] if position < length else self.pad_id)
        for position in range(number * seq_len, (number + 1) * seq_len):
            label = position + 1
            counts = label < length and self.carries_loss[label]
            if counts and boundaries:
                counts = self.owner[position] == self.owner[label]
            mask.append(counts)
            if not boundaries:
                documents.append(0)
            else:
                documents.append(self.owner[position] if position < length else PADDING)
        return ReferenceRow(tokens, mask, documents)


def border_list(rows: list[ReferenceRow]) -> list[int]:
    """Flat positions over the rows at which a document, or a row, begins."""
    borders, flat = [], 0
    for row in rows:
        before = None
        for document in row.documents:
            if document != before:
                borders.append(flat)
            before = document
            flat += 1
    return borders


def group_numbers(rows: list[ReferenceRow]) -> list[list[int]]:
    """[B][T], equal where row and document are; numbered in order of appearance."""
    starts = set(border_list(rows))
    numbers, flat, current = [], 0, -1
    for row in rows:
        line = []
        for _ in row.documents:
            current += flat in starts
            line.append(current)
            flat += 1
        numbers.append(line)
    return numbers


def assert_batch_equals(batch: Any, rows: list[ReferenceRow]) -> None:
    """A `Batch` or `BatchBuffer` against the rows it must hold, everything that goes on the wire."""
    np.testing.assert_array_equal(batch.tokens, [row.tokens for row in rows])
    np.testing.assert_array_equal(batch.loss_mask, [row.mask for row in rows])
    borders = border_list(rows)
    end = len(rows) * len(rows[0].mask)
    assert batch.cu_seqlens[: len(borders)].tolist() == borders
    assert set(batch.cu_seqlens[len(borders) :].tolist()) == {end}  # at least one: the end itself
