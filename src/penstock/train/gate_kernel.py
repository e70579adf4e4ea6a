"""The kernel of gating.py, one program a stretch of a row. Importing it needs Triton."""

import triton
import triton.language as tl

__all__ = ["gate_gradient_kernel"]


@triton.jit
def gate_gradient_kernel(product, given, gradient, num_columns, BLOCK: tl.constexpr):
    """Writes the gradients of gate and up side by side."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < num_columns
    first = row * 2 * num_columns + columns
    gate = tl.load(product + first, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(product + first + num_columns, mask=inside, other=0.0).to(tl.float32)
    pull = tl.load(given + row * num_columns + columns, mask=inside, other=0.0).to(tl.float32)
    share = tl.sigmoid(gate)
    kind = gradient.dtype.element_ty
    tl.store(gradient + first, (pull * up * share * (1.0 + gate * (1.0 - share))).to(kind), mask=inside)
    tl.store(gradient + first + num_columns, (pull * gate * share).to(kind), mask=inside)
