"""Single figures of the load benchmark: how long it takes to go on from a far place, and to open a large store.

Each is taken once in a fresh process, imports done, because that is what a restarted training waits for.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from penstock.bench.loading import opened_plan
from penstock.load import Loader
from penstock.load.state import saved_state

__all__ = ["open_and_load", "resume_far"]


def resume_far(*, store: str, seq_len: int, batch_size: int, step: int) -> dict[str, Any]:
    """From nothing but an open plan to the batch after `step` global batches, by a state that says so."""
    with Loader(opened_plan(store, seq_len=seq_len), batch_rows=batch_size, prefetch_batches=0) as other:
        state = saved_state(step * batch_size, other.identity)
    opened = time.perf_counter()
    plan = opened_plan(store, seq_len=seq_len)
    started = time.perf_counter()
    with Loader(plan, batch_rows=batch_size) as loader:
        loader.load_state_dict(state)
        batch = next(loader)
        ended = time.perf_counter()
        if batch.position != step * batch_size:
            raise RuntimeError(f"asked for position {step * batch_size}, got {batch.position}")
    return {"seconds": ended - started, "seconds_with_opening": ended - opened}


def open_and_load(*, store: str, seq_len: int, batch_size: int, cached: bool) -> dict[str, Any]:
    """Opens a store, plans it and takes the first shuffled batch, checksums included."""
    for path in Path(store).rglob("*"):
        if path.is_file():
            _read(path) if cached else _forget(path)
    started = time.perf_counter()
    plan = opened_plan(store, seq_len=seq_len)
    planned = time.perf_counter()
    with Loader(plan, batch_rows=batch_size) as loader:
        next(loader)
        ended = time.perf_counter()
    return {"seconds": ended - started, "opening_and_planning_seconds": planned - started, "tokens": plan.num_tokens}


def _read(path: Path) -> None:
    """Brings a file into the page cache."""
    with path.open("rb", buffering=0) as file:
        buffer = bytearray(2**20)
        while file.readinto(buffer):
            pass


def _forget(path: Path) -> None:
    """Asks the kernel to drop a file from the page cache; it does so with what is on disk already."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)
