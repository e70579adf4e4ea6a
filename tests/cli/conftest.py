"""Commands as a user types them: a real process, its exit code, its two streams."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest


@dataclass
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    def assert_one_error(self) -> None:
        """One `error:` line, one `hint:` line, nothing else, and no traceback."""
        lines = self.err.strip().splitlines()
        assert [line.split(":")[0] for line in lines] == ["error", "hint"], self.err
        assert self.code == 1


@pytest.fixture
def penstock(tmp_path):
    def run(*arguments: object, expect: int | None = 0, **options: Any) -> Finished:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "penstock", *map(str, arguments)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, **options)
        result = Finished(done.returncode, done.stdout, done.stderr)
        if expect is not None:
            assert result.code == expect, result.err
        return result

    return run
