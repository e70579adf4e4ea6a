"""Stores larger than the local cache: the batches of the same store in a folder, and never more disk than the bound."""

from __future__ import annotations

import _thread
import contextlib
import itertools
import multiprocessing
import os
import random
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock import fs
from penstock.errors import DamagedStoreError, MissingExtraError, StoreError
from penstock.export.rows import PackedRows
from penstock.export.stream import TokenStream
from penstock.load import Loader, sweeping
from penstock.load import loader as loader_module
from penstock.load.copying import TokenCopier
from penstock.load.gather import Gatherer
from penstock.load.mixed import MixedLoader, loader_of
from penstock.load.order import order_named
from penstock.load.transforms import RandomCrop
from penstock.pack import Plan, make_plan
from penstock.pack.mixture import Mixture, make_mixture
from penstock.sources import FilesSource
from penstock.store import PrepareOptions, Store, mirror, objects, open_store, prepare
from penstock.store.layout import SEGMENTS
from penstock.store.mirror import Mirror
from penstock.store.objects import ObjectFolder
from penstock.store.pushing import push
from penstock.store.reader import Segment
from penstock.store.remote import RemoteStore, open_remote

from .conftest import MemorySource, byte_tokenizer, part_documents, random_text, write_files

SEQ_LEN = 48


@pytest.fixture(autouse=True)
def _settings(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(scratch / "cache"))
    monkeypatch.setattr(objects, "PAUSES", (0.0, 0.0))


@pytest.fixture(scope="module")
def stores(module_scratch: Path) -> dict[str, Path]:
    """`long`: twelve segments of three blocks; `parts`: small ones of documents that don't carry loss throughout."""
    chance = random.Random(5)
    # Many rows end in the next segment, and some documents are shorter than a row.
    files = {f"{number:02}{part}.txt": random_text(chance, size) for number in range(12) for part, size in PARTS}
    write_files(module_scratch / "files", files)
    options = PrepareOptions(split="train=80,val=20", unit_bytes=sum(size for _, size in PARTS), dedup="off")
    source = FilesSource(name="files", root=str(module_scratch / "files"))
    prepare([source], module_scratch / "long", tokenizer=byte_tokenizer(), options=options)
    documents = MemorySource(part_documents(), documents_per_unit=10)
    prepare([documents], module_scratch / "parts", tokenizer=byte_tokenizer(), options=options)
    return {name: module_scratch / name for name in ("long", "parts")}


PARTS = (("a", 60_000), ("b", 13), ("c", 9000), ("d", 29))


@pytest.fixture(scope="module")
def many(module_scratch: Path) -> Path:
    """Forty-eight segments."""
    chance = random.Random(6)
    write_files(module_scratch / "many-files", {f"{n:02}.txt": random_text(chance, 6000) for n in range(48)})
    source = FilesSource(name="files", root=str(module_scratch / "many-files"))
    options = PrepareOptions(split="train=9,val=1", unit_bytes=6000)
    prepare([source], module_scratch / "many", tokenizer=byte_tokenizer(), options=options)
    return module_scratch / "many"


@pytest.fixture
def urls(stores: dict[str, Path], scratch: Path) -> dict[str, str]:
    found = {name: f"file://{scratch}/far/{name}" for name in stores}
    for name, url in found.items():
        push(stores[name], url)
    return found


def bound_of(path: Path, segments: int = 3) -> int:
    with open_store(path) as store:
        assert len(store.manifest.segments) >= 12
        return segments * max(entry.bytes for entry in store.manifest.segments)


def plan_of(store: Store, policy: str = "concat", **options: Any) -> Plan:
    return make_plan(store, policy=policy, split="train", seq_len=SEQ_LEN, **options)


def sweeps(loader: Loader) -> bool:
    return loader._stream.sweeper is not None


def taken(loader: Loader, count: int) -> list[list[bytes]]:
    """Everything of some batches."""
    found = []
    for batch in itertools.islice(loader, count):
        arrays = (batch.tokens, batch.loss_mask, batch.cu_seqlens, batch.rows, getattr(batch, "sources", batch.rows))
        found.append([array.tobytes() for array in arrays])
    return found


def batches_per_pass(rows: Plan | Mixture, batch_rows: int) -> int:
    return -(-int(getattr(rows, "epoch_rows", rows.num_rows)) // batch_rows)


class Fetches:
    """Names of the segments whose tokens were asked of the far side."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[str] = []
        chunks = ObjectFolder.chunks

        def counted(folder: ObjectFolder, name: str, num_bytes: int | None) -> Iterator[bytes]:
            if name.endswith(".tokens"):
                self.names.append(name)
                self.before(name)
            yield from chunks(folder, name, num_bytes)

        monkeypatch.setattr(ObjectFolder, "chunks", counted)

    def before(self, name: str) -> None:
        pass


# The same batches


@pytest.mark.parametrize("policy", ["concat", "best-fit", "pad", "windows"])
@pytest.mark.parametrize("name", ["long", "parts"])
def test_batches_are_those_of_the_store_in_a_folder(
    stores: dict[str, Path], urls: dict[str, str], name: str, policy: str
) -> None:
    options = {"overlap": 8} if policy == "windows" else {}
    with open_store(stores[name]) as near, open_remote(urls[name], cache_bytes=bound_of(stores[name])) as far:
        for threads in (None, 1):
            expected = Loader(plan_of(near, policy, **options), batch_rows=8, seed=3)
            found = Loader(plan_of(far, policy, **options), batch_rows=8, seed=3, fill_threads=threads)
            count = 2 * batches_per_pass(expected.plan, 8)
            with expected, found:
                assert (sweeps(expected), sweeps(found)) == (False, True)
                assert taken(found, count) == taken(expected, count)


@pytest.mark.parametrize("prefetch", [None, 0])
def test_a_mixture_of_stores_that_share_a_bound(
    stores: dict[str, Path], urls: dict[str, str], prefetch: int | None
) -> None:
    """Two remote ones, of which each would fit by itself; and one of them twice, as two sources."""
    words = ["long=0.5", "long:00*=2", "parts=3"]

    def loader(opened: dict[str, Store]) -> MixedLoader:
        mixture = make_mixture(opened, words, split="train", seq_len=SEQ_LEN)
        transforms = [RandomCrop.for_plan(mixture, rate=0.3)]  # changes batches in place
        return MixedLoader(mixture, batch_rows=8, seed=4, prefetch_batches=prefetch, transforms=transforms)

    bound = bound_of(stores["long"], 12)
    with open_store(stores["long"]) as long, open_store(stores["parts"]) as parts:
        with loader({"long": long, "parts": parts}) as expected:
            count = 2 * batches_per_pass(expected.mixture, 8)
            wanted = taken(expected, count)
        with (
            open_remote(urls["long"], cache_bytes=bound) as far_long,
            open_remote(urls["parts"], cache_bytes=bound) as far_parts,
        ):
            assert not any(sweeps(loader_of(plan_of(store), batch_rows=8)) for store in (far_long, far_parts))
            with loader({"long": far_long, "parts": far_parts}) as found:
                assert sweeps(found)
                assert taken(found, count) == wanted
        # Beside a store in a folder.
        with (
            open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as far_long,
            loader({"long": far_long, "parts": parts}) as found,
        ):
            assert sweeps(found)
            assert taken(found, count) == wanted


def test_where_all_segments_fit_they_are_mapped(stores: dict[str, Path], urls: dict[str, str]) -> None:
    with open_store(stores["long"]) as store:
        used = np.unique(store.arrays["segment"][store.kept_documents("train")])
        total = sum(store.manifest.segments[number].bytes for number in used)
        assert isinstance(sweeping.copier_of([plan_of(store)], row_tokens=SEQ_LEN + 1), TokenCopier)
    for bound, fits in ((total, True), (total - 1, False)):
        with open_remote(urls["long"], cache_bytes=bound) as store:
            copier = sweeping.copier_of([plan_of(store), plan_of(store, "pad")], row_tokens=SEQ_LEN + 1)
            assert isinstance(copier, TokenCopier) is fits


# The bound


class DiskRoom:
    """The room that segments take on the disk, now and at most: files, those that are arriving, and removed ones that
    this process still maps. Looked at when a segment is opened and when it is about to be, and before any change of the
    disk."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self._root = cache / "remote"
        self.most, self.looks = 0, 0
        fetch, opened = Mirror.fetch_segment, Segment.__init__

        def fetch_segment(one: Mirror, *args: Any, **options: Any) -> int:
            self.look()
            lock = fetch(one, *args, **options)
            self.look()
            return lock

        def open_segment(one: Segment, *args: Any) -> None:
            opened(one, *args)
            self.look()

        monkeypatch.setattr(Mirror, "fetch_segment", fetch_segment)
        monkeypatch.setattr(Segment, "__init__", open_segment)
        monkeypatch.setattr(fs, "before_operation", lambda operation, path: self.look())

    def look(self) -> None:
        # Removed ones first: one that is removed in between would count twice.
        total = self.removed()
        for path in self._root.glob(f"*/{SEGMENTS}/*.tokens*"):
            try:
                total += path.stat().st_size
            except FileNotFoundError:
                continue
        self.most, self.looks = max(self.most, total), self.looks + 1

    def removed(self) -> int:
        """Bytes of the maps of files that have gone."""
        total = 0
        for line in Path("/proc/self/maps").read_text().splitlines():
            if str(self._root) in line and line.endswith(".tokens (deleted)"):
                begin, _, end = line.split()[0].partition("-")
                total += int(end, 16) - int(begin, 16)
        return total


@pytest.mark.parametrize("order", ["shuffled", "sequential"])
def test_the_disk_never_holds_more_than_the_bound(
    bucket: Any, stores: dict[str, Path], scratch: Path, monkeypatch: pytest.MonkeyPatch, order: str
) -> None:
    push(stores["long"], "s3://bucket/store")
    bound = bound_of(stores["long"])
    with open_remote("s3://bucket/store", cache_bytes=bound) as store:
        room = DiskRoom(scratch / "cache", monkeypatch)
        plan = plan_of(store)
        with Loader(plan, batch_rows=32, shuffle=order == "shuffled") as loader:
            assert sweeps(loader)
            for _ in range(batches_per_pass(plan, 32)):
                next(loader)
                room.look()
        assert room.looks > 100
        assert bound / 3 < room.most <= bound
        assert room.removed() == 0


def test_two_stores_take_the_room_of_one_bound(
    stores: dict[str, Path], urls: dict[str, str], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = bound_of(stores["long"])
    with open_remote(urls["long"], cache_bytes=bound) as long, open_remote(urls["parts"], cache_bytes=bound) as parts:
        room = DiskRoom(scratch / "cache", monkeypatch)
        mixture = make_mixture({"long": long, "parts": parts}, ["parts=4"], split="train", seq_len=SEQ_LEN)
        with MixedLoader(mixture, batch_rows=16) as loader:
            for _ in range(batches_per_pass(mixture, 16)):
                next(loader)
                room.look()
        assert bound / 3 < room.most <= bound


def test_evaluation_beside_training_keeps_to_the_bound(
    many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its few segments would fit alone."""
    push(many, f"file://{scratch}/far/many")
    bound = bound_of(many, 8)
    with open_store(many) as store:
        held_out = make_plan(store, split="val", seq_len=SEQ_LEN)
        expected = [read_rows(Gatherer(held_out), rows) for rows in cut(held_out)]
    with open_remote(f"file://{scratch}/far/many", cache_bytes=bound) as store:
        room = DiskRoom(scratch / "cache", monkeypatch)
        plan, held_out = plan_of(store), make_plan(store, split="val", seq_len=SEQ_LEN)
        segments = np.unique(store.arrays["segment"][held_out.documents])
        assert sum(store.manifest.segments[number].bytes for number in segments) <= bound
        with Loader(plan, batch_rows=8, prefetch_batches=12) as loader:
            for _ in range(3):
                taken(loader, batches_per_pass(plan, 8) // 6)
                gatherer = Gatherer(held_out)
                assert [read_rows(gatherer, rows) for rows in cut(held_out)] == expected
        assert bound / 3 < room.most <= bound


def test_held_out_rows_are_swept_together_and_can_be_given_up(
    many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch_loading = pytest.importorskip("penstock.load.torch", exc_type=MissingExtraError)
    push(many, f"file://{scratch}/far/many")
    rows = np.random.default_rng(1).permutation(plan_of(open_store(many)).num_rows)

    def read(store: Store, **options: Any) -> list[tuple[bytes, bytes]]:
        batches = torch_loading.batches_of_rows(plan_of(store), rows, batch_rows=7, **options)
        return [(batch.tokens.numpy().tobytes(), batch.labels.numpy().tobytes()) for batch in batches]

    fetches, is_over = Fetches(monkeypatch), threading.Event()
    with open_remote(f"file://{scratch}/far/many", cache_bytes=bound_of(many, 3)) as store:
        assert read(store) == read(open_store(many))
        assert len(fetches.names) == len(set(fetches.names))
        monkeypatch.setattr(sweeping, "SECONDS_TO_END", 0.1)
        with held_fetches(fetches, after=len(fetches.names), is_held=is_over.set):
            with pytest.raises(mirror.Cancelled):
                read(store, is_cancelled=is_over.is_set)
            left = sweeping_threads()
        for thread in left:
            thread.join()


def cut(plan: Plan) -> list[np.ndarray]:
    return [np.arange(first, min(first + 8, plan.num_rows)) for first in range(0, plan.num_rows, 8)]


def read_rows(gatherer: Gatherer, rows: np.ndarray) -> bytes:
    buffer = gatherer.new_buffer(num_batches=1, batch_rows=len(rows))
    gatherer.fill(rows[None], buffer)
    return buffer.tokens.tobytes()


def test_a_sweep_fetches_what_is_not_here(
    stores: dict[str, Path], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    with open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store:
        plan = plan_of(store)
        names = {store.manifest.segments[n].name for n in np.unique(store.arrays["segment"][plan.documents])}
        gatherer, rows = Gatherer(plan), np.arange(plan.num_rows)[None]
        gatherer.lay_out(rows)
        assert len(fetches.names) == len(set(fetches.names)) == len(names)
        for _ in range(3):
            here = {path.stem for path in (store.path / SEGMENTS).glob("*.tokens")}
            assert len(here) >= 3
            fetches.names.clear()
            gatherer.lay_out(rows)
            assert sorted(Path(name).stem for name in fetches.names) == sorted(names - here)


def test_by_segments_a_pass_fetches_each_about_once(many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for two windows, and layouts of half of one. Of runs of four one row ends in the next run."""
    push(many, f"file://{scratch}/far/many")
    monkeypatch.setattr(loader_module, "LAID_OUT_ROWS", 400)
    fetches, per_pass = Fetches(monkeypatch), {}
    for name in ("segments", "shuffle"):
        with open_remote(f"file://{scratch}/far/many", cache_bytes=bound_of(many, 16)) as store:
            plan = plan_of(store)
            count = batches_per_pass(plan, 8)
            order = order_named(name, plan, seed=1)
            with Loader(plan, batch_rows=8, order=order, prefetch_batches=12) as loader:
                assert sweeps(loader)
                taken(loader, count)
                fetches.names.clear()
                taken(loader, 2 * count)
        per_pass[name] = len(fetches.names) / 2 / len(store.manifest.segments)
    assert 0.5 < per_pass["segments"] < 1.5
    assert per_pass["shuffle"] > 5


# Threads, processes, states, errors


def test_resume_inside_a_layout(stores: dict[str, Path], urls: dict[str, str]) -> None:
    with open_store(stores["parts"]) as near, open_remote(urls["parts"], cache_bytes=bound_of(stores["parts"])) as far:
        plan = plan_of(far, "best-fit")
        with Loader(plan_of(near, "best-fit"), batch_rows=4, seed=2) as loader:
            expected = taken(loader, 30)
        for stop in (0, 1, 7, 19):
            with Loader(plan, batch_rows=4, seed=2) as first, Loader(plan, batch_rows=4, seed=2) as second:
                assert taken(first, stop) == expected[:stop]
                second.load_state_dict(first.state_dict())
                assert taken(second, 30 - stop) == expected[stop:]
                first.close()  # and goes on
                assert taken(first, 30 - stop) == expected[stop:]


def test_close_waits_for_no_sweep(
    stores: dict[str, Path], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    with open_store(stores["long"]) as near, Loader(plan_of(near), batch_rows=2, seed=1) as loader:
        expected = taken(loader, 3)
    with open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store:
        loader = Loader(plan_of(store), batch_rows=2, seed=1)
        sweeper = loader._stream.sweeper
        assert sweeper is not None
        is_fetching, may_go_on = threading.Event(), threading.Event()

        def hold(name: str) -> None:
            if len(fetches.names) > 4:  # the first batch has come, and others are being fetched ahead
                is_fetching.set()
                may_go_on.wait()

        fetches.before = hold  # type: ignore[method-assign]
        assert taken(loader, 1) == expected[:1]
        is_fetching.wait()
        closing = threading.Thread(target=loader.close)
        closing.start()
        sweeper.interrupted.wait()
        may_go_on.set()
        closing.join()
        assert len(fetches.names) <= 4 + 3  # those that were on their way, of twelve
        assert not sweeper.interrupted.is_set()
        assert taken(loader, 2) == expected[1:]
        loader.close()


@contextlib.contextmanager
def held_fetches(fetches: Fetches, *, after: int, is_held: Callable[[], object]) -> Iterator[None]:
    """For the block nothing comes any more after some segments, as from a server that doesn't answer."""
    may_go_on = threading.Event()

    def hold(name: str) -> None:
        if len(fetches.names) > after:
            is_held()
            may_go_on.wait(60)

    fetches.before = hold  # type: ignore[method-assign]
    try:
        yield
    finally:
        may_go_on.set()


def sweeping_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name.startswith("penstock-sweep")]


def test_close_does_not_wait_for_a_server_that_does_not_answer(
    stores: dict[str, Path], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweeping, "SECONDS_TO_END", 0.1)
    fetches, is_held = Fetches(monkeypatch), threading.Event()
    with open_store(stores["long"]) as near, Loader(plan_of(near), batch_rows=2, seed=1) as loader:
        expected = taken(loader, 3)
    others = set(threading.enumerate())  # of tests before, whose loaders nobody has collected yet
    with open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store:
        loader = Loader(plan_of(store), batch_rows=2, seed=1)
        with held_fetches(fetches, after=4, is_held=is_held.set):
            assert taken(loader, 1) == expected[:1]
            is_held.wait()
            loader.close()
            left = sweeping_threads()
            assert left
            own = set(threading.enumerate()) - others
            assert not [thread for thread in own if thread.name.startswith("penstock-load")]
        for thread in left:
            thread.join()
        count = len(fetches.names)
        assert not list((store.path / SEGMENTS).glob(f"*{fs.TEMPORARY_MARK}*"))
        assert taken(loader, 2) == expected[1:]
        assert len(fetches.names) > count
        loader.close()


def test_who_is_left_behind_by_close_fetches_no_more(
    many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All threads of the sweep are inside a request, so nobody else notices that it is over."""
    monkeypatch.setattr(sweeping, "SECONDS_TO_END", 0.1)
    push(many, f"file://{scratch}/far/many")
    fetches, held, others = Fetches(monkeypatch), threading.Semaphore(0), set(threading.enumerate())
    with open_remote(f"file://{scratch}/far/many", cache_bytes=bound_of(many, 20)) as store:
        loader = Loader(plan_of(store), batch_rows=8, seed=1)
        with held_fetches(fetches, after=14, is_held=held.release):
            taken(loader, 1)
            for _ in range(sweeping.MOST_THREADS):
                held.acquire()
            loader.close()
            left, count = set(sweeping_threads()) - others, len(fetches.names)
            assert len(left) == sweeping.MOST_THREADS
        for thread in left:
            thread.join()
        assert len(fetches.names) == count


def test_a_copy_of_the_wrong_size_takes_no_room_of_its_own(many: Path, scratch: Path) -> None:
    push(many, f"file://{scratch}/far/many")
    with open_remote(f"file://{scratch}/far/many") as store:
        entry = store.manifest.segments[0]
    with open_remote(f"file://{scratch}/far/many", cache_bytes=entry.bytes) as store:
        (store.path / SEGMENTS / f"{entry.name}.tokens").write_bytes(b"x" * 1000)
        end, read = time.monotonic() + 30, list[int]()
        store.visit(0, lambda segment: read.append(len(segment.tokens)), is_cancelled=lambda: time.monotonic() > end)
        assert read == [entry.tokens]


def test_who_lets_go_too_late_leaves_what_is_open_anew(many: Path, scratch: Path) -> None:
    push(many, f"file://{scratch}/far/many")
    with open_remote(f"file://{scratch}/far/many") as store:
        store.segment(0)
        store._let_go(0)
        anew = store.segment(0)
        kept = dict(store._kept)
        store._kept.pop(0)  # as a thread finds it that chose the segment before another let go of it
        store._let_go(0)
        assert store._segments[0] is anew
        store._kept.update(kept)


def test_packed_rows_are_exported_within_the_bound(many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(many, f"file://{scratch}/far/many")
    bound = bound_of(many, 4)

    def rows(store: Store) -> list[bytes]:
        packed = PackedRows(TokenStream(store, split="train"), policy="best-fit", seq_len=1024, overlap=0)
        return [block.tokens.tobytes() for block in packed.blocks()]

    with open_store(many) as near:
        expected = rows(near)
    with open_remote(f"file://{scratch}/far/many", cache_bytes=bound) as store:
        room = DiskRoom(scratch / "cache", monkeypatch)
        assert rows(store) == expected
        assert bound / 3 < room.most <= bound


def test_damage_at_the_far_side_is_fetched_thrice(many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(many, f"file://{scratch}/far/many")
    with open_remote(f"file://{scratch}/far/many", cache_bytes=bound_of(many, 3)) as store:
        name = store.manifest.segments[5].name
        file = scratch / "far" / "many" / SEGMENTS / f"{name}.tokens"
        file.write_bytes(bytes(file.stat().st_size))
        fetches = Fetches(monkeypatch)
        with pytest.raises(DamagedStoreError, match=name):
            store.visit(5, lambda segment: None, is_cancelled=lambda: False)
        assert len(fetches.names) == mirror.ARRIVALS


@pytest.mark.parametrize("prefetch", [0, 12, None])
def test_a_server_that_is_gone_is_told_at_once_and_the_loader_goes_on_when_it_is_back(
    many: Path, scratch: Path, monkeypatch: pytest.MonkeyPatch, prefetch: int | None
) -> None:
    push(many, f"file://{scratch}/far/many")
    fetches = Fetches(monkeypatch)
    with open_remote(f"file://{scratch}/far/many", cache_bytes=bound_of(many, 3)) as store:
        loader = Loader(plan_of(store), batch_rows=8, seed=1, prefetch_batches=prefetch)
        found = taken(loader, 3)
        asked: list[str] = []

        def refuse(name: str) -> None:
            asked.append(name)
            raise StoreError(f"{name} can't be reached", hint="is the server up?")

        fetches.before = refuse  # type: ignore[method-assign]
        for number in range(2):
            with pytest.raises(StoreError, match="can't be reached"):
                found.extend(batch for _ in itertools.count() for batch in taken(loader, 1))
            assert len(asked) <= (number + 1) * sweeping.MOST_THREADS
        fetches.before = lambda name: None  # type: ignore[method-assign]
        assert loader.position == 8 * len(found)
        found += taken(loader, 20)
        loader.close()
    with open_store(many) as near, Loader(plan_of(near), batch_rows=8, seed=1) as loader:
        assert found == taken(loader, len(found))


def test_waiting_for_a_batch_has_an_end(
    stores: dict[str, Path], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    with open_store(stores["long"]) as near, Loader(plan_of(near), batch_rows=64) as loader:
        expected = taken(loader, 3)
    with open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store:
        with Loader(plan_of(store), batch_rows=64) as loader:
            with held_fetches(fetches, after=0, is_held=lambda: None):
                assert not loader.wait(0.01)
                assert not loader.wait(0.01)
                assert loader.position == 0
            assert loader.wait(60)
            assert taken(loader, 2) == expected[:2]
            assert loader.wait(60)
            assert taken(loader, 1) == expected[2:]
        with Loader(plan_of(store), batch_rows=64, prefetch_batches=0) as loader:
            assert loader.wait(0)


def test_an_interrupt_does_not_wait_for_a_server_that_does_not_answer(
    stores: dict[str, Path], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor is it lost where the batch is filled on demand: the thread that asks for it makes no request itself."""
    monkeypatch.setattr(sweeping, "SECONDS_TO_END", 0.1)
    fetches = Fetches(monkeypatch)
    with (
        open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store,
        Loader(plan_of(store), batch_rows=64, prefetch_batches=0) as loader,
    ):
        with held_fetches(fetches, after=2, is_held=_thread.interrupt_main):
            with pytest.raises(KeyboardInterrupt):
                taken(loader, 1)
            left = sweeping_threads()
            assert left
        for thread in left:
            thread.join()


def test_a_program_may_end_during_a_sweep(bucket: Any, many: Path) -> None:
    push(many, "s3://bucket/store")
    code = """
        from penstock.load import Loader
        from penstock.pack import make_plan
        from penstock.store import open_store
        plan = make_plan(open_store("s3://bucket/store"), seq_len=48)
        loader = Loader(plan, batch_rows=8)
        next(loader)  # and begins to fetch what 32 rows need
        assert loader._stream.sweeper
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    environment = {**os.environ, mirror.BYTES_SETTING: str(bound_of(many))}
    for _ in range(3):
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=60)
        assert (ended.returncode, ended.stderr) == (0, "")


def taken_until_damage(loader: Loader, name: str) -> list[list[bytes]]:
    found: list[list[bytes]] = []
    try:
        while True:
            found += taken(loader, 1)
    except DamagedStoreError as error:
        assert name in error.message  # noqa: PT017
    return found


def test_damage_is_told_where_the_batch_is_and_mended_here_and_there(
    stores: dict[str, Path], urls: dict[str, str], scratch: Path
) -> None:
    far_folder = scratch / "far" / "long" / SEGMENTS
    with open_store(stores["long"]) as near, Loader(plan_of(near), batch_rows=16, shuffle=False) as loader:
        expected = taken(loader, batches_per_pass(loader.plan, 16))
        segments = near.arrays["segment"][loader.plan.documents]
        name = near.manifest.segments[int(segments[len(segments) // 2])].name
    file = far_folder / f"{name}.tokens"
    whole = file.read_bytes()
    file.write_bytes(bytes(len(whole)))
    with open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store:
        with Loader(plan_of(store), batch_rows=16, shuffle=False) as loader:
            found = taken_until_damage(loader, name)
            assert found == expected[: len(found)]
            state = loader.state_dict()
        file.write_bytes(whole)
        for path in (store.path / SEGMENTS).glob("*.tokens"):  # and the copies here
            path.write_bytes(bytes(path.stat().st_size))
        store._seen[:] = False
        with Loader(plan_of(store), batch_rows=16, shuffle=False) as loader:
            loader.load_state_dict(state)
            assert taken(loader, len(expected) - len(found)) == expected[len(found) :]


def test_a_process_forked_after_a_sweep_can_sweep(stores: dict[str, Path], urls: dict[str, str]) -> None:
    context = multiprocessing.get_context("fork")
    with (
        open_remote(urls["long"], cache_bytes=bound_of(stores["long"])) as store,
        Loader(plan_of(store), batch_rows=8, prefetch_batches=0) as loader,
    ):
        expected = taken(loader, 1)
        loader.load_state_dict({**loader.state_dict(), "position": 0})
        receiving, sending = context.Pipe(duplex=False)
        child = context.Process(target=lambda: sending.send(taken(loader, 1)))
        child.start()
        try:
            assert receiving.poll(60)
            assert receiving.recv() == expected
        finally:
            child.kill()
            child.join()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_of_a_data_loader(
    stores: dict[str, Path], urls: dict[str, str], monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    torch = pytest.importorskip("torch")
    from penstock.load.torch import RowStream

    monkeypatch.setenv(mirror.BYTES_SETTING, str(bound_of(stores["parts"])))
    with open_store(stores["parts"]) as near, open_store(urls["parts"]) as far:
        assert isinstance(far, RemoteStore)

        def items(store: Store, **options: Any) -> list[Any]:
            stream = RowStream(plan_of(store, "best-fit"), batch_rows=16, batched=True, passes=1, seed=1)
            batches = torch.utils.data.DataLoader(stream, batch_size=None, **options)
            return [{name: tensor.tolist() for name, tensor in batch.items()} for batch in batches]

        assert items(far, num_workers=2, multiprocessing_context=method) == items(near)
