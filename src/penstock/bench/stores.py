"""The store that `bench load` and `bench train` read: one that is there, or one prepared for the purpose."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from penstock.bench.corpus import tokenizer_path
from penstock.bench.options import resolved_workers
from penstock.bench.processes import Tell, run_own
from penstock.store import open_store

__all__ = ["store_path"]


def store_path(given: str | None, *, inputs: Sequence[str], tokenizer: str | None, folder: Path, tell: Tell) -> str:
    """The store given, else the corpus prepared into `folder`, in a process of its own.

    Raises:
        StoreError: there is no store where one is said to be, or it is damaged; told here, before anything is measured.
    """
    if given is not None:
        with open_store(given):
            return str(Path(given).resolve())
    tell("preparing a store")
    tokenizer_file, _ = tokenizer_path(tokenizer, inputs, folder)
    settings = {
        "inputs": list(inputs),
        "tokenizer": str(tokenizer_file),
        "workers": resolved_workers(None),
        "out": str(folder / "store"),
        "keep": True,
    }
    run_own("preparing:prepare_store", settings, folder=folder)
    return str(folder / "store")
