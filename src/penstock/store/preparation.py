"""Raw input to a committed version of a store.

    walk -> units -> [read | encode | write] on an engine -> records -> index -> manifest

A pure function of input bytes, tokenizer and options: units, workers, kills and reruns leave no trace in the digest.
Units that an earlier, killed run finished are taken over; documents that an earlier version holds are not encoded again
(same content, same tokenizer). The manifest is the commit; before it, readers see the old version and nothing else.
Memory: two units per worker (about 4 times the unit size each) plus the index (250 bytes per document).
"""

from __future__ import annotations

import contextlib
import datetime
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from penstock import fs
from penstock.engines import can_fork, run_units, run_units_in_processes
from penstock.errors import ConfigError, DamagedStoreError, InputError, NotAStoreError, StoreError, TokenizerError
from penstock.hashing import checksum_hex, digest_of, strong_hash, token_hash
from penstock.sources import DEFAULT_UNIT_BYTES, Document, PartKind, SkipTally, Source, Unit, UnitText
from penstock.store.encoding import Room, Rooms, content_hash, encode_documents
from penstock.store.index import VersionIndex, build_index
from penstock.store.layout import (
    INDEX,
    LOCK,
    MANIFESTS,
    SEGMENTS,
    TOKENIZERS,
    WORK,
    FileEntry,
    Manifest,
    SegmentEntry,
    encode_manifest,
    file_entry,
    manifest_name,
)
from penstock.store.reader import Store, list_versions, open_store
from penstock.store.splits import DEFAULT_SPLIT, group_hash, parse_split
from penstock.store.writer import EncodedUnit, UnitRecord, read_unit_record, write_unit
from penstock.tokenize import DEFAULT_VOCAB_SIZE, TRAINING_SAMPLE_BYTES, Tokenizer, train_tokenizer

__all__ = ["PrepareOptions", "PrepareResult", "Progress", "prepare"]

# A file whose time stamp is this close to the moment it was read may have changed again within the clock's grain.
RACY_NANOSECONDS = 2 * 10**9

Progress = Callable[[int, int], None]
"""Called with (input bytes done, input bytes in all) after each unit."""


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How to prepare; only `split`, `dedup` and `seed` touch the result."""

    split: str = DEFAULT_SPLIT
    dedup: str = "exact"
    seed: int = 0
    workers: int = 1
    processes: bool | None = None  # whether workers are processes where they can be forked; None: if there are several
    unit_bytes: int = DEFAULT_UNIT_BYTES
    vocab_size: int = DEFAULT_VOCAB_SIZE
    control_tokens: tuple[str, ...] = ()  # that a trained vocabulary must have besides its own
    break_lock: bool = False


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """What was done."""

    store: Path
    manifest: Manifest
    seconds: float
    units: int
    units_taken_over: int
    documents_reused: int
    committed: bool
    workers: str
    tokenizer_engine: dict[str, Any] = field(default_factory=dict)


def prepare(
    sources: Sequence[Source],
    out: Path,
    *,
    tokenizer: Tokenizer | None = None,
    options: PrepareOptions | None = None,
    on_progress: Progress | None = None,
) -> PrepareResult:
    """Tokenises the sources into the store at `out` and commits a version.

    Args:
        sources: what to read.
        out: an existing store, or a path where one can be made.
        tokenizer: without one, an existing store keeps its own, and a new one trains a vocabulary on the sources.
        options: see `PrepareOptions`.
        on_progress: called after each unit.

    Raises:
        InputError: there is nothing to prepare.
        StoreError: `out` is something else, or another process is writing to it.
        DiskError: the disk is full or refuses; nothing committed is changed.
    """
    started = time.perf_counter()
    options = options or PrepareOptions()
    if options.dedup not in ("exact", "off"):
        raise ConfigError(f"--dedup {options.dedup!r} isn't available", hint="choose exact or off")
    shares = parse_split(options.split)
    _refuse_foreign_folder(out)
    with fs.fail_as_disk_error(f"writing the store {out}"):
        is_new = not out.exists()
        for folder in (MANIFESTS, SEGMENTS, INDEX, TOKENIZERS, WORK):
            fs.make_folder(out / folder)
        with fs.FolderLock(out / LOCK, break_lock=options.break_lock):
            try:
                tokenizer = tokenizer or _default_tokenizer(out, sources, options)
                with contextlib.closing(_Job(out, sources, tokenizer, shares, options)) as job:
                    return job.run(started, on_progress)
            except (InputError, TokenizerError):
                if is_new and not list_versions(out):  # another process may have been faster, and luckier
                    fs.remove_tree(out)  # nothing came of it: leave the disk as it was
                raise


class _Job:
    """One run of `prepare`, under the store's lock."""

    def __init__(
        self,
        out: Path,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        shares: Mapping[str, float],
        options: PrepareOptions,
    ) -> None:
        self._out = out
        self._sources = {source.name: source for source in sources}
        self._tokenizer = tokenizer
        self._shares = shares
        self._options = options
        versions = list_versions(out)
        self._previous = open_store(out) if versions else None
        self._version = (versions[-1] if versions else 0) + 1
        self._known = _KnownDocuments(self._previous, tokenizer)
        self._rooms = Rooms(tokenizer.dtype)
        wanted = options.workers > 1 if options.processes is None else options.processes
        self._in_processes = wanted and can_fork()
        self._units_taken_over = 0
        self._documents_reused = 0
        source_options = [self._sources[name].options() for name in sorted(self._sources)]
        self._digest_options = {
            "sources": source_options,
            "split": [[name, f"{share:.12g}"] for name, share in shares.items()],  # a list: their order is meaning
            "dedup": options.dedup,
            "seed": options.seed,
        }
        # What a unit's record depends on besides its input. The previous version matters because records point into it.
        previous = self._previous.digest if self._previous else None
        self._task = digest_of([tokenizer.digest, source_options, options.seed, previous])

    def run(self, started: float, on_progress: Progress | None) -> PrepareResult:
        """Everything from the lock to the commit."""
        fs.remove_leftovers(self._out)
        records = list(self._records(on_progress))
        if not any(record.documents.num_rows for record in records):
            raise _nothing_found(list(self._sources.values()), [record.skips for record in records])
        index = build_index(
            records,
            known_segments=self._known.segments,
            shares=self._shares,
            sources=sorted(self._sources),
            dedup=self._options.dedup,
            tokenizer_digest=self._tokenizer.digest,
            options=self._digest_options,
        )
        committed = self._previous is None or self._previous.digest != index.digest
        manifest = self._commit(index, records) if committed else self._previous.manifest  # type: ignore[union-attr]
        self._remove_strangers()
        return PrepareResult(
            store=self._out,
            manifest=manifest,
            seconds=time.perf_counter() - started,
            units=len(records),
            units_taken_over=self._units_taken_over,
            documents_reused=self._documents_reused,
            committed=committed,
            workers=_counted(self._options.workers, "process", "processes")
            if self._in_processes
            else _counted(self._options.workers, "thread", "threads"),
            tokenizer_engine=self._tokenizer.describe_engine(),
        )

    def close(self) -> None:
        """Gives back the previous version's maps."""
        if self._previous is not None:
            self._previous.close()

    def _records(self, on_progress: Progress | None) -> Iterator[UnitRecord]:
        """The record of each unit, in order; those that an earlier run finished are not run again."""
        finished: dict[int, UnitRecord] = {}
        walked: list[Unit] = []
        sizes = {"walked": 0, "done": 0}

        def unfinished() -> Iterator[Unit]:
            for unit in self._walk():
                record = self._finished(unit)
                if record is not None:
                    finished[len(walked)] = record
                walked.append(unit)
                sizes["walked"] += unit.input_bytes
                if record is None:
                    yield unit

        def progress(unit: Unit) -> None:
            sizes["done"] += unit.input_bytes
            if on_progress:
                on_progress(sizes["done"], sizes["walked"])

        number = 0
        for unit, reused in self._run(unfinished()):
            while walked[number] is not unit:
                yield finished[number]
                progress(walked[number])
                number += 1
            record = read_unit_record(self._record_path(unit))
            if record is None:
                raise StoreError(
                    f"{self._record_path(unit)} is missing or damaged a moment after it was written",
                    hint="check the disk; is another program cleaning that folder? Then run the same command again",
                )
            yield record
            progress(unit)
            self._documents_reused += reused
            number += 1
        for rest in range(number, len(walked)):
            yield finished[rest]
            progress(walked[rest])
        self._units_taken_over = len(finished)

    def _walk(self) -> Iterator[Unit]:
        for source in self._sources.values():
            yield from source.units(self._options.unit_bytes)

    def _run(self, units: Iterator[Unit]) -> Iterator[tuple[Unit, int]]:
        """Each unit with the number of its documents that were taken over from an earlier version."""
        workers = self._options.workers
        if self._in_processes:
            _ = self._tokenizer.engine  # chosen and checked once, before the workers inherit it
            return run_units_in_processes(
                units, read=self._read, encode=self._encode, write=self._write_unit, workers=workers
            )
        # Walked before the work, not beside it: two threads of Python would take turns at the GIL, and lose by it.
        return run_units(list(units), read=self._read, encode=self._encode, write=self._write_unit, workers=workers)

    def _read(self, unit: Unit) -> _ReadUnit:
        """Documents and their content hashes."""
        started_ns = time.time_ns()
        text = self._sources[unit.source].read(unit)
        hashes = [content_hash(document) for document in text.documents]
        return _ReadUnit(text=text, content_hashes=hashes, started_ns=started_ns)

    def _encode(self, unit: Unit, read: _ReadUnit) -> _Encoded:
        """Ids of a unit's documents, in store width, with begin and end tokens in place."""
        documents, contents = read.text.documents, read.content_hashes
        known = self._known.find_all(documents, contents)
        fresh = [document for document, place in zip(documents, known, strict=True) if place is None]
        room = self._rooms.borrow()
        payload, lengths, loss_runs = encode_documents(self._tokenizer, fresh, room=room)
        starts = np.concatenate([[0], np.cumsum(lengths)]).tolist()
        new_places = iter(
            (None, starts[n], lengths[n], token_hash(payload[starts[n] : starts[n + 1]]), loss_runs[n])
            for n in range(len(fresh))
        )
        places = [place or next(new_places) for place in known]
        seed = self._options.seed
        columns: dict[str, list[Any]] = {
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
            "content_hash": contents,
            "token_hash": [place[3] for place in places],
            "segment": [place[0] for place in places],
            "offset": [place[1] for place in places],
            "length": [place[2] for place in places],
            "loss_runs": [place[4] for place in places],
        }
        skips = SkipTally()
        skips.merge([unit.skips, read.text.skips])
        encoded = EncodedUnit(
            payload=payload, columns=columns, skips=skips, input_bytes=unit.input_bytes, started_ns=read.started_ns
        )
        return _Encoded(unit=encoded, room=room, reused=len(documents) - len(fresh))

    def _write_unit(self, unit: Unit, encoded: _Encoded) -> int:
        write_unit(self._out, self._record_path(unit), encoded.unit)
        self._rooms.give_back(encoded.room)
        return encoded.reused

    def _commit(self, index: VersionIndex, records: Sequence[UnitRecord]) -> Manifest:
        """Writes index and tokenizer, then the manifest: from there on the version exists."""
        folder = f"{INDEX}/{self._version:06d}-{index.digest[:12]}"
        fs.make_folder(self._out / folder)
        entries = [self._write(f"{folder}/{name}", data) for name, data in index.files().items()]
        # Named by its bytes: files that differ in spelling only have one digest, and an older version names the other.
        source_json = self._tokenizer.spec.source_json
        tokenizer_folder = f"{TOKENIZERS}/{strong_hash(source_json).hex()[:32]}"
        fs.make_folder(self._out / tokenizer_folder)
        tokenizer_file = self._write(f"{tokenizer_folder}/tokenizer.json", source_json)
        skips = SkipTally()
        skips.merge(record.skips for record in records)
        manifest = Manifest(
            version=self._version,
            digest=index.digest,
            created=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            dtype=self._tokenizer.dtype.str,
            tokenizer=self._tokenizer.describe(),
            tokenizer_file=tokenizer_file,
            options=self._digest_options,
            sources=[{"name": name, "location": self._sources[name].location} for name in sorted(self._sources)],
            splits=list(self._shares),
            counts=index.counts,
            segments=index.segments,
            index=entries,
            num_documents=index.provenance.num_rows,
            skipped_examples=skips.examples,
        )
        if not fs.create_if_absent(self._out / MANIFESTS / manifest_name(self._version), encode_manifest(manifest)):
            raise StoreError(
                f"version {self._version} of {self._out} was committed by another process meanwhile",
                hint="run the command again; it builds on that version",
            )
        return manifest

    def _write(self, name: str, data: bytes) -> FileEntry:
        fs.write_atomic(self._out / name, data)
        return file_entry(name, data)

    def _record_path(self, unit: Unit) -> Path:
        return self._out / WORK / f"{digest_of([self._task, unit.source, unit.fingerprint])[:32]}.arrow"

    def _finished(self, unit: Unit) -> UnitRecord | None:
        """The unit's record, if an earlier run finished it, its input is surely the same and its segments are there."""
        record = read_unit_record(self._record_path(unit))
        if record is None or record.started_ns - RACY_NANOSECONDS <= unit.newest_change_ns:
            return None
        whole = all(_segment_is_whole(self._out, entry) for entry in record.segments)
        known = set(self._known.segments) | {entry.name for entry in record.segments}
        if not whole or not set(record.documents["segment"].unique().to_pylist()) <= known:
            return None
        return record

    def _remove_strangers(self) -> None:
        """Removes what no version refers to: leftovers of killed or superseded runs.

        Only names that we give are touched; whatever else someone put there is theirs.
        """
        segments: set[str] = set()
        folders: set[str] = set()
        for version in list_versions(self._out):
            manifest = open_store(self._out, version=version).manifest
            segments |= {entry.name for entry in manifest.segments}
            folders |= {entry.name.rpartition("/")[0] for entry in [*manifest.index, manifest.tokenizer_file]}
        for path in self._named_by_us(WORK, r"[0-9a-f]{32}\.arrow"):
            fs.remove_file(path)
        for path in self._named_by_us(SEGMENTS, r"[0-9a-f]{32}\.(tokens|blocks)"):
            if path.stem not in segments:
                fs.remove_file(path)
        for kind, pattern in ((INDEX, r"[0-9]{6,}-[0-9a-f]{12}"), (TOKENIZERS, r"[0-9a-f]{32}")):
            for path in self._named_by_us(kind, pattern):
                if f"{kind}/{path.name}" not in folders:
                    fs.remove_tree(path)

    def _named_by_us(self, folder: str, pattern: str) -> list[Path]:
        return [path for path in (self._out / folder).iterdir() if re.fullmatch(pattern, path.name)]


@dataclass(frozen=True, kw_only=True)
class _ReadUnit:
    """A unit between reader and encoder."""

    text: UnitText
    content_hashes: list[bytes]
    started_ns: int


@dataclass(frozen=True, kw_only=True)
class _Encoded:
    """A unit between encoder and writer, with the room that its payload lies in."""

    unit: EncodedUnit
    room: Room
    reused: int


_Place = tuple[str | None, int, int, bytes, list[int] | None]
"""Where a document's tokens are: (segment or None for the unit's own, offset, length, token hash, loss runs)."""


class _KnownDocuments:
    """The plain documents of the latest version, by content, when its tokenizer is the same."""

    def __init__(self, store: Store | None, tokenizer: Tokenizer) -> None:
        self.segments: dict[str, SegmentEntry] = {}
        self._store = store
        self._numbers: dict[bytes, int] = {}
        if store is None or store.manifest.tokenizer["digest"] != tokenizer.digest:
            return
        self.segments = {entry.name: entry for entry in store.manifest.segments}
        with_runs = set(store.arrays["loss_documents"].tolist())
        contents = store.provenance()["content_hash"].to_pylist()
        self._numbers = {content: number for number, content in enumerate(contents) if number not in with_runs}

    def find_all(self, documents: Sequence[Document], contents: Sequence[bytes]) -> list[_Place | None]:
        """Where each document was stored before, or None."""
        if not self._numbers:
            return [None] * len(documents)
        return [self.find(document, content) for document, content in zip(documents, contents, strict=True)]

    def find(self, document: Document, content: bytes) -> _Place | None:
        """Where the same content was stored before, or None."""
        number = self._numbers.get(content) if document.is_plain else None
        if number is None or self._store is None:
            return None
        try:
            tokens = self._store.document_tokens(number)
        except DamagedStoreError:
            return None  # encoded again, so that the damage ends with the version that has it
        segment, offset, length = (int(self._store.arrays[name][number]) for name in ("segment", "offset", "length"))
        return self._store.manifest.segments[segment].name, offset, length, token_hash(tokens), None


def _counted(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _default_tokenizer(out: Path, sources: Sequence[Source], options: PrepareOptions) -> Tokenizer:
    """The existing store's own tokenizer, or one trained on a sample of the sources that doesn't depend on units."""
    if list_versions(out):
        return open_store(out).tokenizer()
    units = [unit for source in sources for unit in source.units(options.unit_bytes)]
    if not any(unit.items for unit in units):
        raise _nothing_found(sources, [unit.skips for unit in units])
    total = sum(unit.input_bytes for unit in units)
    limit = min(1.0, TRAINING_SAMPLE_BYTES / max(total, 1)) * 2**64

    def wanted(key: bytes) -> bool:
        return int.from_bytes(strong_hash(b"vocabulary " + key)[:8], "little") < limit

    texts = (
        part.data
        for source in sorted(sources, key=lambda source: source.name)
        for unit in units
        if unit.source == source.name
        for document in source.read(unit, wanted=wanted).documents
        for part in document.parts
        if part.kind is PartKind.TEXT
    )
    return train_tokenizer(texts, vocab_size=options.vocab_size, control_tokens=options.control_tokens)


def _segment_is_whole(out: Path, entry: SegmentEntry) -> bool:
    path = out / SEGMENTS / f"{entry.name}.tokens"
    blocks = path.with_suffix(".blocks")
    if not path.exists() or path.stat().st_size != entry.bytes or not blocks.exists():
        return False
    return checksum_hex(blocks.read_bytes()) == entry.checksum


def _refuse_foreign_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise NotAStoreError(f"output {str(out)!r} is a file, not a store", hint="choose another --out")
    if not out.is_dir() or list_versions(out):
        return
    # Before its first commit a store holds these and nothing else; a `manifests` folder alone proves nothing.
    ours = {MANIFESTS, SEGMENTS, INDEX, TOKENIZERS, WORK, LOCK}
    found = {entry.name for entry in out.iterdir()}
    if found and (not (out / MANIFESTS).is_dir() or found - ours):
        raise NotAStoreError(
            f"output {str(out)!r} is a folder with other things in it, not a store", hint="choose a new or empty --out"
        )


def _nothing_found(sources: Sequence[Source], skips: Sequence[SkipTally]) -> InputError:
    tally = SkipTally()
    tally.merge(skips)
    where = ", ".join(source.location for source in sources)
    if not tally.total:
        return InputError(f"no files in {where}", hint="check the path, or name a folder that holds text or code")
    reasons = ", ".join(f"{count} {reason}" for reason, count in sorted(tally.counts.items()))
    return InputError(
        f"no documents in {where}: {tally.total} left out ({reasons})",
        hint="loosen the filters (--include, --exclude, --hidden, --vendored, --max-file-bytes), or name the columns"
        " of a table (--text-field, --field-map)",
    )
