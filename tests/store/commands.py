"""`penstock` commands that end badly. As a script: orders as JSON lines on stdin, answers on stdout. As a module: the
other side, `Commands`.

Each order is one command in a forked process of its own, a session leader, which starts without the cost of imports:

    {"arguments": ["prepare", …]}                              runs it
    {…, "signal": 9, "after": SECONDS}                         a signal then, if it still runs
    {…, "kill_at": K}                                          SIGKILL of the command before the K-th change of the disk
    {…, "kill_at": K, "only_worker": true}                     …of the worker process that is about to make it
    {…, "fail_at": K, "errno": CODE, "for_ever": bool}         an error instead of it, and of all that follow
    {…, "hold_at": K}                                          says {"holding": pid} there; goes on at the next line
    {…, "interrupt_at": K}                                     SIGTERM there; what comes after hangs
    {…, "interrupt_at": K, "twice": true}                      …and gets another SIGTERM a second later
    {…, "interrupt_at": K, "echo": true}                       …at once, and doesn't hang
    {…, "limits": {"RLIMIT_NOFILE": 20}}                       under limits of the system
    {…, "crowd": true}                                         signals go to the whole group, as Ctrl-C does

Changes of the disk are counted over the command and its workers together. The answer: exit status or signal, both
outputs, the operations (name, path, whether a worker's) and, where asked, how long the end took and which descendants
outlived it (`left`): orphans become children of this process, whatever sessions they opened, so none escapes.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import io
import json
import mmap
import os
import resource
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
SECONDS_TO_END = 60.0
SECONDS_FOR_ORPHANS = 5.0


class Commands:
    """The process that runs commands; see the module for orders and answers."""

    def __init__(self, folder: Path) -> None:
        self.temporary = folder / "temporary"
        self.temporary.mkdir(parents=True)
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PENSTOCK_CACHE": str(folder / "cache"), "TMPDIR": str(self.temporary)},
        )

    def run(self, *arguments: object, **order: Any) -> dict[str, Any]:
        """Runs one command and returns the answer."""
        self.start(*arguments, **order)
        return self.answer()

    def start(self, *arguments: object, **order: Any) -> None:
        """Sends an order without waiting for its answer."""
        self.send(json.dumps({"arguments": [str(word) for word in arguments], **order}))

    def send(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        found: dict[str, Any] = json.loads(self._process.stdout.readline())
        return found

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


class _Seam:
    """For `fs.before_operation`: counts over all processes of a command, and does what was ordered at the K-th."""

    def __init__(self, order: dict[str, Any], log: int) -> None:
        self._order = order
        self._log = log
        self._main = os.getpid()
        self._orders = os.dup(0)  # multiprocessing closes a worker's own
        self._count = mmap.mmap(-1, 8)
        self._threads = threading.Lock()

    def __call__(self, operation: str, path: str) -> None:
        number = self._number(operation, path)
        order, is_worker = self._order, os.getpid() != self._main
        if number == order.get("kill_at"):
            if not (order.get("only_worker") and is_worker):
                os.kill(self._main, signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)
        if number == order.get("hold_at"):
            _say(holding=os.getpid())
            os.read(self._orders, 4096)
        fail_at = order.get("fail_at")
        if "interrupt_at" in order and not is_worker and number >= order["interrupt_at"]:
            if number == order["interrupt_at"]:
                os.kill(self._main, signal.SIGTERM)  # raises here
            if order.get("echo"):
                os.kill(self._main, signal.SIGTERM)
                return
            if order.get("twice"):
                time.sleep(1)
                os.kill(self._main, signal.SIGTERM)
            time.sleep(2 * SECONDS_TO_END)
        if fail_at is not None and (number == fail_at or (order.get("for_ever") and number > fail_at)):
            raise OSError(order["errno"], os.strerror(order["errno"]))

    def _number(self, operation: str, path: str) -> int:
        # A kernel lock, because its holder may be killed; it doesn't hold between threads.
        with self._threads:
            fcntl.lockf(self._log, fcntl.LOCK_EX)
            try:
                number = int.from_bytes(self._count[:8], "little") + 1
                self._count[:8] = number.to_bytes(8, "little")
                line = json.dumps([operation, path, os.getpid() != self._main])
                os.write(self._log, line.encode() + b"\n")
            finally:
                fcntl.lockf(self._log, fcntl.LOCK_UN)
        return number


def _say(**fields: Any) -> None:
    sys.__stdout__.write(json.dumps(fields) + "\n")  # type: ignore[union-attr]
    sys.__stdout__.flush()  # type: ignore[union-attr]


def _become_command(order: dict[str, Any], outputs: dict[str, int]) -> int:
    """In the forked process: runs the command; returns its exit status."""
    import penstock.cli
    from penstock import fs

    os.setsid()
    # Answers of a held command still go to the pipe; what the command prints goes to files.
    answers = os.dup(1)
    sys.__stdout__ = os.fdopen(answers, "w")
    os.dup2(outputs["stdout"], 1)
    os.dup2(outputs["stderr"], 2)
    for name, value in order.get("limits", {}).items():
        resource.setrlimit(getattr(resource, name), (value, value))
    if order.get("count", True):
        fs.before_operation = _Seam(order, outputs["log"])
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    try:
        penstock.cli.main(order["arguments"])
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


def _ended(pid: int, seconds: float | None) -> bool:
    """Waits until a child has ended, without reaping it."""
    descriptor = os.pidfd_open(pid)
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def _descendants_left() -> list[str]:
    """What is still there of the last command after 5 s: our children, because orphans are given to us."""
    deadline = time.monotonic() + SECONDS_FOR_ORPHANS
    while True:
        while True:
            try:
                reaped, _ = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return []
            if reaped == 0:
                break
        if time.monotonic() > deadline:
            return [
                _words_of(int(pid)) for pid in Path("/proc/self/task", str(os.getpid()), "children").read_text().split()
            ]
        time.sleep(0.002)


def _words_of(pid: int) -> str:
    try:
        return f"{pid} " + Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    except OSError:
        return str(pid)


def _answer(order: dict[str, Any]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(dir=Path(tempfile.gettempdir()).parent) as folder:  # TMPDIR is the commands' own
        paths = {name: Path(folder, name) for name in ("stdout", "stderr", "log")}
        outputs = {name: os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND) for name, path in paths.items()}
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            status = 70
            try:
                status = _become_command(order, outputs)
            finally:
                os._exit(status)
        signalled = None
        if "after" in order and not _ended(child, order["after"]):
            (os.killpg if order.get("crowd") else os.kill)(child, order["signal"])
            signalled = time.monotonic()
        hung = not _ended(child, SECONDS_TO_END)
        if hung:
            os.kill(child, signal.SIGKILL)
        ended = time.monotonic()
        _, status = os.waitpid(child, 0)
        left = _descendants_left()
        for descriptor in outputs.values():
            os.close(descriptor)
        return {
            "status": os.waitstatus_to_exitcode(status),
            "hung": hung,
            "signalled": signalled is not None,
            "seconds": ended - started,
            "seconds_to_end": ended - signalled if signalled else None,
            "left": left,
            "stdout": paths["stdout"].read_text(),
            "stderr": paths["stderr"].read_text(),
            "operations": [json.loads(line) for line in paths["log"].read_text().splitlines()],
        }


def _warm_up() -> None:
    """One command in this process, with threads that end, so that the forks start with everything imported."""
    import typer

    from penstock.cli.app import app
    from penstock.sources import sources_from_inputs
    from penstock.store import PrepareOptions, memory, prepare, verify

    memory.LEAST_FILES_PER_STRETCH = 4  # so that reruns with several workers share the walk here too

    with tempfile.TemporaryDirectory() as folder:
        source, store = Path(folder, "source"), Path(folder, "store")
        source.mkdir()
        (source / "warm.txt").write_text("warm up\n" * 100)
        prepare(sources_from_inputs([str(source)]), store, options=PrepareOptions(vocab_size=300, processes=False))
        assert verify(store) == []
        run = typer.main.get_command(app)
        with contextlib.redirect_stdout(io.StringIO()):
            run(["verify", str(store)], prog_name="penstock", standalone_mode=False)
            run(["plan", str(store), "--seq-len", "8", "--json"], prog_name="penstock", standalone_mode=False)
    assert threading.active_count() == 1


def main() -> None:
    if ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(errno.ENOSYS, "no subreapers here")
    _warm_up()
    for line in iter(sys.stdin.readline, ""):
        _say(**_answer(json.loads(line)))


if __name__ == "__main__":
    main()
