"""Whole rows out of the maps of segments, all of them in one call.

To numpy the maps of any number of segments are one array: an entry for each byte from the lowest map on, as long as a
row, so that entries overlap. Taking some entries is copying rows, whichever segments they are of, in about the time
that memory takes and without Python's lock. Most addresses between two maps are nobody's. So entries are only ever
asked for by a segment and an offset, and whoever asks has compared the offset with the segment's length.

Rows that are read at random lie in pages that the processor has forgotten, and copying one after another waits for each
of them in turn. So the first byte of every row is read before: for these it waits together, which saves a quarter.

Memory: the rows taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack.plan import Integers

__all__ = ["Maps"]

# For so few entries numpy keeps Python's lock, unless each is a row of entries itself, which costs a tenth more.
FEW_ENTRIES = 500


class Maps:
    """The maps of some segments, which are kept as long as this is.

    Attributes:
        starts: of each map, the place at which it begins; an offset in bytes added to that is the place there.
    """

    def __init__(self, maps: Sequence[npt.NDArray[Any]]) -> None:
        self._maps, self._dtype = maps, maps[0].dtype
        addresses = np.array([tokens.ctypes.data for tokens in maps], np.int64)
        self._lowest = int(addresses.min())
        self._size = int((addresses + [tokens.nbytes for tokens in maps]).max()) - self._lowest
        self.starts: Integers = addresses - self._lowest
        self._bytes = self._entries(1)

    def take(self, places: Integers, *, row_tokens: int) -> npt.NDArray[Any]:
        """[places, tokens], a copy of the rows there."""
        self.touch(places)
        rows = self._entries(row_tokens * self._dtype.itemsize)
        taken = rows[places] if len(places) > FEW_ENTRIES else rows[:, None][places]
        return taken.view(self._dtype).reshape(-1, row_tokens)

    def touch(self, places: Integers) -> None:
        """Has the processor look up what begins at some places, all at the same time."""
        self._bytes.take(places, mode="clip")  # "raise" would compare all of them first

    def _entries(self, entry_bytes: int) -> npt.NDArray[Any]:
        """All that could be an entry of so many bytes."""
        return np.asarray(_Memory(self._maps, self._lowest, self._size, entry_bytes=entry_bytes))


class _Memory:
    """Addresses for numpy to read from; an array made of it keeps it, and it keeps the maps."""

    def __init__(self, maps: Sequence[npt.NDArray[Any]], lowest: int, size: int, *, entry_bytes: int) -> None:
        self.maps = maps
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{entry_bytes}",
            "data": (lowest, True),  # read-only
            "shape": (size - entry_bytes + 1,),
            "strides": (1,),
        }
