"""One row of a plan, told: which documents are in it, at which places, and what it says."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.errors import PlanError
from penstock.load.gather import Gatherer
from penstock.pack import Plan
from penstock.store import document_origin
from penstock.tokenize import Tokenizer

__all__ = ["describe_row"]


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
