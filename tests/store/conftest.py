"""Fixtures of the store's tests; `samples.py` makes what they hold."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from . import samples
from .commands import Commands
from .trials import UNIT_BYTES, Preparation


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


@pytest.fixture(scope="module")
def commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    """`penstock` commands, each in a process of its own; see commands.py."""
    started = Commands(tmp_path_factory.mktemp("commands"))
    try:
        yield started
    finally:
        started.close()


@pytest.fixture(scope="module")
def preparations(commands: Commands, module_scratch: Path) -> dict[str, Preparation]:
    """`first`, into nothing, and `update`, onto a version; small, with many units and a tokenizer of bytes."""
    folder = module_scratch
    tokenizer = folder / "tokenizer.json"
    tokenizer.write_bytes(samples.BYTES.spec.source_json)
    options = ("--tokenizer", str(tokenizer), "--unit-bytes", str(UNIT_BYTES), "--json")
    old = samples.write_corpus(folder / "old" / "corpus")
    new = samples.update_corpus(samples.write_corpus(folder / "new" / "corpus"))

    def preparation(name: str, corpus: Path, before: Path | None, *goldens: str) -> Preparation:
        (folder / name).mkdir()
        return Preparation(
            commands=commands, folder=folder / name, inputs=(str(corpus),), options=options, before=before,
            goldens=goldens,
        )  # fmt: skip

    def digest_of(undisturbed: Preparation) -> str:
        answer = undisturbed.run("--workers", 1)
        assert answer["status"] == 0, answer["stderr"]
        digest: str = json.loads(answer["stdout"])["digest"]
        return digest

    built = preparation("built", old, None)
    first = digest_of(built)
    fresh = digest_of(preparation("fresh", new, None))
    updated = preparation("updated", new, None)
    shutil.copytree(built.store, updated.store)
    assert digest_of(updated) == fresh != first, "built at once and in steps differ"
    return {
        "first": preparation("first", old, None, first),
        "update": preparation("update", new, built.store, first, fresh),
    }
