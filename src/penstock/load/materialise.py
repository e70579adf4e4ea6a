"""Position ids, document ids and labels written out, for models that want them as arrays.

On the wire a batch is tokens, a mask and `cu_seqlens`; everything else follows from these. The functions take the
arrays of one batch, numpy's or torch's, and give new ones, on the same device: `tokens` is [B, T + 1], `loss_mask`
[B, T], `cu_seqlens` flat positions over B x T at which documents begin, ascending, filled up with B x T.

    inputs     3  8  1  9  4  9  |  7  7  5  9  0  0        two rows of T = 6; 9 ends a document, 0 is padding
    documents  0  0  0  0  1  1  |  2  2  2  2  3  3
    positions  0  1  2  3  0  1  |  0  1  2  3  0  1

Cost with numpy, per place of 8 bytes: about 0.5 ns for labels, as much for positions where documents are long and 1 ns
where they are short, 2 for documents.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from penstock.load.recycling import recycled_empty

if TYPE_CHECKING:
    import torch

__all__ = [
    "IGNORED_LABEL",
    "document_ids",
    "labels",
    "position_ids",
    "torch_document_ids",
    "torch_labels",
    "torch_position_ids",
]

IGNORED_LABEL = -100

Integers = npt.NDArray[np.int64]

# Positions of a part of a document are copied from a row that counts from 0, in half a microsecond: for parts of fewer
# tokens than this on average, a running sum over all places is cheaper.
LONG_PART = 512


def document_ids(cu_seqlens: npt.NDArray[np.int32], shape: tuple[int, int]) -> Integers:
    """[B, T] int64, equal where row and document are the same; numbered from 0 in order of appearance."""
    borders = _inside(cu_seqlens, shape)
    lengths = np.diff(borders, append=shape[0] * shape[1])
    return np.repeat(np.arange(len(borders)), lengths).reshape(shape)


def position_ids(
    cu_seqlens: npt.NDArray[np.int32],
    shape: tuple[int, int],
    *,
    first_row: int = 0,
    dtype: npt.DTypeLike = np.int64,
) -> npt.NDArray[Any]:
    """[B, T], counted from 0 at each border; of the rows from `first_row` on, where they are a part of a batch."""
    borders = _inside(cu_seqlens, shape, first_row)
    inside_row = np.flatnonzero(borders % shape[1])  # every row begins with a border
    if len(inside_row) * LONG_PART > shape[0] * shape[1]:
        steps = recycled_empty((shape[0] * shape[1],), dtype)
        steps.fill(1)
        steps[borders] = 1 - np.diff(borders, prepend=-1)
        return np.cumsum(steps, out=steps).reshape(shape)
    counted = np.arange(shape[1], dtype=dtype)
    made = recycled_empty(shape, dtype)
    made[:] = counted
    flat = made.reshape(-1)
    ends = np.append(borders, shape[0] * shape[1])[inside_row + 1]
    for begin, end in zip(borders[inside_row].tolist(), ends.tolist(), strict=True):
        flat[begin:end] = counted[: end - begin]
    return made


def labels(
    tokens: npt.NDArray[Any], loss_mask: npt.NDArray[np.bool_], *, dtype: npt.DTypeLike = np.int64
) -> npt.NDArray[Any]:
    """[B, T]: the next token, or -100 where it doesn't count."""
    made = recycled_empty(loss_mask.shape, dtype)
    made[:] = tokens[:, 1:]
    made[~loss_mask] = IGNORED_LABEL
    return made


def torch_document_ids(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """`document_ids` on the tensor's device; nothing waits for it, because no size depends on the data."""
    return _torch_marks(cu_seqlens, shape).cumsum(0).sub(1).reshape(shape)


def torch_position_ids(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """`position_ids` on the tensor's device."""
    import torch

    places = torch.arange(shape[0] * shape[1], device=cu_seqlens.device)
    begins = torch.where(_torch_marks(cu_seqlens, shape) > 0, places, 0).cummax(0).values
    return (places - begins).reshape(shape)


def torch_labels(tokens: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
    """`labels` on the tensors' device."""
    import torch

    return torch.where(loss_mask, tokens[:, 1:].to(torch.int64), IGNORED_LABEL)


def _inside(cu_seqlens: npt.NDArray[np.int32], shape: tuple[int, int], first_row: int = 0) -> Integers:
    """The borders in some rows, counted from these rows' begin; what fills the borders up is left out."""
    begin = first_row * shape[1]
    # Keys of the array's own type: for others, numpy would convert the whole array.
    first, last = np.searchsorted(cu_seqlens, np.array([begin, begin + shape[0] * shape[1]], cu_seqlens.dtype))
    return cu_seqlens[first:last].astype(np.int64) - begin


def _torch_marks(cu_seqlens: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    """[B x T] int64, 1 at each border. The place after the last takes what fills the borders up, and is cut off."""
    import torch

    marks = torch.zeros(shape[0] * shape[1] + 1, dtype=torch.int64, device=cu_seqlens.device)
    marks[cu_seqlens.to(torch.int64)] = 1
    return marks[:-1]
