"""Plans whose spans are listed: `best-fit`, `windows` and `pad`.

A document of L tokens is cut into parts that read up to R = T + 1 tokens and begin S apart: one part if L <= R, else
1 + ceil((L - R) / S). With S = T each part begins with the last token of the part before, which was only a label there:
every label is in exactly one part. `windows` has S = T - overlap and `pad` S = T, one part to a row. `best-fit` has
S = T and puts several parts into a row as long as they fit into its R places.

    row_spans       [N + 1]  where the spans of each row begin in the arrays below
    span_documents  [S]      number in the store
    span_firsts     [S]      first token
    span_lengths    [S]      tokens

Memory: 12 bytes per span and 8 per row, several times that while it is made.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack.best_fit import best_fit_decreasing
from penstock.pack.plan import Integers, Plan, Spans, Stretches, WholeRows, ranges, refuse_length, refuse_too_few
from penstock.store import Store

__all__ = ["SpanArrays", "SpanPlan", "plan_spans", "span_arrays", "span_problem"]

SpanArrays = dict[str, npt.NDArray[Any]]
"""The arrays of the module's docstring by name."""

SPAN_TYPES = {"row_spans": "<i8", "span_documents": "<i4", "span_firsts": "<u4", "span_lengths": "<i4"}


@dataclass(frozen=True, kw_only=True, eq=False)
class SpanPlan(Plan):
    """Rows of listed spans; see the module's docstring.

    Attributes:
        stride: S, tokens between the beginnings of two parts of a document.
        overlap_loss: whether labels that two rows hold count in both.
    """

    stride: int
    overlap_loss: bool
    row_spans: Integers
    span_documents: npt.NDArray[np.int32]
    span_firsts: npt.NDArray[np.uint32]
    span_lengths: npt.NDArray[np.int32]

    def options(self) -> dict[str, Any]:
        """See `Plan`."""
        if self.policy != "windows":
            return {}
        return {"overlap": self.seq_len - self.stride, "overlap_loss": self.overlap_loss}

    @property
    def context(self) -> int:
        """See `Plan`."""
        return 0 if self.overlap_loss else max(self.seq_len - self.stride, 0)

    @cached_property
    def most_documents_in_a_row(self) -> int:
        """See `Plan`."""
        filled = np.add.reduceat(self.span_lengths, self.row_spans[:-1], dtype=np.int64)
        return int((np.diff(self.row_spans) + (filled < self.seq_len)).max())

    @cached_property
    def documents_split(self) -> int:
        """See `Plan`."""
        # A document that is split has one second part, which begins a stride in.
        return int((self.span_firsts == self.stride).sum())

    def spans(self, rows: Integers) -> Spans:
        """See `Plan`."""
        begins = self.row_spans[rows]
        counts = self.row_spans[rows + 1] - begins
        row, index = ranges(begins, counts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        length = self.span_lengths[index].astype(np.int64)
        before = np.cumsum(length) - length
        place = before - before[starts[:-1]][row]
        document, first = (values[index].astype(np.int64) for values in (self.span_documents, self.span_firsts))
        return Spans(starts, row, place, document, first, length)

    def stretches(self, rows: Integers, spans: Spans | None = None) -> Stretches:
        """See `Plan`."""
        spans = self.spans(rows) if spans is None else spans
        arrays = self.store.arrays
        segment = arrays["segment"][spans.document].astype(np.int64)
        offset = arrays["offset"][spans.document].astype(np.int64) + spans.first
        return Stretches(spans.row, spans.place, segment, offset, spans.length)

    def whole(self, rows: Integers) -> WholeRows:
        """See `Plan`. Such a row has one span; a document lies in one segment."""
        span = self.row_spans[rows]
        is_undivided = (self.row_spans[rows + 1] - span == 1) & (self.span_lengths[span] == self.seq_len + 1)
        arrays, document = self.store.arrays, self.span_documents[span]
        segment = np.where(is_undivided, arrays["segment"][document], np.int64(-1))
        return WholeRows(segment, arrays["offset"][document].astype(np.int64) + self.span_firsts[span], is_undivided)


def span_arrays(documents: Integers, lengths: Integers, *, seq_len: int, stride: int, share_rows: bool) -> SpanArrays:
    """Cuts documents into parts and puts the parts into rows: one each or, to share rows, as many as fit.

    Rows are in canonical order of their first part, and so are the parts in a row.
    """
    owner, parts, sizes = _cut(lengths, reads=seq_len + 1, stride=stride)
    row_spans = np.arange(len(sizes) + 1)
    if share_rows:
        order, row_spans = _shared_rows(sizes, seq_len + 1)
        owner, parts, sizes = owner[order], parts[order], sizes[order]
    return {
        "row_spans": row_spans,
        "span_documents": documents.astype(np.int32)[owner],
        "span_firsts": parts * np.uint32(stride),
        "span_lengths": sizes,
    }


def _cut(
    lengths: Integers, *, reads: int, stride: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
    """Of each part: which document, which part of it, how many tokens."""
    counts = np.ones(len(lengths), np.int32)
    long = np.flatnonzero(lengths > reads)
    counts[long] += (lengths[long] - reads + stride - 1) // stride
    ends = np.cumsum(counts, dtype=np.int64)
    owner = np.repeat(np.arange(len(lengths), dtype=np.int32), counts)
    parts = np.arange(len(owner), dtype=np.uint32)
    parts -= np.repeat((ends - counts).astype(np.uint32), counts)
    sizes = np.full(len(owner), reads, np.int32)
    sizes[ends - 1] = lengths - (counts - 1) * np.int64(stride)
    return owner, parts, sizes


def _shared_rows(sizes: npt.NDArray[np.int32], places: int) -> tuple[Integers, Integers]:
    """The parts in the order of rows that several may share, and where each row begins in that order."""
    bins, num_bins = best_fit_decreasing(sizes, places)
    first_part = np.empty(num_bins, np.int64)
    first_part[bins[::-1]] = np.arange(len(bins) - 1, -1, -1)  # of several written to one place the last stays
    # By the row's first part, then by part: one number to sort by, which is several times faster than two.
    order = (first_part[bins] << 32) | np.arange(len(bins))
    order.sort()
    part, first_of_row = order.astype("<i8", copy=False).view("<u4").reshape(-1, 2).T
    row_spans = np.append(np.flatnonzero(part == first_of_row), len(bins))
    order &= 2**32 - 1
    return order, row_spans


def plan_spans(
    store: Store,
    *,
    policy: str,
    split: str,
    seq_len: int,
    stride: int,
    boundaries: bool = True,
    overlap_loss: bool = False,
    documents: Integers | None = None,
    arrays: SpanArrays | None = None,
) -> SpanPlan:
    """A plan of listed spans.

    Args:
        documents: the documents to plan over; None for the split's.
        arrays: the spans where they are known already, from a cache.

    Raises:
        PlanError: the row length is impossible or there is nothing to make rows of.
    """
    refuse_length(seq_len)
    documents = store.kept_documents(split) if documents is None else documents
    lengths = store.arrays["length"][documents].astype(np.int64)
    num_tokens = int(lengths.sum())
    refuse_too_few(num_tokens, split=split)
    if arrays is None:
        filled = lengths > 0
        arrays = span_arrays(
            documents[filled],
            lengths[filled],
            seq_len=seq_len,
            stride=stride,
            share_rows=policy == "best-fit",
        )
    num_rows = len(arrays["row_spans"]) - 1
    return SpanPlan(
        store=store,
        split=split,
        policy=policy,
        seq_len=seq_len,
        boundaries=boundaries,
        num_rows=num_rows,
        num_tokens=num_tokens,
        waste_tokens=num_rows * (seq_len + 1) - int(arrays["span_lengths"].sum(dtype=np.int64)),
        documents=documents,
        stride=stride,
        overlap_loss=overlap_loss,
        **arrays,
    )


def span_problem(arrays: SpanArrays, store: Store, *, seq_len: int) -> str | None:
    """The first thing about spans from a file that can't be, in words; None where they fit the store."""
    rows, documents = arrays["row_spans"], arrays["span_documents"]
    firsts, lengths = arrays["span_firsts"], arrays["span_lengths"]
    if not len(rows) > 1 or rows[0] != 0 or rows[-1] != len(documents) or (rows[1:] <= rows[:-1]).any():
        return "the rows don't fit the spans"
    if not len(documents) == len(firsts) == len(lengths):
        return "the arrays differ in length"
    if int(documents.min()) < 0 or int(documents.max()) >= store.num_documents:
        return "a span is of a document that isn't there"
    stored = store.arrays["length"][documents].astype(np.int64)
    if int(lengths.min()) < 1 or (firsts.astype(np.int64) + lengths > stored).any():
        return "a span ends after its document"
    filled = np.add.reduceat(lengths, rows[:-1], dtype=np.int64)
    return "a row is too full" if int(filled.max()) > seq_len + 1 else None
