"""A store behind a URL reads like the same store in a folder, and pushing one is a commit.

Most tests use fsspec's own memory and folders as the far side; those at the end a real S3-compatible server.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import http.server
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

from penstock import fs
from penstock.errors import (
    ConfigError,
    DamagedStoreError,
    DiskError,
    NotAStoreError,
    PenstockError,
    StoreError,
)
from penstock.load import Loader
from penstock.pack import make_plan
from penstock.pack.mixture import make_mixture
from penstock.store import Store, mirror, objects, open_store
from penstock.store.layout import MANIFESTS, SEGMENTS
from penstock.store.objects import ObjectFolder
from penstock.store.pushing import push
from penstock.store.remote import RemoteStore, examine_remote, open_remote
from penstock.store.verification import Examination

from . import samples

UNIT_BYTES = 4000


@pytest.fixture(autouse=True)
def _settings(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(scratch / "cache"))
    monkeypatch.delenv("PENSTOCK_REMOTE_CACHE_BYTES", raising=False)
    monkeypatch.setattr(objects, "PAUSES", (0.0, 0.0))


@pytest.fixture(scope="module")
def local(module_scratch: Path) -> Path:
    """A store of many small segments."""
    corpus = module_scratch / "corpus"
    corpus.mkdir()
    for number in range(40):
        (corpus / f"{number:03}.txt").write_text(f"file {number}\n" + f"line of {number} words\n" * (20 + 3 * number))
    samples.build(module_scratch / "local", samples.files(corpus), unit_bytes=UNIT_BYTES)
    with open_store(module_scratch / "local") as store:
        assert len(store.manifest.segments) >= 8
    return module_scratch / "local"


@pytest.fixture
def far(scratch: Path) -> Path:
    """The folder behind `url`."""
    return scratch / "far" / "store"


@pytest.fixture
def url(far: Path, local: Path) -> str:
    """A pushed store."""
    address = f"file://{far}"
    push(local, address)
    return address


def all_tokens(store: Store) -> list[bytes]:
    return [store.document_tokens(number).tobytes() for number in range(store.num_documents)]


def read_all(url: str) -> None:
    with open_store(url) as store:
        store.tokenizer()
        all_tokens(store)


def assert_same(remote: Store, local: Path) -> None:
    with open_store(local) as expected:
        assert remote.digest == expected.digest
        assert all_tokens(remote) == all_tokens(expected)
        assert remote.provenance().equals(expected.provenance())
        assert remote.tokenizer().spec.source_json == expected.tokenizer().spec.source_json
        columns = ["key", "content_hash"]
        assert list(remote.provenance_batches(columns)) == list(expected.provenance_batches(columns))


def cached_segments(scratch: Path) -> list[Path]:
    return sorted((scratch / "cache" / "remote").glob(f"*/{SEGMENTS}/*.tokens"))


def flipped(path: Path, place: int = 5) -> bytes:
    """Damages a file; returns what it was."""
    data = path.read_bytes()
    path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
    return data


# Reading


def test_reads_what_the_local_store_reads(url: str, local: Path, scratch: Path) -> None:
    with open_store(url) as store:
        assert isinstance(store, RemoteStore)
        assert store.location == url
        assert not cached_segments(scratch), "segments come on first use"
        assert not list((scratch / "cache").rglob("documents.parquet"))
        assert_same(store, local)


def test_memory_as_the_far_side(local: Path) -> None:
    push(local, "memory://bucket/store")
    with open_store("memory://bucket/store@1") as store:
        assert_same(store, local)
    fsspec.filesystem("memory").rm("/bucket", recursive=True)
    with pytest.raises(NotAStoreError, match="holds no committed version"):
        open_store("memory://bucket/store")


def test_http_server_is_read(url: str, far: Path, local: Path) -> None:
    pytest.importorskip("aiohttp")

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=far.parent)) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/store"
        try:
            with open_store(address) as store:
                assert_same(store, local)
            with pytest.raises(ConfigError, match="can't be pushed to"):
                push(local, address)
        finally:
            server.shutdown()


def test_second_open_asks_for_no_segment_again(url: str, far: Path, local: Path) -> None:
    with open_store(url) as store:
        assert_same(store, local)
    for file in (far / SEGMENTS).glob("*.tokens"):
        flipped(file)  # sizes stay
    with open_store(url) as store:
        assert_same(store, local)


def test_loader_over_remote_equals_loader_over_local(url: str, local: Path) -> None:
    def batches(store: Store) -> list[bytes]:
        plan = make_plan(store, policy="best-fit", split="train", seq_len=64)
        with Loader(plan, batch_rows=8, seed=3) as loader:
            return [next(loader).tokens.tobytes() for _ in range(2 * plan.num_rows // 8)]

    with open_store(local) as expected, open_store(url) as remote, open_remote(url, cache_bytes=1) as tiny:
        assert batches(remote) == batches(expected) == batches(tiny)


def test_versions_are_pushed_and_opened_by_number(scratch: Path, corpus: Path, updated_corpus: Path, far: Path) -> None:
    store = scratch / "store"
    samples.build(store, samples.files(corpus))
    push(store, f"file://{far}")
    with open_store(f"file://{far}") as first:
        samples.build(store, samples.files(updated_corpus))
        pushed = push(store, f"file://{far}")
        assert pushed.version == 2
        assert_same(first, Path(f"{store}@1"))  # a reader keeps its version
    with open_store(f"file://{far}") as newest, open_store(f"file://{far}@1") as old:
        assert (newest.version, old.version) == (2, 1)
        assert_same(newest, store)
    with pytest.raises(StoreError, match="has no version 3"):
        open_store(f"file://{far}@3")


# The bounded cache


def test_tiny_bound_keeps_reading_right(url: str, local: Path, scratch: Path) -> None:
    with open_store(local) as expected:
        largest = max(entry.bytes for entry in expected.manifest.segments)
        total = sum(entry.bytes for entry in expected.manifest.segments)
    bound = 2 * largest
    assert bound < total / 2
    with open_remote(url, cache_bytes=bound) as store:
        order = np.random.default_rng(0).permutation(store.num_documents)
        with open_store(local) as expected:
            for number in order.tolist():
                assert store.document_tokens(number).tobytes() == expected.document_tokens(number).tobytes()
                assert sum(path.stat().st_size for path in cached_segments(scratch)) <= bound


def test_views_outlive_the_eviction_of_their_segment(url: str, local: Path) -> None:
    with open_store(local) as expected, open_remote(url, cache_bytes=1) as store:
        views = [store.document_tokens(number) for number in range(store.num_documents)]
        assert [view.tobytes() for view in views] == all_tokens(expected)
        del views


def test_what_another_reader_has_open_is_not_evicted(url: str, scratch: Path) -> None:
    with open_remote(url) as holder:
        holder.segment(0)
        held = cached_segments(scratch)
        assert len(held) == 1
        with open_remote(url, cache_bytes=1) as other:
            for number in range(1, len(other.manifest.segments)):
                other.segment(number)
                assert held[0] in cached_segments(scratch)
    with open_remote(url, cache_bytes=1) as other:
        other.segment(1)
        assert held[0] not in cached_segments(scratch)


def test_setting_bounds_the_cache(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_REMOTE_CACHE_BYTES", "12345")
    assert mirror.Mirror(url).cache_bytes == 12345
    monkeypatch.setenv("PENSTOCK_REMOTE_CACHE_BYTES", "lots")
    with pytest.raises(ConfigError, match="'lots'"):
        open_store(url)


def test_prefetch_brings_the_segments_of_the_split(url: str, scratch: Path) -> None:
    with open_store(url) as store:
        assert isinstance(store, RemoteStore)
        documents = store.kept_documents("train")
        store.expect(documents)
        assert store._prefetch is not None
        store._prefetch.wait()
        wanted = {store.manifest.segments[number].name for number in np.unique(store.arrays["segment"][documents])}
        assert {path.stem for path in cached_segments(scratch)} == wanted


def test_prefetch_stays_within_the_bound(url: str, scratch: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_remote(url) as store:
        bound = 3 * max(entry.bytes for entry in store.manifest.segments)
    chunks = ObjectFolder.chunks

    def slow_chunks(self: ObjectFolder, name: str, num_bytes: int) -> Iterator[bytes]:
        time.sleep(0.2)  # so that all threads look for room before anything has come
        yield from chunks(self, name, num_bytes)

    monkeypatch.setattr(ObjectFolder, "chunks", slow_chunks)
    with open_remote(url, cache_bytes=bound) as store:
        store.expect(store.kept_documents())
        assert store._prefetch is not None
        store._prefetch.wait()
        assert 0 < sum(path.stat().st_size for path in cached_segments(scratch)) <= bound


def test_what_arrives_while_room_is_looked_for_takes_its_room(
    url: str, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the look at what is here and the one at what is on its way."""
    with open_remote(url) as store:
        first, second = store.manifest.segments[:2]
    bound = max(first.bytes, second.bytes)
    one, other = (mirror.Mirror(url, cache_bytes=bound) for _ in range(2))
    is_coming, may_come = threading.Event(), threading.Event()
    chunks = ObjectFolder.chunks

    def held_chunks(self: ObjectFolder, name: str, num_bytes: int) -> Iterator[bytes]:
        if name == mirror.tokens_name(first):
            is_coming.set()
            may_come.wait()
        yield from chunks(self, name, num_bytes)

    monkeypatch.setattr(ObjectFolder, "chunks", held_chunks)
    coming = threading.Thread(target=lambda: one.prefetch_segment(first, is_cancelled=lambda: False))
    coming.start()
    is_coming.wait()

    def then_comes(look: Any) -> Any:
        def looked(self: mirror.Mirror) -> Iterator[Any]:
            seen = list(look(self))
            may_come.set()
            coming.join()
            return iter(seen)

        return looked

    for name in ("_cached", "_arriving"):
        monkeypatch.setattr(mirror.Mirror, name, then_comes(getattr(mirror.Mirror, name)))
    mirror.unlock(other.fetch_segment(second, release=lambda: False))
    assert sum(path.stat().st_size for path in cached_segments(scratch)) <= bound


@pytest.mark.parametrize("is_wanted", [True, False])
def test_a_visit_waits_for_the_room_of_another(url: str, scratch: Path, is_wanted: bool) -> None:
    """Each by a mirror of its own, as in two processes."""
    with open_remote(url) as store:
        first, second = store.manifest.segments[:2]
    bound = max(first.bytes, second.bytes)
    one, other = (mirror.Mirror(url, cache_bytes=bound) for _ in range(2))
    is_waiting, may_cancel = threading.Event(), threading.Event()
    fetched: list[int] = []

    def is_cancelled() -> bool:
        is_waiting.set()
        return may_cancel.is_set()

    def fetch() -> None:
        with contextlib.suppress(mirror.Cancelled):
            fetched.append(other.fetch_segment(second, release=lambda: False, is_visit=True, is_cancelled=is_cancelled))

    visit = one.fetch_segment(first, release=lambda: False, is_visit=True)
    coming = threading.Thread(target=fetch)
    coming.start()
    is_waiting.wait()
    assert [path.stem for path in cached_segments(scratch)] == [first.name]
    if not is_wanted:
        may_cancel.set()
        coming.join()
    mirror.unlock(visit)
    coming.join()
    assert [path.stem for path in cached_segments(scratch)] == [second.name if is_wanted else first.name]
    assert len(fetched) == is_wanted
    for lock in fetched:
        mirror.unlock(lock)


def test_a_visit_does_not_wait_for_the_room_of_what_is_kept(url: str) -> None:
    with open_remote(url) as holder, open_remote(url, cache_bytes=1) as other:
        holder.segment(0)
        read: list[int] = []
        other.visit(1, lambda segment: read.append(len(segment.tokens)), is_cancelled=lambda: False)
        assert read == [other.manifest.segments[1].tokens]


def test_a_killed_fetch_takes_no_room(url: str, scratch: Path) -> None:
    with open_remote(url) as store:
        documents = store.kept_documents()
        entries = store.manifest.segments
        lock = store.path / mirror.LOCKS / f"{SEGMENTS}:another.tokens"
        lock.touch()
        os.truncate(lock, 10**9)  # as the process that fetched it left it
    with open_remote(url, cache_bytes=sum(entry.bytes for entry in entries)) as store:
        store.expect(documents)
        assert store._prefetch is not None
        store._prefetch.wait()
        assert len(cached_segments(scratch)) == len(entries)
    assert lock.stat().st_size == 0


def test_leftovers_of_a_killed_fetch_go(url: str, scratch: Path) -> None:
    with open_store(url) as store:
        name = store.manifest.segments[0].name
        leftover = store.path / SEGMENTS / f"{name}.tokens.tmp-999999-0123abcd"
        leftover.write_bytes(b"half")
        store.segment(1)
        assert not leftover.exists()


KILLED = """
    import os, signal, sys
    from penstock import fs
    from penstock.store import open_store
    def kill(operation, path):
        if operation == "rename" and f"/{sys.argv[2]}/" in path:
            os.kill(os.getpid(), signal.SIGKILL)
    fs.before_operation = kill
    store = open_store(sys.argv[1])
    store.tokenizer()
    store.segment(0)
"""


@pytest.mark.parametrize("folder", [MANIFESTS, "index", "tokenizers", SEGMENTS])
def test_what_a_kill_leaves_goes_when_the_store_is_opened_next(url: str, folder: str) -> None:
    with open_store(url) as store:
        copy = store.path
    shutil.rmtree(copy)
    killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), url, folder], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path for path in copy.rglob("*") if fs.is_temporary(path)]
    mirror.Mirror(url)
    assert not [path for path in copy.rglob("*") if fs.is_temporary(path)]


def test_what_another_fetches_stays_when_the_store_is_opened(url: str) -> None:
    with open_store(url) as store:
        entry = store.manifest.index[0]
        coming = store.path / f"{entry.name}.tmp-999999-0123abcd"
    with mirror.Mirror(url)._locked(entry.name):
        coming.write_bytes(b"half")
        mirror.Mirror(url)
        assert coming.exists()
    mirror.Mirror(url)
    assert not coming.exists()


# Damage and failures


def test_damaged_object_is_refused_and_healed_once_it_is_mended(
    url: str, far: Path, local: Path, scratch: Path
) -> None:
    with open_store(url) as store:
        name = store.manifest.segments[0].name
    file = far / SEGMENTS / f"{name}.tokens"
    whole = flipped(file)
    with open_store(url) as store:
        with pytest.raises(DamagedStoreError, match=rf"{name}.tokens is damaged: the 64 KiB block at byte 0"):
            store.segment(0)
        assert not cached_segments(scratch), "nothing damaged is kept"
        problems = examine_remote(url).problems
        assert [problem.file for problem in problems] == [f"{SEGMENTS}/{name}.tokens"]
        file.write_bytes(whole)
        assert_same(store, local)
    assert not examine_remote(url).problems


@pytest.mark.parametrize("pattern", ["index/*/length.array", "segments/*.blocks", "tokenizers/*/tokenizer.json"])
def test_damaged_small_files_are_refused(url: str, far: Path, pattern: str) -> None:
    file = sorted(far.glob(pattern))[0]
    flipped(file)
    with pytest.raises(DamagedStoreError, match=file.name):
        read_all(url)
    assert [problem.file for problem in examine_remote(url, quick=True).problems] == [str(file.relative_to(far))]


def test_damaged_manifest_is_refused(url: str, far: Path) -> None:
    flipped(far / "manifests" / "000001.json", 200)
    with pytest.raises(DamagedStoreError, match=r"000001.json is damaged: its checksum"):
        open_store(url)


@pytest.mark.parametrize("change", ["truncated", "missing"])
def test_sizes_are_compared_with_the_listing_at_open(url: str, far: Path, change: str) -> None:
    file = sorted((far / SEGMENTS).glob("*.tokens"))[3]
    if change == "missing":
        file.unlink()
    else:
        os.truncate(file, file.stat().st_size - 2)
    with pytest.raises(DamagedStoreError, match=file.name):
        open_store(url)
    problems = examine_remote(url, quick=True).problems
    assert [problem.file for problem in problems] == [f"{SEGMENTS}/{file.name}"]


def test_damaged_local_copy_is_fetched_anew(url: str, local: Path, scratch: Path) -> None:
    with open_store(url) as store:
        assert_same(store, local)
        arrays = sorted(store.path.glob("index/*/*.array"))
    for file in [
        *cached_segments(scratch),
        *arrays,
        *(file.with_suffix(".blocks") for file in cached_segments(scratch)),
    ]:
        if file.stat().st_size:
            flipped(file, 0)
    with open_store(url) as store:
        assert_same(store, local)
    flipped(cached_segments(scratch)[0])
    assert not examine_remote(url).problems


class Failing:
    """Makes `cat_file` of a file system fail some times."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failures: list[Any]) -> None:
        original = ObjectFolder._range
        self.calls = 0

        def ranged(folder: ObjectFolder, name: str, start: int, end: int) -> bytes:
            self.calls += 1
            failure = failures.pop(0) if failures else None
            if isinstance(failure, BaseException):
                raise failure
            data = original(folder, name, start, end)
            return failure(data) if failure else data

        monkeypatch.setattr(ObjectFolder, "_range", ranged)


def test_passing_failures_are_tried_again(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(local, "memory://passing/store")
    Failing(monkeypatch, [ConnectionResetError("reset"), TimeoutError("late"), None, EOFError("cut off")])
    with open_store("memory://passing/store") as store:
        assert_same(store, local)


def test_lasting_failure_says_what_was_asked_and_why(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(local, "memory://lasting/store")
    Failing(monkeypatch, [TimeoutError("no answer in 10 s")] * 3)
    with pytest.raises(StoreError, match=r"memory://lasting/store/manifests.* can't be reached: .*no answer.*3 tries"):
        open_store("memory://lasting/store")


def test_bytes_changed_on_the_way_are_fetched_again(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    push(local, "memory://changed/store")
    with open_store("memory://changed/store") as store:

        def change(data: bytes) -> bytes:
            return bytes([data[0] ^ 255]) + data[1:]

        failing = Failing(monkeypatch, [None, change, change])  # the checksums, then two bad arrivals of the tokens
        store.segment(0)
        assert failing.calls == 4
        assert_same(store, local)


def test_full_disk_is_a_disk_error(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_store(url) as store:

        def refuse(operation: str, path: str) -> None:
            if operation == "write" and ".tokens" in path:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(fs, "before_operation", refuse)
        with pytest.raises(DiskError, match="No space left"):
            store.segment(0)
        monkeypatch.setattr(fs, "before_operation", None)
        store.segment(0)


def test_a_copy_removed_under_a_reader_is_a_disk_error(url: str) -> None:
    with open_store(url) as store:
        shutil.rmtree(store.path)
        with pytest.raises(DiskError, match=rf"{store.path}.* failed: No such file") as caught:
            store.present(range(3))
        assert "open the store again" in caught.value.hint


def test_addresses_that_are_refused(local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="s33:// is no kind of address"):
        open_store("s33://bucket/store")
    with pytest.raises(ConfigError, match="holds a password") as caught:
        open_store("https://me:secret@example.invalid/store")
    assert "secret" not in str(caught.value)
    for word in (f"{local}", "memory://store@2"):
        with pytest.raises(StoreError):
            push(local, word)
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    with pytest.raises(ConfigError, match="PENSTOCK_CACHE is off"):
        open_store("memory://bucket/store")


# Pushing


def test_push_again_sends_nothing(url: str, local: Path) -> None:
    again = push(local, url)
    assert again.was_committed
    assert again.files == 0
    assert again.files_there > 0


def test_another_store_is_not_replaced(url: str, scratch: Path, corpus: Path) -> None:
    samples.build(scratch / "other", samples.files(corpus))
    with pytest.raises(StoreError, match="another version of that number"):
        push(scratch / "other", url)


def test_versions_of_two_stores_do_not_meet_at_one_address(
    scratch: Path, corpus: Path, updated_corpus: Path, far: Path
) -> None:
    """Whichever comes first, and though no number is taken twice."""
    grown, other = scratch / "grown", scratch / "other"
    for input_folder in (corpus, updated_corpus):
        samples.build(grown, samples.files(input_folder))
    samples.build(other, samples.files(updated_corpus))
    push(grown, f"file://{far}/grown")  # its version 2 alone
    with pytest.raises(StoreError, match="has a version 2"):
        push(other, f"file://{far}/grown")
    push(other, f"file://{far}/other")
    with pytest.raises(StoreError, match="another version of that number"):
        push(grown, f"file://{far}/other")
    assert push(Path(f"{grown}@1"), f"file://{far}/grown").version == 1  # an older one of the same is welcome


def test_damaged_store_is_not_pushed(scratch: Path, local: Path, far: Path) -> None:
    shutil.copytree(local, scratch / "copy")
    flipped(sorted((scratch / "copy" / SEGMENTS).glob("*.tokens"))[-1])
    with pytest.raises(DamagedStoreError, match="is damaged"):
        push(scratch / "copy", f"file://{far}")
    with pytest.raises(NotAStoreError):
        open_store(f"file://{far}")


def test_interrupted_push_resumes_and_is_never_half_visible(
    local: Path, scratch: Path, far: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = f"file://{far}"
    original = ObjectFolder.put
    sent = 0

    class Killed(BaseException):
        pass

    def put(folder: ObjectFolder, name: str, file: Path) -> None:
        nonlocal sent
        if sent % 5 == 4:
            sent += 1
            target = far / name
            target.parent.mkdir(parents=True, exist_ok=True)
            # What a server without atomic puts would leave: half of it, or all of it wrong.
            data = file.read_bytes()
            target.write_bytes(data[: len(data) // 2] if sent % 2 else bytes(len(data)))
            raise Killed
        sent += 1
        original(folder, name, file)

    monkeypatch.setattr(ObjectFolder, "put", put)
    kills = 0
    while True:
        try:
            done = push(local, address)
        except Killed:
            kills += 1
            with pytest.raises(NotAStoreError):
                open_store(address)
            continue
        break
    assert kills > 2
    assert done.files_there > done.files > 0
    with open_store(address) as store:
        assert_same(store, local)


def test_of_two_pushes_at_once_both_end_well(local: Path, far: Path) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            push(local, f"file://{far}")
        except PenstockError as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    with open_store(f"file://{far}") as store:
        assert_same(store, local)


# Several processes

READER = """
    import hashlib, sys
    from penstock.store.remote import open_remote
    found = hashlib.sha256()
    with open_remote(sys.argv[1], cache_bytes=int(sys.argv[2])) as store:
        for number in range(store.num_documents):
            found.update(store.document_tokens(number))
    print(found.hexdigest())
"""


def test_two_processes_share_the_cache(url: str, local: Path) -> None:
    words = [sys.executable, "-c", textwrap.dedent(READER)]
    bounds = (10**9, 1)  # one of them throws out what the other doesn't hold
    started = [subprocess.Popen([*words, url, str(bound)], stdout=subprocess.PIPE, text=True) for bound in bounds]
    answers = {process.communicate(timeout=60)[0].strip() for process in started}
    with open_store(local) as expected:
        assert answers == {hashlib.sha256(b"".join(all_tokens(expected))).hexdigest()}


# A real S3-compatible server


def test_a_mixture_calls_a_store_by_its_url(url: str) -> None:
    with open_remote(url) as store:
        (source,) = make_mixture({"far": store}, seq_len=64).describe()["mix"]
        assert source["store"] == url


@contextlib.contextmanager
def sleeping_fork() -> Iterator[None]:
    """A forked process that lives as long as the block."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        yield
    finally:
        os.close(write)
        os.close(read)
        os.waitpid(child, 0)


def test_a_fork_while_segments_are_fetched_takes_no_lock_along(url: str) -> None:
    """The child has the descriptors of all locks that the parent's threads hold just then."""
    with open_remote(url) as store, contextlib.ExitStack() as forked:
        entry = store.manifest.segments[0]
        with mirror.Mirror(url)._locked(mirror.tokens_name(entry)):
            forked.enter_context(sleeping_fork())
        with mirror._flock_if_free(store.path / "locks" / f"{SEGMENTS}:{entry.name}.tokens") as descriptor:
            assert descriptor is not None


def test_a_fork_during_a_visit_does_not_go_on_with_it(url: str) -> None:
    """Others would wait for its room as long as the child lives."""
    with open_remote(url) as store:
        entry = store.manifest.segments[0]
        visit = mirror.Mirror(url).fetch_segment(entry, release=lambda: False, is_visit=True)
        with sleeping_fork():
            mirror.unlock(visit)
            with mirror._flock_if_free(store.path / "locks" / f"visit:{entry.name}.tokens") as descriptor:
                assert descriptor is not None


def is_kept(store: RemoteStore, number: int) -> bool:
    """Whether anybody keeps the file of a segment."""
    lock = store.path / mirror.LOCKS / f"use:{store.manifest.segments[number].name}.tokens"
    with mirror._flock_if_free(lock) as descriptor:
        return descriptor is None


@pytest.mark.parametrize("give_back", [RemoteStore.close, RemoteStore._release_one])
def test_a_fork_does_not_keep_what_its_parent_let_go_of(url: str, give_back: Callable[[RemoteStore], Any]) -> None:
    """The disk would pass its bound as long as the child lives."""
    with open_remote(url) as store:
        store.segment(0)
        with sleeping_fork():
            assert is_kept(store, 0)
            give_back(store)
            assert not is_kept(store, 0)


@pytest.mark.parametrize("give_back", [RemoteStore.close, RemoteStore._release_one])
def test_a_fork_that_lets_go_leaves_what_its_parent_keeps(url: str, give_back: Callable[[RemoteStore], Any]) -> None:
    with open_remote(url) as store:
        store.segment(0)
        process = multiprocessing.get_context("fork").Process(target=give_back, args=(store,))
        process.start()
        process.join(60)
        assert process.exitcode == 0
        assert is_kept(store, 0)


def test_a_fork_while_a_segment_is_examined_does_not_keep_it(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_remote(url) as store, contextlib.ExitStack() as forks:
        examined = Examination.examined

        def forked_meanwhile(self: Examination, *arguments: Any) -> Any:
            forks.enter_context(sleeping_fork())
            return examined(self, *arguments)

        monkeypatch.setattr(Examination, "examined", forked_meanwhile)
        assert not examine_remote(url).problems
        assert not [number for number in range(len(store.manifest.segments)) if is_kept(store, number)]


def test_a_fork_while_another_thread_opens_a_segment_can_open_it(url: str) -> None:
    with open_remote(url) as store:
        held, over = threading.Event(), threading.Event()

        def hold() -> None:
            with store._opening:
                held.set()
                over.wait()

        thread = threading.Thread(target=hold)
        thread.start()
        held.wait()
        context = multiprocessing.get_context("fork")
        process = context.Process(target=store.read, args=(0, 0, 1))
        process.start()
        process.join(60)
        exit_code = process.exitcode
        process.kill()
        over.set()
        thread.join()
        assert exit_code == 0


def test_s3_pushed_and_read_back(bucket: Any, local: Path) -> None:
    assert push(local, "s3://bucket/a/store").files > 0
    assert push(local, "s3://bucket/a/store").files == 0
    with open_store("s3://bucket/a/store@1") as store:
        assert_same(store, local)
    assert not examine_remote("s3://bucket/a/store").problems


def test_s3_commit_is_put_if_absent(bucket: Any) -> None:
    folder = ObjectFolder("s3://bucket/commit")
    assert folder.create("manifests/000001.json", b"first")
    assert not folder.create("manifests/000001.json", b"second")
    assert folder.read("manifests/000001.json", most=100) == b"first"


def test_s3_damage_is_refused_and_mended_by_another_push(bucket: Any, local: Path) -> None:
    push(local, "s3://bucket/store")
    with open_store("s3://bucket/store") as store:
        name = f"store/{SEGMENTS}/{store.manifest.segments[0].name}.tokens"
        size = store.manifest.segments[0].bytes
        bucket.put_object(Key=name, Body=bytes(size))
        with pytest.raises(DamagedStoreError, match=name):
            store.segment(0)
        assert push(local, "s3://bucket/store").files == 1
        assert_same(store, local)


def test_s3_is_read_by_the_threads_that_ask(bucket: Any, local: Path) -> None:
    """Others would come back to Python behind the answer, and abort a process that is ending by then."""
    push(local, "s3://bucket/store")
    code = """
        import threading
        from penstock.store import open_store
        with open_store("s3://bucket/store") as store:
            store.document_tokens(0)
            print([thread.name for thread in threading.enumerate()])
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    found = subprocess.run(command, check=True, capture_output=True, text=True)
    assert found.stdout.strip() == "['MainThread']"


def test_a_program_may_end_while_segments_are_fetched(bucket: Any, local: Path) -> None:
    push(local, "s3://bucket/store")
    code = """
        import numpy
        from penstock.store import open_store
        store = open_store("s3://bucket/store")
        store.expect(numpy.arange(store.num_documents))
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0


def test_s3_in_a_forked_process_is_refused_not_waited_for(bucket: Any, local: Path) -> None:
    push(local, "s3://bucket/store")
    with open_store("s3://bucket/store") as store:
        tokens = store.document_tokens(0).tobytes()  # connections are open now
        pid = os.fork()
        if pid == 0:
            told = 1
            try:
                if store.document_tokens(0).tobytes() == tokens:  # what is mapped can be read
                    open_store("s3://bucket/store")
            except StoreError as error:
                told = 0 if "forked" in error.message and "spawn" in error.hint else 2
            finally:
                os._exit(told)
        assert os.waitpid(pid, 0)[1] == 0


def test_s3_refusals_are_told(bucket: Any, local: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for ask in (lambda: open_store("s3://nobucket/store"), lambda: push(local, "s3://nobucket/store")):
        with pytest.raises(StoreError, match="no such bucket"):
            ask()
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    with pytest.raises(StoreError, match="no credentials"):
        open_store("s3://bucket/store")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    with pytest.raises(StoreError, match="can't be reached"):
        open_store("s3://bucket/store")
