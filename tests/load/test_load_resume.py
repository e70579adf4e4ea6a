"""Exact resume: batch k is a function of plan, seed and position, whoever asks, wherever it was stopped."""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ResumeError
from penstock.load import Batch, Loader
from penstock.load.order import ORDER_NAMES, order_named, permuted
from penstock.load.transforms import RandomCrop
from penstock.pack import Plan, make_plan, plan_concat

from .conftest import SMALL_STORE_NAMES, Sample
from .reference import Reference, ReferenceRow, assert_batch_equals

pytestmark = pytest.mark.torture(lane="D", sample=True)

Samples = Callable[[str], Sample]

PREFETCHES = (0, 1, 2, 8)


@dataclass(frozen=True)
class Copied:
    """A batch that outlives the loader's buffers."""

    position: int
    rows: list[int]
    content: tuple[bytes, bytes, bytes]


def copied(batch: Batch) -> Copied:
    content = (batch.tokens.tobytes(), batch.loss_mask.tobytes(), batch.cu_seqlens.tobytes())
    return Copied(batch.position, batch.rows.tolist(), content)


def take(loader: Loader, count: int) -> list[Copied]:
    return [copied(next(loader)) for _ in range(count)]


def through_json(state: dict[str, Any]) -> dict[str, Any]:
    restored: dict[str, Any] = json.loads(json.dumps(state))
    return restored


def resumed(plan: Plan, state: dict[str, Any], **options: Any) -> Loader:
    loader = Loader(plan, **options)
    loader.load_state_dict(through_json(state))
    return loader


def small_plan(sample: Samples, *, seq_len: int = 16) -> Plan:
    return plan_concat(sample("parts").store, split="val", seq_len=seq_len)


@functools.lru_cache(maxsize=1024)
def order_of_pass(num_rows: int, seed: int, pass_number: int) -> list[int]:
    order: list[int] = permuted(range(num_rows), size=num_rows, seed=seed, pass_number=pass_number).tolist()
    return order


def row_numbers(plan: Plan, positions: range, *, seed: int, shuffle: bool = True) -> list[int]:
    """The row at each position, pass by pass."""
    numbers = []
    for position in positions:
        pass_number, place = divmod(position, plan.num_rows)
        numbers.append(order_of_pass(plan.num_rows, seed, pass_number)[place] if shuffle else place)
    return numbers


def reference_rows(reference: Reference, plan: Plan, numbers: list[int]) -> list[ReferenceRow]:
    return [reference.row(number, plan.seq_len, boundaries=plan.boundaries) for number in numbers]


@given(
    name=st.sampled_from(SMALL_STORE_NAMES),
    split=st.sampled_from(["train", "val", "test"]),
    seq_len=st.integers(1, 64),
    batch_rows=st.integers(1, 13),
    seed=st.integers(0, 2**64),
    boundaries=st.booleans(),
    shuffle=st.booleans(),
    prefetch=st.sampled_from(PREFETCHES),
    start=st.one_of(st.integers(0, 300), st.integers(0, 10**15)),
)
@settings(max_examples=50, deadline=None)
def test_batches_equal_the_reference_from_any_position(
    sample: Samples,
    name: str,
    split: str,
    seq_len: int,
    batch_rows: int,
    seed: int,
    boundaries: bool,
    shuffle: bool,
    prefetch: int,
    start: int,
) -> None:
    one = sample(name)
    plan = plan_concat(one.store, split=split, seq_len=seq_len, boundaries=boundaries)
    options = {"batch_rows": batch_rows, "seed": seed, "shuffle": shuffle, "prefetch_batches": prefetch}
    with Loader(plan, **options) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": start})
        for number in range(6):
            positions = range(start + number * batch_rows, start + (number + 1) * batch_rows)
            numbers = row_numbers(plan, positions, seed=seed, shuffle=shuffle)
            assert loader.position == positions.start
            batch = next(loader)
            assert batch.position == positions.start
            assert batch.rows.tolist() == numbers
            assert_batch_equals(batch, reference_rows(one.splits[split], plan, numbers))


def test_batches_equal_the_reference_past_the_border_of_computed_blocks(sample: Samples) -> None:
    """The loader works out thousands of rows at once; where one such block ends the next goes on."""
    plan = small_plan(sample)
    for batch_rows, num_batches in [(700, 8), (5000, 2)]:
        with Loader(plan, batch_rows=batch_rows, seed=9, prefetch_batches=2) as loader:
            seen = [row for _ in range(num_batches) for row in next(loader).rows.tolist()]
        assert seen == row_numbers(plan, range(num_batches * batch_rows), seed=9)


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("batch_rows", [1, 5, 32])
def test_every_row_once_per_pass_over_batches_that_straddle_passes(
    sample: Samples, prefetch: int, shuffle: bool, batch_rows: int
) -> None:
    plan = small_plan(sample)
    assert batch_rows == 1 or plan.num_rows % batch_rows  # batches do straddle
    with Loader(plan, batch_rows=batch_rows, seed=3, shuffle=shuffle, prefetch_batches=prefetch) as loader:
        rows = [row for _ in range(-(-3 * plan.num_rows // batch_rows)) for row in next(loader).rows.tolist()]
    for number in range(3):
        assert sorted(rows[number * plan.num_rows : (number + 1) * plan.num_rows]) == list(range(plan.num_rows))


@pytest.mark.parametrize("prefetch", PREFETCHES)
@pytest.mark.parametrize(("batch_rows", "shuffle"), [(3, True), (5, True), (9, False)])
def test_resume_at_every_step_of_three_passes(sample: Samples, prefetch: int, batch_rows: int, shuffle: bool) -> None:
    plan = small_plan(sample)
    options = {"batch_rows": batch_rows, "seed": 11, "shuffle": shuffle, "prefetch_batches": prefetch}
    steps = -(-3 * plan.num_rows // batch_rows) + 1
    with Loader(plan, **options) as loader:
        states, whole = [loader.state_dict()], []
        for _ in range(steps):
            whole.append(copied(next(loader)))
            states.append(loader.state_dict())
    for step, state in enumerate(states):
        assert state["position"] == step * batch_rows
        with resumed(plan, state, **options) as again:
            assert take(again, steps - step) == whole[step:]


def chain_of_stops(plan: Plan, seed: int, *, num_stops: int) -> None:
    """A run stopped `num_stops` times at random places, sometimes right after a restore, at any prefetch depth."""
    chance = random.Random(seed)
    batch_rows = chance.randint(1, 9)
    lengths = [chance.choice([0, 1, 2, 3, chance.randint(4, 12)]) for _ in range(num_stops)]
    with Loader(plan, batch_rows=batch_rows, seed=seed, prefetch_batches=0) as loader:
        whole = take(loader, sum(lengths))
    parts: list[Copied] = []
    state = Loader(plan, batch_rows=batch_rows, seed=seed).state_dict()
    for length in lengths:
        with resumed(
            plan, state, batch_rows=batch_rows, seed=seed, prefetch_batches=chance.choice(PREFETCHES)
        ) as loader:
            parts += take(loader, length)
            state = loader.state_dict()
    assert parts == whole


@pytest.mark.parametrize("num_seeds", [20, pytest.param(200, marks=pytest.mark.torture(lane="D"))])
def test_chains_of_twenty_stops(sample: Samples, num_seeds: int, torture_figures: Callable[..., None]) -> None:
    plan = small_plan(sample)
    for seed in range(num_seeds):
        chain_of_stops(plan, seed, num_stops=20)
    torture_figures(lane="D", case="chains of 20 stops", trials=num_seeds, failures=0, random=True)


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_restoring_while_batches_are_filled_ahead_drops_them(sample: Samples, prefetch: int) -> None:
    """One loader, sent back and forth: what the thread had filled for the old place is never given out."""
    plan = small_plan(sample)
    with Loader(plan, batch_rows=4, seed=2, prefetch_batches=prefetch) as loader:
        fresh = loader.state_dict()
        first = take(loader, 10)
        middle = loader.state_dict()
        second = take(loader, 10)
        loader.load_state_dict(fresh)
        assert take(loader, 3) == first[:3]
        loader.load_state_dict(middle)
        loader.load_state_dict(middle)  # twice in a row
        assert loader.state_dict() == middle
        assert take(loader, 10) == second
        loader.load_state_dict(middle)
        assert take(loader, 1) == second[:1]


@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_restore_before_the_first_batch_and_exactly_at_a_pass_end(sample: Samples, prefetch: int) -> None:
    plan = small_plan(sample)
    options = {"batch_rows": plan.num_rows // 2, "seed": 6, "prefetch_batches": prefetch}
    assert plan.num_rows % 2 == 0
    with Loader(plan, **options) as loader:
        before = loader.state_dict()
        whole = take(loader, 2)
        pass_end = loader.state_dict()
        whole += take(loader, 2)
        second_pass_end = loader.state_dict()
        whole += take(loader, 2)
    assert pass_end["position"] == plan.num_rows
    for state, rest in [(before, whole), (pass_end, whole[2:]), (second_pass_end, whole[4:])]:
        with resumed(plan, state, **options) as again:
            assert take(again, len(rest)) == rest


def test_saving_does_not_move_the_loader(sample: Samples) -> None:
    plan = small_plan(sample)
    with Loader(plan, batch_rows=3) as asked, Loader(plan, batch_rows=3) as alone:
        for _ in range(30):
            assert asked.state_dict() == asked.state_dict()
            assert copied(next(asked)) == copied(next(alone))


@pytest.mark.parametrize("prefetch", [0, 2])
def test_world_size_may_change_at_every_stop(sample: Samples, prefetch: int) -> None:
    plan = plan_concat(sample("letters").store, seq_len=16)
    reference = sample("letters").train
    batch_rows, steps_each = 16, 12
    state = Loader(plan, batch_rows=batch_rows, seed=8).state_dict()
    step = 0
    for world_size in (1, 2, 4, 8, 1):
        options = {"batch_rows": batch_rows, "seed": 8, "world_size": world_size, "prefetch_batches": prefetch}
        ranks = [resumed(plan, state, rank=rank, **options) for rank in range(world_size)]
        for _ in range(steps_each):
            positions = range(step * batch_rows, (step + 1) * batch_rows)
            numbers = row_numbers(plan, positions, seed=8)
            rows = reference_rows(reference, plan, numbers)
            share = batch_rows // world_size
            for rank, loader in enumerate(ranks):
                batch = next(loader)
                assert batch.rows.tolist() == numbers[rank * share : (rank + 1) * share]
                assert_batch_equals(batch, rows[rank * share : (rank + 1) * share])
            step += 1
        states = [loader.state_dict() for loader in ranks]
        assert all(other == states[0] for other in states)  # any rank's state is the run's
        state = states[-1]
        for loader in ranks:
            loader.close()
    assert step * batch_rows > plan.num_rows  # more than one pass was seen


@given(sizes=st.lists(st.integers(1, 40), min_size=1, max_size=8), prefetch=st.sampled_from(PREFETCHES))
@settings(max_examples=20, deadline=None)
def test_another_batch_size_goes_on_at_the_same_position(sample: Samples, sizes: list[int], prefetch: int) -> None:
    plan = small_plan(sample)
    reference = sample("parts").splits["val"]
    state = Loader(plan, batch_rows=1, seed=4).state_dict()
    seen: list[int] = []
    for batch_rows in sizes:
        with resumed(plan, state, batch_rows=batch_rows, seed=4, prefetch_batches=prefetch) as loader:
            for _ in range(2):
                batch = next(loader)
                assert batch.position == len(seen)
                seen += batch.rows.tolist()
                assert_batch_equals(batch, [reference.row(row, plan.seq_len) for row in batch.rows.tolist()])
            state = loader.state_dict()
    assert seen == row_numbers(plan, range(len(seen)), seed=4)


def test_a_store_built_in_steps_goes_on_with_the_state_of_one_built_at_once(sample: Samples) -> None:
    """Same digest, other layout on disk: the state fits and the batches are the same."""
    at_once = plan_concat(sample("letters").store, seq_len=24)
    in_steps = plan_concat(sample("grown").store, seq_len=24)
    assert not np.array_equal(at_once.piece_offsets, in_steps.piece_offsets)
    with Loader(at_once, batch_rows=6) as loader:
        take(loader, 5)
        state = loader.state_dict()
        expected = take(loader, 20)
    with resumed(in_steps, state, batch_rows=6) as again:
        assert take(again, 20) == expected


def test_the_state_is_small_json(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=2**20)
    loader = Loader(plan, batch_rows=2, seed=2**64 - 1, prefetch_batches=0)
    loader.load_state_dict({**loader.state_dict(), "position": 10**15})
    assert len(json.dumps(loader.state_dict())) < 4096
    assert through_json(loader.state_dict()) == loader.state_dict()


def other_loader(sample: Samples, change: str) -> Loader:
    """A loader that differs from the plain one in one thing."""
    store = sample("wide" if change == "store" else "letters").store
    plan = plan_concat(
        store,
        split="val" if change == "split" else "train",
        seq_len=32 if change == "seq_len" else 24,
        boundaries=change != "boundaries",
    )
    return Loader(plan, batch_rows=4, seed=77 if change == "seed" else 55, shuffle=change != "shuffle")


@pytest.mark.parametrize("change", ["store", "seq_len", "split", "boundaries", "seed", "shuffle"])
def test_a_state_of_something_else_is_refused_with_both_sides_shown(sample: Samples, change: str) -> None:
    with other_loader(sample, "nothing") as loader, other_loader(sample, change) as other:
        take(loader, 3)
        expected = take(loader, 1)
        loader.load_state_dict({**loader.state_dict(), "position": 12})
        state = other.state_dict()
        with pytest.raises(ResumeError) as refusal:
            loader.load_state_dict(state)
        mine, theirs = loader.state_dict()["identity"][change], state["identity"][change]
        assert mine != theirs
        for value in (change, repr(mine), repr(theirs)):
            assert value in refusal.value.message
        assert loader.position == 12  # the refusal changed nothing
        assert take(loader, 1) == expected


def test_a_state_with_an_unknown_field_is_refused_by_name(sample: Samples) -> None:
    """A state of a later version, which knows more about its place, must not pass for one of ours."""
    with other_loader(sample, "nothing") as loader:
        state = loader.state_dict()
        state["identity"] = {**state["identity"], "mixture": "half"}
        with pytest.raises(ResumeError, match=r"mixture.*'half'"):
            loader.load_state_dict(state)


@pytest.mark.parametrize(
    "changes",
    [
        {"format": 2},
        {"format": None},
        {"position": None},
        {"position": "12"},
        {"position": 1.5},
        {"position": -1},
        {"position": True},
        {"identity": None},
        {"identity": "train"},
    ],
)
def test_a_malformed_state_is_refused(sample: Samples, changes: dict[str, Any]) -> None:
    with other_loader(sample, "nothing") as loader:
        take(loader, 2)
        with pytest.raises(ResumeError):
            loader.load_state_dict({**loader.state_dict(), **changes})
        assert loader.position == 8


@pytest.mark.parametrize("position", [2**62 + 1, 10**19, 10**30])
def test_a_position_beyond_the_last_is_refused_with_both_numbers(sample: Samples, position: int) -> None:
    with other_loader(sample, "nothing") as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 2**62})
        assert next(loader).position == 2**62
        with pytest.raises(ResumeError, match=rf"{position}.*{2**62}"):
            loader.load_state_dict({**loader.state_dict(), "position": position})


@pytest.mark.parametrize("state", [{}, None, [], "position", 7])
def test_what_is_no_state_at_all_is_refused(sample: Samples, state: Any) -> None:
    with other_loader(sample, "nothing") as loader, pytest.raises(ResumeError):
        loader.load_state_dict(state)


POLICIES = ("concat", "best-fit", "windows", "pad")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("prefetch", PREFETCHES)
def test_every_state_of_three_passes_goes_on_alike_in_all_packings(
    sample: Samples, policy: str, prefetch: int, torture_figures: Callable[..., None]
) -> None:
    """Saved at every step, restored at every state: before the first batch, at a pass's end, in later passes."""
    overlap = {"overlap": 5} if policy == "windows" else {}
    plan = make_plan(sample("parts").store, policy=policy, split="val", seq_len=24, **overlap)
    options = {"batch_rows": 7, "seed": 2, "prefetch_batches": prefetch}
    num_batches = -(-3 * plan.num_rows // 7)
    with Loader(plan, **options) as loader:
        states, whole = [], []
        for _ in range(num_batches + 2):
            states.append(loader.state_dict())
            whole.append(copied(next(loader)))
    failures = 0
    for number, state in enumerate(states[:-2]):
        with resumed(plan, state, **options) as again:
            failures += take(again, 3) != whole[number : number + 3]
    case = f"restored at every state of three passes, {policy}, {prefetch} batches ahead"
    torture_figures(lane="D", case=case, trials=num_batches, failures=failures)
    assert failures == 0
    rows = [row for batch in whole for row in batch.rows]
    for first in range(0, 3 * plan.num_rows, plan.num_rows):
        assert sorted(rows[first : first + plan.num_rows]) == list(range(plan.num_rows))


def test_chains_of_twenty_stops_through_every_reader(
    sample: Samples, scale: Callable[..., int], torture_figures: Callable[..., None]
) -> None:
    """Each leg of a chain is read by another reader, batch size, world size, order and packing: the stream goes on."""
    torch_readers = pytest.importorskip("penstock.load.torch", reason="torch isn't installed")
    chains, failures = scale(test=4, torture=200), 0
    for seed in range(chains):
        chance = random.Random(seed)
        plan = make_plan(sample("parts").store, policy=chance.choice(POLICIES), split="val", seq_len=16)
        order = order_named(
            chance.choice(ORDER_NAMES), plan, seed=seed, ranks=np.arange(plan.num_rows) % 5, group_rows=9
        )
        options = {"seed": seed, "order": order, "transforms": [RandomCrop.for_plan(plan)]}
        state = Loader(plan, batch_rows=1, prefetch_batches=0, **options).state_dict()
        seen: list[tuple[int, list[int]]] = []
        for _ in range(20):
            batch_rows, steps = chance.choice([1, 2, 4, 6, 12]), chance.randrange(4)
            if chance.random() < 0.5:
                stream = torch_readers.RowStream(
                    plan,
                    batch_rows=batch_rows,
                    micro_rows=1,
                    rank=0,
                    world_size=1,
                    fields=["row", "input_ids"],
                    **options,
                )
                stream.load_state_dict(through_json(state))
                items = itertools.islice(stream, steps * batch_rows)
                seen += [(int(item["row"]), item["input_ids"].tolist()) for item in items]
                state = stream.state_after(steps)
            else:
                with resumed(
                    plan, state, batch_rows=batch_rows, prefetch_batches=chance.choice(PREFETCHES), **options
                ) as loader:
                    for _ in range(steps):
                        batch = next(loader)
                        seen += zip(batch.rows.tolist(), batch.tokens[:, :-1].tolist(), strict=True)
                    state = loader.state_dict()
        with Loader(plan, batch_rows=1, prefetch_batches=8, **options) as whole:
            wanted = [
                (int(batch.rows[0]), batch.tokens[0, :-1].tolist()) for batch in itertools.islice(whole, len(seen))
            ]
        failures += seen != wanted or state["position"] != len(seen)
    case = "chains of 20 stops over readers, batch sizes, orders, packings"
    torture_figures(lane="D", case=case, trials=chains, failures=failures)
    assert failures == 0
