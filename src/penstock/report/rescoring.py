"""Several runs scored again on the same text.

In: runs whose records tell of different rows. Out: a score of each on the documents that all of them hold out: same
key, same content, in the same split of every store. Chosen in the order of their content's hash, so that a bounded
number of them is a fair sample and the same one in every comparison. Runs whose stores share a tokenizer are scored on
the very same rows; others on the same bytes. Cost: one pass over the documents tables, and a forward pass of each model
over at most `MOST_TOKENS` tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import InputError, PenstockError
from penstock.pack import make_plan
from penstock.report.comparison import Rescored, Score, Side
from penstock.report.steps import open_trained_store
from penstock.store import Store

__all__ = ["score_again"]

MOST_TOKENS = 1 << 18

Documents = npt.NDArray[np.int64]


def score_again(sides: Sequence[Side]) -> Rescored:
    """Scores every run's newest checkpoint on the documents that all hold out.

    Raises:
        InputError: a store or checkpoint can't be opened, or the runs hold out nothing in common.
    """
    first = sides[0]
    with ExitStack() as stack:
        with _refusing(sides, way_out="put that back where it was"):
            stores = [stack.enter_context(open_trained_store(side.folder)[1]) for side in sides]
        with _refusing(sides):
            documents = common_documents(stores, split=first.held_out.split)
        with _refusing(sides, way_out="put that back where it was"):
            models = [_opened(side) for side in sides]
        seq_len = min(first.held_out.seq_len, *(model.max_positions for model in models))
        scores = [
            _score(model, store, chosen, side=first, seq_len=seq_len)
            for model, store, chosen in zip(models, stores, documents, strict=True)
        ]
        return Rescored(
            scores=tuple(scores),
            documents=len(documents[0]),
            tokenizers_differ=len({store.manifest.tokenizer["digest"] for store in stores}) > 1,
            seq_len=seq_len,
        )


@contextmanager
def _refusing(sides: Sequence[Side], *, way_out: str = "") -> Iterator[None]:
    """Says why the runs must be scored again where they can't be, with the error's own way out or a better one."""
    try:
        yield
    except PenstockError as error:
        first = sides[0]
        odd = next(side for side in sides if side.held_out != first.held_out)
        different = "; ".join(first.held_out.differences(odd.held_out))
        raise InputError(
            f"{first.folder} and {odd.folder} were scored on different rows ({different}) "
            f"and can't be scored again: {error.message}",
            hint=f"{way_out or error.hint}, or train both on one store with the same seq_len, pack and eval_rows",
        ) from error


def _opened(side: Side) -> Any:
    from penstock.train.scoring import open_model

    return open_model(side.folder)


def _score(model: Any, store: Store, documents: Documents, *, side: Side, seq_len: int) -> Score:
    held_out = side.held_out
    plan = make_plan(
        store,
        policy=held_out.pack,
        split=held_out.split,
        seq_len=seq_len,
        boundaries=held_out.boundaries,
        documents=documents,
    )
    found = model.score(plan, document_boundaries=held_out.boundaries)
    if found is None:
        raise InputError("the documents that all runs hold out are empty", hint="train on a store with more held out")
    bits = found.bits_per_byte if math.isfinite(found.nats) else math.inf
    return Score(bits_per_byte=bits, loss=found.loss, step=model.step, num_bytes=found.num_bytes)


def common_documents(stores: Sequence[Store], *, split: str) -> list[Documents]:
    """The numbers, in each store, of the documents that every store holds out; at most `MOST_TOKENS` of the first."""
    held_out = [_held_out(store, split=split) for store in stores]
    common = set(held_out[0]).intersection(*held_out[1:])
    if not common:
        raise InputError(
            f"the runs have no document of {split} in common",
            hint="compare runs on stores of the same input with the same split rule",
        )
    lengths = stores[0].arrays["length"]
    chosen, num_tokens = [], 0
    for identity in sorted(common):
        chosen.append(identity)
        num_tokens += int(lengths[held_out[0][identity]])
        if num_tokens >= MOST_TOKENS:
            break
    return [np.array(sorted(numbers[identity] for identity in chosen), np.int64) for numbers in held_out]


def _held_out(store: Store, *, split: str) -> dict[tuple[bytes, bytes], int]:
    """(content hash, key) -> number of each held-out document."""
    wanted = np.zeros(store.num_documents, np.bool_)
    wanted[store.kept_documents(split)] = True
    found: dict[tuple[bytes, bytes], int] = {}
    number = 0
    for batch in store.provenance_batches(["content_hash", "key"]):
        for content, key in zip(batch["content_hash"].to_pylist(), batch["key"].to_pylist(), strict=True):
            if wanted[number]:
                found[content, key] = number
            number += 1
    return found
