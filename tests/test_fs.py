"""The promises of fs.py, shown with real processes and real kills.

The only seam is `fs.before_operation`, which the module offers for this: here it kills the process, or answers with an
error, at the k-th change of the disk, for every k until the work completes.
"""

import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from penstock import fs
from penstock.errors import DiskError, StoreBusyError

OLD = b"old content, whole\n" * 40
NEW = b"NEW CONTENT, WHOLE AND LONGER\n" * 90
ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]

# What runs in a child: `work` is one of these, done in the folder argv[1], killed before operation number argv[2].
WORKS = {
    "write_atomic": "fs.write_atomic(folder / 'file', NEW)",
    "atomic_file": "with fs.atomic_file(folder / 'file') as file: file.write(NEW[:900]); file.write(NEW[900:])",
    "create_if_absent": "fs.create_if_absent(folder / 'file', NEW)",
    "create_if_absent_without_links": "no_hard_links = True; fs.create_if_absent(folder / 'file', NEW)",
    "under_lock": "with fs.FolderLock(folder / 'lock'): fs.write_atomic(folder / 'file', NEW)",
}
PRELUDE = f"""
import errno, os, signal, sys
from pathlib import Path
from penstock import fs
folder, kill_at, count = Path(sys.argv[1]), int(sys.argv[2]), 0
no_hard_links = False
NEW = {NEW!r}
def before(operation, path):
    global count
    count += 1
    if count == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    if operation == "link" and no_hard_links:
        raise OSError(errno.EPERM, "Operation not permitted")
fs.before_operation = before
"""


def run_python(code: str, *arguments: object) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=120, check=False)


def folders_after_each_kill(code: str, tmp_path: Path, *, prepare: Callable[[Path], None]) -> Iterator[Path]:
    """Runs `code` in a fresh folder with a kill at operation 1, 2, 3… and yields the folder, until it ends."""
    for kill_at in range(1, 1000):
        folder = tmp_path / str(kill_at)
        folder.mkdir()
        prepare(folder)
        done = run_python(PRELUDE + code, folder, kill_at)
        if done.returncode == 0:
            assert kill_at > 3, "the seam wasn't reached"
            return
        assert done.returncode == -signal.SIGKILL, done.stderr.decode()
        yield folder


@contextmanager
def children(code: str, *argument_lists: list[object]) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Python processes with pipes on both ends; all are ended and reaped at exit."""
    started = [
        subprocess.Popen(
            [sys.executable, "-c", code, *map(str, arguments)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        for arguments in argument_lists
    ]
    try:
        yield started
    finally:
        for child in started:
            child.kill()
            child.communicate()


def let_race(racers: list[subprocess.Popen[bytes]]) -> list[bytes]:
    """Waits until every child is ready, lets all go, and returns what each printed; none may fail."""
    for racer in racers:
        assert racer.stdout is not None
        assert racer.stdout.readline() == b"ready\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write(b"go\n")
    printed = [racer.communicate(timeout=120)[0] for racer in racers]
    assert [racer.returncode for racer in racers] == [0] * len(racers)
    return printed


def names_below(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*")}


def refusal(call: Callable[[], object]) -> OSError | None:
    """The system's error that `call` ends with; None if it ends well."""
    try:
        call()
    except OSError as error:
        return error
    return None


class FailAt:
    """For `fs.before_operation`: answers operation number `at` with an error, once or from then on."""

    def __init__(self, at: int, code: int, *, for_ever: bool = False) -> None:
        self.at, self.code, self.for_ever = at, code, for_ever
        self.count = 0
        self.failed: list[str] = []

    def __call__(self, operation: str, path: str) -> None:
        self.count += 1
        if self.count == self.at or (self.for_ever and self.count > self.at):
            self.failed.append(operation)
            raise OSError(self.code, os.strerror(self.code))


# Killed


@pytest.mark.parametrize("work", sorted(WORKS))
@pytest.mark.parametrize("before", [OLD, None], ids=["replacing", "new"])
def test_a_kill_at_any_operation_leaves_whole_old_or_whole_new_content(tmp_path, work, before):
    def prepare(folder: Path) -> None:
        if before is not None:
            (folder / "file").write_bytes(before)

    def content(folder: Path) -> bytes | None:
        return (folder / "file").read_bytes() if (folder / "file").exists() else None

    allowed = {before} if work.startswith("create") and before is not None else {before, NEW}
    met = set()
    for folder in folders_after_each_kill(WORKS[work], tmp_path, prepare=prepare):
        met.add(content(folder))
        survivor = content(folder)
        assert survivor in allowed
        # The next start: the dead process's lock is free, its leftovers go, nothing else does.
        with fs.FolderLock(folder / "lock"):
            fs.remove_leftovers(folder)
        assert content(folder) == survivor
        assert names_below(folder) == ({"file"} if survivor is not None else set())
    assert met == allowed, "the kills should have hit both sides of the commit"


def test_a_reader_sees_whole_versions_only_and_so_does_whoever_comes_after_a_kill(tmp_path):
    code = """
import sys
from itertools import count
from pathlib import Path
from penstock import fs
for version in count():
    fs.write_atomic(Path(sys.argv[1]), b"%8d" % version * 20_000)
    if version == 0: print("written", flush=True)
"""
    path = tmp_path / "file"
    with children(code, [path]) as [writer]:
        assert writer.stdout is not None
        assert writer.stdout.readline() == b"written\n"
        versions = set()
        while len(versions) < 100 and writer.poll() is None:
            content = path.read_bytes()
            assert content == b"%8d" % int(content[:8] or -1) * 20_000
            versions.add(content[:8])
    assert len(versions) == 100, "the writer died by itself"
    assert path.read_bytes() == b"%8d" % int(path.read_bytes()[:8]) * 20_000
    fs.remove_leftovers(tmp_path)
    assert names_below(tmp_path) == {"file"}


def test_a_kill_during_recovery_is_recovered_from(tmp_path):
    def prepare(folder: Path) -> None:
        (folder / "file").write_bytes(OLD)
        for name in ("file", "file", "other"):
            fs.temporary_path(folder / name).write_bytes(b"torn")
        (fs.temporary_path(folder / "tree") / "inner").mkdir(parents=True)

    for folder in folders_after_each_kill("fs.remove_leftovers(folder)", tmp_path, prepare=prepare):
        fs.remove_leftovers(folder)
        assert names_below(folder) == {"file"}
        assert (folder / "file").read_bytes() == OLD


def test_a_folder_appears_and_vanishes_whole_under_kills(tmp_path):
    publish = (
        "temporary = fs.temporary_path(folder / 'tree'); fs.make_folder(temporary / 'inner')\n"
        "for name in ('a', 'inner/b'): fs.write_atomic(temporary / name, NEW)\n"
        "fs.replace_tree(temporary, folder / 'tree')\n"
        "fs.remove_tree(folder / 'tree')"
    )
    whole = {"tree", "tree/a", "tree/inner", "tree/inner/b"}
    met = set()
    for folder in folders_after_each_kill(publish, tmp_path, prepare=lambda folder: None):
        fs.remove_leftovers(folder)
        names = names_below(folder)
        assert names in (set(), whole)
        met.add(frozenset(names))
    assert len(met) == 2


# Errors


@pytest.mark.parametrize("for_ever", [False, True], ids=["once", "for-ever"])
@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
@pytest.mark.parametrize("flushed", [True, False], ids=["flushed", "unflushed"])
def test_an_error_at_any_operation_is_raised_and_leaves_the_old_content(tmp_path, monkeypatch, code, for_ever, flushed):
    path = tmp_path / "file"
    failed_at = []
    for at in range(1, 100):
        path.write_bytes(OLD)
        fault = FailAt(at, code, for_ever=for_ever)
        monkeypatch.setattr(fs, "before_operation", fault)
        error = refusal(lambda: fs.write_atomic(path, NEW, flushed=flushed))
        assert names_below(tmp_path) == {"file"}
        if error is None:
            break
        # Flushing the folder comes after the rename: the only error that can meet the new content in place.
        committed = fault.failed == ["fsync-folder"]
        assert (error.errno, error.filename) == (code, str(tmp_path if committed else path))
        assert path.read_bytes() == (NEW if committed else OLD)
        failed_at.append(fault.failed[0])
    operations = ["create", "write", "fsync", "rename", "fsync-folder"]
    assert failed_at == [name for name in operations if flushed or not name.startswith("fsync")]
    assert path.read_bytes() == NEW
    monkeypatch.setattr(fs, "before_operation", None)
    fs.write_atomic(path, OLD)  # and the same call works once the cause is gone
    assert path.read_bytes() == OLD


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
def test_an_error_while_committing_creates_nothing(tmp_path, monkeypatch, code):
    path = tmp_path / "file"
    for at, operation in enumerate(["create", "write", "fsync", "link"], start=1):
        fault = FailAt(at, code)
        monkeypatch.setattr(fs, "before_operation", fault)
        error = refusal(lambda: fs.create_if_absent(path, NEW))
        assert error is not None
        assert (error.errno, error.filename, fault.failed) == (code, str(path), [operation])
        assert names_below(tmp_path) == set()
    monkeypatch.setattr(fs, "before_operation", FailAt(5, code))
    assert refusal(lambda: fs.create_if_absent(path, NEW)) is not None
    assert path.read_bytes() == NEW  # made, though the folder couldn't be flushed: the caller's rerun finds it
    monkeypatch.setattr(fs, "before_operation", None)
    assert fs.create_if_absent(path, OLD) is False


def test_an_error_of_the_caller_discards_the_file(tmp_path):
    def write_and_fail() -> None:
        with fs.atomic_file(tmp_path / "file") as file:
            file.write(NEW)
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_and_fail()
    assert names_below(tmp_path) == set()


def test_a_real_short_write_leaves_the_old_content(tmp_path):
    """The kernel's own limit on file size: write() takes a part, the next one fails."""
    (tmp_path / "file").write_bytes(OLD)
    code = """
import errno, resource, signal, sys
from pathlib import Path
from penstock import fs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    with fs.fail_as_disk_error("writing"):
        fs.write_atomic(Path(sys.argv[1]), bytes(5000))
except fs.DiskError as error:
    print(error.message)
"""
    done = run_python(code, tmp_path / "file")
    assert str(tmp_path / "file").encode() in done.stdout, done.stderr.decode()
    assert (tmp_path / "file").read_bytes() == OLD
    assert names_below(tmp_path) == {"file"}


def test_a_refusal_becomes_a_disk_error_that_names_the_file_and_the_way_out(tmp_path):
    with pytest.raises(DiskError) as caught, fs.fail_as_disk_error("writing the manifest"):
        fs.write_atomic(tmp_path / "absent" / "file", NEW)
    assert "writing the manifest" in caught.value.message
    assert repr(str(tmp_path / "absent" / "file")) in caught.value.message
    assert fs.TEMPORARY_MARK not in caught.value.message
    assert os.strerror(errno.ENOENT) in caught.value.message
    assert caught.value.hint


def test_the_outermost_says_how_to_go_on(tmp_path):
    with (
        pytest.raises(DiskError, match="writing the page") as caught,
        fs.fail_as_disk_error("the command", again="begin anew"),
        fs.fail_as_disk_error("the work", again="go on"),
        fs.fail_as_disk_error("writing the page"),
    ):
        fs.write_atomic(tmp_path / "absent" / "file", NEW)
    assert "begin anew" in caught.value.hint


# Ordinary use


@pytest.mark.parametrize(
    "data",
    [b"", bytearray(b"abc"), memoryview(NEW), np.arange(6, dtype=np.uint32).reshape(2, 3), np.zeros((0, 4), np.uint16)],
    ids=["empty", "bytearray", "memoryview", "array", "empty-array"],
)
def test_any_contiguous_buffer_can_be_written(tmp_path, data):
    with fs.atomic_file(tmp_path / "file") as file:
        file.write(data)
        file.write(data)
    assert (tmp_path / "file").read_bytes() == bytes(data) * 2
    assert file.bytes_written == 2 * memoryview(data).nbytes


@pytest.mark.skipif(sys.platform != "linux", reason="reads the umask from /proc")
def test_permissions_follow_the_umask(tmp_path):
    status = Path("/proc/self/status").read_text().splitlines()
    umask = int(next(line for line in status if line.startswith("Umask")).split()[1], 8)
    fs.write_atomic(tmp_path / "file", NEW)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o666 & ~umask


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 1_000_003])
@pytest.mark.parametrize("misaligned", [0, 1, 512])
def test_past_the_page_cache_the_same_bytes_arrive(tmp_path, size, misaligned):
    memory = np.random.default_rng(size).integers(0, 256, size + 3 * fs.DIRECT_ALIGNMENT, np.uint8)
    start = -memory.ctypes.data % fs.DIRECT_ALIGNMENT + misaligned
    data = memory[start : start + size]
    with fs.atomic_file(tmp_path / "file") as file:
        file.write_past_cache(data)
        file.write(b"and more")
    assert (tmp_path / "file").read_bytes() == data.tobytes() + b"and more"
    assert file.bytes_written == size + 8


def test_where_the_file_system_has_no_way_past_the_page_cache_it_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr(fs, "_set_direct", lambda descriptor, wanted: False)
    with fs.atomic_file(tmp_path / "file") as file:
        file.write_past_cache(np.arange(5000))
    assert (tmp_path / "file").read_bytes() == np.arange(5000).tobytes()


def test_a_short_write_past_the_cache_is_completed_through_it(tmp_path, monkeypatch):
    memory = np.arange(20_000, dtype=np.uint16)
    whole, left = os.write, [100]  # 100 is no multiple of a block, so the next direct write is refused

    def write(descriptor, view):
        return whole(descriptor, view[: left.pop()] if left else view)

    monkeypatch.setattr(fs, "_set_direct", lambda descriptor, wanted: True)
    monkeypatch.setattr(os, "write", write)
    with fs.atomic_file(tmp_path / "file") as file:
        file.write_past_cache(memory)
    assert (tmp_path / "file").read_bytes() == memory.tobytes()


def test_an_error_past_the_cache_leaves_the_old_content(tmp_path, monkeypatch):
    fs.write_atomic(tmp_path / "file", b"old")

    def full(operation, path):
        if operation == "write":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(fs, "before_operation", full)
    with pytest.raises(OSError, match="No space"), fs.atomic_file(tmp_path / "file") as file:
        file.write_past_cache(np.arange(20_000))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"old"}


def test_a_lock_that_a_dead_holders_child_still_has_is_waited_for(tmp_path):
    """The child lives on for a moment after its parent, as a forked worker does."""
    script = """
import os, signal, sys, time
from pathlib import Path
from penstock import fs
lock = fs.FolderLock(Path(sys.argv[1]))
lock.acquire()
if os.fork() == 0:
    time.sleep(0.5)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "lock")], check=False, timeout=60)
    assert done.returncode == -signal.SIGKILL
    with fs.FolderLock(tmp_path / "lock") as lock:
        assert lock.taken_over_from is not None


def test_create_if_absent_keeps_what_is_there(tmp_path):
    assert fs.create_if_absent(tmp_path / "file", OLD) is True
    assert fs.create_if_absent(tmp_path / "file", NEW) is False
    assert (tmp_path / "file").read_bytes() == OLD
    assert names_below(tmp_path) == {"file"}


RACE_TO_CREATE = """
import errno, sys
from pathlib import Path
from penstock import fs
folder, me, rounds, hard_links = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4] == "True"
def before(operation, path):
    if operation == "link" and not hard_links:
        raise OSError(errno.EPERM, "Operation not permitted")
fs.before_operation = before
print("ready", flush=True)
sys.stdin.readline()
print([fs.create_if_absent(folder / str(k), bytes([me]) * 100_000) for k in range(rounds)])
"""


@pytest.mark.parametrize("hard_links", [True, False], ids=["hard-links", "no-hard-links"])
def test_of_eight_racing_creators_one_wins_and_the_content_is_whole(tmp_path, hard_links):
    rounds = 20
    with children(RACE_TO_CREATE, *[[tmp_path, me, rounds, hard_links] for me in range(8)]) as racers:
        won = [json.loads(printed.lower()) for printed in let_race(racers)]
    for k in range(rounds):
        winners = [me for me in range(8) if won[me][k]]
        assert len(winners) == 1
        assert (tmp_path / str(k)).read_bytes() == bytes(winners) * 100_000
    assert len(names_below(tmp_path)) == rounds


def test_make_folder_may_race(tmp_path):
    code = """
import sys
from pathlib import Path
from penstock import fs
print("ready", flush=True)
sys.stdin.readline()
for k in range(50): fs.make_folder(Path(sys.argv[1], str(k), "b", "c"))
"""
    with children(code, *[[tmp_path]] * 4) as racers:
        let_race(racers)
    assert all((tmp_path / str(k) / "b" / "c").is_dir() for k in range(50))


def test_make_folder_refuses_a_file_in_its_place(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises((FileExistsError, NotADirectoryError)) as caught:
            fs.make_folder(path)
        assert caught.value.filename == str(tmp_path / "file")  # what is in the way


def test_remove_tree_refuses_what_is_no_folder_and_accepts_absence(tmp_path):
    (tmp_path / "file").write_bytes(OLD)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    for name in ("file", "link"):
        with pytest.raises(NotADirectoryError):
            fs.remove_tree(tmp_path / name)
    fs.remove_tree(tmp_path / "absent")
    assert names_below(tmp_path) == {"file", "folder", "link"}


def test_remove_tree_is_content_when_another_process_removes_it_meanwhile(tmp_path, monkeypatch):
    """One that clears up after the dead takes a tree that is being removed for one whose removal was interrupted."""
    (tmp_path / "tree" / "inner").mkdir(parents=True)

    def other(operation: str, path: object) -> None:
        if operation == "remove-tree":
            (doomed,) = tmp_path.iterdir()
            shutil.rmtree(doomed)

    monkeypatch.setattr(fs, "before_operation", other)
    fs.remove_tree(tmp_path / "tree")
    assert names_below(tmp_path) == set()


def test_replace_tree_does_not_overwrite(tmp_path):
    for name in ("taken", "fresh"):
        (tmp_path / name).mkdir()
        (tmp_path / name / name).write_bytes(OLD)
    error = refusal(lambda: fs.replace_tree(tmp_path / "fresh", tmp_path / "taken"))
    assert error is not None
    assert error.filename == str(tmp_path / "taken")
    assert names_below(tmp_path) == {"taken", "taken/taken", "fresh", "fresh/fresh"}


def test_leftovers_are_ours_alone(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").write_bytes(OLD)
    store = tmp_path / "store"
    (store / "deep").mkdir(parents=True)
    for name in ("notes.tmp-old", "file.tmp-12-0123456789", "deep/a.tmp-x"):
        (store / name).write_bytes(OLD)
    theirs = names_below(store)
    fs.temporary_path(store / "deep" / "file").write_bytes(b"torn")
    fs.temporary_path(store / "tree").mkdir()
    fs.temporary_path(store / "link").symlink_to(outside)
    assert fs.remove_leftovers(store) == 3
    assert names_below(store) == theirs
    assert (outside / "precious").read_bytes() == OLD
    assert fs.remove_leftovers(tmp_path / "absent") == 0


# Lines that are appended


def test_a_torn_last_line_is_cut_wherever_the_kill_fell(tmp_path):
    path = tmp_path / "lines"
    whole = b"first\nsecond line\n\nfourth\n"
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        file = fs.AppendOnlyFile(path)
        file.write(b"new\n")
        file.close()
        file.close()
        kept = whole[: whole.rfind(b"\n", 0, length) + 1]
        assert path.read_bytes() == kept + b"new\n"


def test_a_torn_line_longer_than_a_block_is_cut(tmp_path):
    path = tmp_path / "lines"
    for kept in (b"", b"kept\n", b"k" * 200_000 + b"\n"):
        path.write_bytes(kept + b"x" * 300_000)
        fs.AppendOnlyFile(path).close()
        assert path.read_bytes() == kept


def test_a_line_that_the_disk_took_in_part_is_taken_back(tmp_path):
    """With the kernel's limit on file size in the middle of a line; then the limit is lifted and writing goes on."""
    code = """
import resource, signal, sys
from pathlib import Path
from penstock import fs
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
file = fs.AppendOnlyFile(Path(sys.argv[1]))
file.write(b"a" * 59 + b"\\n")
resource.setrlimit(resource.RLIMIT_FSIZE, (100, resource.RLIM_INFINITY))
try:
    file.write(b"b" * 59 + b"\\n")
except OSError as error:
    print(error.filename, Path(sys.argv[1]).stat().st_size)
resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
file.write(b"c" * 59 + b"\\n")
file.close()
"""
    path = tmp_path / "lines"
    done = run_python(code, path)
    assert done.stdout.decode() == f"{path} 60\n", done.stderr.decode()
    assert path.read_bytes() == b"a" * 59 + b"\n" + b"c" * 59 + b"\n"


def test_a_line_of_another_handle_is_never_cut(tmp_path):
    path = tmp_path / "lines"
    path.write_bytes(b"first\ntorn")
    one, other = fs.AppendOnlyFile(path), fs.AppendOnlyFile(path)
    for number in range(3):
        one.write(b"one %d\n" % number)
        other.write(b"other %d\n" % number)
    one.close()
    other.close()
    assert path.read_bytes() == b"first\none 0\nother 0\none 1\nother 1\none 2\nother 2\n"


def test_threads_may_append_to_one_file(tmp_path):
    file = fs.AppendOnlyFile(tmp_path / "lines")

    def append(me: int) -> None:
        for number in range(200):
            file.write(b"%d %d\n" % (me, number))

    threads = [threading.Thread(target=append, args=[me]) for me in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    file.close()
    lines = (tmp_path / "lines").read_bytes().splitlines()
    for me in range(6):
        assert [line for line in lines if line.startswith(b"%d " % me)] == [b"%d %d" % (me, n) for n in range(200)]
    assert len(lines) == 1200


@pytest.mark.parametrize("code", ERRNOS, ids=errno.errorcode.get)
def test_appending_reports_errors_even_at_close(tmp_path, monkeypatch, code):
    path = tmp_path / "lines"
    file = fs.AppendOnlyFile(path)
    file.write(b"kept\n")
    monkeypatch.setattr(fs, "before_operation", FailAt(1, code, for_ever=True))
    for call in (lambda: file.write(b"lost\n"), file.sync, file.close):
        error = refusal(call)
        assert error is not None
        assert (error.errno, error.filename) == (code, str(path))
    file.close()  # it is closed, although that failed
    assert path.read_bytes() == b"kept\n"


# The lock

HOLD = """
import sys
from pathlib import Path
from penstock import fs
with fs.FolderLock(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.readline()
"""


@contextmanager
def held_by_another_process(lock: Path) -> Iterator[subprocess.Popen[bytes]]:
    with children(HOLD, [lock]) as [holder]:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        yield holder


def test_a_second_holder_is_refused_with_the_name_of_the_first(tmp_path):
    lock = tmp_path / "lock"
    with held_by_another_process(lock) as holder:
        for break_lock in (False, True):  # a live process of this host can't be pushed aside
            with pytest.raises(StoreBusyError) as caught:
                fs.FolderLock(lock, break_lock=break_lock).acquire()
            assert f"process {holder.pid} " in caught.value.message
            assert socket.gethostname() in caught.value.message
            assert str(tmp_path) in caught.value.message
        holder.communicate(b"end\n", timeout=60)
        assert holder.returncode == 0
    assert names_below(tmp_path) == set()
    with fs.FolderLock(lock) as mine:
        assert mine.taken_over_from is None


def test_a_killed_holders_lock_is_taken_over_at_once(tmp_path):
    lock = tmp_path / "lock"
    with held_by_another_process(lock) as holder:
        holder.kill()
        holder.wait()
        assert lock.exists()
        with fs.FolderLock(lock) as mine:
            assert mine.taken_over_from is not None
            assert mine.taken_over_from["pid"] == holder.pid
            assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert names_below(tmp_path) == set()


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_on_a_full_disk_whoever_frees_space_gets_the_lock_without_a_name(tmp_path, monkeypatch, number):
    def fail(operation: str, path: str) -> None:
        if operation == "write":
            raise OSError(number, os.strerror(number), path)

    lock = tmp_path / "lock"
    monkeypatch.setattr(fs, "before_operation", fail)
    with pytest.raises(OSError, match=os.strerror(number)):
        fs.FolderLock(lock).acquire()
    if number == errno.EIO:
        with pytest.raises(OSError, match=os.strerror(number)):
            fs.FolderLock(lock, frees_space=True).acquire()
    else:
        with fs.FolderLock(lock, frees_space=True):
            assert lock.read_bytes() == b""
            with pytest.raises(StoreBusyError):
                fs.FolderLock(lock).acquire()
    assert names_below(tmp_path) == set()


def test_another_hosts_lock_needs_break_lock(tmp_path):
    lock = tmp_path / "lock"
    theirs = json.dumps({"pid": 77, "host": "another-host", "boot_id": "another-boot", "started": 5})
    lock.write_text(theirs)
    with pytest.raises(StoreBusyError) as caught:
        fs.FolderLock(lock).acquire()
    assert "process 77 on another-host" in caught.value.message
    assert "--break-lock" in caught.value.hint
    assert lock.read_text() == theirs
    with fs.FolderLock(lock, break_lock=True) as mine:
        assert mine.taken_over_from == json.loads(theirs)
    assert names_below(tmp_path) == set()


def test_a_dead_container_of_this_kernel_counts_as_this_host(tmp_path):
    """A container started anew has another host name, and has to go on where the killed one was."""
    lock = tmp_path / "lock"
    with fs.FolderLock(lock):
        mine = json.loads(lock.read_text())
    if not mine["boot_id"]:
        pytest.skip("this system has no boot id")
    lock.write_text(json.dumps(mine | {"host": "0123456789ab", "pid": 1}))
    with fs.FolderLock(lock) as taken:
        assert taken.taken_over_from is not None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b"[" * 4000])
def test_a_damaged_lock_file_of_nobody_is_taken(tmp_path, content):
    lock = tmp_path / "lock"
    lock.write_bytes(content)
    with fs.FolderLock(lock):
        assert json.loads(lock.read_text())["pid"] == os.getpid()
    assert names_below(tmp_path) == set()


@pytest.mark.parametrize("code", [code for code in ERRNOS if code != errno.EACCES], ids=errno.errorcode.get)
def test_an_error_while_locking_frees_the_lock(tmp_path, monkeypatch, code):
    lock = tmp_path / "lock"
    for at, operation in enumerate(["create", "lock", "write"], start=1):
        fault = FailAt(at, code)
        monkeypatch.setattr(fs, "before_operation", fault)
        error = refusal(fs.FolderLock(lock).acquire)
        assert error is not None
        assert (error.errno, error.filename, fault.failed) == (code, str(lock), [operation])
        monkeypatch.setattr(fs, "before_operation", None)
        with fs.FolderLock(lock):
            pass
    held = fs.FolderLock(lock)
    held.acquire()
    monkeypatch.setattr(fs, "before_operation", FailAt(1, code))
    assert refusal(held.release) is not None
    monkeypatch.setattr(fs, "before_operation", None)
    with fs.FolderLock(lock):  # the file stayed, the lock did not
        pass
    assert names_below(tmp_path) == set()


def test_release_leaves_a_successors_file_alone(tmp_path):
    lock = tmp_path / "lock"
    first = fs.FolderLock(lock)
    first.acquire()
    lock.unlink()  # by hand, as users do
    with fs.FolderLock(lock):
        first.release()
        first.release()
        assert json.loads(lock.read_text())["pid"] == os.getpid()
        with pytest.raises(StoreBusyError):
            fs.FolderLock(lock).acquire()
    assert names_below(tmp_path) == set()


COUNT_UP = """
import os, sys
from pathlib import Path
from penstock import fs
from penstock.errors import StoreBusyError
folder, times = Path(sys.argv[1]), int(sys.argv[2])
print("ready", flush=True)
sys.stdin.readline()
done = 0
while done < times:
    try:
        with fs.FolderLock(folder / "lock"):
            count = int((folder / "count").read_text())
            os.sched_yield()
            (folder / "count").write_text(str(count + 1))
            done += 1
    except StoreBusyError:
        os.sched_yield()
"""


def test_no_update_is_lost_between_processes_that_take_and_release(tmp_path):
    (tmp_path / "count").write_text("0")
    with children(COUNT_UP, *[[tmp_path, 400]] * 5) as racers:
        let_race(racers)
    assert (tmp_path / "count").read_text() == "2000"
    assert names_below(tmp_path) == {"count"}
