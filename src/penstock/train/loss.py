"""The loss: a sum over real targets, divided by their number in the whole step.

In: logits [B, T, V] and labels [B, T] with -100 where nothing is scored. Out: one number. A micro-batch contributes
its *sum* over the number of targets of the *step*, so a step gives the same gradient however it is cut, also where
the pieces hold different numbers of real targets. Softmax is taken in float32 whatever the logits are; that copy of
the logits is the largest tensor of a run.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from penstock.load.torch import IGNORED_LABEL, TorchBatch

__all__ = ["Autocast", "add_gradients", "cross_entropy_sum", "logits_of"]

Autocast = Callable[[], AbstractContextManager[None]]


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Nats, summed over the labels that aren't -100."""
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum")


def logits_of(model: nn.Module, batch: TorchBatch, *, document_boundaries: bool, autocast: Autocast) -> Tensor:
    """The model's answer to a (micro-)batch, [B, T, V]; attention stays inside documents if boundaries are on."""
    with autocast():
        logits: Tensor = model(batch.inputs, batch.document_ids if document_boundaries else None)
    return logits


def add_gradients(
    model: nn.Module, batch: TorchBatch, *, micro_batch_rows: int, document_boundaries: bool, autocast: Autocast
) -> Tensor:
    """Runs a step's batch in micro-batches, adds its gradients to the parameters', and returns the mean loss.

    The result stays on the device: reading it would make the host wait for each micro-batch.
    """
    # A batch without a single target has a gradient of zero, not of 0/0.
    num_targets = max(1, batch.num_targets)
    total = torch.zeros((), device=batch.inputs.device)
    for first_row in range(0, len(batch), micro_batch_rows):
        micro_batch = batch[first_row : first_row + micro_batch_rows]
        logits = logits_of(model, micro_batch, document_boundaries=document_boundaries, autocast=autocast)
        loss = cross_entropy_sum(logits, micro_batch.labels) / num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total
