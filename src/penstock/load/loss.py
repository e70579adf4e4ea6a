"""Which labels count in documents that don't carry loss throughout (prompts, tool output).

In: the store's loss runs, and the spans of some rows. Out: the rows' masks with the other labels taken out. The runs of
a document that touch a span are found by search, so that a long document costs what its part in the row does. Memory:
16 bytes per run, 4 per document of the store, and 1 per place of the rows at hand.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from penstock.pack import Spans
from penstock.pack.plan import Integers, ranges
from penstock.store import Store

__all__ = ["LossRuns"]

# Runs of all documents in one ascending list: number of the document's entry above, token below.
TOKEN_BITS = 33


class LossRuns:
    """The loss runs of a store; get it from `of`."""

    def __init__(self, store: Store) -> None:
        arrays = store.arrays
        documents = arrays["loss_documents"].astype(np.int64)
        self._entry_of = np.full(store.num_documents, -1, np.int32)
        self._entry_of[documents] = np.arange(len(documents))
        starts = arrays["loss_starts"].astype(np.int64)
        runs = arrays["loss_runs"].reshape(-1, 2).astype(np.int64)
        begins = (np.repeat(np.arange(len(documents)), starts[1:] - starts[:-1]) << TOKEN_BITS) | runs[:, 0]
        self._begins, self._ends = _merged(begins, begins + runs[:, 1])

    @staticmethod
    def of(store: Store, documents: Integers) -> LossRuns | None:
        """The runs, or None where all of the documents carry loss throughout."""
        return LossRuns(store) if np.isin(documents, store.arrays["loss_documents"]).any() else None

    def apply(self, spans: Spans, mask: npt.NDArray[np.bool_]) -> None:
        """Takes out of `mask` [rows, T] the labels that carry no loss."""
        carries = self.carries(spans, mask.shape[1] + 1)
        if carries is not None:
            mask &= carries[:, 1:]

    def carries(self, spans: Spans, width: int) -> npt.NDArray[np.bool_] | None:
        """[rows, width], whether the token at each place carries loss; False on padding; None where all do."""
        entries = self._entry_of[spans.document]
        if (entries < 0).all():
            return None
        begins = spans.row * width + spans.place  # flat places over rows x width tokens
        key = entries.astype(np.int64) << TOKEN_BITS
        key[entries < 0] = 0
        low = np.searchsorted(self._ends, key | spans.first, side="right")
        high = np.searchsorted(self._begins, (key | spans.first) + spans.length)
        owner, run = ranges(low, np.where(entries < 0, 0, np.maximum(high - low, 0)))
        shift = begins[owner] - spans.first[owner] - key[owner]
        first = np.maximum(self._begins[run] + shift, begins[owner])
        last = np.minimum(self._ends[run] + shift, begins[owner] + spans.length[owner])
        whole = entries < 0
        # One up where a run begins, one down where it ends. No two runs begin, and no two end, at the same place.
        change = np.zeros((len(spans.starts) - 1) * width + 1, np.int8)
        change[np.concatenate([first, begins[whole]])] = 1
        change[np.concatenate([last, (begins + spans.length)[whole]])] -= 1
        return np.cumsum(change[:-1], dtype=np.int8).view(np.bool_).reshape(-1, width)


def _merged(begins: Integers, ends: Integers) -> tuple[Integers, Integers]:
    """The same runs in ascending order, those that touch or overlap made one, empty ones left out."""
    order = np.argsort(begins, kind="stable")
    order = order[(ends > begins)[order]]
    begins, reached = begins[order], np.maximum.accumulate(ends[order])
    apart = np.flatnonzero(begins[1:] > reached[:-1])
    if not len(begins):
        return begins, reached
    return begins[np.append(0, apart + 1)], reached[np.append(apart, len(reached) - 1)]
