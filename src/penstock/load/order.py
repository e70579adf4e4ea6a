"""Which row stands at which position: a pure function of seed and position.

Position p lies in pass p // N, at place p % N; the row is a keyed permutation of the place. The permutation is a
Feistel network on the smallest even or odd number of bits that holds N, walked until it lands below N (fewer than two
steps on average). It costs about 0.1 µs per row in blocks of thousands, needs no memory, and row p of a pass of 10^12
rows is as cheap as the first.

`Shuffled` and `Sequential` are computed and store nothing. `GroupedByLength`, `Curriculum` and `BySegments` keep one
number per row.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, nearest_first
from penstock.hashing import strong_hash
from penstock.pack import Plan
from penstock.pack.plan import is_whole_number

__all__ = [
    "WINDOW_SEGMENTS",
    "BySegments",
    "Curriculum",
    "GroupedByLength",
    "InBlocks",
    "Order",
    "Sequential",
    "Shuffled",
    "mixed_words",
    "order_named",
    "permuted",
    "refuse_seed",
    "row_lengths",
    "row_segments",
    "rows_at",
    "shuffle_quality",
    "window_of",
]

ROUNDS = 6
ORDER_NAMES = ("sequential", "shuffle", "group_by_length", "curriculum", "segments")
MOST_GROUPS_REMEMBERED = 8
WINDOW_SEGMENTS = 8
RUN_SEGMENTS = 4
MOST_PASSES_REMEMBERED = 8
LENGTHS_AT_ONCE = 2**16
BLOCK_ROWS = 2**15

Rows = npt.NDArray[np.int64]
Words = npt.NDArray[np.uint64]

# Multipliers of the SplitMix64 finaliser (Steele, Lea, Flood 2014), whose mixing is well studied.
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1


def mixed_words(words: Words) -> Words:
    """Each word well mixed: the finaliser of SplitMix64."""
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))


def _round_keys(seed: int, passes: npt.NDArray[np.int64]) -> Words:
    """[ROUNDS, passes] keys, from seed and pass; the seed is a Python integer, so that any size of it is taken."""
    start = mixed_words(np.array([(seed * _GOLDEN + 1) & _MASK_64], np.uint64)) ^ passes.astype(np.uint64)
    steps = np.arange(1, ROUNDS + 1, dtype=np.uint64) * np.uint64(_GOLDEN)
    return mixed_words(mixed_words(start) + steps[:, None])


def permuted(places: npt.ArrayLike, *, size: int, seed: int, pass_number: int) -> npt.NDArray[np.int64]:
    """The rows at some places of one pass: a bijection of range(size) for each (seed, pass)."""
    values = np.asarray(places, np.uint64)
    keys = _round_keys(seed, np.array([pass_number]))
    return _walked(values.reshape(-1), keys, size=size).reshape(values.shape)


def _walked(values: Words, keys: Words, *, size: int) -> npt.NDArray[np.int64]:
    """The permutation of each value; `keys` are [ROUNDS, 1] for all values or [ROUNDS, values]."""
    if size <= 1:
        return np.zeros(values.shape, np.int64)
    bits = max((size - 1).bit_length(), 2)
    tables = _tables(bits, keys) if keys.shape[1] == 1 and len(values) >= 4 << (bits - bits // 2) else None
    result = _feistel(values, bits, keys, tables)
    outside = np.flatnonzero(result >= size)
    while len(outside):
        walked = _feistel(result[outside], bits, keys if keys.shape[1] == 1 else keys[:, outside], tables)
        result[outside] = walked
        outside = outside[walked >= size]
    return result.view(np.int64)


def _feistel(values: Words, bits: int, keys: Words, tables: list[Words] | None = None) -> Words:
    """Unbalanced Feistel: the halves keep their widths and take turns, so an odd number of bits works too."""
    low_bits = bits // 2
    masks = np.uint64(2 ** (bits - low_bits) - 1), np.uint64(2**low_bits - 1)
    changed, other = values >> np.uint64(low_bits), values & masks[1]
    for number in range(ROUNDS):
        if tables is None:
            changed = changed ^ (mixed_words(other + keys[number]) & masks[number % 2])
        else:
            changed = changed ^ tables[number].take(other.view(np.int64))
        changed, other = other, changed
    return (changed << np.uint64(low_bits)) | other


def _tables(bits: int, keys: Words) -> list[Words]:
    """What each round makes of each value a half can have. The halves are so narrow that for thousands of values
    looking up takes a quarter of the time that mixing does."""
    low_bits = bits // 2
    widths = (low_bits, bits - low_bits)
    return [
        mixed_words(np.arange(2 ** widths[number % 2], dtype=np.uint64) + keys[number])
        & np.uint64(2 ** widths[1 - number % 2] - 1)
        for number in range(ROUNDS)
    ]


def rows_at(start: int, count: int, *, num_rows: int, seed: int, shuffle: bool) -> npt.NDArray[np.int64]:
    """The rows at positions start .. start + count; a stretch may straddle passes, nothing is dropped or padded."""
    pass_number, first = divmod(start, num_rows)
    if not shuffle:
        return np.arange(first, first + count, dtype=np.int64) % num_rows
    if count <= num_rows:  # one pass, or the end of one and the begin of the next
        here = min(count, num_rows - first)
        parts = [permuted(np.arange(first, first + here), size=num_rows, seed=seed, pass_number=pass_number)]
        if here < count:
            behind = np.arange(count - here)
            parts.append(permuted(behind, size=num_rows, seed=seed, pass_number=pass_number + 1))
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
    # A block of a small plan holds thousands of passes: one call for all of them, not one for each.
    passes, places = np.divmod(np.arange(first, first + count, dtype=np.int64), num_rows)
    keys = _round_keys(seed, pass_number + np.arange(int(passes[-1]) + 1))
    return _walked(places.astype(np.uint64), keys[:, passes], size=num_rows)


class Order(Protocol):
    """Which row stands at which position: each row once per pass. Pure: the same answer to the same question."""

    @property
    def num_rows(self) -> int:
        """Rows per pass."""

    @property
    def identity(self) -> dict[str, Any]:
        """What decides the answers; part of every saved position."""

    def rows_at(self, start: int, count: int) -> Rows:
        """The rows at positions start .. start + count, which may straddle passes."""


@dataclass(frozen=True, kw_only=True)
class Sequential:
    """The plan's own order, again and again."""

    num_rows: int

    @property
    def identity(self) -> dict[str, Any]:
        """See `Order`."""
        return {"name": "sequential"}

    def rows_at(self, start: int, count: int) -> Rows:
        """See `Order`."""
        return rows_at(start, count, num_rows=self.num_rows, seed=0, shuffle=False)


@dataclass(frozen=True, kw_only=True)
class Shuffled:
    """Another keyed permutation each pass."""

    num_rows: int
    seed: int

    def __post_init__(self) -> None:
        refuse_seed(self.seed)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Order`."""
        return {"name": "shuffle", "seed": self.seed}

    def rows_at(self, start: int, count: int) -> Rows:
        """See `Order`."""
        return rows_at(start, count, num_rows=self.num_rows, seed=self.seed, shuffle=True)


class InBlocks:
    """An order that is worked out a block at a time, the latest block remembered: numpy costs a microsecond per call
    however little it is asked, and a permutation takes hundreds of calls. 0.05 µs a row where a stretch of a thousand
    rows takes 0.5. Memory: one block, 256 KiB."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._latest: tuple[int, Rows] = (-1, np.empty(0, np.int64))
        self._working = threading.Lock()  # threads that share an order need the same block at the same time

    @property
    def num_rows(self) -> int:
        """See `Order`."""
        return self._order.num_rows

    @property
    def identity(self) -> dict[str, Any]:
        """See `Order`."""
        return self._order.identity

    def rows_at(self, start: int, count: int) -> Rows:
        """See `Order`."""
        parts, position, end = [np.empty(0, np.int64)], start, start + count
        while position < end:
            block, offset = divmod(position, BLOCK_ROWS)
            part = self._block(block)[offset : offset + end - position]
            parts.append(part)
            position += len(part)
        return parts[1] if len(parts) == 2 else np.concatenate(parts)

    def _block(self, block: int) -> Rows:
        with self._working:
            number, rows = self._latest
            if number != block:
                rows = self._order.rows_at(block * BLOCK_ROWS, BLOCK_ROWS)
                rows.flags.writeable = False
                self._latest = block, rows
            return rows


class GroupedByLength:
    """Rows of like length stand together, in another arrangement each pass.

    The shuffled pass is cut into groups of `group_rows` (some tens of batches), each sorted by length, longest first:
    batches waste little on padding, and neighbours still come from all over the store. A group is worked out when it is
    met (its sort costs about 0.1 µs a row) and the last few are remembered.
    """

    def __init__(self, lengths: npt.ArrayLike, *, seed: int, group_rows: int = 2048) -> None:
        self._lengths = _rank_array(lengths, "lengths")
        refuse_seed(seed)
        if not is_whole_number(group_rows) or group_rows < 1:
            raise ConfigError(f"a group of {group_rows!r} rows is impossible", hint="choose some tens of batches")
        self.seed, self.group_rows = seed, group_rows
        self._digest = digest_of_ranks(self._lengths)
        self._groups: dict[tuple[int, int], Rows] = {}

    @property
    def num_rows(self) -> int:
        """See `Order`."""
        return len(self._lengths)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Order`."""
        return {
            "name": "group_by_length",
            "seed": self.seed,
            "group_rows": self.group_rows,
            "lengths": self._digest,
        }

    def rows_at(self, start: int, count: int) -> Rows:
        """See `Order`."""
        parts, position, end = [np.empty(0, np.int64)], start, start + count
        while position < end:
            pass_number, place = divmod(position, self.num_rows)
            group, offset = divmod(place, self.group_rows)
            rows = self._group(pass_number, group)[offset : offset + end - position]
            parts.append(rows)
            position += len(rows)
        return np.concatenate(parts)

    def _group(self, pass_number: int, group: int) -> Rows:
        found = self._groups.get((pass_number, group))
        if found is None:
            first = group * self.group_rows
            places = np.arange(first, min(first + self.group_rows, self.num_rows))
            rows = permuted(places, size=self.num_rows, seed=self.seed, pass_number=pass_number)
            found = rows[np.argsort(-self._lengths[rows], kind="stable")]
            if len(self._groups) >= MOST_GROUPS_REMEMBERED:
                self._groups = {}
            self._groups[pass_number, group] = found
        return found


class Curriculum:
    """Lowest rank first, every pass; rows of equal rank in an order drawn by the seed. 8 bytes of memory per row."""

    def __init__(self, ranks: npt.ArrayLike, *, seed: int) -> None:
        checked = _rank_array(ranks, "ranks")
        refuse_seed(seed)
        self.seed = seed
        self._digest = digest_of_ranks(checked)
        drawn = permuted(np.arange(len(checked)), size=len(checked), seed=seed, pass_number=0)
        self._order: Rows = np.lexsort((drawn, checked))

    @property
    def num_rows(self) -> int:
        """See `Order`."""
        return len(self._order)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Order`."""
        return {"name": "curriculum", "seed": self.seed, "ranks": self._digest}

    def rows_at(self, start: int, count: int) -> Rows:
        """See `Order`."""
        places = np.arange(start % self.num_rows, start % self.num_rows + count)
        return self._order[places % self.num_rows]


def window_of(window_segments: int) -> tuple[int, int]:
    """Segments in a run, and in a window of whole runs: above `RUN_SEGMENTS`, the next lower multiple of that."""
    run_segments = min(RUN_SEGMENTS, window_segments)
    return run_segments, window_segments - window_segments % run_segments


class BySegments:
    """Rows of a few segments at a time, in another arrangement each pass: for stores that the local cache can't hold.

    Segments are taken in the order in which rows first begin in them, and cut into runs of `RUN_SEGMENTS` neighbours:
    a row that ends in the next segment, as one does in nearly every segment, mostly finds it in its own run. Each pass
    draws the runs in another order, makes windows of them, and shuffles the rows of a window among each other.

    A row costs about as much as of `Shuffled`. Memory: 8 bytes per row, several times that while it is made (a second
    per 10 M rows).

    Args:
        segments: [rows], the segment that each row begins in; see `row_segments`.
        seed: of both draws.
        window_segments: segments in a window, at most; see `window_of`.
    """

    def __init__(self, segments: npt.ArrayLike, *, seed: int, window_segments: int = WINDOW_SEGMENTS) -> None:
        numbers = _rank_array(segments, "segments")
        refuse_seed(seed)
        if not is_whole_number(window_segments) or window_segments < 1:
            raise ConfigError(
                f"a window of {window_segments!r} segments is impossible", hint="choose 1 or more, 8 as a rule"
            )
        self.seed, self.window_segments = seed, window_segments
        self._digest = digest_of_ranks(numbers)
        _, first, which = np.unique(numbers, return_index=True, return_inverse=True)
        places = np.argsort(np.argsort(first))
        run_segments, whole_window = window_of(window_segments)
        runs = places[which] // run_segments
        self._rows: Rows = np.argsort(runs, kind="stable")  # run after run
        self._run_rows = np.bincount(runs)
        self._run_starts = np.cumsum(self._run_rows) - self._run_rows
        self._window_runs = whole_window // run_segments
        self._passes: dict[int, tuple[Rows, Rows]] = {}

    @property
    def num_rows(self) -> int:
        """See `Order`."""
        return len(self._rows)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Order`."""
        return {
            "name": "segments",
            "seed": self.seed,
            "window_segments": self.window_segments,
            "segments": self._digest,
        }

    def rows_at(self, start: int, count: int) -> Rows:
        """See `Order`."""
        parts, position, end = [np.empty(0, np.int64)], start, start + count
        while position < end:
            pass_number, place = divmod(position, self.num_rows)
            parts.append(self._in_window(pass_number, place, end - position))
            position += len(parts[-1])
        return np.concatenate(parts)

    def _in_window(self, pass_number: int, place: int, most: int) -> Rows:
        """The rows from a place of a pass on, as far as its window goes."""
        runs, starts = self._pass(pass_number)
        window = int(np.searchsorted(starts, place, side="right")) - 1
        first, size = int(starts[window]), int(starts[window + 1] - starts[window])
        places = np.arange(place - first, min(place - first + most, size))
        drawn = permuted(places, size=size, seed=self.seed, pass_number=self._draw(pass_number, 1 + window))
        own = runs[window * self._window_runs : (window + 1) * self._window_runs]
        ends = np.cumsum(self._run_rows[own])
        which = np.searchsorted(ends, drawn, side="right")
        rows: Rows = self._rows[(self._run_starts[own] + self._run_rows[own] - ends)[which] + drawn]
        return rows

    def _pass(self, pass_number: int) -> tuple[Rows, Rows]:
        """The runs of a pass in its order, and the place at which each window begins, and the last one ends."""
        found = self._passes.get(pass_number)
        if found is None:
            size = len(self._run_rows)
            runs = permuted(np.arange(size), size=size, seed=self.seed, pass_number=self._draw(pass_number, 0))
            rows = np.add.reduceat(self._run_rows[runs], np.arange(0, size, self._window_runs))
            found = runs, np.concatenate([[0], np.cumsum(rows)])
            if len(self._passes) >= MOST_PASSES_REMEMBERED:
                self._passes = {}
            self._passes[pass_number] = found
        return found

    def _draw(self, pass_number: int, number: int) -> int:
        """A number of its own for each draw: those of a pass are its windows and, before them, their order."""
        return pass_number * (1 + -(-len(self._run_rows) // self._window_runs)) + number


def refuse_seed(seed: int) -> None:
    """Raises `ConfigError` for a seed that isn't a whole number of 64 bits, with or without sign.

    Of a longer one the rest would count for nothing: two runs of different seeds would have one order.
    """
    if not isinstance(seed, int) or isinstance(seed, bool) or not -(2**63) <= seed < 2**64:
        raise ConfigError(f"the seed {seed!r} is impossible", hint="choose a whole number from 0 to 2^64 - 1")


def _rank_array(values: npt.ArrayLike, what: str) -> npt.NDArray[Any]:
    """One finite number per row, integers as int64 and others as float64."""
    array = np.asarray(values)
    if array.ndim != 1 or not len(array) or array.dtype.kind not in "biuf":
        raise ConfigError(
            f"{what} of shape {array.shape} and type {array.dtype} can't order rows",
            hint="give one number for each row of the plan",
        )
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise ConfigError(
            f"{what} hold {int((~np.isfinite(array)).sum())} values that are no finite number",
            hint="give one finite number for each row of the plan",
        )
    return array.astype(np.float64 if array.dtype.kind == "f" else np.int64)


def digest_of_ranks(ranks: npt.NDArray[Any]) -> str:
    """A hash of the numbers and their type, the same on every machine."""
    little = np.ascontiguousarray(ranks, ranks.dtype.newbyteorder("<"))
    return strong_hash(little.view(np.uint8).data, purpose=f"penstock order {little.dtype.str}").hex()


def row_lengths(plan: Plan) -> Rows:
    """[rows], inputs of each row that are tokens and not padding; about a second per 10 M rows."""
    stretches = (
        np.arange(first, min(first + LENGTHS_AT_ONCE, plan.num_rows))
        for first in range(0, plan.num_rows, LENGTHS_AT_ONCE)
    )
    ends = [plan.spans(rows).row_ends() for rows in stretches]
    lengths: Rows = np.minimum(np.concatenate([np.empty(0, np.int64), *ends]), plan.seq_len)
    return lengths


def row_segments(plan: Plan) -> Rows:
    """[rows], number of the segment that holds each row's first token; about a second per 10 M rows."""
    stretches = (
        np.arange(first, min(first + LENGTHS_AT_ONCE, plan.num_rows))
        for first in range(0, plan.num_rows, LENGTHS_AT_ONCE)
    )
    spans = (plan.spans(rows) for rows in stretches)
    numbers = [plan.store.arrays["segment"][one.document[one.starts[:-1]]] for one in spans]
    return np.concatenate([np.empty(0, np.int64), *numbers])


def order_named(
    name: str,
    plan: Plan,
    *,
    seed: int,
    ranks: npt.ArrayLike | None = None,
    group_rows: int = 2048,
    window_segments: int = WINDOW_SEGMENTS,
) -> Order:
    """The order of that name: sequential, shuffle, group_by_length, segments, or curriculum, which needs `ranks`.

    Raises:
        ConfigError: there is no such order, or the ranks are missing or not one number per row.
    """
    if name not in ORDER_NAMES:
        raise ConfigError(f"there is no order {name!r}", hint=f"orders: {nearest_first(name, ORDER_NAMES)}")
    if name == "sequential":
        return Sequential(num_rows=plan.num_rows)
    if name == "shuffle":
        return Shuffled(num_rows=plan.num_rows, seed=seed)
    if name == "group_by_length":
        return GroupedByLength(row_lengths(plan), seed=seed, group_rows=group_rows)
    if name == "segments":
        return BySegments(row_segments(plan), seed=seed, window_segments=window_segments)
    if ranks is None:
        raise ConfigError("the order 'curriculum' needs ranks", hint="give one number for each row of the plan")
    made = Curriculum(ranks, seed=seed)
    if made.num_rows != plan.num_rows:
        raise ConfigError(
            f"{made.num_rows} ranks for {plan.num_rows} rows", hint="give one number for each row of the plan"
        )
    return made


def shuffle_quality(order: Order, *, batch_rows: int, pass_number: int = 0) -> dict[str, float]:
    """How far neighbours in the store end up apart, over one pass of an order; holds two numbers per row in memory.

    Returns:
        mean_distance: places between rows r and r + 1, as a share of the pass (1/3 where the order is random, 1/N where
            it is the store's own); in_one_batch: share of neighbours that share a batch of `batch_rows`;
        in_one_batch_if_random: what that share is in a random order.
    """
    size = order.num_rows
    if size < 2:
        return {"mean_distance": 0.0, "in_one_batch": 0.0, "in_one_batch_if_random": 0.0}
    places = np.empty(size, np.int64)
    places[order.rows_at(pass_number * size, size)] = np.arange(size)
    return {
        "mean_distance": float(np.abs(np.diff(places)).mean() / size),
        "in_one_batch": float((places[1:] // batch_rows == places[:-1] // batch_rows).mean()),
        "in_one_batch_if_random": min(1.0, (min(batch_rows, size) - 1) / (size - 1)),
    }
