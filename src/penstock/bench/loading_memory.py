"""What a loader takes in memory: worked out beforehand, and measured.

Worked out: the buffers that a loader asks for when it is made (nothing is filled, so nothing is taken), its threads,
what is worked out ahead, and for torch the tensors of two batches, the one in use and the one being made. Measured, on
Linux: the most that the process held above what it held with the plan open, without the pages of the store's own files.
Those are mapped, shared with every other reader and taken back by the kernel whenever it wants them; they are reported
apart.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.bench.loading import opened_plan
from penstock.load import Loader
from penstock.load.loader import LAID_OUT_ROWS, LAID_OUT_TOKENS
from penstock.pack import Plan

__all__ = ["estimated_bytes", "measure_memory"]

# Inputs, labels, positions: int64; the mask once more.
TORCH_BYTES_PER_PLACE = 8 + 8 + 8 + 1
BATCHES_ALIVE = 2
# Some fifty numbers for each span of a row while rows are worked out; a thread, its stack and its allocator.
SPAN_BYTES = 450
THREAD_BYTES = 3 * 2**19
PROCESS = Path("/proc/self")


def estimated_bytes(plan: Plan, *, batch_size: int, as_torch: bool) -> int:
    """Bytes that a loader with its own choice of prefetch takes besides the plan."""
    buffers: list[list[int]] = []  # of each, the bytes of its tokens, mask and borders

    def allocate(shape: tuple[int, ...], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        if len(shape) == 3 and dtype != np.bool_:
            buffers.append([])
        buffers[-1].append(math.prod(shape) * dtype.itemsize)
        return np.empty(shape, dtype)

    with Loader(plan, batch_rows=batch_size, allocate=allocate):
        pass
    asked = sum(map(sum, buffers))
    laid_out_rows = min(LAID_OUT_ROWS, LAID_OUT_TOKENS // plan.seq_len)
    laid_out_rows = max(laid_out_rows, buffers[0][0] // ((plan.seq_len + 1) * plan.store.dtype.itemsize))
    filling = (len(buffers) - 1) * THREAD_BYTES
    filling += int(2 * laid_out_rows * (1 + len(plan.documents) / plan.num_rows) * SPAN_BYTES)
    tensors = BATCHES_ALIVE * batch_size * (plan.seq_len + 1) * TORCH_BYTES_PER_PLACE if as_torch else 0
    return asked + filling + tensors


def measure_memory(*, store: str, seq_len: int, batch_size: int, num_batches: int, as_torch: bool) -> dict[str, Any]:
    """Takes batches and reports the estimate beside what the process held at most."""
    if not (PROCESS / "status").exists():
        return {"missing": "memory is measured through /proc, which only Linux has"}
    loader_type: Any = Loader
    if as_torch:
        from penstock.load.torch import TorchLoader as loader_type  # noqa: N813
    plan = opened_plan(store, seq_len=seq_len)
    estimate = estimated_bytes(plan, batch_size=batch_size, as_torch=as_torch)
    before = _memory()
    with contextlib.suppress(OSError):  # where the kernel doesn't let us, its mark is that of the imports, or higher
        (PROCESS / "clear_refs").write_text("5")
    own, mapped = before["RssAnon"], before["RssFile"]
    with loader_type(plan, batch_rows=batch_size) as loader:
        for _ in _fields(loader, num_batches, as_torch=as_torch):
            now = _memory()
            own, mapped = max(own, now["RssAnon"]), max(mapped, now["RssFile"])
        after = _memory()
    # The high-water mark holds what was taken and given back between two looks.
    own = max(own, after["VmHWM"] - mapped)
    return {
        "estimated_bytes": estimate,
        "measured_bytes": own - before["RssAnon"],
        "mapped_bytes": mapped - before["RssFile"],
        "process_bytes_before": before["VmRSS"],
        **_shares(),
    }


def _fields(loader: Any, num_batches: int, *, as_torch: bool) -> Iterator[Any]:
    for _ in range(num_batches):
        batch = next(loader)
        yield (batch, batch.inputs, batch.labels, batch.position_ids) if as_torch else batch


def _memory() -> dict[str, int]:
    """What the kernel says of this process's memory, in bytes."""
    lines = (line.split() for line in (PROCESS / "status").read_text().splitlines())
    return {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if words[0].startswith(("Vm", "Rss"))}


def _shares() -> dict[str, int]:
    """PSS (a page that n processes map counts as 1/n) and what is this process's alone, where the kernel tells."""
    try:
        text = (PROCESS / "smaps_rollup").read_text()
    except OSError:
        return {}
    sizes = {words[0].rstrip(":"): int(words[1]) * 1024 for words in map(str.split, text.splitlines()[1:])}
    return {"pss_bytes": sizes["Pss"], "private_bytes": sizes["Private_Clean"] + sizes["Private_Dirty"]}
