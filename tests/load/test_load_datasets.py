"""The PyTorch data sets: the loader's stream, row for row, whoever shares it and wherever it is stopped."""

from __future__ import annotations

import copy
import itertools
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader  # noqa: E402

from penstock.errors import ConfigError, ResumeError  # noqa: E402
from penstock.load import Loader  # noqa: E402
from penstock.load.sharing import Share  # noqa: E402
from penstock.load.torch import IGNORED_LABEL, RowDataset, RowSampler, RowStream, TorchLoader  # noqa: E402
from penstock.load.transforms import RandomCrop  # noqa: E402
from penstock.pack import Plan, plan_concat  # noqa: E402

from .conftest import SMALL_STORE_NAMES, Sample  # noqa: E402
from .reference import ReferenceRow, border_list  # noqa: E402

Samples = Callable[[str], Sample]
ALL_FIELDS = ("input_ids", "labels", "position_ids", "document_ids", "row")


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def positions_of(row: ReferenceRow) -> list[int]:
    borders = [*border_list([row]), len(row.mask)]
    return [place for first, last in itertools.pairwise(borders) for place in range(last - first)]


def rows_of(batches: Iterator[dict[str, Any]]) -> list[int]:
    return [row for batch in batches for row in batch["row"].reshape(-1).tolist()]


def small_plan(sample: Samples) -> Plan:
    return plan_concat(sample("letters").store, split="val", seq_len=16)


def stream_rows(plan: Plan, count: int, *, seed: int = 0, start: int = 0) -> list[int]:
    with Loader(plan, batch_rows=1, seed=seed, prefetch_batches=0) as loader:
        loader.load_state_dict({**loader.state_dict(), "position": start})
        return [int(next(loader).rows[0]) for _ in range(count)]


@given(
    name=st.sampled_from(SMALL_STORE_NAMES),
    seq_len=st.integers(4, 64),
    boundaries=st.booleans(),
    labels=st.sampled_from(["next", "hugging-face"]),
)
@settings(max_examples=8, deadline=None)
def test_items_equal_the_reference(sample: Samples, name: str, seq_len: int, boundaries: bool, labels: str) -> None:
    one = sample(name)
    plan = plan_concat(one.store, split="test", seq_len=seq_len, boundaries=boundaries)
    dataset = RowDataset(plan, fields=ALL_FIELDS, labels=labels)
    assert len(dataset) == plan.num_rows
    for number in range(plan.num_rows):
        row = one.splits["test"].row(number, seq_len, boundaries=boundaries)
        item = dataset[number]
        assert {tensor.dtype for tensor in item.values()} == {torch.int64}
        assert int(item["row"]) == number
        assert item["position_ids"][:seq_len].tolist() == positions_of(row)
        borders = set(border_list([row]))
        numbers = list(itertools.accumulate(place in borders for place in range(seq_len)))
        assert item["document_ids"][:seq_len].tolist() == numbers
        if labels == "next":
            assert item["input_ids"].tolist() == row.tokens[:-1]
            assert item["labels"].tolist() == row.labels
        else:  # a model that compares position i with label i + 1 sees the same pairs
            assert item["input_ids"].tolist() == row.tokens
            assert item["labels"].tolist() == [IGNORED_LABEL, *row.labels]
            assert {len(item[name]) for name in ALL_FIELDS[:-1]} == {seq_len + 1}


def test_the_batch_on_a_device_has_the_same_positions(sample: Samples) -> None:
    plan = plan_concat(sample("parts").store, seq_len=24)
    dataset = RowDataset(plan)
    with (
        TorchLoader(plan, batch_rows=6, seed=2, prefetch_batches=0) as loader,
        Loader(plan, batch_rows=6, seed=2, prefetch_batches=0) as plain,
    ):
        for _ in range(5):
            batch, rows = next(loader), next(plain).rows.tolist()
            wanted = torch.stack([dataset[row]["position_ids"] for row in rows])
            assert torch.equal(batch.position_ids, wanted)
            assert torch.equal(batch[2:5].position_ids, wanted[2:5])


def test_a_row_that_is_not_there_is_an_index_error(sample: Samples) -> None:
    dataset = RowDataset(small_plan(sample), fields=["row"])
    assert int(dataset[-1]["row"]) == len(dataset) - 1
    for row in (len(dataset), -len(dataset) - 1):
        with pytest.raises(IndexError):
            dataset[row]


@pytest.mark.parametrize("options", [{"fields": ["input_id"]}, {"labels": "previous"}])
def test_unknown_fields_are_refused(sample: Samples, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="there is no"):
        RowDataset(small_plan(sample), **options)


def test_a_sampler_gives_the_loaders_order(sample: Samples) -> None:
    plan = small_plan(sample)
    sampler = RowSampler(plan, seed=3)
    batches = DataLoader(RowDataset(plan, fields=["row"]), batch_size=4, sampler=sampler)
    seen: list[int] = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        seen += rows_of(batches)
    assert seen == stream_rows(plan, 3 * plan.num_rows, seed=3)


@given(
    num_rows=st.integers(1, 60),
    ranks=st.integers(1, 5),
    pieces=st.integers(1, 4),
    piece_rows=st.integers(1, 4),
    start=st.integers(0, 70),
    passes=st.integers(1, 3),
    workers=st.integers(1, 4),
)
@settings(max_examples=150, deadline=None)
def test_every_row_goes_to_one_rank_and_one_worker(
    num_rows: int, ranks: int, pieces: int, piece_rows: int, start: int, passes: int, workers: int
) -> None:
    end = (start // num_rows + passes) * num_rows
    seen: list[int] = []
    for rank in range(ranks):
        share = Share(
            batch_rows=ranks * pieces * piece_rows,
            rank=rank,
            world_size=ranks,
            piece_rows=piece_rows,
            start=start,
            end=end,
        )
        own: list[int] = []
        count = 0
        for worker in range(workers):
            number = worker
            while (piece := share.piece(number)) is not None:
                own += range(piece[0], piece[0] + piece[1])
                number += workers
                count += 1
        assert (len(own), count) == (share.num_rows(), share.num_pieces())
        seen += own
    assert sorted(seen) == list(range(start, end))


@pytest.mark.parametrize(
    "options",
    [
        {"batch_rows": 0},
        {"batch_rows": 6, "world_size": 4, "rank": 0},
        {"batch_rows": 6, "world_size": 2, "rank": 2},
        {"batch_rows": 6, "world_size": 0, "rank": 0},
        {"batch_rows": 6, "micro_rows": 4},
        {"batch_rows": 6, "micro_rows": 0},
        {"batch_rows": 6, "passes": 0},
    ],
)
def test_impossible_shares_are_refused(sample: Samples, options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        RowStream(small_plan(sample), **options)


@pytest.mark.parametrize(
    ("workers", "context", "batched"),
    [(0, None, True), (0, None, False), (2, "fork", True), (2, "fork", False), (2, "spawn", False)],
)
def test_a_data_loader_gives_the_loaders_stream(
    sample: Samples, workers: int, context: str | None, batched: bool
) -> None:
    """Same rows in the same order for any number of workers; the last batch of a pass is short, nothing is dropped."""
    plan = small_plan(sample)
    stream = RowStream(plan, batch_rows=4, passes=1, batched=batched, seed=5, fields=ALL_FIELDS)
    reference = RowDataset(plan, fields=ALL_FIELDS)
    batches = DataLoader(
        stream, batch_size=None if batched else 4, num_workers=workers, multiprocessing_context=context
    )
    for epoch in range(1 if context == "spawn" else 2):
        stream.set_epoch(epoch)
        seen = list(batches)
        assert len(seen) == len(batches) == -(-plan.num_rows // 4)
        assert rows_of(seen) == stream_rows(plan, plan.num_rows, seed=5, start=epoch * plan.num_rows)
        for name in ALL_FIELDS:
            together = torch.cat([batch[name] for batch in seen])
            assert torch.equal(together, torch.stack([reference[row][name] for row in rows_of(seen)]))


def test_what_travels_to_a_worker_is_small_and_holds_no_tokens(sample: Samples) -> None:
    plan = small_plan(sample)
    crop = RandomCrop.for_plan(plan)
    for dataset in (RowDataset(plan, transforms=[crop]), RowStream(plan, batch_rows=4, transforms=[crop])):
        sent = pickle.dumps(dataset)
        assert len(sent) < 4096
        assert str(sample("letters").path).encode() in sent
        there = pickle.loads(sent)
        item, same = next(iter(there)), next(iter(dataset))
        assert all(torch.equal(item[name], same[name]) for name in item)
        there.plan.store.close()


def test_ranks_share_global_batches_as_the_loader_does(sample: Samples) -> None:
    plan = small_plan(sample)
    for rank in range(2):
        stream = RowStream(plan, batch_rows=6, rank=rank, world_size=2, seed=1, fields=["row"], batched=True)
        with Loader(plan, batch_rows=6, rank=rank, world_size=2, seed=1, prefetch_batches=0) as loader:
            for batch in itertools.islice(stream, 20):
                assert batch["row"].tolist() == next(loader).rows.tolist()


def test_torchrun_says_which_rank_this_is(sample: Samples, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small_plan(sample)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    share = RowStream(plan, batch_rows=4).share()
    assert (share.rank, share.world_size) == (1, 2)
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(ConfigError, match="'one'"):
        RowStream(plan, batch_rows=4)


def test_an_endless_stream_has_no_length(sample: Samples) -> None:
    with pytest.raises(TypeError):
        len(RowStream(small_plan(sample), batch_rows=4))


@pytest.mark.torture(lane="D", sample=True)
@pytest.mark.parametrize("workers", [0, 2])
def test_world_size_and_micro_batch_may_change_at_every_stop(sample: Samples, workers: int) -> None:
    """1 -> 2 -> 4 -> 8 -> 1 ranks: the same global batches; the state is the loader's own."""
    plan = small_plan(sample)
    batch_rows, steps = 16, 3
    state = Loader(plan, batch_rows=batch_rows, seed=8).state_dict()
    seen: list[int] = []
    for world_size in (1, 2, 4, 8, 1) if not workers else (1, 2, 1):
        micro_rows = max(1, batch_rows // world_size // 2)
        ranks = []
        for rank in range(world_size):
            stream = RowStream(
                plan,
                batch_rows=batch_rows,
                micro_rows=micro_rows,
                rank=rank,
                world_size=world_size,
                seed=8,
                fields=["row"],
            )
            stream.load_state_dict(state)
            loader = DataLoader(stream, batch_size=micro_rows, num_workers=workers)
            per_step = batch_rows // world_size // micro_rows
            ranks.append([batch["row"].tolist() for batch in itertools.islice(loader, steps * per_step)])
        for step in range(steps):
            seen += [row for own in ranks for part in own[step * per_step : (step + 1) * per_step] for row in part]
        state = stream.state_after(steps)
    assert seen == stream_rows(plan, len(seen), seed=8)
    assert len(seen) > plan.num_rows or workers
    with Loader(plan, batch_rows=5, seed=8, prefetch_batches=0) as loader:
        loader.load_state_dict(state)
        assert next(loader).rows.tolist() == stream_rows(plan, 5, seed=8, start=len(seen))


@pytest.mark.torture(lane="D", sample=True)
def test_every_state_of_three_passes_goes_on_alike(sample: Samples) -> None:
    """Saved after every batch: before the first, in later passes, twice in one, exactly at a pass's end."""
    plan = small_plan(sample)
    batch_rows = 3
    stream = RowStream(plan, batch_rows=batch_rows, seed=2, fields=["row"], batched=True)
    num_batches = -(-3 * plan.num_rows // batch_rows)
    whole = rows_of(itertools.islice(stream, num_batches))
    assert whole == stream_rows(plan, len(whole), seed=2)
    for done in range(num_batches):
        again = RowStream(plan, batch_rows=batch_rows, seed=2, fields=["row"], batched=True)
        again.load_state_dict(stream.state_after(done))
        assert rows_of(itertools.islice(again, 4)) == stream_rows(plan, 12, seed=2, start=done * batch_rows)
    for passes in range(3):
        assert plan.num_rows * (passes + 1) <= len(whole)
        of_pass = whole[passes * plan.num_rows : (passes + 1) * plan.num_rows]
        assert sorted(of_pass) == list(range(plan.num_rows))


@pytest.mark.parametrize("batched", [False, True])
def test_the_state_behind_a_short_last_batch_is_the_end_of_the_pass(sample: Samples, batched: bool) -> None:
    plan = small_plan(sample)
    options: dict[str, Any] = {"passes": 1, "seed": 2, "fields": ["row"], "batched": batched}
    stream = RowStream(plan, batch_rows=plan.num_rows - 1, **options)
    again = RowStream(plan, batch_rows=4, **options)
    again.load_state_dict(stream.state_after(2))
    again.set_epoch(1)
    rows = [row for item in again for row in item["row"].reshape(-1).tolist()]
    assert rows == stream_rows(plan, plan.num_rows, seed=2, start=plan.num_rows)


def test_a_state_inside_a_pass_ends_with_that_pass(sample: Samples) -> None:
    plan = small_plan(sample)
    stream = RowStream(plan, batch_rows=3, passes=1, seed=2, fields=["row"])
    stream.set_epoch(1)
    state = stream.state_after(4)
    again = RowStream(plan, batch_rows=3, passes=1, seed=2, fields=["row"])
    again.load_state_dict(state)
    again.set_epoch(1)  # trainers call it before every pass; it must not move a resumed one back
    assert len(again) == plan.num_rows - 12
    assert [int(item["row"]) for item in again] == stream_rows(
        plan, plan.num_rows - 12, seed=2, start=plan.num_rows + 12
    )


@pytest.mark.parametrize("change", ["seed", "shuffle", "transforms", "seq_len"])
def test_a_state_of_another_stream_is_refused(sample: Samples, change: str) -> None:
    plan = small_plan(sample)
    options: dict[str, Any] = {"seed": 1}
    other_plan = plan_concat(plan.store, split="val", seq_len=17) if change == "seq_len" else plan
    other = (
        options
        | {
            "seed": {"seed": 2},
            "shuffle": {"shuffle": False},
            "transforms": {"transforms": [RandomCrop.for_plan(plan)]},
            "seq_len": {},
        }[change]
    )
    state = RowStream(other_plan, batch_rows=4, **other).state_after(3)
    with pytest.raises(ResumeError, match=change):
        RowStream(plan, batch_rows=4, **options).load_state_dict(state)


@pytest.mark.parametrize("batched", [True, False])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_stateful_data_loader_goes_on_from_every_batch(sample: Samples, batched: bool, workers: int) -> None:
    stateful = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata isn't installed")
    plan = small_plan(sample)
    options: dict[str, Any] = {"batch_rows": 4, "passes": 1, "seed": 5, "fields": ["row"], "batched": batched}

    def loader() -> Any:
        return stateful.StatefulDataLoader(
            RowStream(plan, **options), batch_size=None if batched else 4, num_workers=workers
        )

    running = loader()
    seen, states = [], []
    for batch in running:
        seen.append(batch["row"].tolist())
        states.append(copy.deepcopy(running.state_dict()))
    assert [row for rows in seen for row in rows] == stream_rows(plan, plan.num_rows, seed=5)
    stops = range(0, len(states) - 1, 1 if workers == 0 else 4)
    for number in stops:
        again = loader()
        again.load_state_dict(states[number])
        assert [batch["row"].tolist() for batch in again] == seen[number + 1 :]


def test_a_workers_place_under_another_division_is_refused(sample: Samples) -> None:
    plan = small_plan(sample)
    four, two = (iter(RowStream(plan, batch_rows=rows)) for rows in (4, 2))
    next(four)
    with pytest.raises(ResumeError, match="batch_rows"):
        two.load_state_dict(four.state_dict())


def test_a_workers_place_inside_a_batch_is_kept(sample: Samples) -> None:
    plan = small_plan(sample)
    rows = iter(RowStream(plan, batch_rows=4, fields=["row"]))
    for _ in range(6):
        next(rows)
    again = iter(RowStream(plan, batch_rows=4, fields=["row"]))
    again.load_state_dict(rows.state_dict())
    assert [int(next(again)["row"]) for _ in range(9)] == stream_rows(plan, 9, start=6)


def test_transforms_of_a_map_style_item_follow_the_epoch(sample: Samples) -> None:
    plan = small_plan(sample)
    crop = RandomCrop.for_plan(plan, rate=1.0)
    dataset = RowDataset(plan, transforms=[crop], seed=4)
    with Loader(plan, batch_rows=plan.num_rows, seed=4, shuffle=False, transforms=[crop], prefetch_batches=0) as loader:
        for epoch in range(3):
            dataset.set_epoch(epoch)
            batch = next(loader)
            items = [dataset[row] for row in range(plan.num_rows)]
            np.testing.assert_array_equal(batch.tokens[:, :-1], torch.stack([item["input_ids"] for item in items]))
