"""Tasks of the verify benchmark: a whole `verify` on one core, and what it can't do without.

The ceilings see the same bytes: the tokens of the store's segments. Rates are of those bytes on every side, so that a
ratio is one of times.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from penstock.hardware import peak_memory_bytes
from penstock.store import open_store
from penstock.store.layout import SEGMENTS, block_checksums
from penstock.store.payload import WINDOW_BYTES
from penstock.store.verification import examine

__all__ = ["checksum_in_memory", "read_files", "verify_store"]


def verify_store(*, store: str, quick: bool) -> dict[str, Any]:
    """`verify` with one worker, of a store whose files are in the page cache."""
    tokens_bytes = sum(path.stat().st_size for path in _token_files(store))
    started = time.process_time()
    result = examine(Path(store), quick=quick)
    processor_seconds = time.process_time() - started
    return {
        "problems": len(result.problems),
        "seconds": result.seconds,
        "tokens_megabytes": tokens_bytes / 1e6,
        "megabytes_per_second": tokens_bytes / result.seconds / 1e6,
        "megabytes_per_processor_second": tokens_bytes / processor_seconds / 1e6,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def checksum_in_memory(*, store: str) -> dict[str, Any]:
    """One pass of the checksum, block by block, over each segment while it is in memory; reading isn't counted."""
    seconds, num_bytes = 0.0, 0
    for path in _token_files(store):
        content = path.read_bytes()
        started = time.perf_counter()
        block_checksums(content)
        seconds += time.perf_counter() - started
        num_bytes += len(content)
    return {"megabytes_per_second": num_bytes / seconds / 1e6}


def read_files(*, store: str) -> dict[str, Any]:
    """The same files from the page cache into one buffer, and nothing done with them."""
    buffer = bytearray(WINDOW_BYTES)
    num_bytes = 0
    paths = _token_files(store)
    started = time.perf_counter()
    for path in paths:
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                num_bytes += count
    return {"megabytes_per_second": num_bytes / (time.perf_counter() - started) / 1e6}


def _token_files(store: str) -> list[Path]:
    with open_store(store) as opened:
        return [opened.path / SEGMENTS / f"{entry.name}.tokens" for entry in opened.manifest.segments]
