"""Plans, timed: of documents whose lengths are drawn, and of a real store; and the batches of each policy.

Drawn lengths are log-normal, as those of web pages and source files are; a synthetic store has them in its index and no
tokens at all, because a plan reads none.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.bench.loading import timed_passes
from penstock.hardware import peak_memory_bytes
from penstock.load import Loader
from penstock.pack import make_plan
from penstock.store import open_store

__all__ = ["load_packed", "make_store_plan", "make_synthetic_plan"]

# Median e^6 = 403 tokens, mean 940: between web pages (mean 600 to 1,000) and source files (1,000 to 6,000).
MEAN_OF_LOGARITHM, SPREAD_OF_LOGARITHM = 6.0, 1.3


class _SyntheticStore:
    """What a plan asks of a store."""

    def __init__(self, num_documents: int) -> None:
        chance = np.random.default_rng(0)
        lengths = chance.lognormal(MEAN_OF_LOGARITHM, SPREAD_OF_LOGARITHM, num_documents).astype(np.uint32) + 1
        ends = np.cumsum(lengths, dtype=np.uint64)
        self.num_documents = num_documents
        self.digest = f"lognormal-{num_documents}"
        self.arrays = {"length": lengths, "offset": ends - lengths, "segment": np.zeros(num_documents, np.uint32)}

    def kept_documents(self, split: str | None = None) -> npt.NDArray[np.int64]:
        return np.arange(self.num_documents)


def _timed(store: Any, policy: str, seq_len: int) -> dict[str, Any]:
    started = time.perf_counter()
    plan = make_plan(store, policy=policy, seq_len=seq_len)
    seconds = time.perf_counter() - started
    facts = plan.describe()
    names = ("rows", "tokens", "documents", "documents_split", "waste_percent", "most_documents_in_a_row")
    return {"seconds": seconds, "peak_memory_bytes": peak_memory_bytes(), **{name: facts[name] for name in names}}


def make_synthetic_plan(*, num_documents: int, policy: str, seq_len: int) -> dict[str, Any]:
    """Plans documents of drawn lengths; the memory is that of the whole process, lengths included."""
    return _timed(_SyntheticStore(num_documents), policy, seq_len)


def make_store_plan(*, store: str, policy: str, seq_len: int) -> dict[str, Any]:
    """Plans a store's train split."""
    with open_store(store) as opened:
        return _timed(opened, policy, seq_len)


def load_packed(
    *, store: str, policy: str, seq_len: int, batch_size: int, num_batches: int, passes: int
) -> dict[str, Any]:
    """Shuffled batches as they go on the wire, filled ahead by a thread."""
    plan = make_plan(open_store(store), policy=policy, seq_len=seq_len)
    with Loader(plan, batch_rows=batch_size) as loader:
        return timed_passes(lambda: loader, passes=passes, num_batches=num_batches, batch_tokens=batch_size * seq_len)
