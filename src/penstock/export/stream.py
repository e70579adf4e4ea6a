"""The kept documents of a split, end to end, as one stream of tokens read straight from the maps.

Stream position p is a token, as in plans: documents follow each other in canonical order, excluded ones are not in it.
Any range comes out as an array: a view of the map where it lies in one piece, otherwise one copy per piece. Every block
is checked on first touch by the store's reader, every id against the vocabulary. Memory: 40 bytes per document and what
the caller asks for at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DamagedStoreError, StoreError
from penstock.store import Store

__all__ = ["STRETCH_TOKENS", "TokenStream"]

# Read and written at once: large enough that Python's share vanishes, small enough for any machine.
STRETCH_TOKENS = 2**21

Integers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class TokenStream:
    """One split of a store as a stream; see the module's docstring.

    Attributes:
        documents: [D] numbers of the documents in the store.
        starts: [D + 1] stream position of each, then the number of tokens.
        has_loss_runs: whether some document of the split carries loss on a part of its tokens only.
        store_has_loss_runs: whether one of any split does: tables of several splits need the same columns.
    """

    def __init__(self, store: Store, split: str) -> None:
        self.store = store
        self.split = split
        self.dtype = store.dtype
        self.documents = store.kept_documents(split)
        lengths = store.arrays["length"][self.documents].astype(np.int64)
        self.starts = np.concatenate([[0], np.cumsum(lengths)])
        segments = store.arrays["segment"][self.documents].astype(np.int64)
        offsets = store.arrays["offset"][self.documents].astype(np.int64)
        follows = (segments[1:] == segments[:-1]) & (offsets[1:] == offsets[:-1] + lengths[:-1])
        begins = np.flatnonzero(np.concatenate([[True], ~follows])) if len(lengths) else np.empty(0, np.int64)
        self._piece_starts = np.append(self.starts[begins], self.starts[-1])
        self._piece_segments, self._piece_offsets = segments[begins], offsets[begins]
        loss_documents = store.arrays["loss_documents"].astype(np.int64)
        # Per place its number in `loss_documents`, or -1 where the document carries loss throughout.
        self._loss_entries = np.where(
            np.isin(self.documents, loss_documents), np.searchsorted(loss_documents, self.documents), -1
        )
        self.has_loss_runs = bool((self._loss_entries >= 0).any())
        self.store_has_loss_runs = bool((store.arrays["reason"][loss_documents] == 0).any())

    @property
    def num_tokens(self) -> int:
        """Length of the stream."""
        return int(self.starts[-1])

    @property
    def num_documents(self) -> int:
        """Documents in the stream."""
        return len(self.documents)

    @property
    def end_id(self) -> int:
        """The store's end token, which also fills rows."""
        return int(self.store.manifest.tokenizer["end_id"])

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return int(self.store.manifest.tokenizer["vocab_size"])

    def tokens(self, begin: int, end: int) -> npt.NDArray[Any]:
        """Checked tokens of a range, read-only or fresh."""
        if begin >= end:
            return np.empty(0, self.dtype)
        piece = int(np.searchsorted(self._piece_starts, begin, side="right")) - 1
        if end <= self._piece_starts[piece + 1]:
            part = self._piece(piece, begin, end)
            self.refuse_strange_ids(part)
            return part
        out = np.empty(end - begin, self.dtype)
        done = begin
        while done < end:
            part = self._piece(piece, done, min(end, int(self._piece_starts[piece + 1])))
            out[done - begin : done - begin + len(part)] = part
            done += len(part)
            piece += 1
        self.refuse_strange_ids(out)
        return out

    def signed_tokens(self, begin: int, end: int) -> npt.NDArray[np.int32]:
        """`tokens` as int32, for readers that know no unsigned type of four bytes; never wrapped."""
        if self.vocab_size > 2**31:
            raise StoreError(
                f"a vocabulary of {self.vocab_size:,} ids doesn't fit this format's int32", hint="use --format bin"
            )
        return self.tokens(begin, end).astype(np.int32)

    def carries_loss(self, begin: int, end: int) -> Flags:
        """Whether each token of a range carries loss as a label."""
        if begin >= end or not self.has_loss_runs:
            return np.ones(max(end - begin, 0), np.bool_)
        places = np.arange(*self.places(begin, end))
        firsts, lasts = self._loss_runs(places)
        firsts, lasts = np.clip(firsts - begin, 0, end - begin), np.clip(lasts - begin, 0, end - begin)
        size = end - begin + 1
        # Counted, not set: runs of a document may touch or overlap.
        inside = np.bincount(firsts, minlength=size) - np.bincount(lasts, minlength=size)
        flags: Flags = np.cumsum(inside[:-1]) > 0
        return flags

    def loss_runs(self, place: int) -> list[list[int]] | None:
        """The pairs (first token, count) of a document that carry loss; None where all of it does."""
        if self._loss_entries[place] < 0:
            return None
        firsts, lasts = self._loss_runs(np.array([place]))
        runs = np.stack([firsts - self.starts[place], lasts - firsts], axis=1)
        return [[int(first), int(count)] for first, count in runs]

    def places(self, begin: int, end: int) -> tuple[int, int]:
        """Places in `documents`, from and to, of those with a token in the range."""
        first = int(np.searchsorted(self.starts, begin, side="right")) - 1
        last = int(np.searchsorted(self.starts, end, side="left"))
        return first, min(last, self.num_documents)

    def batches(self, first: int, last: int, *, most: int) -> Iterator[tuple[int, int]]:
        """Ranges of places that cover first to last: at most `most` documents and, but for a single long one, at most
        `STRETCH_TOKENS`."""
        while first < last:
            fitting = int(np.searchsorted(self.starts, self.starts[first] + STRETCH_TOKENS, side="right")) - 1
            end = min(max(fitting, first + 1), first + most, last)
            yield first, end
            first = end

    def stretches(self) -> Iterator[tuple[int, int]]:
        """Ranges of positions that cover the stream."""
        for begin in range(0, self.num_tokens, STRETCH_TOKENS):
            yield begin, min(begin + STRETCH_TOKENS, self.num_tokens)

    def refuse_documents_over(self, limit: int, *, reader: str) -> None:
        """Refuses a document that the format's own numbers can't count."""
        lengths = np.diff(self.starts)
        if len(lengths) and int(lengths.max()) > limit:
            raise StoreError(
                f"document {int(self.documents[lengths.argmax()])} has {int(lengths.max()):,} tokens; {reader} counts "
                f"up to {limit:,}",
                hint="export rows (--seq-len), or use --format bin",
            )

    def _piece(self, piece: int, begin: int, end: int) -> npt.NDArray[Any]:
        offset = int(self._piece_offsets[piece] + begin - self._piece_starts[piece])
        return self.store.read(int(self._piece_segments[piece]), offset, end - begin)

    def refuse_strange_ids(self, tokens: npt.NDArray[Any]) -> None:
        """Raises `DamagedStoreError` for a token that the vocabulary doesn't have."""
        largest = int(tokens.max())
        if largest >= self.vocab_size:
            raise DamagedStoreError(
                f"{self.store.path} holds the token {largest}; its vocabulary has {self.vocab_size} ids",
                hint="it was written by something else than penstock: prepare the data again",
            )

    def _loss_runs(self, places: Integers) -> tuple[Integers, Integers]:
        """Stream positions, from and to, of all runs that carry loss in these documents; a whole one is one run."""
        entries = self._loss_entries[places]
        whole, cut = places[entries < 0], places[entries >= 0]
        arrays, entries = self.store.arrays, entries[entries >= 0]
        first_run = arrays["loss_starts"][entries].astype(np.int64)
        counts = arrays["loss_starts"][entries + 1].astype(np.int64) - first_run
        numbers = np.arange(counts.sum()) + np.repeat(first_run - np.cumsum(counts) + counts, counts)
        runs = arrays["loss_runs"].reshape(-1, 2)[numbers].astype(np.int64)
        firsts = runs[:, 0] + np.repeat(self.starts[cut], counts)
        return (
            np.concatenate([self.starts[whole], firsts]),
            np.concatenate([self.starts[whole + 1], firsts + runs[:, 1]]),
        )
