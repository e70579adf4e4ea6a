"""The loader's thread, buffers and errors."""

from __future__ import annotations

import bisect
import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import ConfigError, DamagedStoreError
from penstock.load import Loader
from penstock.pack import plan_concat
from penstock.store import open_store
from penstock.store.layout import BLOCK_BYTES, SEGMENTS

from .conftest import Sample
from .reference import assert_batch_equals

Samples = Callable[[str], Sample]

PATIENCE_SECONDS = 60


@pytest.mark.parametrize(
    "options",
    [
        {"batch_rows": 0},
        {"batch_rows": -4},
        {"batch_rows": 4, "world_size": 0},
        {"batch_rows": 4, "world_size": -2},
        {"batch_rows": 4, "world_size": 2, "rank": 2},
        {"batch_rows": 4, "world_size": 2, "rank": -1},
        {"batch_rows": 10, "world_size": 4},
        {"batch_rows": 2, "world_size": 4},
        {"batch_rows": 4, "prefetch_batches": -1},
        {"batch_rows": 4, "prefetch_batches": -2},
        {"batch_rows": 4, "fill_threads": 0},
    ],
)
def test_impossible_settings_are_refused(sample: Samples, options: dict[str, Any]) -> None:
    plan = plan_concat(sample("letters").store, seq_len=16)
    with pytest.raises(ConfigError):
        Loader(plan, **options)


class Buffers:
    """The memory a loader asked for, seen from outside."""

    def __init__(self) -> None:
        self.arrays: list[np.ndarray] = []

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray:
        self.arrays.append(np.zeros(shape, dtype))
        return self.arrays[-1]

    def hold(self, tokens: list[list[int]]) -> bool:
        """Whether some batch of some buffer holds these tokens by now."""
        return any(np.array_equal(batch, tokens) for array in self.arrays if array.ndim == 3 for batch in array)


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("prefetch", [1, 2, 3, 8, 13])
def test_a_batch_stays_as_it_is_until_the_next_is_asked_for(sample: Samples, prefetch: int, threads: int) -> None:
    """Even when the threads have filled everything they may fill."""
    one = sample("letters")
    plan = plan_concat(one.store, seq_len=20)
    buffers = Buffers()
    # One stretch is lent; each thread may fill one of those after it. They grow from 1 batch to a buffer's size.
    ahead = min(threads, max(1, prefetch - 1))
    ends = [1]
    while len(ends) < 7:
        ends.append(ends[-1] + min(4 ** len(ends), -(-prefetch // (ahead + 1))))
    options = {"batch_rows": 3, "shuffle": False, "prefetch_batches": prefetch, "fill_threads": threads}
    with Loader(plan, **options, allocate=buffers.allocate) as loader:
        allocated = len(buffers.arrays)
        assert allocated == 3 * (ahead + 1)
        for number in range(ends[-1 - ahead]):
            batch = next(loader)
            # The last batches that the threads can fill while this one is out.
            stretch = bisect.bisect_right(ends, number)
            for last in (end - 1 for end in ends[stretch + 1 : stretch + 1 + ahead]):
                tokens = [one.train.row(row, 20).tokens for row in range(3 * last, 3 * last + 3)]
                deadline = time.monotonic() + PATIENCE_SECONDS
                while not buffers.hold(tokens):
                    assert time.monotonic() < deadline, "the threads don't fill ahead"
                    os.sched_yield()
            assert any(np.shares_memory(batch.tokens, array) for array in buffers.arrays)
            assert_batch_equals(batch, [one.train.row(row, 20) for row in range(3 * number, 3 * number + 3)])
    assert len(buffers.arrays) == allocated  # buffers are used again, none was added


@pytest.mark.parametrize("threads", [None, 2, 5])
def test_threads_change_nothing_about_the_batches(sample: Samples, threads: int | None) -> None:
    plan = plan_concat(sample("letters").store, seq_len=7)
    options = {"batch_rows": 3, "seed": 4}
    with (
        Loader(plan, **options, prefetch_batches=24, fill_threads=threads) as many,
        Loader(plan, **options, prefetch_batches=0) as none,
    ):
        for number in range(300):
            batch, wanted = next(many), next(none)
            assert batch.position == wanted.position == 3 * number
            assert batch.rows.tolist() == wanted.rows.tolist()
            for array in ("tokens", "loss_mask", "cu_seqlens"):
                np.testing.assert_array_equal(getattr(batch, array), getattr(wanted, array))


@pytest.mark.parametrize("prefetch", [0, 1, 8])
@pytest.mark.parametrize("num_batches", [0, 1, 3, 20])
def test_close_leaves_no_thread_and_the_loader_can_go_on(sample: Samples, prefetch: int, num_batches: int) -> None:
    plan = plan_concat(sample("letters").store, seq_len=20)
    before = set(threading.enumerate())
    loader = Loader(plan, batch_rows=3, seed=1, prefetch_batches=prefetch)
    for _ in range(num_batches):
        next(loader)
    loader.close()
    loader.close()
    assert set(threading.enumerate()) <= before
    with loader:
        batch = next(loader)
        assert batch.position == 3 * num_batches
        assert bool(set(threading.enumerate()) - before) == (prefetch > 0)
    assert set(threading.enumerate()) <= before


def test_going_back_again_and_again_keeps_nothing_of_before(sample: Samples) -> None:
    plan = plan_concat(sample("letters").store, seq_len=20)
    held = []
    with Loader(plan, batch_rows=3, seed=1) as loader:
        state = loader.state_dict()
        tracemalloc.start()
        try:
            for _ in range(6):
                for _ in range(12):
                    next(loader)
                loader.load_state_dict(state)
                held.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
    assert held[-1] < 1.5 * held[0]


def read_forked(loader: Loader, told: Any) -> None:
    for again in (False, True):
        try:
            told.put([next(loader).position for _ in range(100)][-1])
        except ConfigError as error:
            told.put((error.message, error.hint))
        if not again:
            loader.close()


@pytest.mark.parametrize("state", ["new", "reading", "closed"])
def test_a_forked_process_has_no_threads_to_wait_for(sample: Samples, state: str) -> None:
    plan = plan_concat(sample("letters").store, seq_len=20)
    loader = Loader(plan, batch_rows=3, seed=1, prefetch_batches=8)
    start = 0 if state == "new" else next(loader).position + 3
    if state == "closed":
        loader.close()
    context = multiprocessing.get_context("fork")
    told = context.SimpleQueue()
    process = context.Process(target=read_forked, args=(loader, told))
    process.start()
    process.join(PATIENCE_SECONDS)
    is_waiting = process.is_alive()
    process.kill()
    assert not is_waiting
    if state == "reading":
        for _ in range(2):
            message, hint = told.get()
            assert "forked" in message
            assert "load_state_dict" in hint
    else:
        assert [told.get(), told.get()] == [start + 3 * 99, start + 3 * 199]
    with loader:
        assert next(loader).position == start


def test_loaders_of_one_plan_do_not_disturb_each_other(sample: Samples) -> None:
    one = sample("letters")
    plan = plan_concat(one.store, seq_len=20)
    loaders = [Loader(plan, batch_rows=4, seed=seed, prefetch_batches=2) for seed in range(4)]
    for _ in range(40):
        for batch in [next(loader) for loader in loaders]:
            assert_batch_equals(batch, [one.train.row(row, 20) for row in batch.rows.tolist()])
    for loader in loaders:
        loader.close()


def copy_with_a_flipped_bit(sample: Sample, folder: Path, segment: int, byte: int) -> Path:
    shutil.copytree(sample.path, folder)
    name = sample.store.manifest.segments[segment].name
    path = folder / SEGMENTS / f"{name}.tokens"
    data = bytearray(path.read_bytes())
    data[byte] ^= 1
    path.write_bytes(data)
    return folder


def damaged_positions(sample: Sample, segment: int, byte: int) -> set[int]:
    """Stream positions of train whose token lies in the damaged block."""
    store = sample.store
    block, width = byte // BLOCK_BYTES, store.dtype.itemsize
    positions, start = set(), 0
    for document in store.kept_documents("train").tolist():
        offset, length = int(store.arrays["offset"][document]), int(store.arrays["length"][document])
        if store.arrays["segment"][document] == segment:
            positions |= {start + place for place in range(length) if (offset + place) * width // BLOCK_BYTES == block}
        start += length
    return positions


def assert_damage_is_found(
    sample: Sample, path: Path, damaged: set[int], *, seq_len: int, prefetch: int, threads: int | None = None
) -> None:
    """Every batch before the first damaged one is right; that one is an error, time and again."""
    with open_store(path) as store:
        plan = plan_concat(store, seq_len=seq_len)
        bad_rows = {row for row in range(plan.num_rows) if damaged & set(range(row * seq_len, (row + 1) * seq_len + 1))}
        with Loader(plan, batch_rows=2, seed=5, prefetch_batches=prefetch, fill_threads=threads) as loader:
            healthy = Loader(plan_concat(sample.store, seq_len=seq_len), batch_rows=2, seed=5, prefetch_batches=0)
            expected = next(healthy)
            while not bad_rows & set(expected.rows.tolist()):
                batch = next(loader)
                assert batch.rows.tolist() == expected.rows.tolist()
                np.testing.assert_array_equal(batch.tokens, expected.tokens)
                expected = next(healthy)
            for _ in range(3):
                with pytest.raises(DamagedStoreError, match=r"\.tokens"):
                    next(loader)
                assert loader.position == expected.position  # nothing was given out


@pytest.mark.parametrize(("prefetch", "threads"), [(0, 1), (1, 1), (2, 1), (8, 1), (8, 2), (12, 5)])
@pytest.mark.parametrize("segment", [0, 3])
def test_damage_is_an_error_where_it_is_met_and_stays_one(
    sample: Samples, tmp_path: Path, prefetch: int, threads: int, segment: int
) -> None:
    one = sample("letters")
    path = copy_with_a_flipped_bit(one, tmp_path / "copy", segment, 11)
    damaged = damaged_positions(one, segment, 11)
    assert damaged
    before = set(threading.enumerate())
    assert_damage_is_found(one, path, damaged, seq_len=4, prefetch=prefetch, threads=threads)
    assert set(threading.enumerate()) <= before


@given(
    place=st.floats(0, 1, exclude_max=True),
    seq_len=st.sampled_from([3_000, 33_000, 70_000, 250_000]),
    prefetch=st.sampled_from([0, 4]),
)
@settings(max_examples=10, deadline=None)
def test_damage_in_any_block_is_found_whatever_the_row_length(
    sample: Samples, tmp_path_factory: pytest.TempPathFactory, place: float, seq_len: int, prefetch: int
) -> None:
    """Rows within a block, over two, over many: every block of a row is checked before the row is given out."""
    one = sample("blocks")
    sizes = [entry.bytes for entry in one.store.manifest.segments]
    byte, segment = int(place * sum(sizes)), 0
    while byte >= sizes[segment]:
        byte -= sizes[segment]
        segment += 1
    path = copy_with_a_flipped_bit(one, tmp_path_factory.mktemp("damaged") / "copy", segment, byte)
    damaged = damaged_positions(one, segment, byte)
    assert_damage_is_found(one, path, damaged, seq_len=seq_len, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_after_damage_is_mended_a_restored_loader_goes_on(sample: Samples, tmp_path: Path, prefetch: int) -> None:
    one = sample("letters")
    path = copy_with_a_flipped_bit(one, tmp_path / "copy", 0, 5)
    options = {"batch_rows": 8, "shuffle": False, "prefetch_batches": prefetch}
    with open_store(path) as store, Loader(plan_concat(store, seq_len=500), **options) as loader:
        state = loader.state_dict()
        with pytest.raises(DamagedStoreError):
            [next(loader) for _ in range(20)]
        name = one.store.manifest.segments[0].name
        healthy = (one.path / SEGMENTS / f"{name}.tokens").read_bytes()
        with (path / SEGMENTS / f"{name}.tokens").open("r+b") as file:
            file.write(healthy)
        loader.load_state_dict(state)
        batch = next(loader)
        assert_batch_equals(batch, [one.train.row(row, 500) for row in batch.rows.tolist()])


LEAVE_OPEN = """
import sys
from penstock.load import Loader
from penstock.pack import plan_concat
from penstock.store import open_store

loader = Loader(plan_concat(open_store(sys.argv[1]), seq_len=16), batch_rows=4, prefetch_batches=8)
for _ in range(int(sys.argv[2])):
    batch = next(loader)
print(batch.position)
"""


@pytest.mark.parametrize("num_batches", [1, 30])
def test_a_loader_never_closed_does_not_keep_the_interpreter(sample: Samples, num_batches: int) -> None:
    done = subprocess.run(
        [sys.executable, "-c", LEAVE_OPEN, str(sample("letters").path), str(num_batches)],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) == 4 * (num_batches - 1)
