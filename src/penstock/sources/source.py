"""The shape of a source: cut into units by a deterministic rule, each unit read on its own.

A unit is the grain of work, of resume and of parallelism: about 16 MB of input. Units may run in any order on any
engine. `Unit.fingerprint` says which input bytes a unit stood for (by file facts, not content), so that a unit finished
before a kill is recognised by the next run.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from penstock.sources.document import Document, SkipTally

__all__ = ["DEFAULT_UNIT_BYTES", "Source", "Unit", "UnitText", "closing_all"]

DEFAULT_UNIT_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Unit:
    """One piece of work.

    Attributes:
        source: name of the source that made it.
        items: what to read, in the source's own terms.
        input_bytes: size of the input, for progress and balance.
        skips: what the source left out while it walked this stretch, unread.
        fingerprint: changes when the input of this unit may have changed.
        newest_change_ns: when the youngest input file last changed, by its own time stamps.
        facts: of a unit of files, what tells whether each of them changed, packed and joined; else empty.
    """

    source: str
    items: tuple[Any, ...]
    input_bytes: int
    skips: SkipTally = field(default_factory=SkipTally)
    fingerprint: str
    newest_change_ns: int
    facts: bytes = b""


@dataclass(frozen=True, kw_only=True)
class UnitText:
    """A unit after reading."""

    documents: list[Document]
    skips: SkipTally


@contextlib.contextmanager
def closing_all(sources: Sequence[Source]) -> Iterator[None]:
    """Closes the sources at the end of the block, whatever ends it."""
    with contextlib.ExitStack() as stack:
        for source in sources:
            stack.callback(source.close)
        yield


class Source(Protocol):
    """Anything that can be prepared.

    A source is data: it can be pickled or copied into a worker process, and holds no open file or process between its
    making and its first `units` or `read`. What `read` keeps open from one unit to the next (a stream that can't be
    entered in the middle, `git cat-file`) belongs to the process that opened it; `close` gives it back. Workers read
    different units of one source, each in ascending order.
    """

    @property
    def name(self) -> str:
        """Unique among the sources of a store; the first part of its documents' keys."""

    @property
    def location(self) -> str:
        """Where the bytes lie on this machine; shown to people, never part of a digest."""

    def options(self) -> dict[str, Any]:
        """The settings that decide which documents come out; part of the store digest."""

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        """The units, in canonical order."""

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        """The documents of a unit, in canonical order; with `wanted`, only those whose key it accepts."""

    def close(self) -> None:
        """Gives back what was opened or made on the disk; harmless when there is nothing, or twice."""
