"""`penstock prepare` on a disk that refuses: every error at every operation, in the parent and in its workers, and the
system's own limits. One line, exit 1, committed data unchanged, and the same command finishes once the cause is gone.
"""

from __future__ import annotations

import ast
import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from penstock.fs import TEMPORARY_MARK

from .samples import spread
from .trials import Preparation, Trials, check_refusal

pytestmark = pytest.mark.torture(lane="B", sample=True)

Preparations = dict[str, Preparation]
ERRNOS = [errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EACCES, errno.EMFILE]


@pytest.mark.parametrize("code", ERRNOS, ids=[errno.errorcode[code] for code in ERRNOS])
def test_an_error_at_every_operation_once_and_for_ever(
    preparations: Preparations, code: int, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    trials, in_full, complete = Trials(), scale(test=0, torture=1) == 1, True
    for name, preparation in preparations.items():
        if not in_full and name != ("first", "update")[ERRNOS.index(code) % 2]:
            continue  # as a sample, each error meets one of the two
        preparation.fresh()
        total = len(preparation.run("--workers", 2)["operations"])
        assert total > 50
        places = spread(max(2, scale(test=3, torture=total)), over=total)
        complete = complete and len(places) == total
        cases = [(place, for_ever) for place in places for for_ever in (False, True)]
        for place, for_ever in cases if in_full else cases[code % 2 :: 2]:
            with trials.trial(f"{name}, operation {place}, for ever: {for_ever}"):
                _check_error(preparation, code, place, for_ever, trials)
    torture_figures(
        lane="B", case=f"{errno.errorcode[code]} at each operation, once and for ever", trials=trials.count,
        failures=len(trials.failures), exhaustive=complete, **trials.seen,
    )  # fmt: skip
    assert trials.failures == []
    assert trials.seen["in the parent"] > 0


def _check_error(preparation: Preparation, code: int, place: int, for_ever: bool, trials: Trials) -> None:
    preparation.fresh()
    answer = preparation.run("--workers", 2, fail_at=place, errno=code, for_ever=for_ever)
    if answer["status"] == 0 and len(answer["operations"]) < place:
        trials.note("no such operation")  # how often two workers wait for a lock differs from run to run
        return
    operation, path, in_worker = answer["operations"][place - 1]
    trials.note("in a worker" if in_worker else "in the parent")
    if (operation, code) == ("lock", errno.EACCES):
        check_refusal(answer, "is being written by")  # what some systems answer when another process has the lock
    else:
        check_refusal(answer, os.strerror(code), str(preparation.folder))
    assert TEMPORARY_MARK not in answer["stderr"]
    if operation == "fsync":
        assert not Path(path).exists(), "a file whose fsync failed is no file"
    preparation.check_versions()
    preparation.check_old_files()
    preparation.check_rerun("--workers", 2)


def test_too_few_open_files(
    preparations: Preparations, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    """A real limit, lower and lower: an error or the whole result, never fewer documents."""
    trials, preparation = Trials(), preparations["first"]
    for limit in range(4, 40, 1 if scale(test=0, torture=1) == 1 else 9):
        with trials.trial(f"{limit} files"):
            preparation.fresh()
            answer = preparation.run("--workers", 2, limits={"RLIMIT_NOFILE": limit}, count=False)
            if answer["status"] == 0:
                assert json.loads(answer["stdout"])["digest"] == preparation.goldens[-1], "documents were left out"
                trials.note("enough")
            else:
                check_refusal(answer, os.strerror(errno.EMFILE))
                trials.note("refused")
            preparation.check_versions()
            preparation.check_rerun("--workers", 2)
    torture_figures(
        lane="B", case="a real limit of open files", trials=trials.count, failures=len(trials.failures), **trials.seen
    )
    assert trials.failures == []
    assert {"enough", "refused"} <= set(trials.seen)


NO_ROOM_TO_READ = """
import errno, os, resource, sys
from penstock.sources import FilesSource
source = FilesSource(name="corpus", root=sys.argv[1])
units = list(source.units(10**9))
taken = []
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
while True:
    try:
        taken.append(os.open("/dev/null", os.O_RDONLY))
    except OSError:
        break
while True:  # one more each time: for the root, a folder, a file
    for work in (lambda: list(source.units(10**9)), lambda: source.read(units[0])):
        try:
            found = work()
        except OSError as error:
            assert error.errno == errno.EMFILE
        else:
            skips = [unit.skips for unit in found] if isinstance(found, list) else [found.skips]
            assert not any("unreadable" in each.counts for each in skips), "counted as unreadable"
    if not taken:
        break
    os.close(taken.pop())
"""


def test_no_document_is_left_out_for_want_of_descriptors(preparations: Preparations):
    subprocess.run([sys.executable, "-c", NO_ROOM_TO_READ, *preparations["first"].inputs], check=True)


@pytest.mark.parametrize("name", ["first", "update"])
def test_files_that_may_not_grow(
    preparations: Preparations, name: str, scale: Callable[..., int], torture_figures: Callable[..., None]
):
    """A real limit of file size: writes are cut short, then refused."""
    trials, preparation = Trials(), preparations[name]
    for limit in (1000 + more for more in spread(max(3, scale(test=3, torture=100)), over=20_000)):
        with trials.trial(f"{limit} bytes"):
            preparation.fresh()
            # A unit in one piece, so that its files are larger than some of the limits; errors go to a file too.
            answer = preparation.run("--workers", 2, "--unit-bytes", 10**6, limits={"RLIMIT_FSIZE": limit}, count=False)
            if answer["status"] == 0:
                trials.note("enough")
            else:
                check_refusal(answer, os.strerror(errno.EFBIG), str(preparation.folder))
                trials.note("refused")
            preparation.check_versions()
            preparation.check_old_files()
            preparation.check_rerun("--workers", 2)
    torture_figures(
        lane="B", case="a real limit of file size", trials=trials.count, failures=len(trials.failures), **trials.seen
    )
    assert trials.failures == []
    assert trials.seen["refused"] > 0


READ_ONLY = """
mount -t tmpfs -o size=4m tmpfs "$1" && cp -r "$2" "$1/store" && mount -o remount,ro "$1" || exit 77
shift 2
"$@"
"""


def test_a_disk_that_is_really_read_only(preparations: Preparations, tmp_path: Path):
    """First and later preparations; in a mount name space that ends with the process, so that root is refused too."""
    preparation, disk = preparations["update"], tmp_path / "disk"
    disk.mkdir()
    if shutil.which("unshare") is None:
        pytest.skip("unshare isn't installed")
    private = ["unshare", "--map-root-user", "--mount", "sh", "-c", READ_ONLY, "sh", disk, preparation.before]
    for out in ("store", "new"):
        command = [sys.executable, "-m", "penstock", "prepare", *preparation.inputs, "--out", disk / out]
        done = subprocess.run(
            [*private, *command, *preparation.options], capture_output=True, text=True, check=False, timeout=120
        )
        if done.returncode == 77:
            pytest.skip(f"mounting isn't permitted here: {done.stderr.strip()}")
        answer = {"status": done.returncode, "stdout": done.stdout, "stderr": done.stderr, "hung": False, "left": []}
        check_refusal(answer, os.strerror(errno.EROFS), str(disk), "read-only: choose another output folder")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written(preparations: Preparations, tmp_path: Path):
    preparation = preparations["update"]
    store = shutil.copytree(str(preparation.before), tmp_path / "store")
    folders = [store, *(path for path in store.rglob("*") if path.is_dir())]
    for folder in folders:
        folder.chmod(0o555)
    try:
        command = ("prepare", *preparation.inputs, "--out", store, *preparation.options)
        check_refusal(preparation.commands.run(*command), os.strerror(errno.EACCES), str(store))
    finally:
        for folder in folders:
            folder.chmod(0o755)


# A page of a map that can't be written back is lost without a word, or kills the process: nothing may write that way.
PACKAGE = Path(penstock.__file__).parent
WRITING_MODES = {"r+", "w+", "r+b", "w+b", "ACCESS_WRITE", "ACCESS_DEFAULT", "PROT_WRITE"}


def writable_maps(source: str) -> list[int]:
    """Lines that map a file in a way that could write to it."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        words = {getattr(part, "value", None) if isinstance(part, ast.Constant) else getattr(part, "attr", None)
                 for argument in [*node.args, *(keyword.value for keyword in node.keywords)]
                 for part in ast.walk(argument)}  # fmt: skip
        if name == "mmap" and not words & {"ACCESS_READ", "PROT_READ", "ACCESS_COPY"}:
            found.append(node.lineno)  # its default writes
        elif name == "memmap" and not words & {"r", "c"}:
            found.append(node.lineno)  # likewise
        elif name in ("mmap", "memmap", "memory_map", "create_memory_map", "load", "open_memmap") and (
            words & WRITING_MODES or name == "create_memory_map"
        ):
            found.append(node.lineno)
    return found


def test_nothing_writes_through_a_map():
    found = {path.name: writable_maps(path.read_text()) for path in PACKAGE.rglob("*.py")}
    assert {name: lines for name, lines in found.items() if lines} == {}


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("mmap.mmap(f, 0)", 1),
        ("mmap.mmap(f, 0, access=mmap.ACCESS_READ)", 0),
        ("mmap.mmap(f, 0, prot=mmap.PROT_READ | mmap.PROT_WRITE)", 1),
        ("np.memmap(p, 'u2')", 1),
        ("np.memmap(p, 'u2', mode='r')", 0),
        ("np.load(p, mmap_mode='r+')", 1),
        ("pa.memory_map(p, 'r+')", 1),
        ("pa.memory_map(p)", 0),
    ],
)
def test_the_search_for_maps_finds_them(source: str, count: int):
    assert len(writable_maps(source)) == count
