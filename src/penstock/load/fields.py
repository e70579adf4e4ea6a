"""A batch as plain wide arrays, for those who want them made: inputs, labels, positions, document numbers.

In: a `Batch` in wire format. Out: a dict of arrays, one row each, that every framework takes. Two styles of labels:

    next           [T]      `labels[i]` is the token after `input_ids[i]`; for models that compare position by position
    hugging-face   [T + 1]  `labels[i]` is `input_ids[i]` itself, for models that shift by one themselves; the row's
                            last token is an input too, so that no label of the row is lost

A label that doesn't count is -100. Positions count from each document's begin; where they fall back to 0 Hugging Face
models keep attention apart. About 1 ns per token on one core, 2 with document numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, nearest_first
from penstock.load import materialise
from penstock.load.gather import Batch
from penstock.load.materialise import IGNORED_LABEL
from penstock.load.recycling import recycled_empty

__all__ = [
    "DEFAULT_FIELDS",
    "FIELD_NAMES",
    "IGNORED_LABEL",
    "LABEL_STYLES",
    "check_fields",
    "document_begins",
    "fields_of",
]

FIELD_NAMES = ("input_ids", "labels", "position_ids", "document_ids", "row")
DEFAULT_FIELDS = ("input_ids", "labels", "position_ids")
LABEL_STYLES = ("next", "hugging-face")


def check_fields(fields: Sequence[str], labels: str) -> tuple[str, ...]:
    """The names of fields, refused where one is unknown."""
    for name, known, what in [*((field, FIELD_NAMES, "field") for field in fields), (labels, LABEL_STYLES, "labels")]:
        if name not in known:
            raise ConfigError(f"there is no {what} {name!r}", hint=f"known: {nearest_first(name, known)}")
    return tuple(fields)


def document_begins(batch: Batch) -> npt.NDArray[np.bool_]:
    """[rows, T], whether a document, or a row, begins at this position."""
    begins = np.zeros(batch.loss_mask.size + 1, np.bool_)
    begins[batch.cu_seqlens] = True
    return begins[:-1].reshape(batch.loss_mask.shape)


def fields_of(
    batch: Batch, fields: Sequence[str] = DEFAULT_FIELDS, *, labels: str = "next", dtype: npt.DTypeLike = np.int64
) -> dict[str, npt.NDArray[Any]]:
    """The fields asked for, in new memory: [rows, T] (or T + 1) of `dtype`; `row`, the plan's row number, is [rows]."""
    return {name: _MAKERS[name](batch, labels, np.dtype(dtype)) for name in fields}


def _input_ids(batch: Batch, style: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    tokens = batch.tokens[:, :-1] if style == "next" else batch.tokens
    made = recycled_empty(tokens.shape, dtype)
    made[:] = tokens
    return made


def _labels(batch: Batch, style: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    next_tokens = materialise.labels(batch.tokens, batch.loss_mask, dtype=dtype)
    if style == "next":
        return next_tokens
    made = np.empty(batch.tokens.shape, dtype)
    made[:, 0] = IGNORED_LABEL
    made[:, 1:] = next_tokens
    return made


def _position_ids(batch: Batch, style: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    made = materialise.position_ids(batch.cu_seqlens, batch.loss_mask.shape, dtype=dtype)
    return _widened(made, style, step=1)


def _document_ids(batch: Batch, style: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """1, 2, 3… in each row; padding is a document of its own."""
    made = recycled_empty(batch.loss_mask.shape, dtype)
    np.cumsum(document_begins(batch), axis=1, out=made)
    return _widened(made, style, step=0)


def _rows(batch: Batch, style: str, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    return batch.rows.astype(dtype)


def _widened(values: npt.NDArray[Any], style: str, *, step: int) -> npt.NDArray[Any]:
    """With the row's last token counted to the document before it: it is the input of no label."""
    return values if style == "next" else np.concatenate([values, values[:, -1:] + values.dtype.type(step)], axis=1)


_MAKERS: dict[str, Callable[[Batch, str, np.dtype[Any]], npt.NDArray[Any]]] = {
    "input_ids": _input_ids,
    "labels": _labels,
    "position_ids": _position_ids,
    "document_ids": _document_ids,
    "row": _rows,
}
