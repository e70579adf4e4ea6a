"""Several runs scored again on the same text.

In: runs whose records tell of different rows. Out: a score of each on the documents that all of them hold out: same
key, same content, in the same split of one of its stores. Chosen in the order of their content's hash, so that a
bounded number of them is a fair sample and the same one in every comparison. Runs whose stores share a tokenizer are
scored on the very same rows; others on the same bytes. Cost: one pass over the documents tables, and a forward pass of
each model over at most `MOST_TOKENS` tokens.
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
from penstock.report.steps import opened_stores
from penstock.store import Store

__all__ = ["score_again"]

MOST_TOKENS = 1 << 18

Documents = npt.NDArray[np.int64]
Held = tuple[Store, Documents]
"""Documents of a store, by number."""


def score_again(sides: Sequence[Side]) -> Rescored:
    """Scores every run's newest checkpoint on the documents that all hold out.

    Raises:
        InputError: a store or checkpoint can't be opened, or the runs hold out nothing in common.
    """
    first = sides[0]
    with ExitStack() as stack:
        with _refusing(sides, way_out="put that back where it was"):
            stores = [list(stack.enter_context(opened_stores(side.folder))[1].values()) for side in sides]
        with _refusing(sides):
            documents = common_documents(stores, split=first.held_out.split)
        with _refusing(sides, way_out="put that back where it was"):
            models = [_opened(side) for side in sides]
        seq_len = min(first.held_out.seq_len, *(model.max_positions for model in models))
        scores = [
            _score(model, held, side=first, seq_len=seq_len) for model, held in zip(models, documents, strict=True)
        ]
        return Rescored(
            scores=tuple(scores),
            documents=sum(len(numbers) for _, numbers in documents[0]),
            tokenizers_differ=len({of_run[0].manifest.tokenizer["digest"] for of_run in stores}) > 1,
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


def _score(model: Any, held: Sequence[Held], *, side: Side, seq_len: int) -> Score:
    from penstock.train.evaluate import evaluations_together

    held_out = side.held_out
    plans = [
        make_plan(
            store,
            policy=held_out.pack,
            split=held_out.split,
            seq_len=seq_len,
            boundaries=held_out.boundaries,
            documents=documents,
        )
        for store, documents in held
    ]
    parts = [model.score(plan, document_boundaries=held_out.boundaries) for plan in plans]
    parts = [part for part in parts if part is not None]
    if not parts:
        raise InputError("the documents that all runs hold out are empty", hint="train on a store with more held out")
    found = evaluations_together(parts)
    bits = found.bits_per_byte if math.isfinite(found.nats) else math.inf
    return Score(bits_per_byte=bits, loss=found.loss, step=model.step, num_bytes=found.num_bytes)


def common_documents(runs: Sequence[Sequence[Store]], *, split: str) -> list[list[Held]]:
    """Of the documents that all runs hold out, where each has them; at most `MOST_TOKENS` of the first."""
    held_out = [_held_out(stores, split=split) for stores in runs]
    common = set(held_out[0]).intersection(*held_out[1:])
    if not common:
        raise InputError(
            f"the runs have no document of {split} in common",
            hint="compare runs on stores of the same input with the same split rule",
        )
    chosen, num_tokens = [], 0
    for identity in sorted(common):
        chosen.append(identity)
        place, number = held_out[0][identity]
        num_tokens += int(runs[0][place].arrays["length"][number])
        if num_tokens >= MOST_TOKENS:
            break
    return [
        _by_store(stores, [places[identity] for identity in chosen])
        for stores, places in zip(runs, held_out, strict=True)
    ]


def _by_store(stores: Sequence[Store], places: Sequence[tuple[int, int]]) -> list[Held]:
    numbers = [sorted(number for place, number in places if place == wanted) for wanted in range(len(stores))]
    return [(store, np.array(own, np.int64)) for store, own in zip(stores, numbers, strict=True) if own]


def _held_out(stores: Sequence[Store], *, split: str) -> dict[tuple[bytes, bytes], tuple[int, int]]:
    """(content hash, key) -> place of the store among a run's, and number there, of each held-out document."""
    found: dict[tuple[bytes, bytes], tuple[int, int]] = {}
    for place, store in enumerate(stores):
        wanted = np.zeros(store.num_documents, np.bool_)
        wanted[store.kept_documents(split)] = True
        number = 0
        for batch in store.provenance_batches(["content_hash", "key"]):
            for content, key in zip(batch["content_hash"].to_pylist(), batch["key"].to_pylist(), strict=True):
                if wanted[number]:
                    found.setdefault((content, key), (place, number))
                number += 1
    return found
