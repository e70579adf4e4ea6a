"""Rows of T tokens, in order, a block of them at a time.

`RowCut` cuts a stream (`concat`): row r holds the tokens from r x (T - overlap) on; the last row is filled up with the
end token. Without overlap the rows are the inputs of `concat`'s plan, plus, where the stream ends one token after a
row, a row with that token: nothing is left out. Rows = 1 if M <= T, else 1 + ceil((M - T) / (T - overlap)).

`PackedRows` are the other policies, from a plan of spans with T places a row. Parts of a document repeat no token but
those of an overlap. A block is about two million tokens.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.export.stream import STRETCH_TOKENS, Flags, Integers, TokenStream
from penstock.load.loss import LossRuns
from penstock.load.sweeping import copier_of
from penstock.pack import Spans
from penstock.pack.plan import ranges
from penstock.pack.spans import plan_spans

__all__ = ["PackedRows", "RowBlock", "RowCut", "Rows"]


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Some rows that follow each other.

    Attributes:
        first_row: number of the first.
        tokens: [rows, T] in store width.
        is_token: [rows, T], False on padding.
        carries_loss: [rows, T]; False on padding, on what overlaps the row before, and outside loss runs.
        spans: which documents stand where.
    """

    first_row: int
    tokens: npt.NDArray[Any]
    is_token: Flags
    carries_loss: Flags
    spans: Spans

    @property
    def document_starts(self) -> Integers:
        """Flat positions over rows x T at which a document, or a later part of one inside a row, begins."""
        begins = (self.spans.first == 0) | (self.spans.place > 0)
        starts: Integers = (self.spans.row * self.tokens.shape[1] + self.spans.place)[begins]
        return starts

    def labels(self, *, boundaries: bool) -> npt.NDArray[np.int32]:
        """[rows, T]: the token itself (the model shifts), -100 where it is no label: without loss, at the beginning of
        a row (nothing before it), of a part and, with boundaries, of a document."""
        counts = self.carries_loss.copy()
        counts[:, 0] = False
        crossed = slice(None) if boundaries else self.spans.first > 0
        counts[self.spans.row[crossed], self.spans.place[crossed]] = False
        return np.where(counts, self.tokens.astype(np.int32), np.int32(-100))


class Rows(ABC):
    """Rows over one split of a store."""

    def __init__(self, stream: TokenStream, *, seq_len: int, overlap: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.overlap = overlap
        self.stride = seq_len - overlap

    @property
    @abstractmethod
    def num_rows(self) -> int:
        """How many rows there are."""

    @property
    @abstractmethod
    def padding(self) -> int:
        """Places that hold no token."""

    @abstractmethod
    def new_tokens(self, first: int, last: int) -> int:
        """Tokens of the rows from first to last that no row before holds."""

    @abstractmethod
    def block(self, first: int, last: int) -> RowBlock:
        """The rows from first to last as one block."""

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[RowBlock]:
        """The rows from first to last, in blocks."""
        last = self.num_rows if last is None else last
        at_once = max(1, STRETCH_TOKENS // self.seq_len)
        for row in range(first, last, at_once):
            yield self.block(row, min(row + at_once, last))


class RowCut(Rows):
    """Rows cut from the stream; see the module's docstring."""

    @property
    def num_rows(self) -> int:
        """See `Rows`."""
        if not self.stream.num_tokens:
            return 0
        return 1 + max(0, -(-(self.stream.num_tokens - self.seq_len) // self.stride))

    @property
    def padding(self) -> int:
        """See `Rows`: the last row's."""
        rows = self.num_rows
        return (rows - 1) * self.stride + self.seq_len - self.stream.num_tokens if rows else 0

    def new_tokens(self, first: int, last: int) -> int:
        """See `Rows`."""
        return self.row_range(last - 1)[1] - (self.row_range(first - 1)[1] if first else 0)

    def row_range(self, row: int) -> tuple[int, int]:
        """Stream positions, from and to, of a row's tokens."""
        begin = row * self.stride
        return begin, min(begin + self.seq_len, self.stream.num_tokens)

    def block(self, first: int, last: int) -> RowBlock:
        """See `Rows`."""
        begin, width = first * self.stride, (last - first - 1) * self.stride + self.seq_len
        end = min(begin + width, self.stream.num_tokens)
        missing = begin + width - end
        carries = self._cut(np.pad(self.stream.carries_loss(begin, end), (0, missing)))
        if self.overlap:
            carries = carries.copy()  # the rows share memory until here
            carries[int(first == 0) :, : self.overlap] = False
        tokens = self.stream.tokens(begin, end)
        if missing:
            tokens = np.pad(tokens, (0, missing), constant_values=self.stream.end_id)
        is_token = self._cut(np.arange(width) < width - missing)
        return RowBlock(
            first_row=first,
            tokens=self._cut(tokens),
            is_token=is_token,
            carries_loss=carries,
            spans=self._spans(first, last),
        )

    def _cut(self, span: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not self.overlap:
            return span.reshape(-1, self.seq_len)
        return np.lib.stride_tricks.sliding_window_view(span, self.seq_len)[:: self.stride]

    def _spans(self, first: int, last: int) -> Spans:
        starts = self.stream.starts
        begins = np.arange(first, last) * self.stride
        ends = np.minimum(begins + self.seq_len, self.stream.num_tokens)
        low = np.searchsorted(starts, begins, side="right") - 1
        counts = np.searchsorted(starts, ends) - low
        row, place_in_stream = ranges(low, counts)
        begin = np.maximum(starts[place_in_stream], begins[row])
        return Spans(
            starts=np.concatenate([[0], np.cumsum(counts)]),
            row=row,
            place=begin - begins[row],
            document=self.stream.documents[place_in_stream],
            first=begin - starts[place_in_stream],
            length=np.minimum(starts[place_in_stream + 1], ends[row]) - begin,
        )


class PackedRows(Rows):
    """Rows of `best-fit`, `windows` or `pad` over a stream of two tokens or more."""

    def __init__(self, stream: TokenStream, *, policy: str, seq_len: int, overlap: int) -> None:
        super().__init__(stream, seq_len=seq_len, overlap=overlap)
        # A plan's row has one place more than it has inputs.
        self._plan = plan_spans(
            stream.store, policy=policy, split=stream.split, seq_len=seq_len - 1, stride=self.stride
        )
        self._copier = copier_of([self._plan], row_tokens=seq_len)
        self._loss_runs = LossRuns.of(stream.store, stream.documents)

    @property
    def num_rows(self) -> int:
        """See `Rows`."""
        return self._plan.num_rows

    @property
    def padding(self) -> int:
        """See `Rows`."""
        return self._plan.waste_tokens

    def new_tokens(self, first: int, last: int) -> int:
        """See `Rows`."""
        spans = self._plan.spans(np.arange(first, last))
        return int(spans.length.sum()) - self.overlap * int((spans.first > 0).sum())

    def block(self, first: int, last: int) -> RowBlock:
        """See `Rows`."""
        rows = np.arange(first, last)
        spans = self._plan.spans(rows)
        ends = spans.row_ends()
        tokens = np.empty((last - first, self.seq_len), self.stream.dtype)
        self._copier.copy(self._plan.stretches(rows, spans), ends, tokens)
        self.stream.refuse_strange_ids(tokens)
        is_token = np.arange(self.seq_len) < ends[:, None]
        carries = is_token.copy()
        if self._loss_runs is not None and (with_loss := self._loss_runs.carries(spans, self.seq_len)) is not None:
            carries &= with_loss
        if self.overlap:
            carries[spans.row[spans.first > 0], : self.overlap] = False
        return RowBlock(first_row=first, tokens=tokens, is_token=is_token, carries_loss=carries, spans=spans)
