"""Labels and positions written out, against a slow reference: documents short and long, whole batches and parts."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.load import materialise


@given(
    rows=st.integers(1, 4),
    width=st.sampled_from([1, 7, 600]),
    borders=st.sets(st.integers(0, 2399), max_size=40),
    padding=st.integers(0, 3),
    dtype=st.sampled_from([np.int32, np.int64]),
    data=st.data(),
)
@settings(max_examples=80, deadline=None)
def test_positions_count_from_each_border(rows, width, borders, padding, dtype, data):
    places = rows * width
    begins = sorted({row * width for row in range(rows)} | {border for border in borders if border < places})
    cu_seqlens = np.array([*begins, *[places] * (1 + padding)], np.int32)
    expected = [place - max(begin for begin in begins if begin <= place) for place in range(places)]
    made = materialise.position_ids(cu_seqlens, (rows, width), dtype=dtype)
    assert made.dtype == dtype
    assert made.reshape(-1).tolist() == expected
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    part = materialise.position_ids(cu_seqlens, (count, width), first_row=first)
    assert part.tolist() == made[first : first + count].tolist()


def test_labels_are_the_next_tokens_where_they_count():
    tokens = np.array([[5, 65535, 7], [1, 2, 3]], np.uint16)
    mask = np.array([[True, False], [True, True]])
    assert materialise.labels(tokens, mask).tolist() == [[65535, -100], [2, 3]]
    assert materialise.labels(tokens, mask, dtype=np.int32).dtype == np.int32
