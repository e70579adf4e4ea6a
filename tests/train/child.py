"""A training process that ends badly: `child.py STORE RUN STEP kill|wait [key=value…]`.

After the record of that step it kills itself with SIGKILL, or says so and waits for a line, so that whoever started it
can send a signal at a known point. What it has to say are lines of JSON.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import torch

from penstock.runlog import Record, RunLog
from penstock.store import open_store
from penstock.train import load_config, train


def say(**fields: object) -> None:
    sys.stdout.write(json.dumps(fields) + "\n")
    sys.stdout.flush()


def main(store_path: str, run: str, step: str, action: str, *settings: str) -> None:
    torch.set_num_threads(1)

    def act(record: Record) -> None:
        if record["kind"] != "step" or record["step"] != int(step):
            return
        if action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        say(waiting_at=record["step"])
        sys.stdin.readline()

    with open_store(store_path) as store, RunLog(Path(run)) as log:
        result = train(load_config(None, settings), store, Path(run), log, on_progress=act)
    say(status=result.status, steps=result.steps)


if __name__ == "__main__":
    main(*sys.argv[1:])
