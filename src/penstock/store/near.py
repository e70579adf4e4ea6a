"""Near copies: which documents resemble which, and which of them go.

In: signatures (see `signatures.py`), a row per document in canonical order. Out: pairs, exclusions, leaks. Two
documents are near copies when at least `threshold` of their signatures' numbers are equal. Nothing else counts, so what
`near_exclusions` leaves, `leaking_pairs` never finds.

How candidates are found: a row is cut into 64 bands of 2 numbers, and documents with an equal band meet in a bucket.
Rows with at most k unequal numbers have at least 64 - k bands in common, so it is enough that each document goes into
the k + 1 rarest of its buckets, in an order of buckets that is the same for all (prefix filtering of set similarity
joins): every pair at or above a threshold over 0.5 still meets, and the huge buckets of a licence text that many
unrelated files begin with are left alone. A bucket of one leads nowhere and isn't kept.

Greedy exclusion compares a document only with those that stay, so a cluster of near equal documents costs one
comparison each, and equal signatures are taken together first. Documents that all share more than half of their text,
yet too little to be near copies, are what stays expensive: each is compared with all before it.

Measured on one core, a million documents: 6 s where nothing is alike or all is equal, 30 s where every document has a
near copy. Memory beyond the signatures: 64 bytes per document, and up to 500 for documents that have near copies.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.store.signatures import (
    MIN_NEAR_TOKENS,
    NEAR_RULES_VERSION,
    SIGNATURE_BINS,
    has_signature,
    signatures,
)

__all__ = [
    "MIN_NEAR_TOKENS",
    "NEAR_RULES_VERSION",
    "NEAR_THRESHOLD",
    "SIGNATURE_BINS",
    "cluster_figures",
    "leaking_pairs",
    "near_exclusions",
    "near_pairs",
    "signatures",
]

# With 5 % of the lines replaced, real code keeps a similarity of 0.88 on average, one file in a hundred less than 0.78:
# at 0.8 one such copy in 25 would be missed, at 0.7 one in 800 is. It is also the value The Stack was made with.
NEAR_THRESHOLD = 0.7

BAND_BINS = 2
BANDS = SIGNATURE_BINS // BAND_BINS
CHUNK_ROWS = 2**14
CHUNK_PAIRS = 2**16
MAX_COUNTER_BITS = 26
CLUSTER_SIZES = {"1": 1, "2": 2, "3-5": 5, "6-10": 10, "11-100": 100}

Signatures = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.int64]


def near_pairs(signatures: Signatures, *, threshold: float = NEAR_THRESHOLD) -> tuple[Numbers, Numbers, Any]:
    """All pairs i < j at or above the threshold, in order, with their estimated similarity (float32).

    As many as there are: n equal documents make n x (n - 1) / 2.
    """
    chosen = np.flatnonzero(has_signature(signatures))
    found = [np.empty((0, 3), np.int64)]
    for members, borders in _buckets(signatures, chosen, threshold=threshold):
        ends = np.repeat(borders[1:], np.diff(borders))
        for left, right in _partners(members, np.arange(1, len(members) + 1), ends):
            found.append(_near_ones(signatures, chosen[left], chosen[right], threshold=threshold))
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[:, 0], pairs[:, 1], (pairs[:, 2] / SIGNATURE_BINS).astype(np.float32)


def leaking_pairs(
    signatures: Signatures,
    split: npt.NDArray[Any],
    kept: npt.NDArray[np.bool_],
    *,
    threshold: float = NEAR_THRESHOLD,
    most: int = 100,
) -> list[tuple[int, int, float]]:
    """Pairs i < j of kept documents in different splits at or above the threshold; the search ends at `most`."""
    chosen = np.flatnonzero(kept & has_signature(signatures))
    found = np.empty((0, 3), np.int64)
    for members, borders in _buckets(signatures, chosen, threshold=threshold):
        if not len(members):
            continue
        bucket = np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        own_split = split[chosen[members]].astype(np.int64)
        order = np.lexsort((own_split, bucket))
        members, own_split = members[order], own_split[order]
        # Partners are those of the bucket in a later split: from the end of one's own run to the end of the bucket.
        is_last = np.append((bucket[1:] != bucket[:-1]) | (own_split[1:] != own_split[:-1]), True)
        run_ends = np.flatnonzero(is_last) + 1
        first = np.repeat(run_ends, np.diff(run_ends, prepend=0))
        for left, right in _partners(members, first, np.repeat(borders[1:], np.diff(borders))):
            some = _near_ones(signatures, chosen[left], chosen[right], threshold=threshold)
            found = np.unique(np.concatenate([found, some]), axis=0)[:most]
            if len(found) >= most:
                return _listed(found)
    return _listed(found)


def near_exclusions(
    signatures: Signatures,
    split: npt.NDArray[Any],
    eligible: npt.NDArray[np.bool_],
    *,
    threshold: float = NEAR_THRESHOLD,
) -> tuple[npt.NDArray[np.bool_], Numbers]:
    """Which eligible documents go, and for each document the one that stands for it (itself unless it goes).

    In the order (most protected split first, then canonical number) a document stays unless it is a near copy of one
    that stays already; the first such stands for it. So no two that stay are near copies, and whatever goes is a near
    copy of what stands for it, never a copy of a copy.

    Args:
        signatures: [documents, bins].
        split: [documents], larger is more protected.
        eligible: [documents], those still kept; the others are neither compared nor excluded.
        threshold: share of equal numbers from which two documents are near copies.
    """
    chosen = np.flatnonzero(eligible & has_signature(signatures))
    chosen = chosen[np.argsort(-split[chosen].astype(np.int64), kind="stable")]
    leaders = _equal_to(signatures, chosen)
    leading = np.flatnonzero(leaders == np.arange(len(chosen)))
    stands = np.arange(len(chosen))
    stands[leading] = leading[_greedy(signatures, chosen[leading], threshold=threshold)]
    stands = stands[leaders]  # what equals an excluded document goes for the same reason
    representative = np.arange(len(signatures))
    representative[chosen] = chosen[stands]
    return representative != np.arange(len(signatures)), representative


def cluster_figures(
    representative: Numbers, excluded: npt.NDArray[np.bool_], *, eligible: npt.NDArray[np.bool_] | None = None
) -> dict[str, Any]:
    """Clusters of near copies: how many, the largest, and how many there are of which size; 1 is a document alone.

    Args:
        representative: the document that stands for each, as `near_exclusions` gives it.
        excluded: which of them go.
        eligible: leaves the others out of the count of documents that are alone.
    """
    counted = np.ones(len(excluded), np.bool_) if eligible is None else eligible | excluded
    sizes = np.bincount(representative[counted], minlength=1)
    sizes = sizes[sizes > 0]
    classes = np.searchsorted(list(CLUSTER_SIZES.values()), sizes)
    counts = np.bincount(classes, minlength=len(CLUSTER_SIZES) + 1).tolist()
    return {
        "clusters": int((sizes > 1).sum()),
        "excluded": int(excluded.sum()),
        "largest": int(sizes.max(initial=0)),
        "sizes": dict(zip([*CLUSTER_SIZES, "more"], counts, strict=True)),
    }


def _numbers_needed(threshold: float) -> int:
    """How many equal numbers make a near copy."""
    if not 0.5 < threshold <= 1:
        raise ConfigError(
            f"a near-copy threshold of {threshold:g} is not over 0.5 and at most 1",
            hint=f"the default is {NEAR_THRESHOLD:g}; below 0.5 files that share a licence text would be near copies",
        )
    return int(np.ceil(round(threshold * SIGNATURE_BINS, 6)))


def _buckets(signatures: Signatures, chosen: Numbers, *, threshold: float) -> Iterator[tuple[Numbers, Numbers]]:
    """For each band the positions in `chosen` that share a bucket, bucket by bucket, ascending, and the borders.

    A position is in the rarest of its buckets only, as many as it takes for near copies to meet; see above.
    """
    words = _words(signatures, np.uint32)
    shared = _shared_bands(words, chosen, unequal=SIGNATURE_BINS - _numbers_needed(threshold))
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
    shared = np.zeros(levels.shape, np.bool_)
    for first in range(0, len(chosen), CHUNK_ROWS):
        some = levels[first : first + CHUNK_ROWS]
        # Levels of different bands may be equal: then the band decides, so that the order is one and the same for all.
        ranks = some.astype(np.uint16) * BANDS + np.arange(BANDS, dtype=np.uint16)
        limits = np.partition(ranks, unequal, axis=1)[:, unequal, None] if unequal < BANDS else ranks.max()
        can_match = (some > 0).sum(axis=1) >= BANDS - unequal
        shared[first : first + CHUNK_ROWS] = (ranks <= limits) & (some > 0) & can_match[:, None]
    return shared


def _partners(members: Numbers, first: Numbers, last: Numbers) -> Iterator[tuple[Numbers, Numbers]]:
    """Pairs of each member with members[first:last] of its own, in runs of about `CHUNK_PAIRS`."""
    counts = last - first
    totals = np.cumsum(counts)
    done, taken = 0, 0
    while done < len(members):
        stop = max(int(np.searchsorted(totals, taken + CHUNK_PAIRS, side="right")), done + 1)
        own = counts[done:stop]
        offsets = np.arange(totals[stop - 1] - taken) - np.repeat(totals[done:stop] - own - taken, own)
        yield np.repeat(members[done:stop], own), members[np.repeat(first[done:stop], own) + offsets]
        done, taken = stop, int(totals[stop - 1])


def _near_ones(signatures: Signatures, left: Numbers, right: Numbers, *, threshold: float) -> Numbers:
    """[pairs, 3]: the smaller document, the larger, and how many numbers are equal, for those that have enough."""
    pairs = np.unique(np.sort(np.stack([left, right], axis=1), axis=1), axis=0)
    equal = np.concatenate(
        [
            (signatures[some[:, 0]] == signatures[some[:, 1]]).sum(axis=1)
            for some in (pairs[first : first + CHUNK_ROWS] for first in range(0, max(len(pairs), 1), CHUNK_ROWS))
        ]
    )
    return np.column_stack([pairs, equal])[equal >= _numbers_needed(threshold)]


def _listed(pairs: Numbers) -> list[tuple[int, int, float]]:
    return [(left, right, equal / SIGNATURE_BINS) for left, right, equal in pairs.tolist()]


def _equal_to(signatures: Signatures, chosen: Numbers) -> Numbers:
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


def _greedy(signatures: Signatures, chosen: Numbers, *, threshold: float) -> Numbers:
    """For each position in `chosen` the first position that stays and is near it, itself where there is none."""
    own_starts, own_buckets, bucket_starts = _memberships(signatures, chosen, threshold=threshold)
    stands = np.arange(len(chosen))
    staying = np.empty(int(bucket_starts[-1]), np.int32)  # those of each bucket that stay, from its start on
    num_staying = np.zeros(len(bucket_starts) - 1, np.int32)
    needed = _numbers_needed(threshold)
    compared = np.flatnonzero(np.diff(own_starts))
    ranges = zip(compared.tolist(), own_starts[compared].tolist(), own_starts[compared + 1].tolist(), strict=True)
    for position, start, stop in ranges:
        buckets = own_buckets[start:stop]
        starts, counts = bucket_starts[buckets], num_staying[buckets]
        if counts.any():
            near = _first_near(signatures, chosen, position, _filled(staying, starts, counts), needed=needed)
            if near is not None:
                stands[position] = near
                continue
        staying[starts + counts] = position
        num_staying[buckets] = counts + 1
    return stands


def _memberships(
    signatures: Signatures, chosen: Numbers, *, threshold: float
) -> tuple[Numbers, npt.NDArray[np.int32], Numbers]:
    """The buckets of each position, one after another with their starts; and where the room of each bucket starts."""
    bands = []
    num_buckets = 0
    for members, borders in _buckets(signatures, chosen, threshold=threshold):
        buckets = num_buckets + np.repeat(np.arange(len(borders) - 1), np.diff(borders))
        bands.append((members.astype(np.int32), buckets.astype(np.int32), np.diff(borders)))
        num_buckets += len(borders) - 1
    totals = np.zeros(len(chosen), np.int64)
    for members32, _, _ in bands:
        totals[members32] += 1
    starts = np.append(0, np.cumsum(totals))
    own_buckets = np.empty(int(starts[-1]), np.int32)
    cursors = starts[:-1].copy()
    for members32, buckets32, _ in bands:
        own_buckets[cursors[members32]] = buckets32
        cursors[members32] += 1
    return starts, own_buckets, np.append(0, np.cumsum(np.concatenate([sizes for _, _, sizes in bands])))


def _filled(staying: npt.NDArray[np.int32], starts: Numbers, counts: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """The different positions that stay in any of some buckets, ascending."""
    if int(counts.max()) == 1:
        return np.unique(staying[starts[counts == 1]])
    ranges = zip(starts.tolist(), counts.tolist(), strict=True)
    return np.unique(np.concatenate([staying[start : start + count] for start, count in ranges]))


def _first_near(
    signatures: Signatures, chosen: Numbers, position: int, candidates: npt.NDArray[np.int32], *, needed: int
) -> int | None:
    row = signatures[chosen[position]]
    for first in range(0, len(candidates), CHUNK_ROWS):
        some = candidates[first : first + CHUNK_ROWS]
        equal = np.count_nonzero(signatures[chosen[some]] == row, axis=1)
        near = np.flatnonzero(equal >= needed)
        if len(near):
            return int(some[near[0]])
    return None


def _words(signatures: Signatures, dtype: Any) -> npt.NDArray[Any]:
    """The same rows in wider numbers, several bins each."""
    return np.ascontiguousarray(signatures, np.uint16).view(dtype)
