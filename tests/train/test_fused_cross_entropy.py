"""The kernel against PyTorch: on a GPU where there is one, else in Triton's interpreter where Triton is installed."""

from __future__ import annotations

from .interpreter import assert_passes, needs_triton

CHECK = """
import torch, torch.nn.functional as F
from penstock.train.fused_cross_entropy import overwrite_with_gradient

device = "cuda" if torch.cuda.is_available() else "cpu"
for dtype, columns in ((torch.float32, 5000), (torch.bfloat16, 64), (torch.float32, 4096)):
    logits = (4 * torch.randn(9, columns, generator=torch.Generator().manual_seed(columns))).to(device, dtype)
    labels = torch.randint(0, columns, (9,), generator=torch.Generator().manual_seed(1)).to(device)
    labels[3], labels[4], labels[5] = -100, 0, columns - 1
    leaf = logits.clone().requires_grad_()
    expected = F.cross_entropy(leaf.float(), labels, reduction="sum")
    (gradient,) = torch.autograd.grad(expected, leaf)
    found = overwrite_with_gradient(logits, labels, ignored_label=-100)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(logits, gradient, atol=1e-2 if dtype is torch.bfloat16 else 1e-5, rtol=1e-4)
    assert not logits[3].any()
"""


@needs_triton
def test_loss_and_gradient_are_those_of_pytorch() -> None:
    assert_passes(CHECK)
