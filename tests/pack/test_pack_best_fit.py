"""Best-fit decreasing over counts, against the same done item by item."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.pack.best_fit import best_fit_decreasing


def rooms_item_by_item(sizes: list[int], capacity: int) -> list[int]:
    """The room left in each bin when every item, the largest first, goes where the least room is left."""
    rooms: list[int] = []
    for size in sorted(sizes, reverse=True):
        fitting = [number for number, room in enumerate(rooms) if room >= size]
        if fitting:
            rooms[min(fitting, key=lambda number: rooms[number])] -= size
        else:
            rooms.append(capacity - size)
    return rooms


@given(data=st.data(), capacity=st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_bins_are_as_full_as_item_by_item(data: st.DataObject, capacity: int) -> None:
    sizes = data.draw(st.lists(st.integers(1, capacity), min_size=1, max_size=120))
    bins, num_bins = best_fit_decreasing(np.array(sizes), capacity)
    filled = Counter[int]()
    for number, size in zip(bins.tolist(), sizes, strict=True):
        filled[number] += size
    assert sorted(filled) == list(range(num_bins))
    rooms = [capacity - filled[number] for number in range(num_bins)]
    assert min(rooms) >= 0
    assert sorted(rooms) == sorted(rooms_item_by_item(sizes, capacity))


@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=60))
@example(sizes=[5, 5, 5, 5])
@settings(max_examples=50, deadline=None)
def test_of_equals_the_earlier_goes_first(sizes: list[int]) -> None:
    """Among items of one size, bins never fall back to one that was opened before."""
    bins, _ = best_fit_decreasing(np.array(sizes), 9)
    again, _ = best_fit_decreasing(np.array(sizes), 9)
    assert bins.tolist() == again.tolist()
    largest = [number for number, size in zip(bins.tolist(), sizes, strict=True) if size == max(sizes)]
    assert largest == sorted(largest)


@pytest.mark.parametrize("capacity", [2**16 - 1, 2**16, 2**20])
def test_wide_bins(capacity: int) -> None:
    """Rooms that two bytes hold are sorted another way than those that they don't."""
    sizes = np.random.default_rng(capacity).integers(1, capacity + 1, 400)
    bins, num_bins = best_fit_decreasing(sizes, capacity)
    filled = np.bincount(bins, sizes, minlength=num_bins)
    assert sorted((capacity - filled).astype(int).tolist()) == sorted(rooms_item_by_item(sizes.tolist(), capacity))
