"""Which documents stay: a greedy choice in a given order, a block of documents at a time.

In: signatures and the documents in the order in which they choose. Out: for each the first one that stays and is near
it. A document is compared with those that stay only. A block meets all that stayed before it at once, in numpy; those
of the block that are left and share a bucket with each other go through one by one, in Python.

Where a document shares buckets with a good part of all that stay, its sketch is compared with every one of theirs
instead: 32 bytes each, in order, are read faster than rows from all over the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.store.near_buckets import (
    CHUNK_ROWS,
    SKETCH_WORDS,
    Numbers,
    Signatures,
    buckets,
    equal_numbers,
    numbers_needed,
    partners,
    sketches,
    unequal_numbers,
)
from penstock.store.signatures import SIGNATURE_BINS

__all__ = ["first_near"]

BLOCK_ROWS = 2**9
# Reading a row from anywhere takes about ten times as long as comparing two bits of each number in order.
DENSE_SHARE = 1 / 8
_NOBODY = np.iinfo(np.int64).max

Positions = npt.NDArray[np.int32]


def first_near(signatures: Signatures, chosen: Numbers, *, threshold: float) -> Numbers:
    """For each position in `chosen` the first position that stays and is near it, itself where there is none."""
    staying = _staying(signatures, chosen, threshold=threshold)
    stands = np.arange(len(chosen))
    compared = np.flatnonzero(np.diff(staying.own_starts))
    for first in range(0, len(compared), BLOCK_ROWS):
        block = compared[first : first + BLOCK_ROWS]
        nearest = staying.nearest_of(block)
        left = block[nearest == _NOBODY]
        stands[block] = np.minimum(nearest, block)
        stands[left] = _one_by_one(staying, left)
        staying.add(left[stands[left] == left])
    return stands


@dataclass(kw_only=True)
class _Staying:
    """Those that stay so far, by bucket.

    Attributes:
        own_starts: where the buckets of each position start in `own_buckets`.
        bucket_starts: where the room of each bucket starts in `members`.
        counts: how many of each bucket stay so far.
        sketches: [words, those that stay], two bits of each number; filled up to `total`.
    """

    signatures: Signatures
    chosen: Numbers
    needed: int
    own_starts: Numbers
    own_buckets: Positions
    bucket_starts: Numbers
    members: Positions
    counts: Positions
    everyone: Numbers
    sketches: npt.NDArray[np.uint64]
    total: int = 0

    def entries(self, block: Numbers) -> tuple[Numbers, Positions]:
        """Each position of a block as often as it has buckets, and these."""
        sizes = self.own_starts[block + 1] - self.own_starts[block]
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1] if len(ends) else 0) + np.repeat(self.own_starts[block] - ends + sizes, sizes)
        return np.repeat(block, sizes), self.own_buckets[places]

    def nearest_of(self, block: Numbers) -> Numbers:
        """The first that stays and is near, for each of a block."""
        nearest = np.full(len(block), _NOBODY)
        owners, own = self.entries(block)
        candidates = np.bincount(np.searchsorted(block, owners), self.counts[own], minlength=len(block))
        dense = candidates > max(DENSE_SHARE * self.total, BLOCK_ROWS)
        for place in np.flatnonzero(dense).tolist():
            nearest[place] = self._nearest_of_all(int(block[place]))
        few = ~dense[np.searchsorted(block, owners)] & (self.counts[own] > 0)
        owners, own = owners[few], own[few]
        starts = self.bucket_starts[own]
        for left, right in partners(owners, starts, starts + self.counts[own], of=self.members):
            pairs = np.unique(left * len(self.chosen) + right)
            left, right = np.divmod(pairs, len(self.chosen))
            near = self.alike(left, right)
            np.minimum.at(nearest, np.searchsorted(block, left[near]), right[near])
        return nearest

    def alike(self, left: Numbers, right: Numbers) -> npt.NDArray[np.bool_]:
        """Which pairs of positions are near copies."""
        return equal_numbers(self.signatures, self.chosen[left], self.chosen[right]) >= self.needed

    def _nearest_of_all(self, position: int) -> int:
        own = sketches(self.signatures, self.chosen[[position]])
        for first in range(0, self.total, CHUNK_ROWS):
            some = slice(first, min(first + CHUNK_ROWS, self.total))
            unequal = unequal_numbers(self.sketches[:, some], own)
            others = self.everyone[some][unequal <= SIGNATURE_BINS - self.needed]
            near = others[self.alike(np.full(len(others), position), others)]
            if len(near):
                return int(near[0])
        return _NOBODY

    def add(self, block: Numbers) -> None:
        """Lets a block stay."""
        owners, own = self.entries(block)
        order = np.argsort(own, kind="stable")
        owners, own = owners[order], own[order]
        is_first = np.append(True, own[1:] != own[:-1])[: len(own)]
        starts = np.flatnonzero(is_first)
        sizes = np.diff(starts, append=len(own))
        places = self.bucket_starts[own] + self.counts[own] + np.arange(len(own)) - np.repeat(starts, sizes)
        self.members[places] = owners
        self.counts[own[starts]] += sizes.astype(np.int32)
        self.everyone[self.total : self.total + len(block)] = block
        self.sketches[:, self.total : self.total + len(block)] = sketches(self.signatures, self.chosen[block])
        self.total += len(block)


def _one_by_one(staying: _Staying, block: Numbers) -> Numbers:
    """For each of a block the first of the block itself that stays and is near it, else itself."""
    stands = block.copy()
    owners, own = staying.entries(block)
    _, numbers, repeats = np.unique(own, return_inverse=True, return_counts=True)
    meets = repeats[numbers] > 1
    owners, own = owners[meets], own[meets]
    members: dict[int, list[int]] = {}
    stretches = (np.searchsorted(owners, block, side=side).tolist() for side in ("left", "right"))
    for number, (first, last) in enumerate(zip(*stretches, strict=True)):
        position, mine = int(block[number]), own[first:last].tolist()
        others = np.array(sorted({other for bucket in mine for other in members.get(bucket, ())}), np.int64)
        near = others[staying.alike(np.full(len(others), position), others)] if len(others) else others
        if len(near):
            stands[number] = near[0]
            continue
        for bucket in mine:
            members.setdefault(bucket, []).append(position)
    return stands


def _staying(signatures: Signatures, chosen: Numbers, *, threshold: float) -> _Staying:
    """Nobody yet; the buckets that each position is in, and room for them."""
    bands = []
    num_buckets = 0
    for members, borders in buckets(signatures, chosen, threshold=threshold):
        numbers = num_buckets + np.repeat(np.arange(len(borders) - 1, dtype=np.int32), np.diff(borders))
        bands.append((members.astype(np.int32), numbers, np.diff(borders)))
        num_buckets += len(borders) - 1
    totals = np.zeros(len(chosen), np.int64)
    for owners, _, _ in bands:
        totals[owners] += 1
    own_starts = np.append(0, np.cumsum(totals))
    own_buckets = np.empty(int(own_starts[-1]), np.int32)
    cursors = own_starts[:-1].copy()
    for owners, numbers, _ in bands:
        own_buckets[cursors[owners]] = numbers
        cursors[owners] += 1
    with_buckets = int(np.count_nonzero(totals))
    return _Staying(
        signatures=signatures,
        chosen=chosen,
        needed=numbers_needed(threshold),
        own_starts=own_starts,
        own_buckets=own_buckets,
        bucket_starts=np.append(0, np.cumsum(np.concatenate([sizes for _, _, sizes in bands]))),
        members=np.empty(len(own_buckets), np.int32),
        counts=np.zeros(num_buckets, np.int32),
        everyone=np.empty(with_buckets, np.int64),
        sketches=np.empty((SKETCH_WORDS, with_buckets), np.uint64),
    )
