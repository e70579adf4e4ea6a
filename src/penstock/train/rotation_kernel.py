"""The kernel of projections.py, one program a position. Importing it needs Triton."""

import triton
import triton.language as tl

__all__ = ["turn_back_kernel"]


@triton.jit
def turn_back_kernel(
    query, key, value, cosine, sine, joined, num_positions,
    query_row, query_head, query_position,
    key_row, key_head, key_position,
    value_row, value_head, value_position,
    QUERY_HEADS: tl.constexpr, KEY_HEADS: tl.constexpr, MOST_HEADS: tl.constexpr,
    HALF: tl.constexpr, HALF_BLOCK: tl.constexpr,
):  # fmt: skip
    """Turns the gradients of query and key back, and writes them and the value's side by side."""
    place = tl.program_id(0).to(tl.int64)
    row, position = place // num_positions, place % num_positions
    heads, columns = tl.arange(0, MOST_HEADS)[:, None], tl.arange(0, HALF_BLOCK)[None, :]
    inside = columns < HALF
    angles = position * 2 * HALF + columns
    first_cosine = tl.load(cosine + angles, mask=inside, other=0.0)
    second_cosine = tl.load(cosine + angles + HALF, mask=inside, other=0.0)
    first_sine = tl.load(sine + angles, mask=inside, other=0.0)
    second_sine = tl.load(sine + angles + HALF, mask=inside, other=0.0)
    out = joined + place * (QUERY_HEADS + 2 * KEY_HEADS) * 2 * HALF + heads * 2 * HALF + columns
    kind = joined.dtype.element_ty

    wanted = inside & (heads < QUERY_HEADS)
    source = query + row * query_row + position * query_position + heads * query_head + columns
    first = tl.load(source, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out, (first * first_cosine + second * second_sine).to(kind), mask=wanted)
    tl.store(out + HALF, (second * second_cosine + first * first_sine).to(kind), mask=wanted)

    out += QUERY_HEADS * 2 * HALF
    wanted = inside & (heads < KEY_HEADS)
    source = key + row * key_row + position * key_position + heads * key_head + columns
    first = tl.load(source, mask=wanted, other=0.0).to(tl.float32)
    second = tl.load(source + HALF, mask=wanted, other=0.0).to(tl.float32)
    tl.store(out, (first * first_cosine + second * second_sine).to(kind), mask=wanted)
    tl.store(out + HALF, (second * second_cosine + first * first_sine).to(kind), mask=wanted)

    out += KEY_HEADS * 2 * HALF
    source = value + row * value_row + position * value_position + heads * value_head + columns
    tl.store(out, tl.load(source, mask=wanted, other=0.0), mask=wanted)
    tl.store(out + HALF, tl.load(source + HALF, mask=wanted, other=0.0), mask=wanted)
