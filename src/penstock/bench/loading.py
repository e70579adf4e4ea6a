"""Shuffled batches of rows, timed: our tasks of the load benchmark, and the ceiling.

Every task makes its loader, then takes several passes of the same number of batches and reports the rate of each pass
and the time to its first batch, which the rate leaves out. A row counts as T tokens on every side; T + 1 are read.
Nothing is done with a batch: what is measured is how fast batches can come to where a model takes them (`arrival`).
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.bench.arrival import awaited, completed, pinned, torch_device
from penstock.hardware import peak_memory_bytes
from penstock.load import Loader
from penstock.pack import Plan, make_plan, plan_concat
from penstock.store import open_store

__all__ = [
    "Timing",
    "describe_rows",
    "gather_with_numpy",
    "load_torch",
    "load_wire",
    "opened_plan",
    "stored_rows",
    "timed_passes",
    "write_rows",
]

LONGEST_PASS_SECONDS = 10.0
ROWS_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class Timing:
    """What is timed, the same for every subject of a batch size.

    Attributes:
        seq_len: T.
        batch_size: rows.
        num_batches: per pass.
        passes: the first, and later ones.
        device: `cpu` or `cuda`: where a batch has to be.
        longest_pass_seconds: a slower pass ends there.
    """

    seq_len: int
    batch_size: int
    num_batches: int
    passes: int
    device: str = "cpu"
    longest_pass_seconds: float = LONGEST_PASS_SECONDS

    def measured(self, one_pass: Callable[[], Iterator[Any]]) -> dict[str, Any]:
        """See `timed_passes`; a batch counts when it is on the device."""
        return timed_passes(
            awaited(one_pass, self.device),
            passes=self.passes,
            num_batches=self.num_batches,
            batch_tokens=self.batch_size * self.seq_len,
            longest_pass_seconds=self.longest_pass_seconds,
        )

    def measured_both(self, tokens: Callable[[], Iterator[Any]], *, end_id: int) -> dict[str, Any]:
        """Of somebody who gives int64 tokens: these, and with labels and positions made of them."""
        report = self.measured(tokens)
        whole = replace(self, passes=1).measured(lambda: (completed(batch, end_id) for batch in tokens()))
        return {**report, "complete": whole["first_pass"], "complete_batches_timed": whole["batches_timed"]}

    def passes_of(self, loader: Any, num_rows: int) -> Callable[[], Iterator[Any]]:
        """One pass after another of an endless loader; where a pass is cut short, the same rows each time."""
        if (self.num_batches + 1) * self.batch_size > num_rows:
            return lambda: iter(loader)
        start = loader.state_dict()

        def from_the_start() -> Iterator[Any]:
            loader.load_state_dict(start)
            return iter(loader)

        return from_the_start


def timed_passes(
    one_pass: Callable[[], Iterator[Any]],
    *,
    passes: int,
    num_batches: int,
    batch_tokens: int,
    longest_pass_seconds: float = LONGEST_PASS_SECONDS,
) -> dict[str, Any]:
    """Rates of several passes. A pass ends after `num_batches`, or after some seconds where somebody is that slow."""
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
            if now - first > longest_pass_seconds:
                break
        first_batch_seconds.append(first - started)
        rates.append(count * batch_tokens / (now - first) if count else 0.0)
        counts.append(count)
        if isinstance(batches, Generator):
            batches.close()  # what a peer's threads still read ahead must not slow its next pass down
    later = sorted(rates[1:]) or rates
    return {
        "first_pass": rates[0],
        "later_passes": later[len(later) // 2],
        "first_batch_seconds": first_batch_seconds[0],
        "later_first_batch_seconds": first_batch_seconds[-1],
        "batches_timed": counts,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def opened_plan(store: str, *, seq_len: int, policy: str = "concat") -> Plan:
    """The rows of a store's train split."""
    return make_plan(open_store(store), policy=policy, split="train", seq_len=seq_len)


def describe_rows(*, store: str, seq_len: int) -> dict[str, Any]:
    """Facts about the rows, the store's width, and where batches have to go on this machine."""
    plan = opened_plan(store, seq_len=seq_len)
    return {
        "rows": plan.num_rows,
        "tokens": plan.num_tokens,
        "dtype": plan.store.dtype.name,
        "digest": plan.store.digest,
        "end_id": plan.store.manifest.tokenizer["end_id"],
        "device": torch_device(),
    }


def load_wire(*, timing: dict[str, Any], store: str, policy: str, prefetch_batches: int | None) -> dict[str, Any]:
    """`penstock.load.Loader`: tokens in store width, loss mask, cu_seqlens, in reusable buffers."""
    wanted = Timing(**timing)
    plan = opened_plan(store, seq_len=wanted.seq_len, policy=policy)
    allocate = np.empty if wanted.device == "cpu" else pinned
    with Loader(plan, batch_rows=wanted.batch_size, prefetch_batches=prefetch_batches, allocate=allocate) as loader:
        batches = wanted.passes_of(loader, plan.num_rows)
        if wanted.device == "cpu":
            return wanted.measured(batches)
        return wanted.measured(lambda: (_wire_on(batch, wanted.device) for batch in batches()))


def _wire_on(batch: Any, device: str) -> tuple[Any, ...]:
    import torch

    arrays = (batch.tokens, batch.loss_mask, batch.cu_seqlens)
    return tuple(torch.from_numpy(array).to(device, non_blocking=True) for array in arrays)


def load_torch(*, timing: dict[str, Any], store: str, prefetch_batches: int | None, everything: bool) -> dict[str, Any]:
    """`penstock.load.torch.TorchLoader`: int64 tokens; with `everything`, labels and positions too."""
    from penstock.load.torch import TorchLoader

    wanted = Timing(**timing)
    plan = opened_plan(store, seq_len=wanted.seq_len)
    with TorchLoader(
        plan, batch_rows=wanted.batch_size, device=wanted.device, prefetch_batches=prefetch_batches
    ) as loader:
        batches = wanted.passes_of(loader, plan.num_rows)

        def fields() -> Iterator[Any]:
            for batch in batches():
                yield (batch.inputs, batch.labels, batch.position_ids) if everything else batch.tokens

        return wanted.measured(fields)


def stored_rows(rows: str, dtype: str, seq_len: int) -> npt.NDArray[Any]:
    """[N, T + 1], a memory map of what `write_rows` wrote."""
    return np.memmap(rows, dtype, "r").reshape(-1, seq_len + 1)


def gather_with_numpy(*, timing: dict[str, Any], rows: str, dtype: str, end_id: int, as_torch: bool) -> dict[str, Any]:
    """The ceiling: rows of equal length out of one memory map, a stored permutation, no borders, no checksums."""
    wanted = Timing(**timing)
    stored = stored_rows(rows, dtype, wanted.seq_len)
    allocate = np.empty if wanted.device == "cpu" else pinned
    out = allocate((wanted.batch_size, wanted.seq_len + 1), np.dtype(dtype))
    chance = np.random.default_rng(0)

    def gathered() -> Iterator[npt.NDArray[Any]]:
        order = chance.permutation(len(stored))
        for start in range(0, len(stored) - len(out) + 1, len(out)):
            # "clip" lets numpy write straight into `out`; "raise" would go through a copy.
            yield np.take(stored, order[start : start + len(out)], axis=0, out=out, mode="clip")

    if not as_torch and wanted.device == "cpu":
        return wanted.measured(gathered)
    import torch

    from penstock.bench.arrival import sent

    if not as_torch:
        return wanted.measured(lambda: (torch.from_numpy(batch).to(wanted.device) for batch in gathered()))
    return wanted.measured_both(
        lambda: (sent(torch.from_numpy(batch), wanted.device) for batch in gathered()), end_id=end_id
    )


def write_rows(*, store: str, seq_len: int, out: str) -> dict[str, Any]:
    """The concat rows as one flat file in store width, T + 1 tokens each, from which the others make their own formats.

    The last row is left out where it is padded: the others know no padding.
    """
    plan = plan_concat(open_store(store), split="train", seq_len=seq_len)
    lengths = np.diff(plan.piece_starts)
    stream = Path(f"{out}.stream")
    with fs.atomic_file(stream) as file:
        for segment, offset, length in zip(plan.piece_segments, plan.piece_offsets, lengths, strict=True):
            file.write(plan.store.read(int(segment), int(offset), int(length)))
    # A row begins with the token that was the last label of the row before.
    tokens = np.memmap(stream, plan.store.dtype, "r")
    windows = np.lib.stride_tricks.sliding_window_view(tokens, min(seq_len + 1, len(tokens)))[::seq_len]
    with fs.atomic_file(Path(out)) as file:
        for first in range(0, len(windows), ROWS_AT_ONCE):
            file.write(np.ascontiguousarray(windows[first : first + ROWS_AT_ONCE]))
    fs.remove_file(stream)
    return {"rows": len(windows)}
