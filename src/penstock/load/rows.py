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
    start, count = plan.row_range(row)
    inputs = min(count, plan.seq_len)
    documents = []
    for place in range(int(plan.first_document[row]), len(plan.documents)):
        begin, end = (int(value) for value in plan.document_starts[place : place + 2] - start)
        if begin >= inputs:
            break
        origin = document_origin(plan.store, int(plan.documents[place]))
        documents.append(
            {
                "document": origin.document,
                "key": origin.key,
                "file": origin.file,
                "row_start": max(begin, 0),
                "row_end": min(end, inputs),
                "document_start": max(-begin, 0),
                "text": tokenizer.decode(buffer.tokens[0, 0, max(begin, 0) : min(end, inputs)]),
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
