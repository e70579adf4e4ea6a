"""Errors of the disk at every operation, a disk that is really full, and two writers on one store."""

from __future__ import annotations

import errno
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from penstock import fs
from penstock.errors import DiskError, InputError, StoreBusyError
from penstock.store import list_versions, open_store, verify

from . import samples
from .samples import GOLDEN_FILES, GOLDEN_UPDATED, FailAt, build, contents, files, spread, stray_files, without_cache

pytestmark = pytest.mark.torture(lane="B", sample=True)

ERRNOS = [errno.ENOSPC, errno.EIO, errno.EACCES, errno.EROFS, errno.EMFILE]


def error_of_build(store: Path, corpus: Path, fault: FailAt, monkeypatch) -> DiskError | StoreBusyError | None:
    """What a prepare under a fault ends with; only these two are allowed."""
    with monkeypatch.context() as patch:
        patch.setattr(fs, "before_operation", fault)
        try:
            build(store, files(corpus))
        except (DiskError, StoreBusyError) as error:
            return error
    return None


def assert_names_the_cause(error: DiskError | StoreBusyError | None, fault: FailAt, store: Path) -> None:
    assert error is not None
    assert error.hint
    if (fault.failed, fault.code) == ("lock", errno.EACCES):
        assert isinstance(error, StoreBusyError)  # what some systems answer when another process has the lock
        return
    assert isinstance(error, DiskError)
    assert str(store.parent) in error.message
    assert fs.TEMPORARY_MARK not in error.message


def num_operations(store: Path, corpus: Path, monkeypatch) -> int:
    counting = FailAt(0)
    assert error_of_build(store, corpus, counting, monkeypatch) is None
    return len(counting.operations)


@pytest.mark.parametrize("number", range(len(ERRNOS)), ids=[errno.errorcode[code] for code in ERRNOS])
def test_an_error_at_any_operation_of_an_update_keeps_the_old_version(
    scratch, updated_corpus, built, monkeypatch, number
):
    """Every operation fails once under one of the five errors; together the five cases leave none out."""
    total = num_operations(shutil.copytree(built, scratch / "counted"), updated_corpus, monkeypatch)
    before = without_cache(built)
    for at in range(1 + number, total + 1, len(ERRNOS)):
        store = shutil.copytree(built, scratch / "failed")
        fault = FailAt(at, ERRNOS[number], for_ever=at % 2 == 0)
        assert_names_the_cause(error_of_build(store, updated_corpus, fault, monkeypatch), fault, store)
        found = contents(store)
        assert {name: found.get(name) for name in before} == before
        with open_store(store, version=1) as old:
            assert old.digest == GOLDEN_FILES
        assert build(store, files(updated_corpus)).manifest.digest == GOLDEN_UPDATED
        assert verify(store) == []
        assert stray_files(store) == set()
        assert list_versions(store) == [1, 2]
        shutil.rmtree(store)


@pytest.mark.parametrize("code", ERRNOS, ids=[errno.errorcode[code] for code in ERRNOS])
def test_an_error_at_any_operation_of_a_first_build_is_made_good_by_the_next(scratch, corpus, monkeypatch, code):
    total = num_operations(scratch / "counted", corpus, monkeypatch)
    store = scratch / "store"
    for at in spread(9, over=total):
        fault = FailAt(at, code, for_ever=at % 2 == 1)
        assert_names_the_cause(error_of_build(store, corpus, fault, monkeypatch), fault, store)
        result = build(store, files(corpus))
        assert (result.manifest.version, result.manifest.digest) == (1, GOLDEN_FILES)
        assert verify(store) == []
        assert stray_files(store) == set()
        shutil.rmtree(store)


FULL_DISK = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from penstock.errors import DiskError
from penstock.store import open_store, verify
from samples import build, files, stray_files, update_corpus, write_corpus
disk = Path(sys.argv[2])
corpus = write_corpus(Path(sys.argv[3]) / "corpus")
store = disk / "store"
first = build(store, files(corpus)).manifest.digest
update_corpus(corpus)
messages = []
for free_pages in (0, 1, 2, 5, 9, 14):
    ballast = disk / "ballast"
    free = os.statvfs(disk).f_bfree
    ballast.write_bytes(bytes(4096 * max(free - free_pages, 0)))
    try:
        build(store, files(corpus))
        messages.append(None)
        break
    except DiskError as error:
        messages.append([error.message, error.hint])
    assert open_store(store).digest == first, "the old version is gone"
    assert verify(store) == []
    ballast.unlink()
ballast.unlink(missing_ok=True)
second = build(store, files(corpus)).manifest.digest
assert verify(store) == []
print(json.dumps([first, second, sorted(stray_files(store)), messages]))
"""


def test_a_disk_that_is_really_full(tmp_path):
    """A file system of half a megabyte, filled up to a few pages, in a mount name space that ends with the process."""
    if shutil.which("unshare") is None:
        pytest.skip("unshare isn't installed")
    disk = tmp_path / "disk"
    disk.mkdir()
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c"]
    mount = 'mount -t tmpfs -o size=512k tmpfs "$1"'
    attempt = subprocess.run([*private, mount, "sh", disk], capture_output=True, text=True, check=False)
    if attempt.returncode != 0:
        pytest.skip(f"mounting isn't permitted here: {attempt.stderr.strip()}")
    helpers = Path(samples.__file__).parent
    command = [*private, f'{mount} && exec "$0" -c "$2" "$3" "$1" "$4"', sys.executable]
    done = subprocess.run(
        [*command, disk, FULL_DISK, helpers, tmp_path], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    first, second, stray, messages = json.loads(done.stdout)
    assert (first, second, stray) == (GOLDEN_FILES, GOLDEN_UPDATED, [])
    failures = [message for message in messages if message is not None]
    assert len(failures) >= 3, "the disk should have been too full for the update"
    for message, hint in failures:
        # The system's answer, or ours a moment before: the rest can't fit.
        assert "No space left on device" in message or "bytes left, about" in message
        assert "free some space" in hint


# Two writers, and readers


def test_a_second_writer_is_refused_while_readers_see_the_old_version(corpus, updated_corpus, built, writer):
    with open_store(built) as reader:
        before = [reader.document_tokens(number).tolist() for number in range(reader.num_documents)]
        # The first thing an update does is to take the lock (create, lock, write); operation 20 is in its midst.
        holder = writer.order(corpus=updated_corpus, out=built, wait_at=20)["waiting"]
        with pytest.raises(StoreBusyError, match=rf"\b{holder}\b") as caught:
            build(built, files(updated_corpus))
        assert caught.value.hint
        with open_store(built) as late:
            assert (late.version, late.digest) == (1, GOLDEN_FILES)
        assert verify(built) == []
        assert writer.send("go on")["digest"] == GOLDEN_UPDATED
        assert [reader.document_tokens(number).tolist() for number in range(reader.num_documents)] == before
    with open_store(built) as opened:
        assert (opened.version, opened.digest) == (2, GOLDEN_UPDATED)
    assert stray_files(built) == set()


def test_a_first_build_is_no_store_until_it_is_committed(scratch, corpus, writer):
    store = scratch / "store"
    writer.order(corpus=corpus, out=store, wait_at=60)
    assert list_versions(store) == []
    with pytest.raises(StoreBusyError):
        build(store, files(corpus))
    assert writer.send("go on")["digest"] == GOLDEN_FILES
    assert list_versions(store) == [1]


def test_a_refused_input_never_removes_what_another_writer_made(scratch, corpus, monkeypatch):
    """Two start on a new path at once; the one that finds nothing usable comes second."""
    store, useless = scratch / "store", scratch / "useless"
    useless.mkdir()
    (useless / "binary").write_bytes(b"\0")
    done = []

    def other_writer_first(operation: str, path: str) -> None:
        if operation == "mkdir" and not done:
            done.append(True)
            build(store, files(corpus))

    monkeypatch.setattr(fs, "before_operation", other_writer_first)
    with pytest.raises(InputError):
        build(store, files(useless))
    with open_store(store) as opened:
        assert opened.digest == GOLDEN_FILES
