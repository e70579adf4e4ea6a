"""The bugs that other loaders have when resumed (torture.md, D), each with a test that would find it here.

Every reader is asked: one plan, a mixture, a data set for DataLoader; every order and transform travels along.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from penstock.errors import ResumeError
from penstock.load import Loader
from penstock.load.mixed import MixedLoader, loader_of
from penstock.load.stream import StreamSettings
from penstock.pack import Plan, make_plan
from penstock.pack.mixture import Mixture, make_mixture

from .conftest import Sample

pytestmark = pytest.mark.torture(lane="D", sample=True)

Samples = Callable[[str], Sample]
BATCH_ROWS, SEED = 5, 3
SETTINGS = {
    "plan": StreamSettings(),
    "mixture": StreamSettings(),
    "curriculum": StreamSettings(order="curriculum"),
    "groups": StreamSettings(order="group-by-length"),
    "segments": StreamSettings(order="segments"),
    "cropped": StreamSettings(random_crop=0.5),
    "mixed curriculum": StreamSettings(order="curriculum", random_crop=0.5),
    "stream": StreamSettings(),
    "mixed stream": StreamSettings(random_crop=0.5),
}


class Reader:
    """A loader, or a data set for DataLoader, by the same few words: tokens of the next batches, state, restore."""

    def __init__(self, rows: Plan | Mixture, settings: StreamSettings, *, is_stream: bool, seed: int = SEED) -> None:
        options = settings.options(rows, seed=seed, batch_rows=BATCH_ROWS)
        self._given = 0
        self._loader: Loader | None = None
        if is_stream:
            from penstock.load.torch import RowStream

            self._stream = RowStream(rows, batch_rows=BATCH_ROWS, batched=True, seed=seed, **options)
            self._batches: Iterator[Any] | None = None
        else:
            self._loader = loader_of(rows, batch_rows=BATCH_ROWS, seed=seed, prefetch_batches=4, **options)

    def take(self, count: int) -> list[Any]:
        if self._loader is not None:
            return [next(self._loader).tokens[:, :-1].tolist() for _ in range(count)]
        self._batches = iter(self._stream) if self._batches is None else self._batches
        self._given += count
        return [next(self._batches)["input_ids"].tolist() for _ in range(count)]

    def state(self) -> dict[str, Any]:
        state = self._stream.state_after(self._given) if self._loader is None else self._loader.state_dict()
        restored: dict[str, Any] = json.loads(json.dumps(state))
        return restored

    def restore(self, state: dict[str, Any]) -> None:
        if self._loader is not None:
            self._loader.load_state_dict(state)
        else:
            self._stream.load_state_dict(state)
            self._batches, self._given = None, 0


def rows_of(sample: Samples, name: str, *, seq_len: int = 48) -> Plan | Mixture:
    options: dict[str, Any] = {"policy": "pad", "seq_len": seq_len}
    if "mix" in name:
        return make_mixture({"parts": sample("parts").store}, ["memory/0*=2"], split="val", **options)
    return make_plan(sample("parts").store, split="val", **options)


@pytest.fixture(params=list(SETTINGS))
def make_reader(request: pytest.FixtureRequest, sample: Samples) -> Callable[..., Reader]:
    name: str = request.param
    if "stream" in name:
        pytest.importorskip("torch")

    def make(*, seq_len: int = 48, seed: int = SEED) -> Reader:
        return Reader(rows_of(sample, name, seq_len=seq_len), SETTINGS[name], is_stream="stream" in name, seed=seed)

    make.num_rows = rows_of(sample, name).num_rows  # type: ignore[attr-defined]
    return make


def batches_per_pass(make_reader: Callable[..., Reader]) -> int:
    return -(-make_reader.num_rows // BATCH_ROWS)  # type: ignore[attr-defined]


def assert_goes_on(make_reader: Callable[..., Reader], *stops: int) -> None:
    """Stopped after each of these numbers of batches, always in a new reader, the sequence is that of no stop."""
    whole = make_reader().take(stops[-1] + 6)
    state, done = make_reader().state(), 0
    for stop in stops:
        reader = make_reader()
        reader.restore(state)
        assert reader.take(stop - done) == whole[done:stop]
        state, done = reader.state(), stop
    reader = make_reader()
    reader.restore(state)
    assert reader.take(6) == whole[done:]


def test_resume_in_a_later_pass(make_reader: Callable[..., Reader]) -> None:
    """Bug: the pass isn't part of the state, so a run resumed in epoch >= 1 gets the order of epoch 0 again."""
    a_pass = batches_per_pass(make_reader)
    assert_goes_on(make_reader, a_pass + 2)
    assert_goes_on(make_reader, 2 * a_pass + 1)


def test_resume_twice_in_one_pass(make_reader: Callable[..., Reader]) -> None:
    """Bug: what is skipped is counted from the last restore, so a second resume in one epoch repeats the first part."""
    assert_goes_on(make_reader, 2, 4)
    assert_goes_on(make_reader, 1, 1, 2, 2, 5)


def test_resume_exactly_at_a_pass_end(make_reader: Callable[..., Reader]) -> None:
    """Bug: at the epoch's end the saved place is "all consumed", and the resumed run gives an empty epoch or the same
    one again."""
    size: int = make_reader.num_rows  # type: ignore[attr-defined]
    whole = make_reader().take(2 * size // BATCH_ROWS + 6)
    flat = [row for batch in whole for row in batch]
    for end in (size, 2 * size):
        reader = make_reader()
        reader.restore({**reader.state(), "position": end})
        assert reader.take(1)[0] == flat[end : end + BATCH_ROWS]


def test_resume_before_the_first_batch(make_reader: Callable[..., Reader]) -> None:
    """Bug: a state saved before anything was read can't be loaded, or counts the batches filled ahead."""
    reader = make_reader()
    before = reader.state()
    assert before["position"] == 0
    whole = reader.take(5)
    again = make_reader()
    again.restore(before)
    assert again.take(5) == whole
    reader.restore(before)  # and in the reader that has moved on
    assert reader.take(5) == whole


def test_batches_filled_ahead_do_not_count(make_reader: Callable[..., Reader]) -> None:
    """Bug: the state tells how far workers have read, not how far training came: batches in between are lost."""
    reader = make_reader()
    for number in range(1, 8):
        reader.take(1)
        assert reader.state()["position"] == number * BATCH_ROWS


def test_every_row_once_per_pass(sample: Samples) -> None:
    """Bug: the last rows of an epoch are dropped, or padded with repeated ones, where batches don't divide it; of a
    mixture, the pass of a source."""
    for name in ("plan", "curriculum", "groups", "mixture", "mixed curriculum"):
        rows = rows_of(sample, name)
        options = SETTINGS[name].options(rows, seed=SEED, batch_rows=BATCH_ROWS)
        with loader_of(rows, batch_rows=BATCH_ROWS, seed=SEED, **options) as loader:
            seen: dict[int, list[int]] = {}
            for _ in range(4 * rows.num_rows // BATCH_ROWS):
                batch = next(loader)
                sources = batch.sources if isinstance(loader, MixedLoader) else [0] * BATCH_ROWS  # type: ignore[attr-defined]
                for source, row in zip(sources, batch.rows.tolist(), strict=True):
                    seen.setdefault(int(source), []).append(row)
        plans = rows.plans if isinstance(rows, Mixture) else (rows,)
        for source, plan in enumerate(plans):
            for start in range(0, len(seen[source]) - plan.num_rows + 1, plan.num_rows):
                assert sorted(seen[source][start : start + plan.num_rows]) == list(range(plan.num_rows)), name


def test_a_state_of_something_else_is_refused(make_reader: Callable[..., Reader]) -> None:
    """Bug: the state is a bare number, and goes on silently in another store, plan or order."""
    reader = make_reader()
    first = reader.take(1)
    for other in (make_reader(seq_len=47), make_reader(seed=SEED + 1)):
        with pytest.raises(ResumeError) as caught:
            reader.restore(other.state())
        assert "saved" in caught.value.message
        assert "here" in caught.value.message
    assert len(first) == 1


def test_a_store_of_another_tokenizer_is_refused(sample: Samples) -> None:
    """Bug: the tokens of another vocabulary are read at the same places. The store digest covers the tokenizer."""
    plans = [make_plan(sample(name).store, seq_len=24) for name in ("letters", "wide")]
    digests = [plan.store.digest for plan in plans]
    with Loader(plans[0], batch_rows=2) as loader, Loader(plans[1], batch_rows=2) as other:
        with pytest.raises(ResumeError) as caught:
            other.load_state_dict(loader.state_dict())
        assert all(digest in caught.value.message for digest in digests)


@pytest.mark.parametrize("name", ["plan", "mixed curriculum"])
def test_the_world_may_grow_and_shrink(sample: Samples, name: str) -> None:
    """Bug: each rank keeps a state of its own, so that a run can't go on with another number of them."""
    rows = rows_of(sample, name)
    options = {**SETTINGS[name].options(rows, seed=SEED, batch_rows=8), "batch_rows": 8, "seed": SEED}
    with loader_of(rows, **options) as loader:
        whole = [next(loader).tokens.tolist() for _ in range(15)]
    state, step = None, 0
    for world_size in (1, 2, 4, 8, 1):
        ranks = [loader_of(rows, rank=rank, world_size=world_size, **options) for rank in range(world_size)]
        for loader in ranks:
            if state is not None:
                loader.load_state_dict(state)
        for _ in range(3):
            assert [row for loader in ranks for row in next(loader).tokens.tolist()] == whole[step]
            step += 1
        state = ranks[-1].state_dict()
        for loader in ranks:
            loader.close()
