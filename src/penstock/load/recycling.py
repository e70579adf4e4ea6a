"""New arrays in memory that is warm already.

A large array that is made for each batch costs more than what is written into it: the system takes its pages away when
it is dropped, and gives zeroed ones the next time, at about 2 ns per token of 8 bytes. Here the memory of an array is
kept when nobody holds the array any more, and the next one of that size gets it. An array that is held is never
touched, nor one of which somebody holds a part, so batches can be kept for as long as anybody likes. Arrays begin on
a cache line, which lets JAX and TensorFlow take them as they are.

Memory: at most `MOST_FREE` arrays of each size in use lately, for each of up to `MOST_SIZES` sizes.
"""

from __future__ import annotations

import math
import weakref
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["recycled_empty"]

# tf.data holds a dozen arrays of a size at a time: three fields of the batches it reads ahead and has yet to let go.
MOST_FREE = 16
MOST_SIZES = 8
# Below this malloc keeps the memory itself.
SMALLEST_BYTES = 2**16
ALIGNMENT = 64

_free: dict[int, list[npt.NDArray[np.uint8]]] = {}


def recycled_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """`np.empty`, with the memory of an array of this size that was dropped, if there is one."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    if size < SMALLEST_BYTES:
        return np.empty(shape, kind)
    free = _free.get(size)
    if free is None:
        if len(_free) >= MOST_SIZES:
            _free.clear()  # whoever still holds arrays gives them back to a list that nobody reads
        free = _free[size] = []
    try:
        memory = free.pop()
    except IndexError:  # asked for and taken in one step: threads may share this
        memory = _aligned(size)
    # A view of an array is, to numpy, one of the array behind it that has the memory, and holds only that. Over a
    # memoryview, that is this one.
    lent = np.frombuffer(memory.data, kind)
    weakref.finalize(lent, _give_back, free, memory).atexit = False
    return lent.reshape(shape)


def _aligned(size: int) -> npt.NDArray[np.uint8]:
    memory = np.empty(size + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    return memory[begin : begin + size]


def _give_back(free: list[npt.NDArray[np.uint8]], memory: npt.NDArray[np.uint8]) -> None:
    if len(free) < MOST_FREE:
        free.append(memory)
