"""Processes that prepare a store and end badly: `writer.py`, orders as JSON lines on stdin, answers on stdout.

Each order is one `prepare` in a forked process of its own, which starts without the cost of the imports:

    {"corpus": FOLDER, "out": STORE, "aged": bool, "kill_at": K}     SIGKILL before the K-th change of the disk
    {…, "wait_at": K}                                                says {"waiting": pid} there, goes on at a line

The answer: {"signal": 9} for a killed one, else {"signal": 0, "digest": …, "taken_over": …, "reused": …}.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
from samples import aged_files, build, bytes_tokenizer, files

from penstock import fs
from penstock.tokenize.engines import EngineChoice, GigatokenEngine

# Without the self-check, and warm before the forks: both cost more than the rest and have nothing to do with the disk.
TOKENIZER = bytes_tokenizer(engine=EngineChoice(name="gigatoken", reason="for this test", build=GigatokenEngine))
TOKENIZER.encode([b"warm"])
pa.table({"warm": ["up"]})  # imports pandas where it is installed


def say(**fields: Any) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def prepare_as_ordered(order: dict[str, Any]) -> None:
    count = 0

    def before(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        if count == order.get("kill_at"):
            os.kill(os.getpid(), signal.SIGKILL)
        if count == order.get("wait_at"):
            say(waiting=os.getpid())
            sys.stdin.readline()

    fs.before_operation = before
    source = (aged_files if order.get("aged") else files)(Path(order["corpus"]))
    result = build(Path(order["out"]), source, tokenizer=TOKENIZER)
    say(
        signal=0,
        digest=result.manifest.digest,
        taken_over=result.units_taken_over,
        reused=result.documents_reused,
        operations=count,
    )


def main() -> None:
    for line in iter(sys.stdin.readline, ""):
        child = os.fork()
        if child == 0:
            status = 1
            try:
                prepare_as_ordered(json.loads(line))
                status = 0
            finally:
                os._exit(status)
        _, status = os.waitpid(child, 0)
        if os.WIFSIGNALED(status):
            say(signal=os.WTERMSIG(status))
        elif os.WEXITSTATUS(status):
            say(signal=0, failed=True)


if __name__ == "__main__":
    main()
