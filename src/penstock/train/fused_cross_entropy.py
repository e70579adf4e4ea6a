"""Softmax cross-entropy and its gradient in one kernel, for GPUs.

In: logits [N, V] and labels [N], -100 where nothing is scored. Out: nats, summed, and the gradient of the logits, which
takes their place in memory: each row is read from the device's memory once, and written once. Softmax is taken in
float32. Compiled PyTorch needs a kernel forward and one backward for it, and reads the row three times: with this one a
step of 117 ms takes 114 (65,536 x 50,304 in bfloat16, 124M parameters on an H200).

Written in Triton, which comes with PyTorch for GPUs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.train.kernel_support import triton_kernel

__all__ = ["overwrite_with_gradient"]

BLOCK_COLUMNS = 4096
NUM_WARPS = 4


def overwrite_with_gradient(logits: Tensor, labels: Tensor, *, ignored_label: int) -> Tensor:
    """The loss as a sum; afterwards `logits` holds its gradient, with rows of zeros where nothing is scored."""
    nats = torch.empty(len(labels), dtype=torch.float32, device=logits.device)
    triton_kernel("cross_entropy_kernel", "cross_entropy_kernel")[(len(labels),)](
        logits,
        labels,
        nats,
        logits.stride(0),
        logits.shape[1],
        IGNORED=ignored_label,
        BLOCK=BLOCK_COLUMNS,
        num_warps=NUM_WARPS,
    )
    return nats.sum()
