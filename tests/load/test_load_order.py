"""Which row stands at which position: a bijection per pass, the same for ever, however it is asked for."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, ResumeError
from penstock.load import Loader
from penstock.load.mixed import MixedLoader, seed_of_source
from penstock.load.order import (
    BLOCK_ROWS,
    ORDER_NAMES,
    RUN_SEGMENTS,
    BySegments,
    Curriculum,
    GroupedByLength,
    InBlocks,
    Order,
    Sequential,
    Shuffled,
    order_named,
    permuted,
    row_lengths,
    row_segments,
    rows_at,
    shuffle_quality,
)
from penstock.load.stream import StreamSettings
from penstock.pack import make_plan, plan_concat
from penstock.pack.mixture import make_mixture

from .conftest import Sample

SEEDS = st.integers(-(2**70), 2**70)
PASSES = st.integers(0, 2**50)

GOLDEN_SMALL = [14, 3, 0, 18, 8, 13, 9, 10, 1, 17, 16, 2, 15, 19, 5, 6, 7, 12, 11, 4]
GOLDEN_STRADDLING = [7, 7, 6, 0, 1, 2, 5, 4, 8, 3]
GOLDEN_LARGE = [782484449951, 822077242186, 788778038680, 617941350226]


@given(size=st.integers(1, 5000), seed=SEEDS, pass_number=PASSES)
@settings(max_examples=60, deadline=None)
def test_a_pass_holds_every_row_once(size: int, seed: int, pass_number: int) -> None:
    rows = permuted(np.arange(size), size=size, seed=seed, pass_number=pass_number)
    assert sorted(rows.tolist()) == list(range(size))


@pytest.mark.parametrize("size", range(1, 70))
def test_a_pass_of_few_rows_holds_every_row_once(size: int) -> None:
    for seed in range(5):
        rows = permuted(np.arange(size), size=size, seed=seed, pass_number=seed)
        assert sorted(rows.tolist()) == list(range(size))


@pytest.mark.parametrize("size", [2**k + step for k in (12, 13, 20, 33, 40) for step in (-1, 0, 1)] + [10**12])
def test_places_of_a_large_pass_lead_to_different_rows_in_range(size: int) -> None:
    chance = random.Random(size)
    places = sorted({0, 1, size - 2, size - 1} | {chance.randrange(size) for _ in range(2000)})
    rows = permuted(np.array(places), size=size, seed=7, pass_number=3)
    assert len(set(rows.tolist())) == len(places)
    assert rows.min() >= 0
    assert rows.max() < size
    # They spread over the whole pass: a constant offset or a short cycle would not reach all of ten equal parts.
    assert len(set((rows * 10 // size).tolist())) == 10


@given(size=st.integers(50, 5000), seed=st.integers(0, 1000), pass_number=st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_order_differs_between_passes_and_seeds_and_from_the_plan(size: int, seed: int, pass_number: int) -> None:
    places = np.arange(size)
    order = permuted(places, size=size, seed=seed, pass_number=pass_number)
    others = [
        permuted(places, size=size, seed=seed, pass_number=pass_number + 1),
        permuted(places, size=size, seed=seed + 1, pass_number=pass_number),
        permuted(places, size=size, seed=pass_number, pass_number=seed) if seed != pass_number else places,
        places,
    ]
    for other in others:
        # Two unrelated orders agree in one place on average; more than 12 happens once in 10^9.
        assert int((order == other).sum()) <= 12


def test_every_order_of_four_rows_turns_up() -> None:
    """Small plans are shuffled as well: of the 24 orders none is out of reach."""
    orders = {tuple(permuted(range(4), size=4, seed=0, pass_number=number).tolist()) for number in range(2000)}
    assert len(orders) == 24


def test_the_order_never_changes() -> None:
    """Golden values: another order would silently send every running training to other rows."""
    small = permuted(range(20), size=20, seed=1234, pass_number=5)
    assert small.tolist() == GOLDEN_SMALL
    assert rows_at(17, 10, num_rows=9, seed=42, shuffle=True).tolist() == GOLDEN_STRADDLING
    assert rows_at(10**15, 4, num_rows=10**12, seed=-3, shuffle=True).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize("shape", [(), (0,), (6,), (2, 3)])
def test_places_may_have_any_shape(shape: tuple[int, ...]) -> None:
    places = np.arange(int(np.prod(shape))).reshape(shape)
    with np.errstate(all="raise"):
        rows = permuted(places, size=11, seed=1, pass_number=2)
    assert rows.shape == shape
    one_by_one = [int(permuted([place], size=11, seed=1, pass_number=2)[0]) for place in places.reshape(-1).tolist()]
    assert rows.reshape(-1).tolist() == one_by_one


@given(
    start=st.one_of(st.integers(0, 500), st.integers(0, 10**15)),
    count=st.integers(0, 120),
    num_rows=st.one_of(st.integers(1, 60), st.sampled_from([10**6, 10**12])),
    seed=SEEDS,
    shuffle=st.booleans(),
)
@example(start=0, count=0, num_rows=1, seed=0, shuffle=True)
@example(start=59, count=2, num_rows=60, seed=0, shuffle=True)
@settings(max_examples=100, deadline=None)
def test_a_stretch_is_its_positions_one_by_one(start: int, count: int, num_rows: int, seed: int, shuffle: bool) -> None:
    def single(position: int) -> int:
        place, pass_number = position % num_rows, position // num_rows
        if not shuffle:
            return place
        return int(permuted([place], size=num_rows, seed=seed, pass_number=pass_number)[0])

    rows = rows_at(start, count, num_rows=num_rows, seed=seed, shuffle=shuffle)
    assert rows.dtype == np.int64
    assert rows.tolist() == [single(position) for position in range(start, start + count)]


@pytest.mark.parametrize("num_rows", [1000, 5000, 2**14 + 1, 2**20 + 7, 10**12])
def test_many_positions_at_once_are_the_same_as_few(num_rows: int) -> None:
    """Of many values the rounds are looked up in tables, of few they are computed."""
    start, count = 3 * num_rows - 2048, 4096  # across the end of a pass
    many = rows_at(start, count, num_rows=num_rows, seed=5, shuffle=True)
    few = [rows_at(position, 7, num_rows=num_rows, seed=5, shuffle=True) for position in range(start, start + count, 7)]
    assert many.tolist() == np.concatenate(few)[:count].tolist()


@given(num_rows=st.integers(1, 80), cuts=st.lists(st.integers(1, 90), min_size=1, max_size=12), shuffle=st.booleans())
@settings(max_examples=40, deadline=None)
def test_every_row_once_per_pass_however_positions_are_cut(num_rows: int, cuts: list[int], shuffle: bool) -> None:
    rows: list[int] = []
    for count in cuts:
        rows += rows_at(len(rows), count, num_rows=num_rows, seed=5, shuffle=shuffle).tolist()
    for first in range(0, len(rows), num_rows):
        of_pass = rows[first : first + num_rows]
        assert len(set(of_pass)) == len(of_pass)
        if len(of_pass) == num_rows:
            assert set(of_pass) == set(range(num_rows))


def test_unshuffled_order_is_the_plans_own_again_and_again() -> None:
    assert rows_at(3, 9, num_rows=5, seed=1, shuffle=False).tolist() == [3, 4, 0, 1, 2, 3, 4, 0, 1]


def orders_of(lengths: list[int], seed: int) -> list[Order]:
    size = len(lengths)
    return [
        Sequential(num_rows=size),
        Shuffled(num_rows=size, seed=seed),
        GroupedByLength(lengths, seed=seed, group_rows=7),
        Curriculum(lengths, seed=seed),
        BySegments(lengths, seed=seed, window_segments=2),
        BySegments(lengths, seed=seed, window_segments=9),
    ]


@given(
    lengths=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    cuts=st.lists(st.integers(0, 50), min_size=1, max_size=10),
    start=st.one_of(st.integers(0, 200), st.integers(0, 10**12)),
    seed=st.integers(0, 50),
)
@settings(max_examples=60, deadline=None)
def test_every_order_is_pure_and_holds_each_row_once_per_pass(
    lengths: list[int], cuts: list[int], start: int, seed: int
) -> None:
    size = len(lengths)
    for order, fresh in zip(orders_of(lengths, seed), orders_of(lengths, seed), strict=True):
        begin = start - start % size
        of_pass = order.rows_at(begin, size).tolist()
        assert sorted(of_pass) == list(range(size))
        position = start
        for count in cuts:
            rows = order.rows_at(position, count)
            assert rows.dtype == np.int64
            # Asked one by one, by somebody who was asked nothing before.
            one_by_one = [int(fresh.rows_at(position + step, 1)[0]) for step in range(count)]
            assert rows.tolist() == one_by_one
            position += count
        assert fresh.identity == order.identity


@given(
    pieces=st.lists(
        st.tuples(st.integers(0, 4 * BLOCK_ROWS), st.integers(0, 2 * BLOCK_ROWS + 3)), min_size=1, max_size=4
    ),
    num_rows=st.integers(1, 3 * BLOCK_ROWS),
)
@settings(max_examples=30, deadline=None)
def test_an_order_in_blocks_is_the_order(pieces: list[tuple[int, int]], num_rows: int) -> None:
    order = Shuffled(num_rows=num_rows, seed=3)
    in_blocks = InBlocks(order)
    for start, count in pieces:
        assert np.array_equal(in_blocks.rows_at(start, count), order.rows_at(start, count))


def test_rows_of_like_length_stand_together() -> None:
    lengths = np.random.default_rng(0).integers(1, 1000, 5000)
    order = GroupedByLength(lengths, seed=3, group_rows=640)
    shuffled = Shuffled(num_rows=5000, seed=3)

    def padding(rows: np.ndarray) -> float:
        batches = lengths[rows[: len(rows) // 32 * 32]].reshape(-1, 32)
        return float(1 - batches.sum() / (batches.max(axis=1) * 32).sum())

    first, second = order.rows_at(0, 5000), order.rows_at(5000, 5000)
    assert padding(first) < 0.1 < 0.4 < padding(shuffled.rows_at(0, 5000))
    assert (first == second).mean() < 0.01  # another arrangement each pass
    assert shuffle_quality(order, batch_rows=32)["mean_distance"] == pytest.approx(1 / 3, abs=0.02)


def test_a_curriculum_goes_from_low_to_high_and_draws_among_equals() -> None:
    ranks = np.random.default_rng(1).integers(0, 4, 400) / 3
    order = Curriculum(ranks, seed=1)
    rows = order.rows_at(0, 400)
    assert (np.diff(ranks[rows]) >= 0).all()
    assert order.rows_at(400, 400).tolist() == rows.tolist()
    equals = rows[ranks[rows] == 0]
    assert equals.tolist() != sorted(equals.tolist())
    assert Curriculum(ranks, seed=2).rows_at(0, 400).tolist() != rows.tolist()
    assert Curriculum(ranks, seed=1).identity != Curriculum(ranks + 1e-9, seed=1).identity


@pytest.mark.parametrize("window", [1, 3, 4, 8, 100])
def test_rows_of_few_segments_stand_together(window: int) -> None:
    chance, size = np.random.default_rng(0), 72  # which all of these windows, and their runs, divide
    appearance = chance.permutation(size)  # segments are numbered in no order
    places = np.argsort(appearance)
    segments = np.repeat(appearance, chance.integers(1, 40, size))
    order = BySegments(segments, seed=3, window_segments=window)
    run, of_passes = min(window, RUN_SEGMENTS), []
    for pass_number in range(3):
        rows = order.rows_at(pass_number * len(segments), len(segments))
        _, first = np.unique(segments[rows], return_index=True)
        met = segments[rows[np.sort(first)]]
        windows = [met[begin : begin + window] for begin in range(0, size, window)]
        for one, begin, end in zip(
            windows, np.sort(first)[::window], [*np.sort(first)[::window][1:], None], strict=True
        ):
            assert set(segments[rows[begin:end]]) == set(one)  # and no segment comes again later
            assert set(np.bincount(places[one] // run)) <= {0, run}  # whole runs of neighbours
        of_passes.append([frozenset(one.tolist()) for one in windows])
        assert (np.diff(rows) == 1).mean() < 0.1 + 0.4 / window
    if window < size:
        assert of_passes[0] != of_passes[1] != of_passes[2]
    assert BySegments(segments, seed=3, window_segments=window + 1).identity != order.identity
    assert BySegments(appearance[segments], seed=3, window_segments=window).identity != order.identity
    with pytest.raises(ConfigError, match="0 segments"):
        BySegments(segments, seed=3, window_segments=0)


@pytest.mark.parametrize(("asked", "window"), [(1, 1), (3, 3), (4, 4), (5, 4), (7, 4), (8, 8), (11, 8)])
def test_a_window_is_of_whole_runs_and_the_record_says_of_how_many(asked: int, window: int) -> None:
    segments = np.repeat(np.arange(24), 10)  # which all of these windows divide
    order = BySegments(segments, seed=3, window_segments=asked)
    rows = order.rows_at(0, window * 10)
    assert len(set(segments[rows])) == window
    assert len(set(segments[order.rows_at(0, window * 10 + 1)])) > window
    (_, _, reason), *_ = StreamSettings(order="segments", window_segments=asked).choices()
    assert f"rows of {window} segments" in reason
    assert (str(asked) in reason.replace(f"rows of {window} ", "")) == (asked != window)


@pytest.mark.parametrize("policy", ["concat", "best-fit", "windows", "pad"])
@pytest.mark.parametrize("name", ["letters", "grown", "parts"])
def test_a_row_is_of_the_segment_of_its_first_token(sample: Callable[[str], Sample], name: str, policy: str) -> None:
    plan = make_plan(sample(name).store, policy=policy, seq_len=16)
    stretches = plan.stretches(np.arange(plan.num_rows))
    first = [int(stretches.segment[stretches.row == row][0]) for row in range(plan.num_rows)]
    assert row_segments(plan).tolist() == first


def test_sources_of_a_mixture_have_windows_of_their_own(sample: Callable[[str], Sample]) -> None:
    stores = {name: sample(name).store for name in ("letters", "parts")}
    mixture = make_mixture(stores, ["parts=2"], policy="best-fit", split="train", seq_len=16)
    settings = StreamSettings(order="segments", window_segments=3)
    options = settings.options(mixture, seed=5, batch_rows=4)
    expected = [
        order_named("segments", plan, seed=seed_of_source(5, number), window_segments=3)
        for number, plan in enumerate(mixture.plans)
    ]
    assert [order.identity for order in options["order"]] == [order.identity for order in expected]
    with MixedLoader(mixture, batch_rows=1, seed=5, **options) as loader:
        batches = list(itertools.islice(loader, int(mixture.epoch_rows)))
        assert len({(int(batch.sources[0]), int(batch.rows[0])) for batch in batches if batch.sources[0] == 0}) == (
            mixture.plans[0].num_rows
        )


@pytest.mark.parametrize("ranks", [[], [[1, 2]], ["a", "b"], [1.0, float("nan")], [float("inf")], 3])
def test_ranks_that_order_nothing_are_refused(ranks: Any) -> None:
    with pytest.raises(ConfigError):
        Curriculum(ranks, seed=0)


def test_orders_by_name(sample: Callable[[str], Sample]) -> None:
    plan = make_plan(sample("letters").store, policy="windows", seq_len=16)
    ranks = np.arange(plan.num_rows)[::-1]
    made = {name: order_named(name, plan, seed=4, ranks=ranks) for name in ORDER_NAMES}
    assert [order.identity["name"] for order in made.values()] == list(ORDER_NAMES)
    assert {order.num_rows for order in made.values()} == {plan.num_rows}
    assert made["curriculum"].rows_at(0, 3).tolist() == [plan.num_rows - 1, plan.num_rows - 2, plan.num_rows - 3]
    # What a row's length is, from the plan's own padding.
    with Loader(plan, batch_rows=plan.num_rows, order=made["group_by_length"], prefetch_batches=0) as loader:
        batch = next(loader)
        found = row_lengths(plan)[batch.rows]
        assert found.tolist() == sorted(found.tolist(), reverse=True)  # one group holds all rows of this plan
        padding_begins = [np.flatnonzero(row)[-1] + 1 if row.any() else 1 for row in batch.loss_mask]
        assert (found >= padding_begins).all()
    for name, ranks_given, message in [
        ("shufle", None, "shufle"),
        ("curriculum", None, "needs ranks"),
        ("curriculum", [1, 2], "2 ranks"),
    ]:
        with pytest.raises(ConfigError, match=message):
            order_named(name, plan, seed=0, ranks=ranks_given)


ORDERS: dict[str, Callable[[Any], Order]] = {
    "shuffle": lambda seed: Shuffled(num_rows=3, seed=seed),
    "group_by_length": lambda seed: GroupedByLength([1, 2, 3], seed=seed),
    "curriculum": lambda seed: Curriculum([1, 2, 3], seed=seed),
    "segments": lambda seed: BySegments([0, 0, 1], seed=seed),
}


@pytest.mark.parametrize("name", ORDERS)
def test_a_seed_of_more_than_64_bits_or_no_whole_number_is_refused(name: str) -> None:
    for seed in (-(2**63), 0, 2**64 - 1):
        assert sorted(ORDERS[name](seed).rows_at(0, 3)) == [0, 1, 2]
    for impossible in (-(2**63) - 1, 2**64, 1.5, None, "7", True):
        with pytest.raises(ConfigError, match=f"seed {impossible!r}"):
            ORDERS[name](impossible)


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_loader_refuses_an_impossible_seed_in_any_order(sample: Callable[[str], Sample], shuffle: bool) -> None:
    plan = plan_concat(sample("letters").store, seq_len=16)
    with pytest.raises(ConfigError, match=r"seed 1.5"):
        Loader(plan, batch_rows=2, seed=1.5, shuffle=shuffle)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [2.5, math.nan, math.inf, "8", None, True, 0])
def test_what_counts_segments_or_rows_is_a_whole_number(count: Any) -> None:
    with pytest.raises(ConfigError, match=f"a window of {count!r} segments"):
        BySegments([0, 0, 1], seed=3, window_segments=count)
    with pytest.raises(ConfigError, match=f"a group of {count!r} rows"):
        GroupedByLength([1, 2, 3], seed=3, group_rows=count)


def test_a_state_of_another_order_is_refused(sample: Callable[[str], Sample]) -> None:
    plan = plan_concat(sample("letters").store, seq_len=16)
    ranks = np.arange(plan.num_rows)
    orders = [None, Sequential(num_rows=plan.num_rows), Curriculum(ranks, seed=0), Curriculum(-ranks, seed=0)]
    loaders = [Loader(plan, batch_rows=2, order=order, prefetch_batches=0) for order in orders]
    for one, two in itertools.permutations(loaders, 2):
        with pytest.raises(ResumeError, match="order"):
            one.load_state_dict(two.state_dict())
    for loader, order in zip(loaders, orders, strict=True):
        again = Loader(plan, batch_rows=2, order=order, prefetch_batches=0)
        next(loader)
        again.load_state_dict(loader.state_dict())
        assert next(again).rows.tolist() == next(loader).rows.tolist()
    with pytest.raises(ConfigError, match="3 rows"):
        Loader(plan, batch_rows=2, order=Sequential(num_rows=3))


def test_the_figure_of_shuffling_tells_orders_apart() -> None:
    own = shuffle_quality(Sequential(num_rows=3000), batch_rows=30)
    drawn = shuffle_quality(Shuffled(num_rows=3000, seed=0), batch_rows=30)
    assert own["mean_distance"] == pytest.approx(1 / 3000)
    assert own["in_one_batch"] > 0.96
    assert drawn["mean_distance"] == pytest.approx(1 / 3, abs=0.02)
    assert drawn["in_one_batch"] == pytest.approx(drawn["in_one_batch_if_random"], abs=0.01)
    assert shuffle_quality(Sequential(num_rows=1), batch_rows=4)["mean_distance"] == 0
