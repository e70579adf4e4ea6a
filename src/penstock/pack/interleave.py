"""Which of several sources stands at position p, by shares that are real numbers: a closed form, no table, no replay.

Two sources: the first has the share a / b, and floor((n a + b // 2) / b) of the first n positions are its own; so it
stands at n where that number grows. Its count is never more than 1/2 off its share. More sources: a binary tree of such
pairs, each counting the positions that the one above gave it. All numbers are whole ones, so every machine agrees, and
position 10^18 costs what position 0 does: about 10 ns a position and level in blocks of thousands.

How far a count is off n times its share, at any n: each pair adds at most 1/2, and what comes from above shrinks by the
share of the pair, so that a source of share s is off by at most 1/2 (1 + the sum of s / S over the pairs of shares S
above it, the top one left out). Up to `MOST_FOR_BEST_TREE` sources get the tree over sorted shares for which the
largest of these is smallest: at most 1 for all that was tried of up to four sources, at most 1.12 of up to 20. More
sources get Huffman's tree, where a node has at most the share of its parent's sibling: the worst chain then sums to the
reciprocals of Fibonacci's numbers, 1/2 x 3.36 = 1.68.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from penstock.pack.plan import Integers

__all__ = ["Interleaving"]

# With numbers below 2^31 the product of a share's numerator and a place in a block fits 63 bits.
LARGEST_NUMBER = 2**31 - 1
MOST_FOR_BEST_TREE = 32
BISECTIONS = 24


@dataclass(frozen=True, slots=True)
class _Leaf:
    source: int


@dataclass(frozen=True, slots=True)
class _Pair:
    """`part` / `whole` of the positions are the left one's, the smaller."""

    part: int
    whole: int
    left: _Node
    right: _Node

    def left_count(self, n: int) -> int:
        return (n * self.part + self.whole // 2) // self.whole

    def left_place(self, number: int) -> int:
        """Where the left one stands for the `number`-th time, counted from 0."""
        return -(-((number + 1) * self.whole - self.whole // 2) // self.part) - 1

    def right_place(self, number: int) -> int:
        return (number * self.whole + self.whole // 2) // (self.whole - self.part)


_Node = _Leaf | _Pair


class Interleaving:
    """An endless series of sources.

    Args:
        shares: of each source, any positive numbers; what counts is their proportion.
    """

    def __init__(self, shares: Mapping[int, Fraction]) -> None:
        self._root = _best_tree(shares) if len(shares) <= MOST_FOR_BEST_TREE else _huffman(shares)
        self._paths = dict(_paths(self._root, ()))

    @property
    def most_off(self) -> float:
        """How far the count of a source can be off its share, at most (see the module)."""
        return float(max((1 + sum(_below_the_top(path))) / 2 for path in self._paths.values()))

    def runs(self, start: int, count: int) -> Iterator[tuple[int, Integers, int]]:
        """Of each source that stands in positions start .. start + count: the source, at which of them (counted from
        `start`), and how often it stood before them."""
        return _runs(self._root, start, np.arange(count, dtype=np.int64))

    def counts(self, n: int) -> dict[int, int]:
        """How often each source stands in the first n positions."""
        found: dict[int, int] = {}
        waiting: list[tuple[_Node, int]] = [(self._root, n)]
        while waiting:
            node, count = waiting.pop()
            if isinstance(node, _Leaf):
                found[node.source] = count
            else:
                left = node.left_count(count)
                waiting += [(node.left, left), (node.right, count - left)]
        return found

    def place_of(self, source: int, number: int) -> int:
        """The position at which a source stands for the `number`-th time, counted from 0."""
        for pair, is_left in reversed(self._paths[source]):
            number = pair.left_place(number) if is_left else pair.right_place(number)
        return number


def _joined(one: tuple[Fraction, _Node], other: tuple[Fraction, _Node]) -> tuple[Fraction, _Node]:
    """A pair of two nodes with their shares; the smaller one on the left."""
    (small, left), (large, right) = (one, other) if one[0] <= other[0] else (other, one)
    part = (small / (small + large)).limit_denominator(LARGEST_NUMBER) or Fraction(1, LARGEST_NUMBER)
    return small + large, _Pair(part.numerator, part.denominator, left, right)


def _best_tree(shares: Mapping[int, Fraction]) -> _Node:
    """Of the trees over sorted shares, one for which the largest error bound is smallest (see the module)."""
    leaves = sorted((share, source) for source, share in shares.items())
    sizes = [float(share / leaves[-1][0]) for share, _ in leaves]
    low, high = 0.0, 1.0
    while (cuts := _cuts(sizes, high)) is None:
        low, high = high, 2 * high
    for _ in range(BISECTIONS):
        middle = (low + high) / 2
        found = _cuts(sizes, middle)
        low, high, cuts = (middle, high, cuts) if found is None else (low, middle, found)

    def built(first: int, last: int) -> tuple[Fraction, _Node]:
        if first == last:
            return leaves[first][0], _Leaf(leaves[first][1])
        cut = cuts[first, last]
        return _joined(built(first, cut), built(cut + 1, last))

    return built(0, len(leaves) - 1)[1]


def _cuts(sizes: list[float], limit: float) -> dict[tuple[int, int], int] | None:
    """Where to cut each stretch of sorted leaves so that for every leaf the sum of s / S over the pairs above it stays
    within `limit`; None where that can't be.

    `room` is how much a stretch can bear of the sum of 1 / S from above it; a leaf bears limit / s.
    """
    num, room, cuts = len(sizes), {}, {}
    for place, size in enumerate(sizes):
        room[place, place] = limit / size
    before = list(itertools.accumulate(sizes, initial=0.0))
    for width in range(2, num + 1):
        for first in range(num - width + 1):
            last = first + width - 1
            best = max((min(room[first, cut], room[cut + 1, last]), -cut) for cut in range(first, last))
            cuts[first, last] = -best[1]
            room[first, last] = best[0] - (1 / (before[last + 1] - before[first]) if width < num else 0.0)
    return cuts if room[0, num - 1] >= 0 else None


def _huffman(shares: Mapping[int, Fraction]) -> _Node:
    """Joins the two smallest until one is left; of equals, those that came first."""
    leaves = enumerate(sorted(shares.items()))
    heap: list[tuple[Fraction, int, _Node]] = [(share, order, _Leaf(source)) for order, (source, share) in leaves]
    heapq.heapify(heap)
    order = len(heap)
    while len(heap) > 1:
        (one, _, left), (other, _, right) = heapq.heappop(heap), heapq.heappop(heap)
        share, pair = _joined((one, left), (other, right))
        heapq.heappush(heap, (share, order, pair))
        order += 1
    return heap[0][2]


def _paths(node: _Node, above: tuple[tuple[_Pair, bool], ...]) -> Iterator[tuple[int, tuple[tuple[_Pair, bool], ...]]]:
    if isinstance(node, _Leaf):
        yield node.source, above
        return
    yield from _paths(node.left, (*above, (node, True)))
    yield from _paths(node.right, (*above, (node, False)))


def _below_the_top(path: tuple[tuple[_Pair, bool], ...]) -> Iterator[Fraction]:
    """The share of a leaf in each pair above it but for the top one."""
    share = Fraction(1)
    for pair, is_left in reversed(path[1:]):
        share *= Fraction(pair.part if is_left else pair.whole - pair.part, pair.whole)
        yield share


def _runs(node: _Node, start: int, places: Integers) -> Iterator[tuple[int, Integers, int]]:
    if not len(places):
        return
    if isinstance(node, _Leaf):
        yield node.source, places, start
        return
    # The whole part of n a / b at the start is Python's, of any size; from there on small numbers are enough.
    before, rest = divmod(start * node.part + node.whole // 2, node.whole)
    counted = (rest + np.arange(len(places) + 1) * node.part) // node.whole
    is_left = counted[1:] > counted[:-1]
    yield from _runs(node.left, before, places[is_left])
    yield from _runs(node.right, start - before, places[~is_left])
