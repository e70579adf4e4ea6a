"""The loss: a sum over real targets, divided by their number in the whole step.

In: a model, a batch with labels of -100 where nothing is scored, and the kernel to compute with. Out: one number. A
micro-batch contributes its *sum* over the number of targets of the *step*, so a step gives the same gradient however it
is cut, also where the pieces hold different numbers of real targets. Softmax is taken in float32 whatever the logits
are, over the padded vocabulary: columns past the last id are learned to be unlikely, as any id that never occurs.

Kernels (`loss_kernel`), all with the same sum:

    plain     the model's logits [B, T, V], their float32 copy and its gradient: the largest tensors of a run
    chunked   head and softmax a few tokens at a time (chunked_loss.py): less memory, a little slower
    liger     Liger's fused linear cross-entropy; needs the package liger-kernel and a GPU
    cce       Apple's cut cross-entropy; needs the package cut-cross-entropy and a GPU
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.load.torch import IGNORED_LABEL, TorchBatch
from penstock.train.attention import BORDER_KERNELS
from penstock.train.chunked_loss import CrossEntropySum, chunked_cross_entropy_sum, cross_entropy_sum

__all__ = [
    "Autocast",
    "add_gradients",
    "logits_of",
    "nats_of",
    "refuse_impossible_kernel",
]

Autocast = Callable[[], AbstractContextManager[None]]

# Kernel -> its module, and what pip calls it.
_FOREIGN_KERNELS = {"liger": ("liger_kernel", "liger-kernel"), "cce": ("cut_cross_entropy", "cut-cross-entropy")}


def logits_of(model: nn.Module, batch: TorchBatch, *, document_boundaries: bool, autocast: Autocast) -> Tensor:
    """The model's answer to a (micro-)batch, [B, T, V]; attention stays inside documents if boundaries are on."""
    with autocast():
        logits: Tensor = model(batch.inputs, *_documents(model, batch, document_boundaries=document_boundaries))
    return logits


def nats_of(
    model: nn.Module,
    batch: TorchBatch,
    *,
    document_boundaries: bool,
    autocast: Autocast,
    loss_kernel: str = "plain",
) -> Tensor:
    """The loss of a (micro-)batch, summed over its targets, by the kernel named."""
    of_logits = _compiled_cross_entropy_sum() if getattr(model, "is_compiled", False) else cross_entropy_sum
    if loss_kernel == "plain":
        logits = logits_of(model, batch, document_boundaries=document_boundaries, autocast=autocast)
        return of_logits(logits.flatten(0, 1), batch.labels.flatten())
    with autocast():
        documents = _documents(model, batch, document_boundaries=document_boundaries)
        hidden, weight = _before_the_head(model, batch.inputs, *documents)
        vectors, labels = hidden.flatten(0, 1), batch.labels.flatten()  # [N, D], [N]
        if loss_kernel == "chunked":
            return chunked_cross_entropy_sum(vectors, weight, labels, of_logits=of_logits)
        return _foreign_cross_entropy_sum(loss_kernel, vectors, weight, labels)


@cache
def _compiled_cross_entropy_sum() -> CrossEntropySum:
    """One kernel forward and one backward, with no float32 copy of the logits in between."""
    compiled: CrossEntropySum = torch.compile(cross_entropy_sum, dynamic=False)
    return compiled


def _documents(model: Any, batch: TorchBatch, *, document_boundaries: bool) -> tuple[Tensor | None, Tensor | None]:
    """The document ids [B, T], and the same as borders where the model's kernel takes those."""
    if not document_boundaries:
        return None, None
    takes_borders = getattr(model, "attention_kernel", None) in BORDER_KERNELS
    return batch.document_ids, batch.borders if takes_borders else None


def _before_the_head(
    model: Any, inputs: Tensor, document_ids: Tensor | None, borders: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Hidden [B, T, D] and the head's weight [V, D]."""
    return model.hidden(inputs, document_ids, borders), model.head_weight


def _foreign_cross_entropy_sum(loss_kernel: str, vectors: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    """By a package's kernel, in the precision that autocast asks of products: these kernels don't ask it themselves."""
    if torch.is_autocast_enabled(vectors.device.type):
        dtype = torch.get_autocast_dtype(vectors.device.type)
        vectors, weight = vectors.to(dtype), weight.to(dtype)
    module = importlib.import_module(_FOREIGN_KERNELS[loss_kernel][0] + (".transformers" * (loss_kernel == "liger")))
    if loss_kernel == "liger":
        loss: Tensor = module.LigerFusedLinearCrossEntropyLoss(ignore_index=IGNORED_LABEL, reduction="sum")(
            weight, vectors, labels
        )
    else:
        loss = module.linear_cross_entropy(vectors, weight, labels, ignore_index=IGNORED_LABEL, reduction="sum")
    return loss


def refuse_impossible_kernel(loss_kernel: str, *, device: str, has_head_weight: bool) -> None:
    """Raises `ConfigError` where the kernel can't work: package missing, no GPU, or a head of more than one product."""
    if loss_kernel != "plain" and not has_head_weight:
        raise ConfigError(
            f"loss_kernel is {loss_kernel!r}, but this model's head is more than one matrix: expected 'plain'",
            hint="set loss_kernel=plain, or leave it out",
        )
    if loss_kernel not in _FOREIGN_KERNELS:
        return
    module, package = _FOREIGN_KERNELS[loss_kernel]
    if importlib.util.find_spec(module) is None:
        raise ConfigError(
            f"loss_kernel is {loss_kernel!r}, but the package {package} is not installed",
            hint=f"pip install {package}, or set loss_kernel=chunked, which needs no package",
        )
    if device != "cuda":
        raise ConfigError(
            f"loss_kernel is {loss_kernel!r}, which needs a GPU; this run computes on {device}",
            hint="set loss_kernel=chunked, or leave it out",
        )


def add_gradients(
    model: nn.Module,
    batch: TorchBatch,
    *,
    micro_batch_rows: int,
    document_boundaries: bool,
    autocast: Autocast,
    loss_kernel: str = "plain",
    divisor: float | None = None,
    before_micro_batch: Callable[[bool], None] = lambda is_last: None,
) -> Tensor:
    """Runs a step's batch in micro-batches, adds its gradients to the parameters', and returns the mean loss.

    The result stays on the device: reading it would make the host wait for each micro-batch. A process that runs a
    share of the rows gives the `divisor` of its sums, and is told before each micro-batch whether it is the last.
    """
    # A batch without a single target has a gradient of zero, not of 0/0.
    num_targets = max(1, batch.num_targets) if divisor is None else divisor
    total = torch.zeros((), device=batch.inputs.device)
    for first_row in range(0, len(batch), micro_batch_rows):
        before_micro_batch(first_row + micro_batch_rows >= len(batch))
        nats = nats_of(
            model,
            batch[first_row : first_row + micro_batch_rows],
            document_boundaries=document_boundaries,
            autocast=autocast,
            loss_kernel=loss_kernel,
        )
        loss = nats / num_targets
        loss.backward()  # type: ignore[no-untyped-call]
        total += loss.detach()
    return total
