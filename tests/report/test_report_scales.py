"""Axes, smoothing and thinning."""

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.report.scales import running_middle, scale_over, thinned

_values = st.lists(st.floats(min_value=-1e100, max_value=1e100), min_size=1, max_size=50)


@given(_values)
def test_an_axis_holds_its_values_and_has_a_handful_of_ticks(values: list[float]) -> None:
    scale = scale_over(values)
    slack = 1e-9 * (scale.high - scale.low)
    assert scale.low - slack <= min(values) <= max(values) <= scale.high + slack
    assert 2 <= len(scale.ticks) <= 8
    assert list(scale.ticks) == sorted(set(scale.ticks))
    assert all(0 <= scale.share(value) <= 1 for value in values)


@given(st.lists(st.floats(min_value=1e-40, max_value=1e40), min_size=1, max_size=50))
def test_a_log_axis_holds_its_values(values: list[float]) -> None:
    scale = scale_over(values, is_log=True)
    assert scale.low <= min(values) <= max(values) <= scale.high
    assert 2 <= len(scale.ticks) <= 8


def test_ticks_are_round() -> None:
    assert scale_over([2.48, 8.9]).ticks == (2, 4, 6, 8, 10)
    assert scale_over([0.4, 37_000], from_zero=True).ticks == (0, 10_000, 20_000, 30_000, 40_000)
    assert scale_over([2.2, 90], is_log=True).ticks == (2, 5, 10, 20, 50, 100)


def test_a_constant_lies_in_the_middle() -> None:
    scale = scale_over([3e-4, 3e-4])
    assert 0.2 < scale.share(3e-4) < 0.8


def test_smoothing_ignores_a_single_spike_and_keeps_a_line() -> None:
    flat = [(float(x), 100.0 if x in (0, 20, 39) else 5.0) for x in range(40)]
    assert {y for _, y in running_middle(flat, window=9)} == {5.0}
    slope = [(float(x), float(x)) for x in range(40)]
    assert running_middle(slope, window=9)[:-4] == slope[2:-4], "a fall is drawn neither late nor early"


def test_thinning_keeps_the_extremes_in_order() -> None:
    points = [(float(x), math.sin(x / 700)) for x in range(100_000)]
    points[51_234] = (51_234.0, 9.0)
    points[51_235] = (51_235.0, None)
    kept = thinned(points, most=800)
    assert len(kept) <= 802
    assert (51_234.0, 9.0) in kept
    assert [x for x, _ in kept] == sorted(x for x, _ in kept)
