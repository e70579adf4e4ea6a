from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.schedule import Schedule, learning_rate_at


def rates(num_steps: int, num_warmup_steps: int, schedule: Schedule, minimum: float = 0.0, **shape: Any) -> list[float]:
    return [
        learning_rate_at(
            step,
            num_steps=num_steps,
            num_warmup_steps=num_warmup_steps,
            peak=1.0,
            minimum=minimum,
            schedule=schedule,
            **shape,
        )
        for step in range(num_steps)
    ]


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (rates(6, 2, "linear"), [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        (rates(6, 2, "linear", minimum=0.2), [0.5, 1.0, 1.0, 0.8, 0.6, 0.4]),
        (rates(6, 2, "constant"), [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        (rates(4, 0, "cosine"), [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2]),
        (rates(3, 9, "cosine"), [1 / 3, 2 / 3, 1.0]),
        (rates(1, 1, "linear"), [1.0]),
        (rates(6, 2, "polynomial", power=2.0), [0.5, 1.0, 1.0, 0.5625, 0.25, 0.0625]),
        (rates(6, 2, "polynomial", power=1.0), rates(6, 2, "linear")),
        (rates(8, 0, "cosine-restarts", cycles=2), rates(4, 0, "cosine") * 2),
        (rates(8, 0, "cosine-restarts", cycles=1), rates(8, 0, "cosine")),
        (rates(10, 2, "wsd", decay_ratio=0.4), [0.5, 1, 1, 1, 1, 1, 1, 0.75, 0.5, 0.25]),
        (rates(10, 0, "wsd", decay_ratio=1), [step / 10 for step in range(10, 0, -1)]),
        (rates(4, 3, "wsd", decay_ratio=1, minimum=0.5), [1 / 3, 2 / 3, 1, 1]),  # to zero, whatever the minimum
    ],
)
def test_table(found: list[float], expected: list[float]) -> None:
    assert found == pytest.approx(expected)


def test_66_steps_with_7_of_warm_up() -> None:
    found = rates(66, 7, "cosine")
    assert found[:7] == pytest.approx([(step + 1) / 7 for step in range(7)])
    assert found[7] == 1.0
    assert found[8] < 1.0


@given(
    st.integers(1, 300),
    st.integers(0, 400),
    st.sampled_from(["linear", "cosine", "constant", "polynomial", "wsd"]),
    st.floats(0, 1),
    st.floats(0.1, 5),
    st.floats(0.01, 1),
)
def test_rises_to_the_peak_then_never_rises(
    num_steps: int, warmup: int, schedule: Schedule, minimum: float, power: float, decay_ratio: float
) -> None:
    found = rates(num_steps, warmup, schedule, minimum, power=power, decay_ratio=decay_ratio)
    top = min(warmup, num_steps)
    assert all(0 < rate <= 1 for rate in found)
    assert found[:top] == sorted(found[:top])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert max(found) == 1.0
    if schedule != "wsd":
        assert all(rate >= minimum - 1e-12 for rate in found[top:])


@given(st.integers(1, 300), st.integers(0, 50), st.integers(1, 12))
def test_each_cycle_starts_at_the_peak(num_steps: int, warmup: int, cycles: int) -> None:
    found = rates(num_steps, warmup, "cosine-restarts", cycles=cycles)[warmup:]
    assert all(0 <= rate <= 1 for rate in found)
    rises = sum(later > earlier for earlier, later in itertools.pairwise(found))
    assert rises <= cycles - 1
    if len(found) % cycles == 0 and len(found) > cycles:
        assert rises == cycles - 1
        assert found[:: len(found) // cycles] == pytest.approx([1.0] * cycles)
