from __future__ import annotations

import os
import subprocess
import sys

import pytest

COMMAND = """
import atexit
from penstock.cli import main
atexit.register(print, "taken down")
main(["doctor", "--profile", "cpu-2"])
"""


@pytest.mark.parametrize(("size", "is_taken_down"), [(1, True), (2, False)])
def test_one_of_several_processes_ends_before_python_takes_down_what_their_threads_use(
    size: int, is_taken_down: bool
) -> None:
    environment = {**os.environ, "RANK": "0", "WORLD_SIZE": str(size)}
    ended = subprocess.run(
        [sys.executable, "-c", COMMAND], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert "cpu-2" in ended.stdout  # all of it was written
    assert ("taken down" in ended.stdout) == is_taken_down
