"""The kernel of fused_cross_entropy.py, one program a row. Importing it needs Triton."""

import triton
import triton.language as tl

__all__ = ["cross_entropy_kernel"]


@triton.jit
def cross_entropy_kernel(logits, labels, nats, row_stride, num_columns, IGNORED: tl.constexpr, BLOCK: tl.constexpr):
    """Writes each row's nats, and its gradient in place of its logits."""
    row = tl.program_id(0).to(tl.int64)
    first = logits + row * row_stride
    label = tl.load(labels + row)
    if label == IGNORED:
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            tl.store(first + columns, 0.0, mask=columns < num_columns)
        tl.store(nats + row, 0.0)
    else:
        # The sum of exponents over the highest so far, corrected whenever a higher one is met.
        highest = float("-inf")
        total = 0.0
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(first + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
            higher = tl.maximum(highest, tl.max(values))
            total = total * tl.exp(highest - higher) + tl.sum(tl.exp(values - higher))
            highest = higher
        log_total = highest + tl.log(total)
        tl.store(nats + row, log_total - tl.load(first + label).to(tl.float32))
        tl.debug_barrier()  # every thread has read the label's logit before one of them overwrites it
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            values = tl.load(first + columns, mask=columns < num_columns, other=float("-inf")).to(tl.float32)
            gradient = tl.exp(values - log_total)
            gradient = tl.where(columns == label, gradient - 1.0, gradient)
            tl.store(first + columns, gradient.to(logits.dtype.element_ty), mask=columns < num_columns)
