"""Rows of T tokens cut from a stream, in order, a block of them at a time.

Row r holds the tokens from r x (T - overlap) on; the last row is filled up with the end token. Without overlap the rows
are the inputs of `concat`'s plan, plus, where the stream ends one token after a row, a row with that token: nothing is
left out. Rows = 1 if M <= T, else 1 + ceil((M - T) / (T - overlap)). A block is about two million tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.export.stream import STRETCH_TOKENS, Flags, Integers, TokenStream

__all__ = ["RowBlock", "RowCut"]


@dataclass(frozen=True, kw_only=True)
class RowBlock:
    """Some rows that follow each other.

    Attributes:
        first_row: number of the first.
        tokens: [rows, T] in store width.
        is_token: [rows, T], False on padding.
        carries_loss: [rows, T]; False on padding, on what overlaps the row before, and outside loss runs.
        document_starts: flat positions over rows x T at which a document begins.
    """

    first_row: int
    tokens: npt.NDArray[Any]
    is_token: Flags
    carries_loss: Flags
    document_starts: Integers

    def labels(self, *, boundaries: bool) -> npt.NDArray[np.int32]:
        """[rows, T]: the token itself (the model shifts), -100 where it is no label: without loss, at the beginning of
        a row (nothing before it) and, with boundaries, of a document."""
        counts = self.carries_loss.copy()
        counts[:, 0] = False
        if boundaries:
            counts.reshape(-1)[self.document_starts] = False
        return np.where(counts, self.tokens.astype(np.int32), np.int32(-100))


class RowCut:
    """Rows over a stream; see the module's docstring."""

    def __init__(self, stream: TokenStream, *, seq_len: int, overlap: int) -> None:
        self.stream = stream
        self.seq_len = seq_len
        self.overlap = overlap
        self.stride = seq_len - overlap

    @property
    def num_rows(self) -> int:
        """How many rows there are."""
        if not self.stream.num_tokens:
            return 0
        return 1 + max(0, -(-(self.stream.num_tokens - self.seq_len) // self.stride))

    @property
    def padding(self) -> int:
        """Places of the last row that hold no token."""
        rows = self.num_rows
        return (rows - 1) * self.stride + self.seq_len - self.stream.num_tokens if rows else 0

    def row_range(self, row: int) -> tuple[int, int]:
        """Stream positions, from and to, of a row's tokens."""
        begin = row * self.stride
        return begin, min(begin + self.seq_len, self.stream.num_tokens)

    def blocks(self, first: int = 0, last: int | None = None) -> Iterator[RowBlock]:
        """The rows from first to last, in blocks."""
        last = self.num_rows if last is None else last
        at_once = max(1, STRETCH_TOKENS // self.seq_len)
        for row in range(first, last, at_once):
            yield self.block(row, min(row + at_once, last))

    def block(self, first: int, last: int) -> RowBlock:
        """The rows from first to last as one block."""
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
            document_starts=self._document_starts(first, last),
        )

    def _cut(self, span: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if not self.overlap:
            return span.reshape(-1, self.seq_len)
        return np.lib.stride_tricks.sliding_window_view(span, self.seq_len)[:: self.stride]

    def _document_starts(self, first: int, last: int) -> Integers:
        starts = self.stream.starts[:-1]
        begins = np.arange(first, last) * self.stride
        low = np.searchsorted(starts, begins)
        counts = np.searchsorted(starts, begins + self.seq_len) - low
        row_of = np.repeat(np.arange(last - first), counts)
        places = np.arange(len(row_of)) + np.repeat(low - np.cumsum(counts) + counts, counts)
        flat: Integers = row_of * self.seq_len + starts[places] - begins[row_of]
        return flat
