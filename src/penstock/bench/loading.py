"""Shuffled batches of rows, timed: our tasks of the load benchmark, and the ceiling.

Every task makes its loader, then takes several passes of the same number of batches and reports the rate of each pass
and the time to its first batch, which the rate leaves out. A row counts as T tokens on every side; T + 1 are read.
Nothing is done with a batch: what is measured is how fast batches can come.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.hardware import peak_memory_bytes
from penstock.load import Loader
from penstock.pack import ConcatPlan, plan_concat
from penstock.store import open_store

__all__ = ["describe_rows", "gather_with_numpy", "load_torch", "load_wire", "timed_passes", "write_stream"]

LONGEST_PASS_SECONDS = 10.0


def timed_passes(
    one_pass: Callable[[], Iterator[Any]], *, passes: int, num_batches: int, batch_tokens: int
) -> dict[str, Any]:
    """Rates of several passes. A pass ends after `num_batches`, or after 10 s where somebody is that slow."""
    first_batch_seconds: list[float] = []
    rates: list[float] = []
    counts: list[int] = []
    for _ in range(passes):
        started = time.perf_counter()
        batches = one_pass()
        next(batches)
        first = now = time.perf_counter()
        count = 0
        for _ in itertools.islice(batches, num_batches - 1):
            count += 1
            now = time.perf_counter()
            if now - first > LONGEST_PASS_SECONDS:
                break
        first_batch_seconds.append(first - started)
        rates.append(count * batch_tokens / (now - first) if count else 0.0)
        counts.append(count)
    later = sorted(rates[1:]) or rates
    return {
        "first_pass": rates[0],
        "later_passes": later[len(later) // 2],
        "first_batch_seconds": first_batch_seconds[0],
        "later_first_batch_seconds": first_batch_seconds[-1],
        "batches_timed": counts,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _plan(store: str, seq_len: int) -> ConcatPlan:
    return plan_concat(open_store(store), split="train", seq_len=seq_len)


def describe_rows(*, store: str, seq_len: int) -> dict[str, Any]:
    """Facts about the rows, and the store's width."""
    plan = _plan(store, seq_len)
    return {
        "rows": plan.num_rows,
        "tokens": plan.num_tokens,
        "dtype": plan.store.dtype.name,
        "digest": plan.store.digest,
    }


def load_wire(
    *, store: str, seq_len: int, batch_size: int, num_batches: int, passes: int, prefetch_batches: int | None
) -> dict[str, Any]:
    """`penstock.load.Loader`: tokens in store width, loss mask, cu_seqlens, in reusable buffers."""
    with Loader(_plan(store, seq_len), batch_rows=batch_size, prefetch_batches=prefetch_batches) as loader:
        return timed_passes(lambda: loader, passes=passes, num_batches=num_batches, batch_tokens=batch_size * seq_len)


def load_torch(
    *,
    store: str,
    seq_len: int,
    batch_size: int,
    num_batches: int,
    passes: int,
    prefetch_batches: int | None,
    everything: bool,
) -> dict[str, Any]:
    """`penstock.load.torch.TorchLoader`: int64 tokens; with `everything`, labels and document ids too."""
    from penstock.load.torch import TorchLoader

    plan = _plan(store, seq_len)
    with TorchLoader(plan, batch_rows=batch_size, prefetch_batches=prefetch_batches) as loader:

        def batches() -> Iterator[Any]:
            for batch in loader:
                yield (batch.tokens, batch.labels, batch.document_ids) if everything else batch.tokens

        return timed_passes(batches, passes=passes, num_batches=num_batches, batch_tokens=batch_size * seq_len)


def gather_with_numpy(
    *, stream: str, dtype: str, seq_len: int, batch_size: int, num_batches: int, passes: int, as_torch: bool
) -> dict[str, Any]:
    """The ceiling: rows of equal length out of one memory map, a stored permutation, no borders, no checksums."""
    tokens = np.memmap(stream, dtype, "r")
    rows = tokens[: len(tokens) // (seq_len + 1) * (seq_len + 1)].reshape(-1, seq_len + 1)
    out = np.empty((batch_size, seq_len + 1), dtype)
    chance = np.random.default_rng(0)

    def gathered() -> Iterator[npt.NDArray[Any]]:
        order = chance.permutation(len(rows))
        for start in range(0, len(rows) - batch_size + 1, batch_size):
            # "clip" lets numpy write straight into `out`; "raise" would go through a copy.
            yield np.take(rows, order[start : start + batch_size], axis=0, out=out, mode="clip")

    one_pass: Callable[[], Iterator[Any]] = gathered
    if as_torch:
        import torch

        def one_pass() -> Iterator[Any]:
            return (torch.from_numpy(batch.astype(np.int64)) for batch in gathered())

    return timed_passes(one_pass, passes=passes, num_batches=num_batches, batch_tokens=batch_size * seq_len)


def write_stream(*, store: str, seq_len: int, out: str) -> dict[str, Any]:
    """The tokens of our rows as one flat file in store width, from which the others make their own formats."""
    plan = _plan(store, seq_len)
    lengths = np.diff(plan.piece_starts)
    with fs.atomic_file(Path(out)) as file:
        for segment, offset, length in zip(plan.piece_segments, plan.piece_offsets, lengths, strict=True):
            file.write(plan.store.read(int(segment), int(offset), int(length)))
    return {"tokens": plan.num_tokens}
