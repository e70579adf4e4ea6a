"""Documents to ids in store width: what a worker does between reading a unit and writing it.

In: documents. Out: one flat array with begin and end tokens in place, each document's length and loss runs; and the
hash that says which documents are the same. Memory: one room per unit in flight, used again.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.hashing import strong_hash
from penstock.sources import Document
from penstock.tokenize import Tokenizer
from penstock.tokenize.engines import Encoded

__all__ = ["ENCODE_BATCH_BYTES", "Room", "Rooms", "content_hash", "encode_documents", "fill_room"]

# Each call costs 0.3 ms besides the encoding, so that 1 MiB a call takes a tenth longer; 8 MiB are no faster. So it is
# where the allocator keeps what is freed, as in worker processes; elsewhere the ids of each call are fresh pages.
ENCODE_BATCH_BYTES = 2**22
# Ids that are looked through and copied while the processor's cache holds them: a fifth less than one after the other.
CHECKED_IDS = 2**16


def content_hash(document: Document) -> bytes:
    """What makes two documents the same: their bytes and, where they aren't plain text, how these are divided."""
    if document.is_plain:
        return document.text_hash or strong_hash(document.parts[0].data)
    pieces = [b"framed" if document.framed else b""]
    for part in document.parts:
        pieces += [f"{part.kind.value} {int(part.loss)} {len(part.data)} ".encode(), part.data]
    return strong_hash(b"".join(pieces), purpose="penstock parts")


def encode_documents(
    tokenizer: Tokenizer, documents: Sequence[Document], *, room: Room
) -> tuple[list[int], list[list[int] | None]]:
    """Adds documents to a room, in store width; each one's length there, and its loss runs (None: all carries loss).

    Plain documents are encoded in native calls of about `ENCODE_BATCH_BYTES`; the copy that narrows ids to the store's
    width also makes room for the begin and end tokens, so each token is written once.
    """
    lengths: list[int] = []
    loss_runs: list[list[int] | None] = []
    for batch in _batches(documents):
        for is_plain, run in itertools.groupby(batch, operator.attrgetter("is_plain")):
            if is_plain:
                encoded = tokenizer.encode_unchecked([document.parts[0].data for document in run])
                run_lengths = fill_room(room, tokenizer, encoded)
                lengths += run_lengths
                loss_runs += [None] * len(run_lengths)
                continue
            for document in run:
                _add_parts(tokenizer, document, room, lengths, loss_runs)
    return lengths, loss_runs


def _add_parts(
    tokenizer: Tokenizer, document: Document, room: Room, lengths: list[int], loss_runs: list[list[int] | None]
) -> None:
    ids, runs = tokenizer.encode_document(document)
    room.take(len(ids))[:] = ids
    lengths.append(len(ids))
    loss_runs.append(_flat(runs))


def fill_room(room: Room, tokenizer: Tokenizer, encoded: Encoded) -> list[int]:
    """Puts texts into the room, each with begin and end tokens around it; their lengths with these.

    Raises:
        TokenizerError: an id is beyond the vocabulary, or a control token's.
    """
    ids, borders = encoded
    begin = np.array(tokenizer.spec.begin_ids, tokenizer.dtype)
    added = len(begin) + 1
    count = len(borders) - 1
    target = room.take(len(ids) + added * count)
    ends = borders[1:] + added * np.arange(1, count + 1)
    # A slice costs half a microsecond, so the loop does little else.
    place, checked = len(begin), 0
    first, *others = borders.tolist()
    for last in others:
        if last > checked:
            checked = max(last, first + CHECKED_IDS)
            tokenizer.check(ids[first:checked])
        target[place : place + last - first] = ids[first:last]
        place += last - first + added
        first = last
    target[ends - 1] = tokenizer.end_id
    lengths: list[int] = (np.diff(borders) + added).tolist()
    for number, token in enumerate(begin):
        target[ends - lengths + number] = token
    return lengths


class Room:
    """An array that is filled from the front. What isn't filled is never touched, so it takes address space only."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._array = _aligned(0, dtype)
        self.used = 0

    def empty(self, *, capacity: int) -> None:
        """Makes room for about so many tokens where there is none yet; what was in it is gone."""
        # Later units may be larger. A token has several bytes, so they fit all the same, and where one doesn't `take`
        # makes room: a new array for each would be faulted in page by page.
        if not len(self._array):
            self._array = _aligned(capacity, self._array.dtype)
        self.used = 0

    def take(self, count: int) -> npt.NDArray[Any]:
        """The next `count` places, to be filled now."""
        if self.used + count > len(self._array):
            larger = _aligned(2 * len(self._array) + count, self._array.dtype)
            larger[: self.used] = self._array[: self.used]
            self._array = larger
        self.used += count
        return self._array[self.used - count : self.used]

    def filled(self) -> npt.NDArray[Any]:
        """Everything taken so far."""
        return self._array[: self.used]


def _aligned(count: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """An array that begins where `fs` can write it past the page cache."""
    memory = np.empty(count * dtype.itemsize + fs.DIRECT_ALIGNMENT, np.uint8)
    start = -memory.__array_interface__["data"][0] % fs.DIRECT_ALIGNMENT
    return memory[start : start + count * dtype.itemsize].view(dtype)


class Rooms:
    """Rooms that are used again: a new one costs a page fault per page, a sixth of all the time."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self._dtype = dtype
        self._free: list[Room] = []  # append and pop are atomic

    def borrow(self) -> Room:
        """A room nobody is in."""
        return self._free.pop() if self._free else Room(self._dtype)

    def give_back(self, room: Room) -> None:
        """Lets the next one in; the payload in it is no longer valid."""
        self._free.append(room)


def _batches(documents: Sequence[Document]) -> Iterator[list[Document]]:
    """Runs of documents of about `ENCODE_BATCH_BYTES`."""
    batch: list[Document] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += document.num_bytes
        if size >= ENCODE_BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _flat(runs: npt.NDArray[np.uint32] | None) -> list[int] | None:
    return None if runs is None else [int(value) for value in runs.reshape(-1)]
