"""When a batch counts as delivered, the same for everybody: on the device, widened, complete.

In: a torch batch of tokens as somebody's loader gives it, [B, T + 1] of any integer type. Out: int64 tokens on the
device and, where asked for, the inputs, labels and positions that a model takes. Nobody else knows where documents
begin, so both are found again at the end tokens, in the few lines of plain numpy or PyTorch that whoever uses such a
loader would write. On a GPU the copies are awaited; on a CPU there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.load.materialise import IGNORED_LABEL

if TYPE_CHECKING:
    import torch

__all__ = ["awaited", "completed", "pinned", "sent", "torch_device"]


def torch_device() -> str:
    """`cuda` where PyTorch finds a GPU, else `cpu`, also where there is no PyTorch."""
    try:
        import torch
    except ModuleNotFoundError:
        return "cpu"
    return "cuda" if torch.cuda.is_available() else "cpu"


def pinned(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """Memory from which copies to a GPU don't block."""
    import torch

    array: np.ndarray[Any, Any] = torch.empty(
        shape, dtype=torch.from_numpy(np.empty(0, dtype)).dtype, pin_memory=True
    ).numpy()
    return array


def sent(batch: torch.Tensor, device: str) -> torch.Tensor:
    """The batch on the device, as int64; on a CPU numpy widens, which there is faster than PyTorch's thread pool."""
    import torch

    if device != "cpu":
        return batch.to(device, non_blocking=True).to(torch.int64)
    return batch if batch.dtype == torch.int64 else torch.from_numpy(batch.numpy().astype(np.int64))


def completed(tokens: torch.Tensor, end_id: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, labels and positions, [B, T] each, of tokens [B, T + 1]: a document ends with each `end_id`."""
    import torch

    inputs = tokens[:, :-1]
    if tokens.device.type != "cpu":
        return inputs, *_completed_on_device(tokens, end_id)
    known = tokens.numpy()
    ends = known[:, :-1] == end_id
    begins = np.zeros(ends.shape, np.bool_)
    begins[:, 1:] = ends[:, :-1]
    begins[:, 0] = True
    borders = np.flatnonzero(begins)
    # Of the plain ways to count from each border this is the fastest: a running maximum takes three times as long.
    positions = np.arange(ends.size) - np.repeat(borders, np.diff(borders, append=ends.size))
    labels = np.where(ends, IGNORED_LABEL, known[:, 1:])
    return inputs, torch.from_numpy(labels), torch.from_numpy(positions.reshape(ends.shape))


def _completed_on_device(tokens: torch.Tensor, end_id: int) -> tuple[torch.Tensor, torch.Tensor]:
    import torch

    ends = tokens[:, :-1] == end_id
    places = torch.arange(ends.shape[1], device=tokens.device)
    begins = torch.zeros_like(ends)
    begins[:, 1:] = ends[:, :-1]
    latest_begin = torch.where(begins, places, 0).cummax(1).values
    return torch.where(ends, IGNORED_LABEL, tokens[:, 1:]), places - latest_begin


def awaited(batches: Callable[[], Iterator[Any]], device: str) -> Callable[[], Iterator[Any]]:
    """The same batches, each given out when everything asked of the device before is done."""
    if device == "cpu":
        return batches

    def waiting() -> Iterator[Any]:
        import torch

        for batch in batches():
            torch.cuda.synchronize()
            yield batch

    return waiting
