"""Memory is used again when nobody holds any part of it, and never before."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from penstock.load import materialise
from penstock.load.recycling import ALIGNMENT, recycled_empty

SHAPE = (64, 1031)  # a size that nobody else asks for

VIEWS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "itself": lambda array: array,
    "a slice": lambda array: array[3:, :-1],
    "another shape": lambda array: array.reshape(-1),
    "another type": lambda array: array.view(np.uint8),
    "a view of a view": lambda array: array[1:].reshape(-1)[5:],
}


@pytest.mark.parametrize("name", VIEWS)
def test_what_somebody_holds_is_never_touched(name: str) -> None:
    held = VIEWS[name](recycled_empty(SHAPE, np.int64))
    held.fill(7)
    others = [recycled_empty(SHAPE, np.int64) for _ in range(8)]
    assert not any(np.shares_memory(held, other) for other in others)
    for other in others:
        other.fill(1)
    assert (held == 7).all()


def test_what_nobody_holds_is_used_again() -> None:
    first = recycled_empty(SHAPE, np.int32)
    address = first.ctypes.data
    part = first[2:]
    del first
    second = recycled_empty(SHAPE, np.int32)
    assert second.ctypes.data != address
    del part
    assert address in {recycled_empty(SHAPE, np.int32).ctypes.data for _ in range(2)}


def test_what_jax_took_as_it_is_is_not_touched() -> None:
    jax = pytest.importorskip("jax")
    array = recycled_empty(SHAPE, np.int32)
    array.fill(7)
    taken = jax.device_put(array)
    aliased = taken.unsafe_buffer_pointer() == array.ctypes.data
    del array
    for _ in range(8):
        recycled_empty(SHAPE, np.int32).fill(1)
    assert aliased  # else this tests nothing
    assert int(taken.min()) == 7


def test_arrays_begin_on_a_cache_line() -> None:
    arrays = [recycled_empty(SHAPE, dtype) for dtype in (np.int8, np.int32, np.int64) for _ in range(3)]
    assert {array.ctypes.data % ALIGNMENT for array in arrays} == {0}


def test_positions_of_short_documents_outlive_the_next_batch() -> None:
    """They are a view of what was written; labels of the same batch have the same size."""
    shape = (128, 1024)
    borders = np.arange(0, shape[0] * shape[1] + 1, 16, dtype=np.int32)
    positions = materialise.position_ids(borders, shape)
    tokens = np.full((shape[0], shape[1] + 1), 500, np.uint16)
    labels = [materialise.labels(tokens, np.ones(shape, np.bool_)) for _ in range(4)]
    assert np.array_equal(positions.reshape(-1, 16), np.tile(np.arange(16), (len(borders) - 1, 1)))
    assert all((made == 500).all() for made in labels)
