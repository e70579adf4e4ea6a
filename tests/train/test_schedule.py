from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.schedule import Schedule, learning_rate_at


def rates(num_steps: int, num_warmup_steps: int, schedule: Schedule, minimum: float = 0.0) -> list[float]:
    return [
        learning_rate_at(
            step, num_steps=num_steps, num_warmup_steps=num_warmup_steps, peak=1.0, minimum=minimum, schedule=schedule
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
    st.sampled_from(["linear", "cosine", "constant"]),
    st.floats(0, 1),
)
def test_rises_to_the_peak_then_never_rises(num_steps: int, warmup: int, schedule: Schedule, minimum: float) -> None:
    found = rates(num_steps, warmup, schedule, minimum)
    top = min(warmup, num_steps)
    assert all(0 < rate <= 1 for rate in found)
    assert found[:top] == sorted(found[:top])
    assert found[top:] == sorted(found[top:], reverse=True)
    assert max(found) == 1.0
    assert all(rate >= minimum - 1e-12 for rate in found[top:])
