"""What every source yields: documents, and a tally of what was left out and why.

A document is a key (its identity, the same on every machine), a few facts, and parts. Plain text is one part. A part is
UTF-8 bytes, of kind text (encoded as ordinary text, whatever it spells) or control (one control token, named by its
bytes), with or without loss.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

__all__ = ["Document", "Part", "PartKind", "SkipTally", "printable"]

EXAMPLES_PER_REASON = 5


class PartKind(Enum):
    """How a part's bytes become tokens."""

    TEXT = "text"
    CONTROL = "control"


# Not frozen: freezing costs 5 µs per document, as much as hashing it.
@dataclass(kw_only=True, slots=True)
class Part:
    """A stretch of a document."""

    data: bytes
    kind: PartKind = PartKind.TEXT
    loss: bool = True


@dataclass(kw_only=True, slots=True)
class Document:
    """One document as a source read it.

    Attributes:
        key: identity, unique in a store: source name, then the path in it (then row or commit).
        group: what the split hashes; documents of one group are never parted.
        path: where it was read, relative to the source's root; raw bytes, because file names are.
        byte_start: first byte of the document in that file.
        byte_end: one past the last byte.
        parts: the content.
        language: by file ending; empty where unknown.
        facts: what else the source knows (a row's other columns, a commit's hash and time) as one JSON object, made by
            `hashing.canonical_json`; empty where there is nothing. For people and queries: no part of any digest.
        exact: whether the content is those very bytes of the file, neither unescaped nor rendered.
        framed: whether the parts spell their own beginning and end (a chat template does); then no begin token is put
            before them, and an end token after them only where they don't end with it.
        text_hash: `strong_hash` of a plain document's text, where the source needed it anyway; else empty.
    """

    key: bytes
    group: bytes
    path: bytes
    byte_start: int
    byte_end: int
    parts: tuple[Part, ...]
    language: str = ""
    facts: str = ""
    exact: bool = True
    framed: bool = False
    text_hash: bytes = b""

    @property
    def is_plain(self) -> bool:
        """Whether the document is one text part that carries loss throughout."""
        parts = self.parts
        return len(parts) == 1 and parts[0].kind is PartKind.TEXT and parts[0].loss and not self.framed

    @property
    def num_bytes(self) -> int:
        """Size of the content."""
        return len(self.parts[0].data) if len(self.parts) == 1 else sum([len(part.data) for part in self.parts])


@dataclass(slots=True)
class SkipTally:
    """How many documents were left out for each reason, with the first few as examples.

    Attributes:
        counts: documents by reason.
        examples: a few keys by reason, fit to print.
        each: every (key, reason) of one unit, for sources that ask about each file whether it changed; else None.
    """

    counts: dict[str, int] = field(default_factory=dict)
    examples: dict[str, list[str]] = field(default_factory=dict)
    each: list[tuple[bytes, str]] | None = None

    def add(self, reason: str, key: bytes, *, count: int = 1) -> None:
        """Counts a document left out, or several that have no key of their own."""
        if self.each is not None:
            self.each.append((key, reason))
        self.counts[reason] = self.counts.get(reason, 0) + count
        shown = self.examples.setdefault(reason, [])
        if len(shown) < EXAMPLES_PER_REASON:
            shown.append(printable(key))

    def merge(self, others: Iterable[SkipTally]) -> None:
        """Adds other tallies; in canonical order, so that the examples kept are the same for any number of workers."""
        for other in others:
            for reason, count in other.counts.items():
                self.counts[reason] = self.counts.get(reason, 0) + count
                shown = self.examples.setdefault(reason, [])
                shown.extend(other.examples.get(reason, [])[: EXAMPLES_PER_REASON - len(shown)])

    @property
    def total(self) -> int:
        """All documents left out."""
        return sum(self.counts.values())


def printable(name: bytes) -> str:
    """A file name or key as text that can't move a cursor: undecodable bytes and control characters are escaped."""
    text = os.fsdecode(name).encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)
