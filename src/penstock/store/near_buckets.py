"""Who may be a near copy of whom: candidates from signatures, without comparing everything with everything.

In: signatures and the documents that take part. Out: buckets of documents, and which pairs of them really are alike.

A row is cut into 64 bands of 2 numbers, and documents with an equal band meet in a bucket.
Rows with at most k unequal numbers have at least 64 - k bands in common, so it is enough that each document goes into
the k + 1 rarest of its buckets, in an order of buckets that is the same for all (prefix filtering of set similarity
joins): every pair at or above a threshold over 0.5 still meets, and the huge buckets of a licence text that many
unrelated files begin with are left alone. A bucket of one leads nowhere and isn't kept.

Memory: 64 bytes per document, and a table of counts of 64 bytes per document, at most 512 MB.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.store.signatures import SIGNATURE_BINS

__all__ = [
    "NEAR_THRESHOLD",
    "Numbers",
    "Signatures",
    "buckets",
    "equal_numbers",
    "equal_to",
    "near_ones",
    "numbers_needed",
    "partners",
    "sketches",
    "unequal_numbers",
]

# With 5 % of the lines replaced, real code keeps a similarity of 0.88 on average, one file in a hundred less than 0.78:
# at 0.8 one such copy in 25 would be missed, at 0.7 one in 800 is. It is also the value The Stack was made with.
NEAR_THRESHOLD = 0.7

BAND_BINS = 2
BANDS = SIGNATURE_BINS // BAND_BINS
CHUNK_ROWS = 2**14
CHUNK_PAIRS = 2**16
CHUNK_COMPARED = 2**10  # their rows stay in the caches
MAX_COUNTER_BITS = 26
SKETCH_WORDS = SIGNATURE_BINS // 32

Signatures = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]


def numbers_needed(threshold: float) -> int:
    """How many equal numbers make a near copy."""
    if not 0.5 < threshold <= 1:
        raise ConfigError(
            f"a near-copy threshold of {threshold:g} is not over 0.5 and at most 1",
            hint=f"the default is {NEAR_THRESHOLD:g}; below 0.5 files that share a licence text would be near copies",
        )
    return int(np.ceil(round(threshold * SIGNATURE_BINS, 6)))


def buckets(signatures: Signatures, chosen: Numbers, *, threshold: float) -> Iterator[tuple[Numbers, Numbers]]:
    """For each band the positions in `chosen` that share a bucket, bucket by bucket, ascending, and the borders.

    A position is in the rarest of its buckets only, as many as it takes for near copies to meet; see above.
    """
    words = _words(signatures, np.uint32)
    shared = _shared_bands(words, chosen, unequal=SIGNATURE_BINS - numbers_needed(threshold))
    for band in range(BANDS):
        positions = np.flatnonzero(shared[:, band])
        keys = words[chosen[positions], band]
        order = np.argsort(keys, kind="stable")
        keys, positions = keys[order], positions[order]
        starts = np.flatnonzero(np.append(True, keys[1:] != keys[:-1])) if len(keys) else np.empty(0, np.int64)
        sizes = np.diff(starts, append=len(keys))
        positions = positions[np.repeat(sizes > 1, sizes)]
        yield positions, np.append(0, np.cumsum(sizes[sizes > 1]))


def _shared_bands(words: npt.NDArray[np.uint32], chosen: Numbers, *, unequal: int) -> npt.NDArray[np.bool_]:
    """[chosen, bands]: the buckets that each goes into."""
    # How full a bucket is gets counted in a table of hashes: collisions make a bucket seem fuller, for all alike.
    bits = min(max(8 * len(chosen), 2).bit_length(), MAX_COUNTER_BITS)
    levels = np.empty((len(chosen), BANDS), np.uint8)
    for band in range(BANDS):
        slots = (words[chosen, band] * np.uint32(0x9E3779B1)) >> np.uint32(32 - bits)
        counts = np.bincount(slots, minlength=2**bits).astype(np.uint32)
        levels[:, band] = np.minimum(8 * np.log2(counts[slots]), 255)
    for first in range(0, len(chosen), CHUNK_ROWS):
        some = levels[first : first + CHUNK_ROWS]
        # Levels of different bands may be equal: then the band decides, so that the order is one and the same for all.
        ranks = some.astype(np.uint16) * BANDS + np.arange(BANDS, dtype=np.uint16)
        limits = np.partition(ranks, unequal, axis=1)[:, unequal, None] if unequal < BANDS else ranks.max()
        can_match = (some > 0).sum(axis=1) >= BANDS - unequal
        some[:] = (ranks <= limits) & (some > 0) & can_match[:, None]
    return levels.view(np.bool_)


def partners(
    owners: Numbers, first: Numbers, last: Numbers, *, of: npt.NDArray[Any]
) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs of each owner with each of its `of[first:last]`, in runs of about `CHUNK_PAIRS`."""
    counts = last - first
    totals = np.cumsum(counts)
    done, taken = 0, 0
    while done < len(owners):
        stop = max(int(np.searchsorted(totals, taken + CHUNK_PAIRS, side="right")), done + 1)
        own = counts[done:stop]
        offsets = np.arange(totals[stop - 1] - taken) - np.repeat(totals[done:stop] - own - taken, own)
        yield np.repeat(owners[done:stop], own), of[np.repeat(first[done:stop], own) + offsets]
        done, taken = stop, int(totals[stop - 1])


def near_ones(
    signatures: Signatures, words: npt.NDArray[np.uint64], left: Numbers, right: Numbers, *, threshold: float
) -> Numbers:
    """[pairs, 3]: the smaller document, the larger, and how many numbers are equal, for those that have enough.

    Args:
        signatures: [documents, bins].
        words: the `sketches` of all documents.
        left: documents, some pairs perhaps more than once.
        right: as many.
        threshold: of near copies.
    """
    needed = numbers_needed(threshold)
    possible = unequal_numbers(words[:, left], words[:, right]) <= SIGNATURE_BINS - needed
    left, right = left[possible], right[possible]
    codes = np.unique(np.minimum(left, right) * len(signatures) + np.maximum(left, right))
    smaller, larger = np.divmod(codes, max(len(signatures), 1))
    equal = equal_numbers(signatures, smaller, larger)
    return np.stack([smaller, larger, equal], axis=1)[equal >= needed]


def sketches(signatures: Signatures, chosen: Numbers) -> npt.NDArray[np.uint64]:
    """[words, chosen]: the lowest two bits of each number, 32 numbers to a word.

    Numbers that differ in these do differ, so a pair with too many of those needs no further look.
    """
    words = np.empty((SKETCH_WORDS, len(chosen)), np.uint64)
    shifts = np.arange(0, 64, 2, dtype=np.uint64)
    for first in range(0, len(chosen), CHUNK_COMPARED):
        some = slice(first, first + CHUNK_COMPARED)
        low = (signatures[chosen[some]] & np.uint16(3)).astype(np.uint64).reshape(-1, SKETCH_WORDS, 32)
        words[:, some] = np.bitwise_or.reduce(low << shifts, axis=2).T
    return words


def unequal_numbers(left: npt.NDArray[np.uint64], right: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint8]:
    """How many numbers differ at least, by sketches: [words, pairs] each, or one of them [words, 1]."""
    unequal = np.zeros(max(left.shape[1], right.shape[1]), np.uint8)
    for left_word, right_word in zip(left, right, strict=True):
        differing = left_word ^ right_word
        differing |= differing >> np.uint64(1)
        differing &= np.uint64(0x5555555555555555)
        unequal += np.bitwise_count(differing)
    return unequal


def equal_numbers(signatures: Signatures, left: Numbers, right: Numbers) -> Numbers:
    """How many numbers two documents' rows have in common, pair by pair."""
    equal = np.empty(len(left), np.int64)
    for first in range(0, len(left), CHUNK_COMPARED):
        some = slice(first, first + CHUNK_COMPARED)
        equal[some] = np.count_nonzero(signatures[left[some]] == signatures[right[some]], axis=1)
    return equal


def equal_to(signatures: Signatures, chosen: Numbers) -> Numbers:
    """For each position in `chosen` the first one with the same signature."""
    words = _words(signatures, np.uint64)
    multipliers = np.random.Generator(np.random.PCG64(0)).integers(0, 2**64, words.shape[1], np.uint64) | np.uint64(1)
    chunks = [chosen[first : first + CHUNK_ROWS] for first in range(0, len(chosen), CHUNK_ROWS)]
    hashes = np.concatenate([np.empty(0, np.uint64), *((words[some] * multipliers).sum(axis=1) for some in chunks)])
    _, first, inverse = np.unique(hashes, return_index=True, return_inverse=True)
    leaders: Numbers = first[inverse]
    positions = np.flatnonzero(leaders != np.arange(len(chosen)))
    for some in (positions[low : low + CHUNK_ROWS] for low in range(0, len(positions), CHUNK_ROWS)):
        differs = (words[chosen[some]] != words[chosen[leaders[some]]]).any(axis=1)
        leaders[some[differs]] = some[differs]  # two rows with one hash: left to the comparison of numbers
    return leaders


def _words(signatures: Signatures, dtype: Any) -> npt.NDArray[Any]:
    """The same rows in wider numbers, several bins each."""
    return np.ascontiguousarray(signatures, np.uint16).view(dtype)
