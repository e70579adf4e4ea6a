"""Batches of a mixture: against a slow reference, at every state, for every world size, with weights that change."""

from __future__ import annotations

import collections
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, PlanError, ResumeError
from penstock.load import Loader
from penstock.load.gather import Gatherer
from penstock.load.mixed import MixedLoader
from penstock.load.order import permuted
from penstock.load.transforms import RandomCrop
from penstock.pack import make_plan
from penstock.pack.mixture import Mixture, make_mixture

from .conftest import Sample
from .reference import Reference, assert_batch_equals

SEQ_LEN = 24
Samples = Callable[[str], Sample]


def mixture_of(sample: Samples, *mix: str, names: tuple[str, ...] = ("letters", "parts"), **options: Any) -> Mixture:
    stores = {name: sample(name).store for name in names}
    return make_mixture(stores, mix, **{"seq_len": SEQ_LEN, **options})


def batches(loader: Loader, count: int) -> Iterator[Any]:
    for _ in range(count):
        yield next(loader)


def copied(batch: Any) -> tuple[list[Any], ...]:
    fields = (batch.tokens, batch.loss_mask, batch.cu_seqlens, batch.rows, batch.sources)
    return (*(field.tolist() for field in fields), batch.position)


def stream(loader: Loader, count: int) -> list[tuple[list[Any], ...]]:
    with loader:
        return [copied(batch) for batch in batches(loader, count)]


def consumed(loader: MixedLoader, count: int) -> list[tuple[int, int]]:
    """Source and row at each position of the next `count` batches."""
    found: list[tuple[int, int]] = []
    for batch in batches(loader, count):
        found += zip(batch.sources.tolist(), batch.rows.tolist(), strict=True)
    return found


def assert_passes_are_whole(found: list[tuple[int, int]], mixture: Mixture) -> None:
    """Each source gives every row once before it gives one again."""
    for number, plan in enumerate(mixture.plans):
        rows = [row for source, row in found if source == number]
        for start in range(0, len(rows), plan.num_rows):
            one = rows[start : start + plan.num_rows]
            assert len(set(one)) == len(one)
            assert set(one) <= set(range(plan.num_rows))


# The rows and their tokens


@pytest.mark.parametrize("boundaries", [True, False])
@pytest.mark.parametrize("batch_rows", [1, 5, 16])
def test_batches_equal_the_slow_reference(sample: Samples, boundaries: bool, batch_rows: int) -> None:
    mixture = mixture_of(sample, "letters=0.3", "parts:memory/00*=3", "parts=2", boundaries=boundaries)
    letters, parts = sample("letters").train, sample("parts").train
    early = [document.key.startswith("memory/00") for document in parts.documents]
    expected = [
        letters,
        Reference([one for one, is_early in zip(parts.documents, early, strict=True) if is_early], pad_id=parts.pad_id),
        Reference(
            [one for one, is_early in zip(parts.documents, early, strict=True) if not is_early], pad_id=parts.pad_id
        ),
    ]
    rows = [one.rows(SEQ_LEN, boundaries=boundaries) for one in expected if one.documents]
    assert [len(one) for one in rows] == [plan.num_rows for plan in mixture.plans]
    with MixedLoader(mixture, batch_rows=batch_rows, seed=3) as loader:
        for batch in batches(loader, 60 // batch_rows + 2):
            wanted = [rows[source][row] for source, row in zip(batch.sources, batch.rows, strict=True)]
            assert_batch_equals(batch, wanted)


@pytest.mark.parametrize("policy", ["best-fit", "windows", "pad"])
def test_every_policy_gives_what_its_own_plans_give(sample: Samples, policy: str) -> None:
    options = {"policy": policy, "overlap": 5 if policy == "windows" else 0}
    mixture = mixture_of(sample, "*-long*=2", "parts=0.5", **options)
    gatherers = [Gatherer(plan) for plan in mixture.plans]
    seen = set()
    with MixedLoader(mixture, batch_rows=6, seed=1) as loader:
        for batch in batches(loader, 20):
            borders = []
            for place, (source, row) in enumerate(zip(batch.sources.tolist(), batch.rows.tolist(), strict=True)):
                seen.add(source)
                buffer = gatherers[source].new_buffer(num_batches=1, batch_rows=1)
                gatherers[source].fill(np.array([[row]]), buffer)
                np.testing.assert_array_equal(batch.tokens[place], buffer.tokens[0, 0])
                np.testing.assert_array_equal(batch.loss_mask[place], buffer.loss_mask[0, 0])
                borders += [place * SEQ_LEN + border for border in buffer.cu_seqlens[0].tolist() if border < SEQ_LEN]
            assert batch.cu_seqlens[: len(borders)].tolist() == borders
            assert set(batch.cu_seqlens[len(borders) :].tolist()) == {6 * SEQ_LEN}
    assert seen == set(range(len(mixture.plans)))


@pytest.mark.parametrize("policy", ["concat", "best-fit"])
def test_a_mixture_of_one_source_is_the_plain_loader(sample: Samples, policy: str) -> None:
    store = sample("letters").store
    plan = make_plan(store, seq_len=SEQ_LEN, policy=policy)
    mixture = make_mixture({"letters": store}, seq_len=SEQ_LEN, policy=policy)
    with Loader(plan, batch_rows=7, seed=5) as plain, MixedLoader(mixture, batch_rows=7, seed=5) as mixed:
        for one, other in zip(batches(plain, 40), batches(mixed, 40), strict=True):
            for name in ("tokens", "loss_mask", "cu_seqlens", "rows"):
                np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert not other.sources.any()


def test_rows_follow_each_sources_own_permutation(sample: Samples) -> None:
    mixture = mixture_of(sample, "letters=3")
    cursors: collections.Counter[int] = collections.Counter()
    first = mixture.plans[0].num_rows
    with MixedLoader(mixture, batch_rows=10, seed=9) as loader:
        for source, row in consumed(loader, 50):
            if source == 0:
                pass_number, place = divmod(cursors[0], first)
                assert row == permuted(place, size=first, seed=9, pass_number=pass_number)
            cursors[source] += 1
    assert min(cursors.values()) > 1


# Weights


@pytest.mark.parametrize("weights", [(0.3, 1, 3), (3, 0.3, 1), (1, 1, 1), (0.01, 1, 0.123456)])
def test_weights_are_passes_per_epoch(sample: Samples, weights: tuple[float, float, float]) -> None:
    words = [
        f"{name}={weight}" for name, weight in zip(("letters", "parts:memory/00*", "parts:*"), weights, strict=True)
    ]
    mixture = mixture_of(sample, *words)
    num_rows = [plan.num_rows for plan in mixture.plans]
    # As many epochs as give the rarest source a hundred rows and more: one row more or less is then below 1 %.
    epochs = int(100 / min(w * n for w, n in zip(weights, num_rows, strict=True))) + 1
    positions = round(epochs * sum(w * n for w, n in zip(weights, num_rows, strict=True)))
    loader = MixedLoader(mixture, batch_rows=1, seed=2, prefetch_batches=0)
    rows, _ = loader._stream.at(0, positions)
    counts = np.bincount(np.searchsorted(mixture.first_rows, rows, side="right") - 1)
    expected = [epochs * w * n for w, n in zip(weights, num_rows, strict=True)]
    np.testing.assert_allclose(counts, expected, rtol=0.01)
    found = [(int(s), int(r)) for s, r in zip(*_split(mixture, rows), strict=True)]
    assert_passes_are_whole(found, mixture)


def _split(mixture: Mixture, rows: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    sources = np.searchsorted(mixture.first_rows, rows, side="right") - 1
    return sources, rows - mixture.first_rows[sources]


def test_a_third_is_another_third_each_epoch(sample: Samples) -> None:
    mixture = mixture_of(sample, "letters=0.25")
    num_rows = mixture.plans[0].num_rows
    epoch = 0.25 * num_rows + mixture.plans[1].num_rows
    with MixedLoader(mixture, batch_rows=1, seed=2) as loader:
        rows = [row for source, row in consumed(loader, round(4 * epoch)) if source == 0]
    quarter = len(rows) // 4
    assert abs(len(rows) - num_rows) <= 1
    assert not set(rows[:quarter]) & set(rows[quarter : 2 * quarter])
    assert len(set(rows)) >= num_rows - 1


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_changed_weights_repeat_and_skip_nothing(sample: Samples, data: st.DataObject) -> None:
    mixture = mixture_of(sample, "*-long*=2", seq_len=61)
    names = [source.name for source in mixture.sources]
    found: list[tuple[int, int]] = []
    with MixedLoader(mixture, batch_rows=data.draw(st.integers(1, 7)), seed=4, prefetch_batches=0) as loader:
        for _ in range(data.draw(st.integers(1, 5))):
            found += consumed(loader, data.draw(st.integers(0, 12)))
            weights = data.draw(st.dictionaries(st.sampled_from(names), st.sampled_from([0.1, 0.3, 1, 2.5, 7])))
            loader.change_weights(weights)
        found += consumed(loader, 12)
        state = json.loads(json.dumps(loader.state_dict()))
        ahead = consumed(loader, 5)
        assert len(json.dumps(state)) < 4096
    assert_passes_are_whole(found + ahead, mixture)
    with MixedLoader(mixture, batch_rows=loader.batch_rows, seed=4) as again:
        again.load_state_dict(state)
        assert consumed(again, 5) == ahead


def test_what_was_given_before_a_change_is_not_touched_by_it(sample: Samples) -> None:
    """Batches filled ahead under the old weights are dropped; those given out count."""
    mixture = mixture_of(sample)
    with MixedLoader(mixture, batch_rows=4, seed=4) as loader, MixedLoader(mixture, batch_rows=4, seed=4) as same:
        before = consumed(loader, 3)
        assert before == consumed(same, 3)
        loader.change_weights({"letters": 5, "parts": 0})
        after = consumed(loader, 6)
        assert {source for source, _ in after} == {0}
        assert_passes_are_whole(before + after, mixture)
        assert [stage.start for stage in loader.stages] == [0, 12]
        assert loader.stages[1].cursors == tuple(np.bincount([s for s, _ in before], minlength=2).tolist())


def test_epochs_end_a_source_and_then_the_mixture(sample: Samples) -> None:
    mixture = mixture_of(sample, epochs=["letters=1.5", "parts=1"])
    num_rows = [plan.num_rows for plan in mixture.plans]
    last = [int(1.5 * num_rows[0]), num_rows[1]]
    with MixedLoader(mixture, batch_rows=1, seed=4) as loader:
        found = consumed(loader, sum(last))
        assert np.bincount([source for source, _ in found]).tolist() == last
        assert_passes_are_whole(found, mixture)
        assert found[-1][0] == 0  # the other had left: its place is the first one's
        with pytest.raises(PlanError, match=str(sum(last))):
            next(loader)


# Position, world size, state


def test_world_sizes_give_the_same_global_batches(sample: Samples) -> None:
    mixture = mixture_of(sample, "letters=0.3", "*-long*=3")
    with MixedLoader(mixture, batch_rows=8, seed=6) as whole:
        expected = [copied(batch) for batch in batches(whole, 20)]
    state: dict[str, Any] | None = None
    step = 0
    for world_size in (1, 2, 4, 8, 1):
        loaders = [MixedLoader(mixture, batch_rows=8, seed=6, rank=r, world_size=world_size) for r in range(world_size)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(4):
            shares = [copied(next(loader)) for loader in loaders]
            for field in (0, 1, 3, 4):
                assert [row for share in shares for row in share[field]] == expected[step][field]
            step += 1
        states = [loader.state_dict() for loader in loaders]
        assert all(one == states[0] for one in states)
        state = states[0]
        for loader in loaders:
            loader.close()


@pytest.mark.parametrize("prefetch", [0, 3, None])
def test_resume_at_every_state(sample: Samples, prefetch: int | None) -> None:
    mixture = mixture_of(sample, "letters=0.3", "*-long*=3")
    loader = MixedLoader(mixture, batch_rows=6, seed=6, prefetch_batches=prefetch)
    states, expected = [], []
    for step in range(12):
        states.append(json.dumps(loader.state_dict()))
        if step == 5:
            loader.change_weights({"letters:rest": 4})
            states[-1] = json.dumps(loader.state_dict())
        expected.append(copied(next(loader)))
    loader.close()
    for step, state in enumerate(states):
        with MixedLoader(mixture, batch_rows=6, seed=6, prefetch_batches=prefetch) as again:
            upto = 5 if step < 5 else 12
            for _ in range(2):  # and once more, from where that ended
                again.load_state_dict(json.loads(state))
                assert [copied(batch) for batch in batches(again, upto - step)] == expected[step:upto]
                again.change_weights({"letters:rest": 7})


def test_other_weights_after_a_resume_are_appended(sample: Samples) -> None:
    before, after = mixture_of(sample, "letters=0.3"), mixture_of(sample, "letters=2")
    assert before.fingerprint == after.fingerprint
    with MixedLoader(before, batch_rows=6, seed=6) as loader:
        found = consumed(loader, 7)
        state = loader.state_dict()
        loader.change_weights({"letters": 2})
        expected = consumed(loader, 7)
    with MixedLoader(after, batch_rows=6, seed=6) as again:
        again.load_state_dict(state)
        assert [stage.start for stage in again.stages] == [0]
        again.change_weights({source.name: source.weight for source in after.sources})
        assert [stage.start for stage in again.stages] == [0, 42]
        assert again.weights["letters"] == 2
        assert consumed(again, 7) == expected
    assert_passes_are_whole(found + expected, before)


def test_far_positions_cost_what_near_ones_do(sample: Samples) -> None:
    mixture = mixture_of(sample, "letters=0.3")
    with MixedLoader(mixture, batch_rows=6, seed=6) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": 6 * 10**15})
        batch = next(loader)
        assert batch.position == 6 * 10**15
        counts = loader._stream.schedule.cursors_at(6 * 10**15)
        assert sum(counts) == 6 * 10**15


def test_transforms_are_applied_and_seeded(sample: Samples) -> None:
    mixture = mixture_of(sample, "letters=0.3")
    crop = RandomCrop(pad_id=256, rate=1.0, smallest_share=0.5)
    one = stream(MixedLoader(mixture, batch_rows=6, seed=6, transforms=[crop]), 6)
    other = stream(MixedLoader(mixture, batch_rows=6, seed=6, transforms=[crop], prefetch_batches=0), 6)
    assert one == other
    assert one != stream(MixedLoader(mixture, batch_rows=6, seed=6), 6)


# What is refused


@pytest.mark.parametrize(
    "change",
    [
        lambda state: {**state, "stages": []},
        lambda state: {**state, "stages": None},
        lambda state: {**state, "stages": [{"start": 0, "weights": [1.0], "cursors": [0]}]},
        lambda state: {**state, "stages": [{"start": 0, "weights": [1.0, -1.0], "cursors": [0, 0]}]},
        lambda state: {**state, "stages": [{"start": 0, "weights": [1.0, "1"], "cursors": [0, 0]}]},
        lambda state: {**state, "stages": [{"start": 0, "weights": [1.0, 1.0], "cursors": [1, 0]}]},
        lambda state: {**state, "stages": [*state["stages"], {"start": 10**9, "weights": [1, 1], "cursors": [0, 0]}]},
        lambda state: {**state, "stages": [*state["stages"], *state["stages"]][::-1], "position": -1},
        lambda state: {**state, "identity": {**state["identity"], "seed": 1}},
        lambda state: {name: value for name, value in state.items() if name != "stages"},
        lambda state: [],
    ],
)
def test_a_state_that_does_not_fit_is_refused(sample: Samples, change: Callable[[Any], Any]) -> None:
    with MixedLoader(mixture_of(sample), batch_rows=6, seed=6) as loader:
        next(loader)
        state = loader.state_dict()
        with pytest.raises(ResumeError):
            loader.load_state_dict(change(state))
        loader.load_state_dict(state)


@pytest.mark.parametrize("other", [("*-long*=2",), ("letters:*=2", "parts:0*=1")])
def test_another_mixture_is_refused_with_both_fingerprints(sample: Samples, other: tuple[str, ...]) -> None:
    here, there = mixture_of(sample), mixture_of(sample, *other) if other[0][0] == "*" else mixture_of(sample, other[0])
    with MixedLoader(here, batch_rows=6) as loader, MixedLoader(there, batch_rows=6) as another:
        with pytest.raises(ResumeError) as caught:
            another.load_state_dict(loader.state_dict())
        assert here.identity["mixture"] in caught.value.message
        assert there.identity["mixture"] in caught.value.message


def test_impossible_weights_are_refused(sample: Samples) -> None:
    with MixedLoader(mixture_of(sample), batch_rows=6) as loader:
        for weights in ({"nowhere": 1.0}, {"letters": -1.0}, {"letters": float("nan")}, {"letters": 0.0, "parts": 0.0}):
            with pytest.raises(ConfigError):
                loader.change_weights(weights)
        with pytest.raises(ConfigError):
            MixedLoader(mixture_of(sample), batch_rows=6, order=object())
    mixture: Any = mixture_of(sample)
    with pytest.raises(ConfigError, match="mixture"):
        Loader(mixture, batch_rows=6)


def test_stages_end_before_the_state_grows_too_large(sample: Samples) -> None:
    with MixedLoader(mixture_of(sample), batch_rows=6, prefetch_batches=0) as loader:

        def change_for_ever() -> None:
            for number in range(200):
                next(loader)
                loader.change_weights({"letters": 1 + number / 1000})

        with pytest.raises(ConfigError, match="stages"):
            change_for_ever()
        assert len(loader.stages) > 20
        assert len(json.dumps(loader.state_dict())) <= 4096
        next(loader)
