"""What becomes of one unit: its documents read and cleaned, encoded, written, and noted down in a record.

    read | clean -> parts -> known or encoded -> payload in a room -> segment and record on the disk

In: a unit. Out: its record, whole on the disk or not there, which a later run takes over. The steps are called by an
engine, in threads or in forked processes, each for any unit and in any order of units; what they share doesn't change
while they work. Memory: the parts in flight and a room for the payload, about 4 times the unit's size together.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import StoreError
from penstock.hashing import checksum_hex, digest_of, token_hash
from penstock.sources import Document, FilesSource, SkipTally, Source, Unit, UnitText
from penstock.sources.hygiene import Cleaning
from penstock.store.blocklist import Blocklist
from penstock.store.encoding import ENCODE_BATCH_BYTES, Room, Rooms, content_hash, encode_documents, fill_room
from penstock.store.known import KnownDocuments, Place
from penstock.store.layout import SEGMENTS, WORK, SegmentEntry
from penstock.store.memory import RACY_NANOSECONDS
from penstock.store.near import signatures
from penstock.store.splits import group_hash
from penstock.store.writer import (
    DOCUMENT_SCHEMA,
    EncodedUnit,
    UnitRecord,
    no_documents,
    read_unit_record,
    write_unit,
)
from penstock.tokenize import Tokenizer
from penstock.tokenize.engines import Encoded

__all__ = ["Counts", "UnitInRoom", "UnitPart", "UnitWork"]

Counts = tuple[int, int]
"""Of a unit's documents, how many were taken over, and how many were encoded again because their tokens are damaged."""


@dataclass(frozen=True, kw_only=True)
class UnitPart:
    """A unit, or a part of one, between reader and encoder."""

    text: UnitText
    content_hashes: list[bytes]
    started_ns: int
    looked_up: _LookedUp | None = None
    encoded: Encoded | None = None


@dataclass(frozen=True, kw_only=True)
class _LookedUp:
    """Which documents of a part the latest version holds.

    Attributes:
        places: where, or None.
        fresh: the others.
        damaged: how many of these it would hold, were their tokens whole.
    """

    places: list[Place | None]
    fresh: list[Document]
    damaged: int


@dataclass(frozen=True, kw_only=True)
class UnitInRoom:
    """A unit between encoder and writer, with the room that its payload lies in."""

    unit: EncodedUnit
    room: Room
    counts: Counts


class UnitWork:
    """The steps of the work on a unit.

    Args:
        out: the store.
        task: what records depend on besides their unit's input.
        sources, cleaning: by name.
        blocklist: what stays out whatever the source says.
        tokenizer: of the store.
        known: the documents that needn't be encoded.
        seed: of the splits.
        signed: whether documents get the signatures by which near copies are found.
    """

    def __init__(
        self,
        out: Path,
        *,
        task: str,
        sources: Mapping[str, Source],
        cleaning: Mapping[str, Cleaning],
        blocklist: Blocklist,
        tokenizer: Tokenizer,
        known: KnownDocuments,
        seed: int,
        signed: bool,
    ) -> None:
        self._out = out
        self._task = task
        self._sources = sources
        self._cleaning = cleaning
        self._blocklist = blocklist
        self._tokenizer = tokenizer
        self._known = known
        self._seed = seed
        self._signed = signed
        self._rooms = Rooms(tokenizer.dtype)

    # The steps

    def read(self, unit: Unit) -> Iterable[UnitPart]:
        """Documents, clean, and their content hashes."""
        return [self._read_part(unit)]

    def read_in_parts(self, unit: Unit) -> Iterable[UnitPart]:
        """The same in parts, each for one call of the encoder, read as they are asked for."""
        if not isinstance(self._sources[unit.source], FilesSource):
            return self.read(unit)
        return (self._read_part(replace(unit, items=items)) for items in _runs_of_files(unit, ENCODE_BATCH_BYTES))

    def encode_ahead(self, part: UnitPart) -> UnitPart:
        """The same part with the ids of its documents, where all that are new are plain."""
        looked_up, encoded = self._look_up(part), None
        if looked_up.fresh and all(document.is_plain for document in looked_up.fresh):
            encoded = self._tokenizer.encode_unchecked([document.parts[0].data for document in looked_up.fresh])
        return replace(part, looked_up=looked_up, encoded=encoded)

    def encode(self, unit: Unit, parts: Iterable[UnitPart]) -> UnitInRoom:
        """Ids of a unit's documents, in store width, with begin and end tokens in place."""
        room = self._rooms.borrow()
        room.empty(capacity=unit.input_bytes)
        columns: dict[str, list[Any]] = {column.name: [] for column in DOCUMENT_SCHEMA}
        skips = SkipTally()
        left_out: list[tuple[bytes, str]] = []
        skips.merge([unit.skips])
        started_ns, reused, damaged = 0, 0, 0
        for part in parts:
            started_ns = started_ns or part.started_ns
            looked_up = part.looked_up or self._look_up(part)
            self._add_part(unit, part, looked_up, room, columns)
            reused += len(looked_up.places) - len(looked_up.fresh)
            damaged += looked_up.damaged
            skips.merge([part.text.skips])
            left_out += part.text.skips.each or ()
        encoded = EncodedUnit(
            payload=room.filled(),
            columns=columns,
            skips=skips,
            left_out=left_out,
            input_bytes=unit.input_bytes,
            started_ns=started_ns,
        )
        return UnitInRoom(unit=encoded, room=room, counts=(reused, damaged))

    def write(self, unit: Unit, encoded: UnitInRoom) -> Counts:
        """Segment and record, whole on the disk."""
        write_unit(self._out, self._record_path(unit), encoded.unit)
        self._rooms.give_back(encoded.room)
        return encoded.counts

    # Records

    def record(self, unit: Unit) -> UnitRecord:
        """The record of a unit that was written a moment ago."""
        record = read_unit_record(self._record_path(unit))
        if record is None:
            raise StoreError(
                f"{self._record_path(unit)} is missing or damaged a moment after it was written",
                hint="check the disk; is another program cleaning that folder? Then run the same command again",
            )
        return record

    def finished(self, unit: Unit) -> UnitRecord | None:
        """The unit's record, if an earlier run finished it, its input is surely the same and its segments are there."""
        if not unit.items:  # there is nothing to read
            return UnitRecord(documents=no_documents(), segments=[], skips=unit.skips)
        record = read_unit_record(self._record_path(unit))
        if record is None or record.started_ns - RACY_NANOSECONDS <= unit.newest_change_ns:
            return None
        whole = all(_segment_is_whole(self._out, entry) for entry in record.segments)
        known = set(self._known.segments) | {entry.name for entry in record.segments}
        if not whole or not set(record.documents["segment"].unique().to_pylist()) <= known:
            return None
        return record

    def _record_path(self, unit: Unit) -> Path:
        return self._out / WORK / f"{digest_of([self._task, unit.source, unit.fingerprint])[:32]}.arrow"

    # Parts

    def _read_part(self, unit: Unit) -> UnitPart:
        started_ns = time.time_ns()
        text = self._cleaning[unit.source].clean(self._sources[unit.source].read(unit))
        hashes = [content_hash(document) for document in text.documents]
        if self._blocklist.rules:
            text, hashes = self._blocklist.without_blocked(text, hashes)
        return UnitPart(text=text, content_hashes=hashes, started_ns=started_ns)

    def _look_up(self, part: UnitPart) -> _LookedUp:
        places, damaged = self._known.find_all(part.content_hashes)
        fresh = [document for document, place in zip(part.text.documents, places, strict=True) if place is None]
        return _LookedUp(places=places, fresh=fresh, damaged=damaged)

    def _add_part(
        self, unit: Unit, part: UnitPart, looked_up: _LookedUp, room: Room, columns: dict[str, list[Any]]
    ) -> None:
        """Adds documents to the room and to the columns."""
        documents = part.text.documents
        first = room.used
        loss_runs: list[list[int] | None]
        if part.encoded is None:
            lengths, loss_runs = encode_documents(self._tokenizer, looked_up.fresh, room=room)
        else:
            lengths = fill_room(room, self._tokenizer, part.encoded)
            loss_runs = [None] * len(lengths)
        payload = room.filled()
        borders = np.concatenate([[first], first + np.cumsum(lengths, dtype=np.int64)])
        starts = borders.tolist()
        places: list[Place] = [
            (None, start, length, token_hash(payload[start : start + length]), runs)
            for start, length, runs in zip(starts, lengths, loss_runs, strict=False)
        ]
        if len(looked_up.fresh) < len(documents):
            new_places = iter(places)
            places = [place or next(new_places) for place in looked_up.places]
        seed = self._seed
        more: dict[str, Iterable[Any]] = {
            "key": [document.key for document in documents],
            "group_hash": [group_hash(document.group, seed=seed) for document in documents],
            "source": [unit.source] * len(documents),
            "path": [document.path for document in documents],
            "byte_start": [document.byte_start for document in documents],
            "byte_end": [document.byte_end for document in documents],
            "text_bytes": [document.num_bytes for document in documents],
            "exact": [document.exact for document in documents],
            "language": [document.language for document in documents],
            "facts": [document.facts for document in documents],
            "content_hash": part.content_hashes,
            "signature": self._signatures(payload[first:], borders - first, looked_up.places),
            **dict(
                zip(("segment", "offset", "length", "token_hash", "loss_runs"), zip(*places, strict=True), strict=False)
            ),
        }
        for name, values in more.items():
            columns[name] += values

    def _signatures(
        self, payload: npt.NDArray[Any], borders: npt.NDArray[np.int64], places: Sequence[Place | None]
    ) -> list[bytes]:
        """Of the fresh documents, where near copies are looked for; the index makes those of the others."""
        if not self._signed:
            return [b""] * len(places)
        fresh = iter(signatures(payload, borders))
        return [b"" if place is not None else next(fresh).tobytes() for place in places]


def _runs_of_files(unit: Unit, run_bytes: int) -> Iterator[tuple[Any, ...]]:
    """The files of a unit in runs of about that size."""
    first, size = 0, 0
    for number, (_, file_size) in enumerate(unit.items, 1):
        size += file_size
        if size >= run_bytes:
            yield unit.items[first:number]
            first, size = number, 0
    if first < len(unit.items):
        yield unit.items[first:]


def _segment_is_whole(out: Path, entry: SegmentEntry) -> bool:
    path = out / SEGMENTS / f"{entry.name}.tokens"
    blocks = path.with_suffix(".blocks")
    if not path.exists() or path.stat().st_size != entry.bytes or not blocks.exists():
        return False
    return checksum_hex(blocks.read_bytes()) == entry.checksum
