"""Several processes that train together: `ranks.py`, told by lines of JSON what to do.

    {"store": …, "run": …, "size": 2, "settings": […], "resume": false, "kill": {"rank": 1, "step": 3}}

Torch is imported once; for each line the ranks are forked, with the variables that torchrun would set. The answer is a
line with each rank's exit status and what it said, errors by name. `kill` has a rank killed after a step; `stop` sends
one a SIGTERM there; `kill_operation` kills a process before its k-th change of the disk below `checkpoints`, and
`operations` of the answer says how many there were; `memory` is the most rows that a rank's model takes at once.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import tensorboard.compat.proto.event_pb2
import tensorboard.summary.writer.record_writer  # noqa: F401
import torch

import penstock.train.sharded_checkpoint  # noqa: F401  imported once for all that are forked
from penstock import fs
from penstock.errors import PenstockError
from penstock.runlog import RunLog
from penstock.store import open_store
from penstock.train import load_config, loop, train
from penstock.train.model import Body

PATIENCE_SECONDS = 60.0


def disturb(at_step: int, number: signal.Signals) -> None:
    """Has a signal sent to this process after a step; callbacks wouldn't do: only rank 0 has them."""
    record_step = loop._record_step

    def disturbed(run: Any, progress: Any, step: Any) -> None:
        record_step(run, progress, step)
        if progress.step == at_step:
            os.kill(os.getpid(), number)

    loop._record_step = disturbed


def count_operations(kill_at: int | None) -> list[str]:
    """Notes every change of the disk below `checkpoints`, and ends the process before one of them."""
    seen: list[str] = []

    def note(operation: str, path: str) -> None:
        if "/checkpoints" in path:
            seen.append(operation)
            if len(seen) == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    fs.before_operation = note
    return seen


def limit_rows(most: int) -> None:
    """Has models answer more rows than `most` with what a full GPU says."""
    forward = Body.forward

    def limited(self: Body, inputs: torch.Tensor, *more: Any) -> torch.Tensor:
        if len(inputs) > most:
            raise torch.OutOfMemoryError("CUDA out of memory (as the test has it)")
        return forward(self, inputs, *more)

    Body.forward = limited  # type: ignore[method-assign]


def run_rank(order: dict[str, Any], rank: int, port: int) -> dict[str, Any]:
    size = order["size"]
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    if size == 1:
        del os.environ["RANK"]
    torch.set_num_threads(1)
    for name, number in (("kill", signal.SIGKILL), ("stop", signal.SIGTERM)):
        if name in order and order[name]["rank"] == rank:
            disturb(order[name]["step"], number)
    operations = count_operations(order.get("kill_operation"))
    if "memory" in order and order["memory"]["rank"] == rank:
        limit_rows(order["memory"]["rows"])
    folder = Path(order["run"])
    try:
        config = load_config(None, order["settings"])
        with open_store(order["store"]) as store, RunLog(folder if rank == 0 else folder / "ignored") as log:
            result = train(config, store, folder, log, resume=order.get("resume", False))
    except PenstockError as error:
        return {"error": type(error).__name__, "message": error.message}
    figures = {"loss": result.final_loss, "val_loss": result.val_loss}
    return {
        "status": result.status,
        "steps": result.steps,
        "operations": len(operations) if size == 1 else 0,
        **figures,
    }


def answer_of(order: dict[str, Any]) -> dict[str, Any]:
    """Forks the ranks and waits for them, not for ever."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = [os.pipe() for _ in range(order["size"])]
    started, children = time.monotonic(), []
    for rank, (_, writing) in enumerate(pipes):
        child = os.fork()
        if child == 0:
            try:
                os.write(writing, json.dumps(run_rank(order, rank, port)).encode())
            except BaseException:  # noqa: BLE001  a fork must never go on as its parent
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    ends: dict[int, int] = {}
    while len(ends) < len(children) and time.monotonic() - started < PATIENCE_SECONDS:
        for child in set(children) - set(ends):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid:
                ends[child] = os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    hung = [child for child in children if child not in ends]
    for child in hung:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    said = []
    for reading, writing in pipes:
        os.close(writing)
        said.append(json.loads(os.read(reading, 1 << 16) or b"null"))
        os.close(reading)
    exits = [ends.get(child) for child in children]
    return {"exits": exits, "said": said, "hung": len(hung), "seconds": time.monotonic() - started}


if __name__ == "__main__":
    for line in sys.stdin:
        sys.stdout.write(json.dumps(answer_of(json.loads(line))) + "\n")
        sys.stdout.flush()
