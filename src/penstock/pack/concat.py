"""`concat`: the stream of a split cut into rows of equal length; every token is in some row, only the end is padded.

Rows: ceil((M - 1) / T). Each label belongs to exactly one row, and each token is an input or a label of some row. Costs
three passes over the documents' index; 10 M documents take about a second.
"""

from __future__ import annotations

import numpy as np

from penstock.errors import PlanError
from penstock.pack.plan import Integers, Plan
from penstock.store import Store

__all__ = ["plan_concat"]


def plan_concat(store: Store, *, split: str = "train", seq_len: int, boundaries: bool = True) -> Plan:
    """Plans rows of `seq_len` tokens over the kept documents of a split, in canonical order.

    Raises:
        PlanError: the length is impossible or the split is too small to make a row.
    """
    if seq_len < 1:
        raise PlanError(f"a row of {seq_len} tokens is impossible", hint="--seq-len must be 1 or more")
    documents = store.kept_documents(split)
    lengths = store.arrays["length"][documents].astype(np.int64)
    document_starts = np.concatenate([[0], np.cumsum(lengths)])
    num_tokens = int(document_starts[-1])
    if num_tokens < 2:
        raise PlanError(
            f"split {split!r} holds {num_tokens} tokens, too few for a row",
            hint="give it a larger share with --split when preparing, or prepare more data",
        )
    num_rows = -(-(num_tokens - 1) // seq_len)
    row_starts = np.arange(num_rows + 1, dtype=np.int64) * seq_len
    pieces = _pieces(store, documents, lengths, document_starts)
    return Plan(
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
        first_piece=np.searchsorted(pieces[0], row_starts[:-1], side="right") - 1,
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
