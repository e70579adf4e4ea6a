"""`concat`: the stream of a split cut into rows of equal length; every token is in some row, only the end is padded.

The documents of a split, one after another, form a stream of M tokens; row r reads up to T + 1 of them from r x T.
Rows: ceil((M - 1) / T). Each label belongs to exactly one row, and each token is an input or a label of some row. Costs
three passes over the documents' index; 10 M documents take about a second.

    documents        [D]      numbers in the store, in stream order
    document_starts  [D + 1]  stream position of each, then M
    piece_*          [P]      stretches that lie together in a segment; neighbours in the store are one piece
    first_document   [N + 1]  the document that holds the first token of each row
    first_piece      [N + 1]  the piece that does
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from penstock.pack.plan import Integers, Plan, Spans, Stretches, WholeRows, ranges, refuse_length, refuse_too_few
from penstock.store import Store

__all__ = ["ConcatPlan", "plan_concat"]

IS_UNDIVIDED, LIES_TOGETHER = 1, 2


@dataclass(frozen=True, kw_only=True, eq=False)
class ConcatPlan(Plan):
    """A stream cut into rows; see the module's docstring."""

    document_starts: Integers
    piece_starts: Integers
    piece_segments: Integers
    piece_offsets: Integers
    first_document: Integers
    first_piece: Integers

    @cached_property
    def most_documents_in_a_row(self) -> int:
        """See `Plan`."""
        return int(np.diff(self.first_document).max()) + 1

    @cached_property
    def documents_split(self) -> int:
        """See `Plan`. A row reads the next row's first token too, as a label."""
        first_row = self.document_starts[:-1] // self.seq_len
        last_label = np.maximum(self.document_starts[1:] - 2, self.document_starts[:-1])
        return int((last_label // self.seq_len > first_row).sum())

    def row_range(self, row: int) -> tuple[int, int]:
        """First stream position of a row and how many tokens it reads (T + 1, fewer in the last one)."""
        start = row * self.seq_len
        return start, min(self.seq_len + 1, self.num_tokens - start)

    def spans(self, rows: Integers) -> Spans:
        """See `Plan`."""
        row, index, place, skipped, length = self._cut(rows, self.document_starts, self.first_document)
        starts = np.searchsorted(row, np.arange(len(rows) + 1))
        return Spans(starts, row, place, self.documents[index], skipped, length)

    def stretches(self, rows: Integers, spans: Spans | None = None) -> Stretches:
        """See `Plan`. Documents that lie together are read together."""
        row, index, place, skipped, length = self._cut(rows, self.piece_starts, self.first_piece)
        return Stretches(row, place, self.piece_segments[index], self.piece_offsets[index] + skipped, length)

    def whole(self, rows: Integers) -> WholeRows:
        """See `Plan`."""
        fact = self._row_facts[rows]
        piece = fact >> 2
        segment = np.where(fact & LIES_TOGETHER, self.piece_segments[piece], -1)
        return WholeRows(
            segment, self._piece_shifts[piece] + rows * self.seq_len, (fact & IS_UNDIVIDED).astype(np.bool_)
        )

    @cached_property
    def _row_facts(self) -> npt.NDArray[np.int32] | Integers:
        """[N], all that `whole` has to know of a row in one number, because a look at memory far away costs more than
        all it does with it: the piece that it begins in, whether it ends there too, and in the document it began with.

        A row ends where the next row begins: its last label is that one's first token. Behind the stream's end there is
        no piece, and no document, that it could be in.
        """
        facts = self.first_piece[:-1] << 2
        facts |= LIES_TOGETHER * (self.first_piece[1:] == self.first_piece[:-1])
        facts |= IS_UNDIVIDED * (self.first_document[1:] == self.first_document[:-1])
        return facts.astype(np.int32) if len(self.piece_segments) < 2**29 else facts

    @cached_property
    def _piece_shifts(self) -> Integers:
        """[P], from a position in the stream to one in the piece's segment."""
        return self.piece_offsets - self.piece_starts[:-1]

    def _cut(
        self, rows: Integers, starts: Integers, first: Integers
    ) -> tuple[Integers, Integers, Integers, Integers, Integers]:
        """Of each row the parts of the stream that begin at `starts`: row, which part, place in the row, how much of
        the part comes before the row, and its length there."""
        begins = first[rows]
        # Up to the part that holds the next row's first token, this row's last label; none at the stream's end.
        row, index = ranges(begins, np.minimum(first[rows + 1], len(starts) - 2) - begins + 1)
        row_start = (rows * self.seq_len)[row]
        place = starts[index] - row_start
        end = np.minimum(starts[index + 1] - row_start, self.seq_len + 1)
        skipped = np.maximum(-place, 0)
        place = np.maximum(place, 0)
        length = end - place
        if length.min() <= 0:  # only a document without tokens
            row, index, place, skipped, length = (a[length > 0] for a in (row, index, place, skipped, length))
        return row, index, place, skipped, length


def plan_concat(
    store: Store, *, split: str = "train", seq_len: int, boundaries: bool = True, documents: Integers | None = None
) -> ConcatPlan:
    """Plans rows of `seq_len` tokens over the kept documents of a split, in canonical order.

    Raises:
        PlanError: the length is impossible or the split is too small to make a row.
    """
    refuse_length(seq_len)
    documents = store.kept_documents(split) if documents is None else documents
    lengths = store.arrays["length"][documents].astype(np.int64)
    document_starts = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(document_starts[-1])
    refuse_too_few(num_tokens, split=split)
    num_rows = -(-(num_tokens - 1) // seq_len)
    row_starts = np.arange(num_rows + 1, dtype=np.int64) * seq_len
    pieces = _pieces(store, documents, lengths, document_starts)
    return ConcatPlan(
        store=store,
        split=split,
        policy="concat",
        seq_len=seq_len,
        boundaries=boundaries,
        num_rows=num_rows,
        num_tokens=num_tokens,
        waste_tokens=num_rows * seq_len + 1 - num_tokens,
        documents=documents,
        document_starts=document_starts,
        piece_starts=pieces[0],
        piece_segments=pieces[1],
        piece_offsets=pieces[2],
        first_document=np.searchsorted(document_starts, row_starts, side="right") - 1,
        first_piece=np.searchsorted(pieces[0], row_starts, side="right") - 1,
    )


def _pieces(
    store: Store, documents: Integers, lengths: Integers, starts: Integers
) -> tuple[Integers, Integers, Integers]:
    """Stream start, segment and offset of each stretch of documents that lie one after another in one segment."""
    segments = store.arrays["segment"][documents].astype(np.int64)
    offsets = store.arrays["offset"][documents].astype(np.int64)
    follows = (segments[1:] == segments[:-1]) & (offsets[1:] == offsets[:-1] + lengths[:-1])
    begins = np.flatnonzero(np.concatenate([[True], ~follows]))
    return np.append(starts[begins], starts[-1]), segments[begins], offsets[begins]
