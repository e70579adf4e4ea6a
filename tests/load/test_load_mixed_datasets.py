"""A mixture in PyTorch's data sets: the stream of `MixedLoader`, for any number of workers, from any state."""

from __future__ import annotations

import itertools
import json
import pickle
from collections.abc import Callable
from typing import Any

import pytest
from torch.utils.data import DataLoader

from penstock.errors import ConfigError, PlanError, ResumeError
from penstock.load.mixed import MixedLoader
from penstock.load.torch import RowDataset, RowSampler, RowStream
from penstock.load.transforms import RandomCrop
from penstock.pack.mixture import Mixture, make_mixture

from .conftest import Sample

Samples = Callable[[str], Sample]
SEQ_LEN, BATCH_ROWS, SEED = 24, 6, 5


def mixture_of(sample: Samples, *mix: str) -> Mixture:
    stores = {name: sample(name).store for name in ("letters", "parts")}
    return make_mixture(stores, mix or ("letters=0.3", "*-long*=3"), seq_len=SEQ_LEN)


def transforms() -> list[Any]:
    """Of its own for each stream: they count."""
    return [RandomCrop(pad_id=256, rate=0.5, smallest_share=0.5)]


def expected(mixture: Mixture, count: int, *, start: dict[str, Any] | None = None) -> list[Any]:
    """[rows] inputs of the first `count` batches of the loader."""
    with MixedLoader(mixture, batch_rows=BATCH_ROWS, seed=SEED, transforms=transforms()) as loader:
        if start is not None:
            loader.load_state_dict(start)
        return [row for _ in range(count) for row in next(loader).tokens[:, :-1].tolist()]


def inputs(batches: Any, count: int) -> list[Any]:
    return [row for batch in itertools.islice(batches, count) for row in batch["input_ids"].tolist()]


@pytest.mark.parametrize(("workers", "context"), [(0, None), (2, "fork")])
def test_a_stream_is_that_of_the_loader(sample: Samples, workers: int, context: str | None) -> None:
    mixture = mixture_of(sample)
    stream = RowStream(mixture, batch_rows=BATCH_ROWS, batched=True, seed=SEED, transforms=transforms())
    batches = DataLoader(stream, batch_size=None, num_workers=workers, multiprocessing_context=context)
    assert inputs(batches, 12) == expected(mixture, 12)


@pytest.mark.parametrize("workers", [0, 2])
def test_items_asked_for_in_order_are_that_stream_too(sample: Samples, workers: int) -> None:
    mixture = mixture_of(sample)
    dataset = RowDataset(mixture, seed=SEED, transforms=transforms())
    wanted = expected(mixture, 3 * len(dataset) // BATCH_ROWS)
    assert abs(len(dataset) - mixture.describe()["epoch_rows"]) <= 0.5
    for epoch in range(2):
        dataset.set_epoch(epoch)
        seen = inputs(DataLoader(dataset, batch_size=BATCH_ROWS, num_workers=workers), 10**9)
        assert seen == wanted[epoch * len(dataset) : (epoch + 1) * len(dataset)]
    some = [5, 3, 4, 5, -1, 0]
    dataset.set_epoch(0)
    assert [item["input_ids"].tolist() for item in dataset.__getitems__(some)] == [
        wanted[row % len(dataset)] for row in some
    ]
    with pytest.raises(IndexError):
        dataset[len(dataset)]


def test_every_state_goes_on_alike_and_may_change_hands(sample: Samples) -> None:
    """Loader to stream and back, with weights that change on the way; each time through JSON and pickle."""
    first, second = (
        mixture_of(sample),
        mixture_of(sample, "letters=2", "*-long*=0.5"),
    )  # whose weights count for nothing
    options: dict[str, Any] = {"batch_rows": BATCH_ROWS, "seed": SEED}
    with MixedLoader(first, transforms=transforms(), **options) as loader:
        for _ in range(7):
            next(loader)
        loader.change_weights({"letters:rest": 5.0})
        state = loader.state_dict()
    stream = RowStream(second, batched=True, transforms=transforms(), **options)
    stream.load_state_dict(json.loads(json.dumps(state)))
    assert len(stream.state_dict()["stages"]) == 2
    there = pickle.loads(pickle.dumps(stream))  # what a spawned worker gets
    for each in (stream, there):
        assert inputs(each, 9) == expected(second, 9, start=state)
    with MixedLoader(second, transforms=transforms(), **options) as loader:
        loader.load_state_dict(json.loads(json.dumps(stream.state_after(4))))
        assert loader.stages == tuple(stream._filler.schedule.stages)
        assert next(loader).tokens[:, :-1].tolist() == expected(second, 5, start=state)[4 * BATCH_ROWS :]


def test_an_epoch_ends_and_has_a_length(sample: Samples) -> None:
    mixture = mixture_of(sample)
    stream = RowStream(mixture, batch_rows=BATCH_ROWS, passes=1, seed=SEED, transforms=transforms())
    assert len(stream) == mixture.epoch_rows
    rows = [item["input_ids"].tolist() for item in stream]
    stream.set_epoch(1)
    rows += [item["input_ids"].tolist() for item in stream]
    assert rows == expected(mixture, 2 * mixture.epoch_rows // BATCH_ROWS + 1)[: 2 * mixture.epoch_rows]


def test_a_stateful_data_loader_goes_on(sample: Samples) -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata isn't installed")

    def made() -> Any:
        stream = RowStream(mixture_of(sample), batch_rows=BATCH_ROWS, batched=True, seed=SEED, transforms=transforms())
        return torchdata.StatefulDataLoader(stream, batch_size=None, num_workers=2)

    before = iter(loader := made())
    inputs(before, 5)
    state = loader.state_dict()
    again = made()
    again.load_state_dict(state)
    assert inputs(again, 4) == expected(mixture_of(sample), 9)[5 * BATCH_ROWS :]


def test_what_cannot_be_is_refused(sample: Samples) -> None:
    mixture = mixture_of(sample)
    with pytest.raises(ConfigError, match="mixture"):
        RowSampler(mixture)  # type: ignore[arg-type]
    stream = RowStream(mixture, batch_rows=BATCH_ROWS, seed=SEED)
    with pytest.raises(ResumeError, match="seed"):
        stream.load_state_dict(RowStream(mixture, batch_rows=BATCH_ROWS, seed=SEED + 1).state_dict())
    with pytest.raises(ResumeError):
        stream.load_state_dict({name: value for name, value in stream.state_dict().items() if name != "stages"})
    by_hand = RowStream(Mixture(sources=mixture.sources), batch_rows=BATCH_ROWS)
    with pytest.raises(PlanError, match="by hand"):
        pickle.dumps(by_hand)
