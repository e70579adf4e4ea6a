"""A plan: which stretch of which document stands where in row r. Nothing is copied.

A row has T + 1 places for tokens. The first T are inputs, and the label of each is the token at the next place, so the
last place holds a label only. A *span* is a stretch of one document in a row; a row is spans side by side from place 0
on, then padding. Plans differ in how they know their spans:

    ConcatPlan   arithmetic over a virtual stream of all documents   (concat.py)
    SpanPlan     flat arrays: row -> spans -> document, first token, length   (spans.py; best-fit, windows, pad)

Both answer for many rows at once, in a handful of numpy calls; docs/packing.md has the arithmetic of each policy.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import PlanError
from penstock.hashing import digest_of
from penstock.store import Store

__all__ = [
    "Integers",
    "Plan",
    "Spans",
    "Stretches",
    "WholeRows",
    "is_whole_number",
    "ranges",
    "refuse_length",
    "refuse_too_few",
]

Integers = npt.NDArray[np.int64]

LONGEST_ROW = 2**31 - 2


@dataclass(frozen=True, slots=True)
class Spans:
    """The spans of some rows, row after row, from left to right.

    Attributes:
        starts: [rows + 1], where each row's spans begin in the other arrays; every row has one.
        row: [S], which of the rows asked for, counted from 0.
        place: [S], where in the row the span begins, 0 to T.
        document: [S], number in the store.
        first: [S], the document's token at `place`; above 0 where an earlier row holds what comes before.
        length: [S], tokens; at least 1.
    """

    starts: Integers
    row: Integers
    place: Integers
    document: Integers
    first: Integers
    length: Integers

    def row_ends(self) -> Integers:
        """[rows], places filled in each row; padding begins there."""
        last = self.starts[1:] - 1
        ends: Integers = self.place[last] + self.length[last]
        return ends

    def of_rows(self, first_row: int, last_row: int) -> Spans:
        """Those of the rows first_row .. last_row, counted from there."""
        begin, end = self.starts[[first_row, last_row]].tolist()
        starts, row = self.starts[first_row : last_row + 1] - begin, self.row[begin:end] - first_row
        return Spans(
            starts, row, *(values[begin:end] for values in (self.place, self.document, self.first, self.length))
        )


@dataclass(frozen=True, slots=True)
class Stretches:
    """The tokens of some rows as they lie in segments, to be copied; order, `row` and `place` as in `Spans`."""

    row: Integers
    place: Integers
    segment: Integers
    offset: Integers
    length: Integers


@dataclass(frozen=True, slots=True)
class WholeRows:
    """Which of some rows are a single stretch of a segment, and which have no border: most of them, where documents
    are longer than rows, and told without their spans.

    Attributes:
        segment: [rows], of a row whose T + 1 tokens lie together; -1 for the others.
        offset: [rows], the first of these tokens; of the others anything.
        is_undivided: [rows], whether all T + 1 tokens are of one document.
    """

    segment: Integers
    offset: Integers
    is_undivided: npt.NDArray[np.bool_]


def ranges(first: Integers, counts: Integers) -> tuple[Integers, Integers]:
    """For each i the numbers first[i] .. first[i] + counts[i], one after another: which i, and the number."""
    owner = np.repeat(np.arange(len(counts)), counts)
    numbers = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts - first, counts)
    return owner, numbers


def refuse_length(seq_len: int) -> None:
    """Raises `PlanError` for a row length that isn't one, or whose places don't fit 31 bits."""
    if not is_whole_number(seq_len) or not 1 <= seq_len <= LONGEST_ROW:
        raise PlanError(
            f"a row of {seq_len!r} tokens is impossible",
            hint=f"--seq-len must be a whole number from 1 to {LONGEST_ROW}",
        )


def is_whole_number(value: object) -> bool:
    """Whether a setting that counts something is a number that can."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def refuse_too_few(num_tokens: int, *, split: str) -> None:
    """Raises `PlanError` for a split in which no token is followed by another."""
    if num_tokens < 2:
        raise PlanError(
            f"split {split!r} holds {num_tokens} tokens, too few for a row",
            hint="give it a larger share with --split when preparing, or prepare more data",
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan(ABC):
    """Rows over the documents of a split; see the module's docstring.

    Attributes:
        policy: how rows were made: one of `POLICIES`.
        seq_len: T, inputs of a row.
        boundaries: whether labels and attention stop at document borders.
        num_tokens: tokens of the documents, each counted once.
        waste_tokens: places, of T + 1 in each row, that hold no token.
        documents: [D] numbers in the store, in canonical order.
    """

    store: Store
    split: str
    policy: str
    seq_len: int
    boundaries: bool
    num_rows: int
    num_tokens: int
    waste_tokens: int
    documents: Integers

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens are in row r; part of every saved position."""
        return {
            "store": self.store.digest,
            "split": self.split,
            "policy": self.policy,
            "seq_len": self.seq_len,
            "boundaries": self.boundaries,
            **self.options(),
        }

    def options(self) -> dict[str, Any]:
        """What else the policy was told; part of `identity`."""
        return {}

    @cached_property
    def fingerprint(self) -> str:
        """Hash of `identity`."""
        return digest_of(self.identity)

    @property
    def context(self) -> int:
        """Label places at the start of a span with `first` above 0 whose labels an earlier row counts already."""
        return 0

    @property
    @abstractmethod
    def most_documents_in_a_row(self) -> int:
        """The largest number of documents, or parts of them, that share a row (padding counts as one)."""

    @property
    @abstractmethod
    def documents_split(self) -> int:
        """Documents whose tokens are in more than one row."""

    @abstractmethod
    def spans(self, rows: Integers) -> Spans:
        """What stands where in each of the rows."""

    @abstractmethod
    def stretches(self, rows: Integers, spans: Spans | None = None) -> Stretches:
        """The same rows as stretches of segments, in the order of `Spans`; `spans` are those of the rows where they
        are known already."""

    @abstractmethod
    def whole(self, rows: Integers) -> WholeRows:
        """Which of the rows lie together; the same as `spans` and `stretches` say, at a fraction of their cost."""

    def describe(self) -> dict[str, Any]:
        """The figures that `penstock plan` prints."""
        positions = self.num_rows * self.seq_len
        return {
            **self.identity,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "documents": len(self.documents),
            "documents_split": self.documents_split,
            "waste_tokens": self.waste_tokens,
            "waste_percent": round(100 * self.waste_tokens / positions, 4) if positions else 0.0,
            "repeated_tokens": positions + self.num_rows - self.waste_tokens - self.num_tokens,
            "most_documents_in_a_row": self.most_documents_in_a_row,
        }
