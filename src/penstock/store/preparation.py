"""Raw input to a committed version of a store.

    walk -> units -> [read, clean | encode | write] on an engine -> records -> index -> manifest
      '-> recognised inputs -> rows of the latest version -----------------------^

A pure function of input bytes, tokenizer and options: units, workers, kills and reruns leave no trace in the digest.
Inputs that didn't change since the latest version are not read (`memory`); units that an earlier, killed run finished
are taken over; documents that the latest version holds are not encoded again (same content, same tokenizer). The
manifest is the commit; before it, readers see the old version and nothing else. Memory: two units per worker (about 4
times the unit size each) plus the index (250 bytes per document).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import fs
from penstock.engines import (
    can_fork,
    drawn_beside,
    run_side_by_side,
    run_units,
    run_units_in_processes,
    settled_objects,
)
from penstock.errors import InputError, NotAStoreError, TokenizerError
from penstock.hardware import available_cores
from penstock.hashing import canonical_json, digest_of
from penstock.sources import (
    FilesSource,
    SkipTally,
    Source,
    Unit,
    leave_alone,
    nothing_found,
)
from penstock.sources.files import FileEntry
from penstock.sources.hygiene import Cleaning
from penstock.store.blocklist import Blocklist, recorded_rules
from penstock.store.cleanup import remove_strangers
from penstock.store.commit import commit_version, write_tokenizer
from penstock.store.decisions import Decisions, differences
from penstock.store.index import VersionIndex, build_index, skips_before_index
from penstock.store.known import KnownDocuments, SegmentTokens, document_rows
from penstock.store.layout import (
    CACHE,
    INDEX,
    LOCK,
    MANIFESTS,
    SEGMENTS,
    TOKENIZERS,
    WORK,
    Manifest,
)
from penstock.store.memory import SourceMemory
from penstock.store.own_tokenizer import default_tokenizer, mend_tokenizer
from penstock.store.prepare_options import PrepareOptions
from penstock.store.reader import Store, is_a_version, list_versions, no_store, open_store
from penstock.store.space import SIGNATURE_BYTES, Estimate, SpaceGuard, estimate
from penstock.store.splits import splits_of_sources
from penstock.store.unit_work import Counts, UnitWork
from penstock.store.writer import (
    UnitRecord,
    arrow_array,
    no_documents,
)
from penstock.tokenize import Tokenizer

__all__ = ["PrepareResult", "Progress", "estimate_store", "prepare"]

# Whose documents are cleaned as code unless asked otherwise.
CODE_KINDS = ("files", "git")

Progress = Callable[[int, int], None]
"""Called with (input bytes done, input bytes in all) after each unit."""

Note = Callable[[str], None]
"""Called with a line for people."""


@dataclass(frozen=True, kw_only=True)
class PrepareResult:
    """What was done."""

    store: Path
    manifest: Manifest
    seconds: float
    units: int
    units_taken_over: int
    documents_reused: int
    documents_repaired: int
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
    on_note: Note | None = None,
) -> PrepareResult:
    """Tokenises the sources into the store at `out` and commits a version.

    Args:
        sources: what to read.
        out: an existing store, or a path where one can be made.
        tokenizer: without one, an existing store keeps its own, and a new one trains a vocabulary on the sources.
        options: see `PrepareOptions`.
        on_progress: called after each unit.
        on_note: called with a line for people, such as what differs from the version before.

    Raises:
        InputError: there is nothing to prepare.
        StoreError: `out` is something else, or another process is writing to it.
        DiskError: the disk is full or refuses; nothing committed is changed.
    """
    started = time.perf_counter()
    options = options or PrepareOptions()
    decisions = _decisions(options, previous=None, blocklist=Blocklist(options.block))
    if decisions.by_source:
        splits_of_sources(
            [source.name for source in sources], decisions.shares
        )  # wrong words are refused before all else
    _refuse_foreign_folder(out)
    leave_alone(sources, out)  # it may lie inside its own input
    with fs.fail_as_disk_error(f"writing the store {out}"), _walk_beside(sources, out, options) as walk:
        is_new = not out.exists()
        for folder in (MANIFESTS, SEGMENTS, INDEX, TOKENIZERS, WORK, CACHE):
            fs.make_folder(out / folder)
        with fs.FolderLock(out / LOCK, break_lock=options.break_lock):
            try:
                tokenizer = tokenizer or default_tokenizer(out, sources, options)
                with contextlib.closing(_Job(out, sources, tokenizer, options, on_note, walk)) as job:
                    return job.run(started, on_progress)
            except (InputError, TokenizerError):
                if is_new and not list_versions(out):  # another process may have been faster, and luckier
                    fs.remove_tree(out)  # nothing came of it: leave the disk as it was
                raise


def estimate_store(
    sources: Sequence[Source], out: Path, *, tokenizer: Tokenizer | None = None, options: PrepareOptions | None = None
) -> Estimate:
    """What `prepare` would take, from a sample; writes nothing."""
    options = options or PrepareOptions()
    _refuse_foreign_folder(out)
    tokenizer = tokenizer or default_tokenizer(out, sources, options)
    with open_store(out) if list_versions(out) else contextlib.nullcontext() as previous:
        rules = recorded_rules(previous)
    cleaning = {source.name: _cleaning_of(source, options) for source in sources}
    return estimate(
        sources,
        out,
        tokenizer=tokenizer,
        cleaning=cleaning,
        blocklist=Blocklist([*rules, *options.block]),
        signed=options.dedup == "near",
        unit_bytes=options.unit_bytes,
    )


def _cleaning_of(source: Source, options: PrepareOptions) -> Cleaning:
    return Cleaning(options.cleaning, is_code=source.options().get("kind") in CODE_KINDS)


class _Job:
    """One run of `prepare`, under the store's lock."""

    def __init__(
        self,
        out: Path,
        sources: Sequence[Source],
        tokenizer: Tokenizer,
        options: PrepareOptions,
        on_note: Note | None,
        walk: _Walk | None = None,
    ) -> None:
        self._out = out
        self._walk_beside = walk
        self._sources = {source.name: source for source in sources}
        self._tokenizer = tokenizer
        self._options = options
        self._note = on_note or (lambda line: None)
        versions = list_versions(out)
        if versions:
            mend_tokenizer(out, versions[-1], tokenizer)
        self._previous = open_store(out) if versions else None
        self._version = (versions[-1] if versions else 0) + 1
        self._known = KnownDocuments(self._previous, tokenizer)
        self._in_processes = _uses_processes(options)
        self._reads_ahead = self._in_processes and available_cores() > options.workers
        self._done_in_walk: dict[str, Counts] = {}  # by the unit's fingerprint
        self._units_taken_over = 0
        self._documents_reused = 0
        self._documents_repaired = 0
        self._cleaning = {name: _cleaning_of(source, options) for name, source in self._sources.items()}
        self._blocklist = Blocklist([*recorded_rules(self._previous), *options.block])
        self._decisions = _decisions(options, previous=self._previous, blocklist=self._blocklist)
        source_options = {name: self._source_options(name) for name in sorted(self._sources)}
        self._digest_options = {"sources": list(source_options.values()), **self._decisions.options()}
        # What a unit's record depends on besides its input. The previous version matters because records point into it.
        previous = self._previous.digest if self._previous else None
        blocked = self._blocklist.rules
        signed = self._decisions.near_threshold is not None
        self._work = UnitWork(
            out,
            task=digest_of([tokenizer.digest, list(source_options.values()), options.seed, blocked, signed, previous]),
            sources=self._sources,
            cleaning=self._cleaning,
            blocklist=self._blocklist,
            tokenizer=tokenizer,
            known=self._known,
            seed=options.seed,
            signed=signed,
        )
        self._memories = {
            name: SourceMemory(
                out,
                name,
                task=digest_of([tokenizer.digest, source_options[name], options.seed, blocked]),
                previous=self._previous,
                believe=not options.reread,
            )
            for name in self._sources
        }

    def run(self, started: float, on_progress: Progress | None) -> PrepareResult:
        """Everything from the lock to the commit."""
        fs.remove_leftovers(self._out)
        self._tell_what_differs()
        started_ns = time.time_ns()
        with settled_objects() if self._in_processes else contextlib.nullcontext():
            records = list(self._records(on_progress))
        if self._is_unchanged(records):
            manifest, committed = self._previous.manifest, False  # type: ignore[union-attr]
            self._documents_reused = manifest.num_documents
        else:
            manifest, committed = self._new_version([*records, *self._recognised()], started_ns)
        remove_strangers(self._out)
        return PrepareResult(
            store=self._out,
            manifest=manifest,
            seconds=time.perf_counter() - started,
            units=len(records),
            units_taken_over=self._units_taken_over,
            documents_reused=self._documents_reused,
            documents_repaired=self._documents_repaired,
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

    def _source_options(self, name: str) -> dict[str, Any]:
        return {**self._sources[name].options(), "cleaning": self._cleaning[name].options()}

    def _tell_what_differs(self) -> None:
        if self._previous is not None:
            for line in differences(self._previous.manifest, self._tokenizer, self._digest_options):
                self._note(line)

    def _new_version(self, records: Sequence[UnitRecord], started_ns: int) -> tuple[Manifest, bool]:
        """Builds the index over everything and commits it, unless it is what the latest version is already."""
        if not any(record.documents.num_rows for record in records):
            raise nothing_found(list(self._sources.values()), [record.skips for record in records])
        index = build_index(
            records,
            known_segments=self._known.segments,
            sources=sorted(self._sources),
            decisions=self._decisions,
            tokenizer_digest=self._tokenizer.digest,
            source_options=self._digest_options["sources"],
            read_tokens=SegmentTokens(self._out, self._tokenizer.dtype),
        )
        latest = self._previous.manifest if self._previous is not None else None
        # What was left out isn't in the digest, but every version tells the truth about it.
        same = latest is not None and (latest.digest, latest.counts) == (index.digest, index.counts)
        committed = not same or self._documents_repaired > 0
        manifest = self._commit(index, records) if committed or latest is None else latest
        self._remember(index, records, started_ns)
        return manifest, committed

    def _recognised(self) -> Iterator[UnitRecord]:
        """What inputs that didn't change contribute, source by source."""
        for memory in self._memories.values():
            numbers = memory.recognised_rows
            documents = no_documents()
            if len(numbers) and self._previous is not None:
                documents = document_rows(self._previous, numbers)
                self._documents_reused += len(numbers)
            yield UnitRecord(documents=documents, segments=[], skips=memory.recognised_skips)

    def _is_unchanged(self, records: Sequence[UnitRecord]) -> bool:
        """Whether nothing was read, nothing is missing and nothing else is asked for than the latest version has."""
        if self._previous is None or any(record.documents.num_rows for record in records):
            return False
        manifest = self._previous.manifest
        same_sources = {source["name"] for source in manifest.sources} == set(self._sources)
        same_task = (manifest.tokenizer["digest"], canonical_json(manifest.options)) == (
            self._tokenizer.digest,
            canonical_json(self._digest_options),
        )
        if not (same_sources and same_task and all(memory.is_unchanged for memory in self._memories.values())):
            return False
        skips = SkipTally()
        skips.merge([record.skips for record in records])
        skips.merge([memory.recognised_skips for memory in self._memories.values()])
        same_skips: bool = skips.counts == skips_before_index(manifest).counts
        return same_skips

    def _remember(self, index: VersionIndex, records: Sequence[UnitRecord], started_ns: int) -> None:
        """Writes what became of the inputs, for the next run. The version is committed: this may be lost."""
        left_out = {key: reason for record in records for key, reason in record.left_out}
        names = sorted(self._sources)
        for name, memory in self._memories.items():
            rows = np.flatnonzero(index.arrays["source"] == names.index(name))
            keys = index.provenance["key"].take(arrow_array(rows, pa.int64()))
            memory.save(started_ns=started_ns, digest=index.digest, keys=keys, left_out=left_out, latest=self._previous)

    def _records(self, on_progress: Progress | None) -> Iterator[UnitRecord]:
        """The record of each unit, in order; those that an earlier run finished are not run again."""
        finished: dict[int, UnitRecord] = {}
        walked: list[Unit] = []
        sizes = {"walked": 0, "done": 0}
        guard, walk_is_over = SpaceGuard(self._out), False
        signature_bytes = 0 if self._decisions.near_threshold is None else SIGNATURE_BYTES

        def unfinished() -> Generator[Unit]:
            nonlocal walk_is_over
            for unit in self._walk():
                done = self._done_in_walk.pop(unit.fingerprint, None)
                record = self._work.finished(unit) if done is None else self._work.record(unit)
                if record is not None:
                    finished[len(walked)] = record
                    self._units_taken_over += done is None and bool(unit.items)
                    self._count(done or (0, 0))
                walked.append(unit)
                sizes["walked"] += unit.input_bytes
                if record is None:
                    yield unit
            walk_is_over = True

        def progress(unit: Unit, record: UnitRecord) -> UnitRecord:
            if not isinstance(self._sources[unit.source], FilesSource):
                self._memories[unit.source].saw_unit(unit, record.documents["key"].to_pylist(), record.skips)
            sizes["done"] += unit.input_bytes
            if on_progress:
                on_progress(sizes["done"], sizes["walked"])
            return record

        number = 0
        with contextlib.closing(unfinished()) as units:
            for unit, counts in self._run(units):
                while walked[number] is not unit:
                    yield progress(walked[number], finished[number])
                    number += 1
                record = self._work.record(unit)
                rows = record.documents.num_rows
                guard.done(
                    input_bytes=unit.input_bytes,
                    written_bytes=sum(entry.bytes for entry in record.segments) + signature_bytes * rows,
                    documents=rows,
                    left_bytes=sizes["walked"] - sizes["done"] - unit.input_bytes if walk_is_over else None,
                )
                yield progress(unit, record)
                self._count(counts)
                number += 1
        for rest in range(number, len(walked)):
            yield progress(walked[rest], finished[rest])

    def _count(self, counts: Counts) -> None:
        reused, repaired = counts
        self._documents_reused += reused
        self._documents_repaired += repaired

    def _walk(self) -> Iterator[Unit]:
        """The units that must be looked at: those of inputs that the memory doesn't recognise."""
        for name, source in self._sources.items():
            memory = self._memories[name]
            if not isinstance(source, FilesSource):
                yield from (unit for unit in source.units(self._options.unit_bytes) if not memory.recognises_unit(unit))
            elif memory.num_files:
                yield from self._walk_again(source, memory)
            else:
                yield from self._walk_anew(source, memory)

    def _walk_anew(self, source: FilesSource, memory: SourceMemory) -> Iterator[Unit]:
        """The units of a source of which nothing is remembered."""
        walk = self._walk_beside
        for unit in source.units(self._options.unit_bytes) if walk is None else walk.units_of(source.name):
            memory.saw_files(unit)
            yield unit

    def _walk_again(self, source: FilesSource, memory: SourceMemory) -> Iterator[Unit]:
        """The units of files that changed. Where many are remembered, the walk is shared among processes.

        Each of them reads and encodes the first unit of its stretch at once: mostly there is no other, and to fork
        again, or to wait for the others' stretches, would take longer than it helps.
        """
        stretches = memory.stretches(self._options.workers if self._in_processes else 1)
        if len(stretches) > 1:
            _ = self._tokenizer.engine  # chosen and checked once, before the workers inherit it
        walk = functools.partial(self._walk_stretch, source, memory, begin=len(stretches) > 1)
        for walked in run_side_by_side(stretches, walk):
            memory.saw_stretch(walked.recognised, walked.changes)
            for number, unit in enumerate(source.units_of(walked.changes, self._options.unit_bytes)):
                if number == 0 and walked.first_unit is not None:
                    self._done_in_walk[unit.fingerprint] = walked.first_unit
                yield unit

    def _walk_stretch(
        self, source: FilesSource, memory: SourceMemory, numbers: range, *, begin: bool
    ) -> _WalkedStretch:
        stretch = memory.stretch(numbers)
        changes = source.changes(stretch)
        first_unit = None
        unit = next(source.units_of(changes, self._options.unit_bytes), None) if begin else None
        if unit is not None and self._work.finished(unit) is None:
            first_unit = self._work.write(unit, self._work.encode(unit, self._work.read(unit)))
        recognised = np.array(stretch.recognised, np.int64)
        return _WalkedStretch(recognised=recognised, changes=changes, first_unit=first_unit)

    def _run(self, units: Iterator[Unit]) -> Iterator[tuple[Unit, Counts]]:
        """Each unit with the number of its documents that were taken over, and of those whose tokens were damaged."""
        work, workers = self._work, self._options.workers
        first = list(itertools.islice(units, 1))
        if not first:
            return iter(())  # nobody to start for nothing
        _ = self._tokenizer.engine  # chosen and checked once, before the workers inherit it; the walk goes on beside
        self._known.load()
        first += itertools.islice(units, 1)
        units = itertools.chain(first, units)
        if self._in_processes and len(first) > 1:  # to fork for one unit takes longer than it helps
            return run_units_in_processes(
                units,
                read=work.read_in_parts,
                encode=work.encode,
                write=work.write,
                workers=workers,
                ahead=work.encode_ahead if self._reads_ahead else None,
            )
        # Walked before the work, not beside it: two threads of Python would take turns at the GIL, and lose by it.
        return run_units(list(units), read=work.read, encode=work.encode, write=work.write, workers=workers)

    def _commit(self, index: VersionIndex, records: Sequence[UnitRecord]) -> Manifest:
        skips = SkipTally()
        skips.merge(record.skips for record in records)
        return commit_version(
            self._out,
            index,
            version=self._version,
            dtype=self._tokenizer.dtype.str,
            tokenizer=self._tokenizer.describe(),
            tokenizer_file=write_tokenizer(self._out, self._tokenizer.spec.source_json),
            sources=[{"name": name, "location": self._sources[name].location} for name in sorted(self._sources)],
            splits=list(self._decisions.shares),
            skipped_examples=skips.examples,
        )


class _Walk:
    """Units of several sources, one source after the other, as a process beside finds them."""

    def __init__(self, units: Iterator[Unit]) -> None:
        self._units = units
        self._next: Unit | None = None  # the first unit of another source, met when the one before was over

    def units_of(self, source: str) -> Iterator[Unit]:
        """Those of one source. Sources are asked for in the order of the walk."""
        if self._next is None:
            self._next = next(self._units, None)
        while self._next is not None and self._next.source == source:
            yield self._next
            self._next = next(self._units, None)


@contextlib.contextmanager
def _walk_beside(sources: Sequence[Source], out: Path, options: PrepareOptions) -> Iterator[_Walk | None]:
    """For a new store of files: a process that walks while this one loads the tokenizer; when the workers begin, they
    have all cores. A store that exists remembers files, and walks otherwise."""
    files = [source for source in sources if isinstance(source, FilesSource)]
    if not files or list_versions(out) or not _uses_processes(options):
        yield None
        return
    with drawn_beside(unit for source in files for unit in source.units(options.unit_bytes)) as units:
        yield _Walk(units)


def _uses_processes(options: PrepareOptions) -> bool:
    wanted = options.workers > 1 if options.processes is None else options.processes
    return wanted and can_fork()


@dataclass(frozen=True, kw_only=True)
class _WalkedStretch:
    """A part of a walk over files that are remembered.

    Attributes:
        recognised: the numbers of those that are what they were.
        changes: everything else that was found.
        first_unit: what came of the first unit of these, if it was read and written.
    """

    recognised: npt.NDArray[np.int64]
    changes: list[FileEntry]
    first_unit: Counts | None


def _decisions(options: PrepareOptions, *, previous: Store | None, blocklist: Blocklist) -> Decisions:
    return Decisions.from_words(
        split=options.split,
        seed=options.seed,
        dedup=options.dedup,
        near_threshold=options.near_threshold,
        split_by=options.split_by,
        split_at=options.split_at,
        time_field=options.time_field,
        previous=previous,
        blocklist=blocklist,
    )


def _counted(number: int, one: str, more: str) -> str:
    return f"{number} {one if number == 1 else more}"


def _refuse_foreign_folder(out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise NotAStoreError(f"output {str(out)!r} is a file, not a store", hint="choose another --out")
    if is_a_version(out):  # a store of that name would stand for it from then on
        raise no_store(out)
    if not out.is_dir() or list_versions(out):
        return
    # Before its first commit a store holds these and nothing else; a `manifests` folder alone proves nothing.
    ours = {MANIFESTS, SEGMENTS, INDEX, TOKENIZERS, WORK, CACHE, LOCK}
    found = {entry.name for entry in out.iterdir()}
    if found and (not (out / MANIFESTS).is_dir() or found - ours):
        raise NotAStoreError(
            f"output {str(out)!r} is a folder with other things in it, not a store", hint="choose a new or empty --out"
        )
