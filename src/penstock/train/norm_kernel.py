"""The kernel of norms.py, a few programs a multiprocessor. Importing it needs Triton."""

import triton
import triton.language as tl

__all__ = ["norm_gradient_kernel"]


@triton.jit
def norm_gradient_kernel(
    stream, weight, passed, given, gradient, weight_sums, num_rounds, num_rows, num_columns, eps,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Writes the stream's gradient, and the sum of this program's rows for the weight's."""
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = columns < num_columns
    scale = tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    sums = tl.zeros([ROWS, COLUMNS], tl.float32)
    for number in range(num_rounds):
        rows = (number * tl.num_programs(0) + tl.program_id(0)) * ROWS + tl.arange(0, ROWS)[:, None]
        wanted = inside & (rows < num_rows)
        places = rows.to(tl.int64) * num_columns + columns
        values = tl.load(stream + places, mask=wanted, other=0.0).to(tl.float32)
        pull = tl.load(given + places, mask=wanted, other=0.0).to(tl.float32)
        straight = tl.load(passed + places, mask=wanted, other=0.0).to(tl.float32)
        root = tl.rsqrt(tl.sum(values * values, 1) / num_columns + eps)[:, None]
        normal = values * root
        scaled = pull * scale
        mean = (tl.sum(scaled * normal, 1) / num_columns)[:, None]
        through = root * (scaled - normal * mean)
        tl.store(gradient + places, (straight + through).to(gradient.dtype.element_ty), mask=wanted)
        sums += pull * normal.to(stream.dtype.element_ty).to(tl.float32)
    tl.store(weight_sums + tl.program_id(0) * num_columns + columns, tl.sum(sums, 0)[None, :], mask=inside)
