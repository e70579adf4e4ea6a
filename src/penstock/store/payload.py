"""One pass over a segment: its blocks against their checksums, its documents against their hashes, its largest id.

In: the file, and where the index says documents lie in it. Out: which blocks and documents aren't what was committed.
The file passes through windows of 256 KiB, which the processor's own cache holds while they are hashed twice (windows
of 4 MiB take three times as long); about 160 ns per document come on top. Memory: 50 bytes per document of the segment.
"""

from __future__ import annotations

import io
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.hashing import TOKEN_HASH_BYTES, RunningTokenHash, token_hash
from penstock.store.layout import BLOCK_BYTES, block_checksums

__all__ = ["WINDOW_BYTES", "Ranges", "SegmentFindings", "examine_segment", "file_windows"]

WINDOW_BYTES = 4 * BLOCK_BYTES


@dataclass(frozen=True, kw_only=True)
class Ranges:
    """Stretches of a segment, in bytes, ascending, none empty, none reaching into the next; one hash for each."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]

    @classmethod
    def none(cls) -> Ranges:
        """Where the index can't be trusted, or has nothing there."""
        return cls(starts=np.empty(0, np.int64), ends=np.empty(0, np.int64))

    def positions_of(self, others: Ranges) -> npt.NDArray[np.int64] | None:
        """For each of `others` its number here; None unless all of them are here."""
        if not len(others.starts):
            return np.empty(0, np.int64)
        places = np.searchsorted(self.starts, others.starts)
        if not len(self.starts) or places[-1] == len(self.starts):
            return None
        same = (self.starts[places] == others.starts) & (self.ends[places] == others.ends)
        return places if same.all() else None


@dataclass(frozen=True, kw_only=True)
class SegmentFindings:
    """What a pass found.

    Attributes:
        bytes_read: fewer than asked for where the file ended early.
        bad_blocks: numbers of the blocks whose checksum isn't the committed one.
        largest_id: of all tokens.
        ranges: those asked about.
        hashes: [ranges, 16], the token hash of each; none where a block is bad.
    """

    bytes_read: int
    bad_blocks: list[int]
    largest_id: int
    ranges: Ranges
    hashes: npt.NDArray[np.uint8]


def file_windows(path: Path, *, window_bytes: int = WINDOW_BYTES) -> Iterator[bytes]:
    """The content of a file in windows, each full but the last. Read, not mapped: a bad sector is an `OSError`."""
    with path.open("rb", buffering=0) as file:
        while window := file.read(window_bytes):
            while len(window) < window_bytes and (more := file.read(window_bytes - len(window))):
                window += more
            yield window


def examine_segment(
    path: Path, *, num_bytes: int, dtype: np.dtype[Any], checksums: npt.NDArray[np.uint64], ranges: Ranges
) -> SegmentFindings:
    """Reads a segment once.

    Args:
        path: its file of tokens.
        num_bytes: the committed size.
        dtype: of the tokens.
        checksums: of its blocks.
        ranges: the documents in it.

    Raises:
        OSError: the file can't be read.
    """
    hasher = _PieceHasher(ranges, num_bytes)
    bad_blocks: list[int] = []
    largest_id, position = 0, 0
    for window in file_windows(path):
        window = window[: num_bytes - position]
        if not window:
            break
        first_block = position // BLOCK_BYTES
        found = block_checksums(window)
        bad = np.flatnonzero(found != checksums[first_block : first_block + len(found)])
        bad_blocks += (bad + first_block).tolist()
        if not bad_blocks and len(window) % dtype.itemsize == 0:
            largest_id = max(largest_id, int(np.frombuffer(window, dtype).max()))
            hasher.add(window, position)
        position += len(window)
    whole = position == num_bytes and not bad_blocks
    return SegmentFindings(
        bytes_read=position,
        bad_blocks=bad_blocks,
        largest_id=largest_id,
        ranges=ranges,
        hashes=hasher.hashes() if whole else np.empty((0, TOKEN_HASH_BYTES), np.uint8),
    )


class _PieceHasher:
    """Token hashes of ranges, while the segment passes in windows.

    Ranges and the gaps between them cut the segment into pieces that lie end to end, so that a window is taken apart
    by reading lengths, all in native code.
    """

    def __init__(self, ranges: Ranges, num_bytes: int) -> None:
        borders = np.sort(np.concatenate([[0, num_bytes], ranges.starts, ranges.ends]))
        self._borders = borders[np.concatenate([[True], borders[1:] != borders[:-1]])]
        self._wanted = np.searchsorted(self._borders, ranges.starts)
        self._next = 0  # the first piece that isn't finished
        self._running: RunningTokenHash | None = None  # of a piece that began in an earlier window
        self._finished: list[bytes] = []

    def add(self, window: bytes, start: int) -> None:
        """Takes the next window, which begins at byte `start`."""
        after = int(np.searchsorted(self._borders, start + len(window), side="right")) - 1
        lengths = np.diff(np.maximum(self._borders[self._next : after + 1], start)).tolist()
        read = io.BytesIO(window).read
        if self._running is not None and lengths:
            self._running.update(read(lengths.pop(0)))
            self._finished.append(self._running.digest())
            self._running = None
        self._finished.append(b"".join(map(token_hash, map(read, lengths))))
        if rest := read():
            self._running = self._running or RunningTokenHash()
            self._running.update(rest)
        self._next = after

    def hashes(self) -> npt.NDArray[np.uint8]:
        """[ranges, 16], once all windows are through."""
        pieces = np.frombuffer(b"".join(self._finished), np.uint8).reshape(-1, TOKEN_HASH_BYTES)
        return pieces[self._wanted]
