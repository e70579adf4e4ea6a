"""Whole rows out of the maps of segments, all of them in one call.

To numpy the maps of any number of segments are one array: an entry for each byte from the lowest map on, as long as a
row, so that entries overlap. Taking some entries is copying rows, whichever segments they are of, in about the time
that memory takes and without Python's lock. Most addresses between two maps are nobody's. So entries are only ever
asked for by a segment and an offset, and whoever asks has compared the offset with the segment's length.

Memory: the rows taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack.plan import Integers

__all__ = ["MappedRows"]

# For so few entries numpy keeps Python's lock, unless each is a row of entries itself, which costs a tenth more.
FEW_ENTRIES = 500


class MappedRows:
    """All that could be a row of so many bytes in some maps, which are kept as long as this is.

    Attributes:
        starts: of each map, the entry at its begin; an offset in bytes added to that is the entry there.
    """

    def __init__(self, maps: Sequence[npt.NDArray[Any]], *, row_tokens: int) -> None:
        self._dtype, self._row_tokens = maps[0].dtype, row_tokens
        row_bytes = row_tokens * self._dtype.itemsize
        addresses = np.array([tokens.ctypes.data for tokens in maps], np.int64)
        lowest = int(addresses.min())
        size = int((addresses + [tokens.nbytes for tokens in maps]).max()) - lowest
        self.starts: Integers = addresses - lowest
        self._entries = np.asarray(_Memory(maps, lowest, entries=size - row_bytes + 1, entry_bytes=row_bytes))

    def take(self, entries: Integers) -> npt.NDArray[Any]:
        """[entries, tokens], a copy."""
        source = self._entries if len(entries) > FEW_ENTRIES else self._entries[:, None]
        return source[entries].view(self._dtype).reshape(-1, self._row_tokens)


class _Memory:
    """Addresses for numpy to read from; an array made of it keeps it, and it keeps the maps."""

    def __init__(self, maps: Sequence[npt.NDArray[Any]], lowest: int, *, entries: int, entry_bytes: int) -> None:
        self.maps = maps
        self.__array_interface__ = {
            "version": 3,
            "typestr": f"|V{entry_bytes}",
            "data": (lowest, True),  # read-only
            "shape": (entries,),
            "strides": (1,),
        }
