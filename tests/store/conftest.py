"""Fixtures of the store's tests; `samples.py` makes what they hold."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import samples


@pytest.fixture
def corpus(scratch: Path) -> Path:
    return samples.write_corpus(scratch / "corpus")


@pytest.fixture
def updated_corpus(scratch: Path) -> Path:
    """The corpus after one change, one addition and one removal, under the same last name."""
    return samples.update_corpus(samples.write_corpus(scratch / "updated" / "corpus"))


@pytest.fixture
def built(scratch: Path, corpus: Path) -> Path:
    """A store of the corpus, to be harmed."""
    samples.build(scratch / "store", samples.files(corpus))
    return scratch / "store"


class Writer:
    """The process `writer.py`; see there for orders and answers."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(samples.__file__).with_name("writer.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def order(self, **order: Any) -> dict[str, Any]:
        """Sends an order and returns the answer."""
        return self.send(json.dumps(order, default=str))

    def send(self, line: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        assert not answer.get("failed"), "the writer met an error, see stderr"
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=60)
        assert self._process.returncode == 0


@pytest.fixture(scope="module")
def writer() -> Iterator[Writer]:
    started = Writer()
    try:
        yield started
    finally:
        started.close()
