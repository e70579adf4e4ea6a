"""Exports that are killed: one line of JSON on stdin, one on stdout. Each export is a forked process of its own.

    {"store": STORE, "out": FOLDER, "options": {…}, "force": bool, "kills": [K, …]}

Export number K goes to FOLDER/K (copied from FOLDER/before where that is there) and gets SIGKILL before its K-th change
of the disk. The answer lists the signal each ended by.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path

from penstock import fs
from penstock.export import ExportOptions, export_store
from penstock.store import open_store


def export_until(kill_at: int, order: dict) -> None:
    count = 0

    def before(operation: str, path: str) -> None:
        nonlocal count
        count += 1
        if count == kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    fs.before_operation = before
    with open_store(order["store"]) as store:
        out = Path(order["out"], str(kill_at), "out")
        export_store(store, out, options=ExportOptions(**order["options"]), force=order["force"])


def main() -> None:
    order = json.loads(sys.stdin.readline())
    signals = []
    for kill_at in order["kills"]:
        folder = Path(order["out"], str(kill_at))
        folder.mkdir()
        if Path(order["out"], "before").exists():
            shutil.copytree(Path(order["out"], "before"), folder / "out")
        child = os.fork()
        if child == 0:
            try:
                export_until(kill_at, order)
                os._exit(0)
            finally:
                os._exit(1)
        signals.append(os.WTERMSIG(os.waitpid(child, 0)[1]))
    print(json.dumps(signals))


if __name__ == "__main__":
    main()
