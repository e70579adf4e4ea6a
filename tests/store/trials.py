"""Trials of `penstock prepare`: what is prepared, how it is disturbed, and what must hold afterwards.

The four things of torture.md: one clear line; committed data unchanged; a rerun that ends with the golden digest; no
temporary file, lock or process left.
"""

from __future__ import annotations

import json
import shutil
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import PenstockError
from penstock.fs import TEMPORARY_MARK
from penstock.store import list_versions, open_store, verify

from . import samples
from .commands import Commands

UNIT_BYTES = 600


@dataclass(frozen=True, kw_only=True)
class Preparation:
    """A `prepare` with a golden digest; onto a store that is there, or a first one."""

    commands: Commands
    folder: Path
    inputs: tuple[str, ...]
    options: tuple[str, ...]
    before: Path | None
    goldens: tuple[str, ...]  # of each version once it is done

    @property
    def store(self) -> Path:
        return self.folder / "store"

    def fresh(self) -> Path:
        """The store as it is before the command."""
        if self.store.exists():
            shutil.rmtree(self.store)
        if self.before is not None:
            shutil.copytree(self.before, self.store)
        return self.store

    def run(self, *more: object, **order: Any) -> dict[str, Any]:
        return self.commands.run("prepare", *self.inputs, "--out", self.store, *self.options, *more, **order)

    def check_versions(self) -> int:
        """What readers see: the old versions or the new one too, each whole. Returns how many there are."""
        versions = list_versions(self.store) if self.store.exists() else []
        old = list(range(1, len(self.goldens)))
        assert versions in (old, [*old, len(self.goldens)])
        for version, golden in zip(versions, self.goldens, strict=False):
            with open_store(self.store, version=version) as opened:
                assert opened.digest == golden, f"version {version} is another one"
        if versions:
            assert verify(self.store) == []
        return len(versions)

    def check_old_files(self) -> None:
        """Committed data is the same, byte for byte."""
        if self.before is not None:
            old = {name: (self.before / name).read_bytes() for name in samples.names_in_manifests(self.before)}
            assert {name: (self.store / name).read_bytes() for name in old} == old

    def check_rerun(self, *more: object) -> dict[str, Any]:
        """The same command again, to its end."""
        answer = self.run(*more)
        assert answer["status"] == 0, answer["stderr"]
        facts: dict[str, Any] = json.loads(answer["stdout"])
        assert facts["digest"] == self.goldens[-1]
        assert facts["version"] == len(self.goldens)
        assert self.check_versions() == len(self.goldens)
        assert left_behind(self.store) == set()
        left = sorted(path.relative_to(self.commands.temporary) for path in self.commands.temporary.rglob("*"))
        assert left == [], [str(path) for path in left][:20]
        return facts


def left_behind(store: Path) -> set[str]:
    """Files that no version and no known folder accounts for, and versions' files that are gone."""
    temporary = {name for name in samples.contents(store) if TEMPORARY_MARK in name}  # in a cache too
    return samples.stray_files(store) | temporary


def check_refusal(answer: dict[str, Any], *words: str, status: int = 1) -> None:
    """An error of a command: two lines, no traceback, nothing running on."""
    assert answer["status"] == status, answer
    lines = answer["stderr"].splitlines()
    assert len(lines) == 2, answer["stderr"]
    assert lines[0].startswith("error: ")
    assert lines[1].startswith("hint: ")
    assert all(word in answer["stderr"] for word in words), answer["stderr"]
    assert answer["stdout"] == ""
    assert not answer["hung"]
    assert answer["left"] == []


@dataclass
class Trials:
    """Counts trials and keeps what went wrong, so that one failure doesn't hide the others."""

    count: int = 0
    failures: list[str] = field(default_factory=list)
    seen: dict[str, int] = field(default_factory=dict)

    @contextmanager
    def trial(self, what: str) -> Iterator[None]:
        self.count += 1
        try:
            yield
        except (AssertionError, PenstockError, OSError) as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            self.failures.append(f"{what}: {place.line}: {type(error).__name__}: {error}"[:2000])

    def note(self, what: str) -> None:
        """Counts how often something was met: a trial that never meets what it is for shows nothing."""
        self.seen[what] = self.seen.get(what, 0) + 1
