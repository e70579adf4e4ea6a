"""Signatures that say how much two documents have in common, from their token ids alone.

In: one flat array of ids and where each document starts. Out: 128 numbers of 16 bits per document; the share of equal
numbers in two rows estimates the Jaccard similarity of the documents' sets of 5-token shingles (standard deviation
0.035 at 0.8). A row is a pure function of its document's ids: neighbours, batch and width of the array don't matter.

How: every shingle gets a 32-bit hash, the top 7 bits of which choose a bin; each bin keeps its smallest hash (one-
permutation hashing: one hash per shingle instead of 128). A bin that no shingle reached takes the value of another, in
an order of its own that is the same for all documents (optimal densification), so that short documents compare well
too. Of the smallest hash 16 mixed bits are kept (b-bit MinHash): two different ones agree once in 65,536.

Cost: about 7 ns a token on one core; 20 bytes per token of a chunk and 4 KB per document of a group, at most 20 MB
beyond the result, however large the unit.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = [
    "MIN_NEAR_TOKENS",
    "NEAR_RULES_VERSION",
    "SHINGLE_TOKENS",
    "SIGNATURE_BINS",
    "has_signature",
    "shingle_hashes",
    "signatures",
]

NEAR_RULES_VERSION = 1
SIGNATURE_BINS = 128
SHINGLE_TOKENS = 5
# One changed token spoils five shingles: it leaves a copy of fewer than 33 tokens with a similarity below 0.7, so that
# looking for near copies of anything shorter would find little but exact ones, which are found anyway.
MIN_NEAR_TOKENS = 33

# Chosen by measurement: larger chunks leave the second-level cache, smaller ones pay for the calls.
CHUNK_TOKENS = 2**17
GROUP_DOCUMENTS = 2**12

_BIN_SHIFT = np.uint32(32 - SIGNATURE_BINS.bit_length() + 1)
_EMPTY = np.uint32(2**32 - 1)
# Odd multipliers of xxHash; the finaliser is Wellons' lowbias32. 32 bits, because numpy multiplies those 8 at a time.
_PAIR, _QUAD, _LAST = np.uint32(0x9E3779B1), np.uint32(0x85EBCA77), np.uint32(0xC2B2AE3D)
_MIX_1, _MIX_2 = np.uint32(0x7FEB352D), np.uint32(0x846CA68B)
_KEPT_BITS = np.uint32(0x27D4EB2F)


def signatures(tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint16]:
    """A row of `SIGNATURE_BINS` numbers per document; all zeros where it has fewer than `MIN_NEAR_TOKENS` tokens.

    Args:
        tokens: ids of all documents, uint16 or uint32.
        starts: [documents + 1]; document i is `tokens[starts[i]:starts[i + 1]]`.
    """
    starts = np.asarray(starts, np.int64)
    rows = np.zeros((max(len(starts) - 1, 0), SIGNATURE_BINS), np.uint16)
    for first in range(0, len(rows), GROUP_DOCUMENTS):
        borders = starts[first : first + GROUP_DOCUMENTS + 1]
        smallest = _smallest_hashes(tokens, borders)
        long_enough = np.flatnonzero(np.diff(borders) >= MIN_NEAR_TOKENS)
        rows[first + long_enough] = _kept_bits(_densified(smallest[long_enough]))
    return rows


def has_signature(rows: npt.NDArray[np.uint16]) -> npt.NDArray[np.bool_]:
    """Which rows belong to documents long enough to have one; kept numbers are never 0."""
    present: npt.NDArray[np.bool_] = rows[:, 0] != 0
    return present


def _smallest_hashes(tokens: npt.NDArray[Any], borders: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
    """[documents, bins]: the smallest shingle hash of each bin, `_EMPTY` where there is none."""
    count = len(borders) - 1
    smallest = np.full((count + 1) * SIGNATURE_BINS, _EMPTY)  # the last row is for what begins in two documents
    # Positions in turns: where a shingle of a document begins, and its last four, which have no room for one.
    ends = np.maximum(borders[1:] - (SHINGLE_TOKENS - 1), borders[:-1])
    turns = np.append(np.stack([borders[:-1], ends], axis=1).reshape(-1), borders[-1])
    rows = np.stack([np.arange(count), np.full(count, count)], axis=1).reshape(-1) * SIGNATURE_BINS
    stop = int(borders[-1]) - (SHINGLE_TOKENS - 1)
    for low in range(int(borders[0]), stop, CHUNK_TOKENS):
        high = min(low + CHUNK_TOKENS, stop)
        hashes = shingle_hashes(tokens[low : high + SHINGLE_TOKENS - 1])
        first, last = np.searchsorted(turns, low, side="right") - 1, np.searchsorted(turns, high, side="left")
        lengths = np.diff(np.clip(turns[first : last + 1], low, high))
        places = np.repeat(rows[first:last], lengths)
        places += hashes >> _BIN_SHIFT
        np.minimum.at(smallest, places, hashes)
    return smallest.reshape(-1, SIGNATURE_BINS)[:-1]


def shingle_hashes(tokens: npt.NDArray[Any]) -> npt.NDArray[np.uint32]:
    """The hash of each run of five tokens, by pairs and pairs of pairs; everything modulo 2**32."""
    wide = tokens.astype(np.uint32)
    pairs = wide[:-1] * _PAIR
    pairs += wide[1:]
    hashes = pairs[:-3] * _QUAD
    hashes += pairs[2:-1]
    hashes *= _LAST
    hashes += wide[4:]
    shifted = hashes >> np.uint32(16)
    hashes ^= shifted
    hashes *= _MIX_1
    hashes ^= np.right_shift(hashes, np.uint32(15), out=shifted)
    hashes *= _MIX_2
    hashes ^= np.right_shift(hashes, np.uint32(16), out=shifted)
    return hashes


def _probes() -> npt.NDArray[np.intp]:
    """[turns, bins]: whom an empty bin asks, turn after turn; each bin has a permutation of its own."""
    numbers = np.arange(SIGNATURE_BINS * SIGNATURE_BINS, dtype=np.uint32) * _PAIR
    numbers ^= numbers >> np.uint32(16)
    numbers *= _MIX_1
    numbers ^= numbers >> np.uint32(15)
    numbers *= _MIX_2
    numbers ^= numbers >> np.uint32(16)
    return np.argsort(numbers.reshape(SIGNATURE_BINS, SIGNATURE_BINS), axis=0, kind="stable")


_PROBES = _probes()


def _densified(smallest: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint32]:
    """Every bin filled; each document has at least one to begin with."""
    known = smallest.reshape(-1)
    dense = known.copy()
    places = np.flatnonzero(known == _EMPTY)
    bins = places % SIGNATURE_BINS
    for probes in _PROBES:
        if not len(places):
            break
        found = known.take(places - bins + probes.take(bins))
        dense[places] = found
        missing = np.flatnonzero(found == _EMPTY)
        places, bins = places.take(missing), bins.take(missing)
    return dense.reshape(smallest.shape)


def _kept_bits(smallest: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint16]:
    """16 bits of each hash. The smallest of many are all small: they are spread before the top bits are taken."""
    kept = np.maximum((smallest * _KEPT_BITS) >> np.uint32(16), np.uint32(1))
    return np.asarray(kept, np.uint16)
