"""One number per row of a plan, by which orders sort: its length, or what its documents say.

    "row-length"        inputs of the row that are tokens and not padding
    "document-length"   tokens of the documents in the row
    NAME                a fact of the documents: a number, or a time as text (`time` of commits, a table's column)

A row of several documents has the mean, each weighing by its tokens in the row. A row with a document that lacks the
fact comes after all others. Numbers are the same on every machine. Cost: about a second per 10 M rows, and the facts
of all documents read once; what takes longer than that is kept in the plan cache. Memory: 8 bytes per document and row.
"""

from __future__ import annotations

import datetime
import json
import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, nearest_first
from penstock.load.order import LENGTHS_AT_ONCE, row_lengths
from penstock.pack import Plan
from penstock.pack.cache import cached_ranks, keep_ranks

__all__ = ["DOCUMENT_LENGTH", "ROW_LENGTH", "row_ranks"]

ROW_LENGTH = "row-length"
DOCUMENT_LENGTH = "document-length"

# What takes less to make than this is made again.
SECONDS_WORTH_KEEPING = 0.5
MOST_NAMES = 200

Ranks = npt.NDArray[Any]


def row_ranks(plan: Plan, by: str, *, bucket: str = "") -> Ranks:
    """[rows] finite numbers, int64 of lengths of rows and float64 of anything else.

    Args:
        plan: the rows.
        by: see the module's docstring.
        bucket: of a plan over some documents of a split: the hash that tells them apart (see `MixSource`).

    Raises:
        ConfigError: no document of the plan has such a fact.
    """
    kind = "<i8" if by == ROW_LENGTH else "<f8"
    key = {"plan": plan.identity, "bucket": bucket, "ranks": by}
    found = cached_ranks(key, num_rows=plan.num_rows, kind=kind)
    if found is not None:
        return found
    started = time.perf_counter()
    ranks = row_lengths(plan) if by == ROW_LENGTH else _means(plan, _document_values(plan, by))
    if time.perf_counter() - started > SECONDS_WORTH_KEEPING:
        keep_ranks(key, ranks, kind=kind)
    return ranks


def _document_values(plan: Plan, by: str) -> npt.NDArray[np.float64]:
    """[documents of the store], NaN where a document lacks the fact."""
    store = plan.store
    if by == DOCUMENT_LENGTH:
        return np.asarray(store.arrays["length"], np.float64)
    values = np.full(store.num_documents, np.nan)
    wanted = np.zeros(store.num_documents, np.bool_)
    wanted[plan.documents] = True
    names: set[str] = set()
    marks, document = {json.dumps(by), json.dumps(by, ensure_ascii=False)}, 0
    for batch in store.provenance_batches(["facts"]):
        for text in batch["facts"].to_pylist():
            if wanted[document] and text:
                if any(
                    mark in text for mark in marks
                ):  # most of the cost is reading JSON: only where the name is in it
                    values[document] = _number(_facts(text).get(by))
                elif len(names) < MOST_NAMES:
                    names |= _facts(text).keys()
            document += 1
    if np.isnan(values[plan.documents]).all():
        known = nearest_first(by, [DOCUMENT_LENGTH, *sorted(names)])
        raise ConfigError(
            f"no document of {store.location} has a fact {by!r} that is a number or a time", hint=f"known: {known}"
        )
    return values


def _facts(text: str) -> dict[str, Any]:
    facts = json.loads(text)
    return facts if isinstance(facts, dict) else {}


def _number(value: Any) -> float:
    """A number, or the moment of a date or time (UTC where it has no zone); NaN where it is neither."""
    if isinstance(value, str):
        try:
            value = float(value)  # first: 20240131 is a number, and sorts as the date does
        except ValueError:
            return _moment(value)
    try:
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else math.nan
    except OverflowError:  # an integer beyond all floats
        return math.nan


def _moment(text: str) -> float:
    try:
        moment = datetime.datetime.fromisoformat(text)
        return (moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)).timestamp()
    except (ValueError, OverflowError):
        return math.nan


def _means(plan: Plan, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """[rows], the mean of the documents' values by tokens; rows without one after all others."""
    means = np.empty(plan.num_rows, np.float64)
    for first in range(0, plan.num_rows, LENGTHS_AT_ONCE):
        rows = np.arange(first, min(first + LENGTHS_AT_ONCE, plan.num_rows))
        spans = plan.spans(rows)
        total = np.bincount(spans.row, spans.length * values[spans.document], minlength=len(rows))
        means[rows] = total / np.bincount(spans.row, spans.length, minlength=len(rows))
    known = means[np.isfinite(means)]
    means[~np.isfinite(means)] = np.nextafter(known.max(initial=0.0), np.inf)
    return means
