"""One row of a plan, told: which documents are in it, at which places, and what it says. And the other way round: the
rows that hold some tokens of a document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.load.gather import Gatherer
from penstock.pack import Plan
from penstock.store import document_origin
from penstock.tokenize import Tokenizer

__all__ = ["describe_row", "rows_holding"]

ROWS_AT_ONCE = 2**16


def describe_row(plan: Plan, row: int, tokenizer: Tokenizer) -> dict[str, Any]:
    """The row's documents in order, each with its places in the row, its first token there and its text."""
    if not 0 <= row < plan.num_rows:
        raise PlanError(f"the plan has no row {row}", hint=f"rows are numbered 0 to {plan.num_rows - 1}")
    gatherer = Gatherer(plan)
    buffer = gatherer.new_buffer(num_batches=1, batch_rows=1)
    gatherer.fill(np.array([[row]]), buffer)
    spans = plan.spans(np.array([row]))
    inputs = min(int(spans.row_ends()[0]), plan.seq_len)
    documents = []
    for place, document, first, length in zip(
        *(values.tolist() for values in (spans.place, spans.document, spans.first, spans.length)), strict=True
    ):
        end = min(place + length, inputs)
        if place >= end:
            break
        origin = document_origin(plan.store, document)
        documents.append(
            {
                "document": origin.document,
                "key": origin.key,
                "file": origin.file,
                "row_start": place,
                "row_end": end,
                "document_start": first,
                "text": tokenizer.decode(buffer.tokens[0, 0, place:end]),
            }
        )
    return {
        "row": row,
        "split": plan.split,
        "seq_len": plan.seq_len,
        "tokens": inputs,
        "targets": int(buffer.loss_mask.sum()),
        "documents": documents,
    }


def rows_holding(plan: Plan, stretches: Sequence[tuple[int, int, int]]) -> list[list[int]]:
    """The rows that have one of some tokens among their inputs, ascending, for each stretch of tokens.

    Args:
        plan: whose rows.
        stretches: document, first token and last token of each.

    One pass over the plan's spans, 64 K rows at a time: about a second for 10 M documents, however many stretches.
    """
    found: list[list[int]] = [[] for _ in stretches]
    wanted = np.unique(np.array([document for document, _, _ in stretches], np.int64))
    for start in range(0, plan.num_rows, ROWS_AT_ONCE):
        rows = np.arange(start, min(start + ROWS_AT_ONCE, plan.num_rows), dtype=np.int64)
        spans = plan.spans(rows)
        chosen = np.flatnonzero(np.isin(spans.document, wanted))
        document, first, row = spans.document[chosen], spans.first[chosen], rows[spans.row[chosen]]
        # The place after the last input holds a label only, which is an input of another row.
        end = first + np.minimum(spans.length[chosen], plan.seq_len - spans.place[chosen])
        for number, (which, first_token, last_token) in enumerate(stretches):
            holds = (document == which) & (first <= last_token) & (end > first_token)
            found[number].extend(np.unique(row[holds]).tolist())
    return found
