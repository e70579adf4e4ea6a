"""Whether a store is what was committed, and keeps its promises.

Every byte of every file that any version names is compared with its checksum; each document's tokens are hashed again;
the digest and the counts are computed again from the index; every number of the index points into the store; no id is
beyond the vocabulary; no content is in two splits. Unlike a reader, it goes on after a problem, so that one run lists
them all. `quick` leaves out the tokens themselves, of which it looks at the sizes only.

One pass over the tokens at more than 1 GB/s per core (bench verify), however many versions share them. Memory: the
index of one version, and 32 bytes per document of segments that a later version names too.
"""

from __future__ import annotations

import errno
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.engines.processes import can_fork, run_units_in_processes
from penstock.errors import DamagedStoreError, DiskError, PenstockError
from penstock.hashing import RunningChecksum, token_hash
from penstock.store.layout import (
    BLOCK_BYTES,
    CACHE,
    MANIFESTS,
    SEGMENTS,
    FileEntry,
    Manifest,
    SegmentEntry,
    manifest_name,
)
from penstock.store.payload import Ranges, SegmentFindings, examine_segment, file_windows
from penstock.store.places import DocumentPlaces, document_places
from penstock.store.promises import Broken, DocumentColumns, broken_promises, read_document_columns
from penstock.store.reader import Store, link_on_the_way, list_versions, no_store, read_manifest
from penstock.store.writer import decode_table

__all__ = ["Entry", "Examination", "Problem", "Verification", "examine", "examine_entry", "verify"]

MOST_PROBLEMS_OF_A_KIND = 100
# Below this a second process takes longer to start than it saves.
LEAST_BYTES_FOR_PROCESSES = 2**26

# The system's limits, not the store's condition: to list every file as unreadable would slander it.
_NOT_THE_STORE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)

Progress = Callable[[int, int], None]
Entry = FileEntry | SegmentEntry


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Something that isn't as committed."""

    file: str
    kind: str
    detail: str


@dataclass(frozen=True, kw_only=True)
class Verification:
    """What `examine` found.

    Attributes:
        problems: none means whole.
        versions: those there are.
        bytes: read; of files that versions share, once.
        seconds: taken.
        quick: whether the tokens themselves were left out.
    """

    problems: list[Problem]
    versions: list[int]
    bytes: int
    seconds: float
    quick: bool


def verify(path: Path, *, quick: bool = False) -> list[Problem]:
    """All problems of all versions of a store; an empty list means whole.

    Raises:
        NotAStoreError: there is no store at `path`.
    """
    return examine(path, quick=quick).problems


def examine(path: Path, *, quick: bool = False, workers: int = 1, on_progress: Progress | None = None) -> Verification:
    """All problems of all versions of a store, and what it took to find them.

    Args:
        path: the store.
        quick: leave out the tokens themselves.
        workers: processes that read tokens, where they can be forked.
        on_progress: given bytes done and in all.

    Raises:
        NotAStoreError: there is no store at `path`.
        DiskError: the system has no more files or memory to give.
    """
    started = time.perf_counter()
    versions = list_versions(path)
    if not versions:
        raise no_store(path)
    run = Examination(path, quick=quick, workers=workers, on_progress=on_progress)
    try:
        run.versions(versions)
        run.problems += cache_problems(path)
    except OSError as error:
        raise DiskError.from_os_error(error, doing="reading") from error
    return Verification(
        problems=run.problems,
        versions=versions,
        bytes=run.bytes_done,
        seconds=time.perf_counter() - started,
        quick=quick,
    )


def cache_problems(path: Path) -> list[Problem]:
    """No version needs what the store remembers of its inputs, but damage there is damage to the disk too."""
    if (path / CACHE).is_symlink():
        return [Problem(file=CACHE, kind="missing", detail="it is a link")]
    detail = "it isn't what was written; remove it, or prepare again, which writes it anew"
    return [
        Problem(file=str(file.relative_to(path)), kind="checksum", detail=detail)
        for file in sorted(path.glob(f"{CACHE}/*.arrow"))
        if decode_table(file) is None
    ]


def examine_entry(path: Path, entry: Entry) -> list[Problem]:
    """One file that a manifest names, or one segment, on its own: as `examine` does it, but without what it means."""
    run = Examination(path, quick=False, workers=1, on_progress=None)
    problems = run.entry_problems(entry)
    if isinstance(entry, SegmentEntry) and not problems:
        dtype = np.dtype(f"<u{entry.bytes // entry.tokens}")
        problems = _segment_problems(entry, run.examined(entry, dtype, Ranges.none()))
    return problems


@dataclass(frozen=True, kw_only=True)
class _Opened:
    """What the tokens of a version are judged by."""

    columns: DocumentColumns
    places: DocumentPlaces
    vocab_size: int


class Examination:
    """One run over a store; what versions share is looked at once."""

    def __init__(self, path: Path, *, quick: bool, workers: int, on_progress: Progress | None) -> None:
        self.problems: list[Problem] = []
        self.bytes_done = 0
        self._bytes_total = 0
        self._path = path
        self._quick = quick
        self._workers = workers
        self._on_progress = on_progress
        self._found: dict[Entry, list[Problem]] = {}  # of everything but the tokens
        self._hashed: dict[SegmentEntry, SegmentFindings] = {}  # while a later version names the segment too
        self._bad_segments: set[SegmentEntry] = set()
        self._last_version_with: dict[SegmentEntry, int] = {}

    def versions(self, versions: Sequence[int]) -> None:
        """Looks at all of them."""
        manifests = {version: self._manifest(version) for version in versions}
        entries = {entry: None for manifest in manifests.values() if manifest for entry in _entries(manifest)}
        self._bytes_total = sum(self._bytes_to_read(entry) for entry in entries)
        self._last_version_with = {
            entry: version for version, manifest in manifests.items() if manifest for entry in manifest.segments
        }
        for version, manifest in manifests.items():
            if manifest is not None:
                self._version(version, manifest)

    def manifest(self, version: int) -> Manifest:
        """A version's manifest; a remote store's is fetched first."""
        return read_manifest(self._path, version)

    def store(self, version: int) -> Store:
        """A version, opened."""
        return Store(self._path, version)

    def _bytes_to_read(self, entry: Entry) -> int:
        if not isinstance(entry, SegmentEntry):
            return entry.bytes
        return _blocks_entry(entry).bytes + (0 if self._quick else entry.bytes)

    def _manifest(self, version: int) -> Manifest | None:
        try:
            return self.manifest(version)
        except (DamagedStoreError, DiskError) as error:
            self.problems.append(Problem(file=_manifest_file(version), kind="manifest", detail=str(error)))
            return None

    def _version(self, version: int, manifest: Manifest) -> None:
        for entry in _entries(manifest):
            if entry not in self._found:
                self._found[entry] = self.entry_problems(entry)
                self.problems += self._found[entry]
        # With a file in doubt, what the index means can't be judged; blocks still can.
        doubtful = any(self._found[entry] for entry in _entries(manifest))
        opened = None if doubtful else self._opened(version)
        if not self._quick:
            self._payload(version, manifest, opened)

    def _opened(self, version: int) -> _Opened | None:
        """The documents of a version, once its promises are checked."""
        file = _manifest_file(version)
        try:
            with self.store(version) as store:
                columns = read_document_columns(store)
                tokenizer = store.tokenizer()
                store.signatures()
                opened = _Opened(columns=columns, places=document_places(store), vocab_size=tokenizer.vocab_size)
                self._add(file, broken_promises(store, columns, tokenizer))
        except (PenstockError, RecursionError, ValueError) as error:  # checksums fit, but nobody of ours wrote this
            self._add(file, [("meaning", str(error))])
            return None
        overlapping = opened.places.overlapping.tolist()
        self._add(file, (("tokens", f"document {number} overlaps with another") for number in overlapping))
        return opened

    def _add(self, file: str, found: Iterable[Broken]) -> None:
        """Adds (kind, detail) pairs; of one kind no more than anybody reads."""
        counts: dict[str, int] = {}
        for kind, detail in found:
            counts[kind] = counts.get(kind, 0) + 1
            if counts[kind] <= MOST_PROBLEMS_OF_A_KIND:
                self.problems.append(Problem(file=file, kind=kind, detail=detail))
        for kind, count in counts.items():
            if count > MOST_PROBLEMS_OF_A_KIND:
                detail = f"and {count - MOST_PROBLEMS_OF_A_KIND} more of this kind"
                self.problems.append(Problem(file=file, kind=kind, detail=detail))

    # Files

    def entry_problems(self, entry: Entry) -> list[Problem]:
        """Of a file all there is; of a segment its checksums' file and its size."""
        if not isinstance(entry, SegmentEntry):
            return self._file_problems(entry)
        tokens = FileEntry(name=_tokens_name(entry), bytes=entry.bytes, checksum="")
        size = self._size_problem(tokens)
        return self._file_problems(_blocks_entry(entry)) + ([size] if size else [])

    def _size_problem(self, entry: FileEntry) -> Problem | None:
        file = self._path / entry.name
        try:
            found = file.stat(follow_symlinks=False)
        except (FileNotFoundError, NotADirectoryError):
            return Problem(file=entry.name, kind="missing", detail="the manifest names it")
        except OSError as error:
            return _unreadable(entry.name, error)
        if not stat.S_ISREG(found.st_mode) or (link := link_on_the_way(self._path, entry.name)):
            what = f"{link} is a link" if stat.S_ISREG(found.st_mode) else "it is a link or no file at all"
            return Problem(file=entry.name, kind="missing", detail=f"the manifest names it, but {what}")
        if found.st_size != entry.bytes:
            detail = f"{found.st_size} bytes, committed were {entry.bytes}"
            return Problem(file=entry.name, kind="size", detail=detail)
        return None

    def _file_problems(self, entry: FileEntry) -> list[Problem]:
        if problem := self._size_problem(entry):
            return [problem]
        running = RunningChecksum()
        try:
            for window in file_windows(self._path / entry.name):
                running.update(window)
                self._progress(len(window))
        except OSError as error:  # a bad sector, say: the other files are still worth reading
            return [_unreadable(entry.name, error)]
        if running.hex() != entry.checksum:
            return [Problem(file=entry.name, kind="checksum", detail="content differs from what was committed")]
        return []

    def _progress(self, num_bytes: int) -> None:
        self.bytes_done += num_bytes
        if self._on_progress is not None:
            self._on_progress(min(self.bytes_done, self._bytes_total), self._bytes_total)

    # Tokens

    def _payload(self, version: int, manifest: Manifest, opened: _Opened | None) -> None:
        """Reads the segments that no version before has read, or in which this one has documents of its own."""
        readable = [
            number
            for number, entry in enumerate(manifest.segments)
            if not self._found[entry] and entry not in self._bad_segments
        ]
        unread = [number for number in readable if not self._is_known(manifest.segments[number], number, opened)]

        def examined(number: int) -> SegmentFindings | OSError:
            entry = manifest.segments[number]
            ranges = opened.places.ranges(number) if opened else Ranges.none()
            try:
                return self.examined(entry, np.dtype(manifest.dtype), ranges)
            except OSError as error:
                return error

        for number, findings in self._examined_all(unread, examined, manifest):
            entry = manifest.segments[number]
            self._progress(0 if entry in self._hashed else entry.bytes)
            if problems := _segment_problems(entry, findings):
                self.problems += problems
                self._bad_segments.add(entry)
            elif isinstance(findings, SegmentFindings):
                self._hashed[entry] = findings
        if opened is not None:
            self._judge_tokens(version, manifest, readable, opened)

    def _is_known(self, entry: SegmentEntry, number: int, opened: _Opened | None) -> bool:
        """Whether an earlier version's pass over this segment tells all that this version asks."""
        known = self._hashed.get(entry)
        return known is not None and (
            opened is None or known.ranges.positions_of(opened.places.ranges(number)) is not None
        )

    def examined(self, entry: SegmentEntry, dtype: np.dtype[Any], ranges: Ranges) -> SegmentFindings:
        """What a pass over a segment finds."""
        checksums = np.frombuffer((self._path / _blocks_entry(entry).name).read_bytes(), "<u8")
        file = self._path / _tokens_name(entry)
        return examine_segment(file, num_bytes=entry.bytes, dtype=dtype, checksums=checksums, ranges=ranges)

    def _examined_all(
        self, work: Sequence[int], examined: Callable[[int], SegmentFindings | OSError], manifest: Manifest
    ) -> Iterator[tuple[int, SegmentFindings | OSError]]:
        workers = min(self._workers, len(work))
        large = sum(manifest.segments[number].bytes for number in work) >= LEAST_BYTES_FOR_PROCESSES
        if workers < 2 or not large or not can_fork():
            return ((number, examined(number)) for number in work)
        return run_units_in_processes(
            work,
            read=lambda number: None,
            encode=lambda number, _: examined(number),
            write=lambda number, findings: findings,
            workers=workers,
        )

    def _judge_tokens(self, version: int, manifest: Manifest, readable: Sequence[int], opened: _Opened) -> None:
        empty, hash_of_nothing = opened.places.empty, np.frombuffer(token_hash(b""), np.uint8)
        wrong = [empty[(opened.columns.token_hashes[empty] != hash_of_nothing).any(axis=1)]]
        for number in readable:
            entry = manifest.segments[number]
            found = self._hashed.get(entry)
            if found is None:
                continue
            if found.largest_id >= opened.vocab_size:
                detail = f"it has the id {found.largest_id}, the vocabulary ends at {opened.vocab_size - 1}"
                self._add(_tokens_name(entry), [("tokens", detail)])
            documents, stretches = opened.places.documents_in(number)
            positions = found.ranges.positions_of(opened.places.ranges(number))
            if positions is not None:
                hashes = found.hashes[positions][stretches]
                wrong.append(documents[(hashes != opened.columns.token_hashes[documents]).any(axis=1)])
            if version == self._last_version_with[entry]:
                del self._hashed[entry]
        detail = "the tokens of document {} aren't those it was committed with"
        numbers = np.sort(np.concatenate(wrong)).tolist()
        self._add(_manifest_file(version), (("tokens", detail.format(number)) for number in numbers))


def _manifest_file(version: int) -> str:
    return f"{MANIFESTS}/{manifest_name(version)}"


def _entries(manifest: Manifest) -> list[Entry]:
    return [*manifest.index, manifest.tokenizer_file, *manifest.segments]


def _tokens_name(entry: SegmentEntry) -> str:
    return f"{SEGMENTS}/{entry.name}.tokens"


def _blocks_entry(entry: SegmentEntry) -> FileEntry:
    """The file of block checksums, as if the manifest named it."""
    num_bytes = 8 * -(-entry.bytes // BLOCK_BYTES)
    return FileEntry(name=f"{SEGMENTS}/{entry.name}.blocks", bytes=num_bytes, checksum=entry.checksum)


def _segment_problems(entry: SegmentEntry, findings: SegmentFindings | OSError) -> list[Problem]:
    name = _tokens_name(entry)
    if isinstance(findings, OSError):
        return [_unreadable(name, findings)]
    problems = [
        Problem(
            file=name,
            kind="checksum",
            detail=f"the block at byte {block * BLOCK_BYTES} differs from what was committed",
        )
        for block in findings.bad_blocks
    ]
    if findings.bytes_read != entry.bytes:
        detail = f"{findings.bytes_read} bytes, committed were {entry.bytes}"
        problems.append(Problem(file=name, kind="size", detail=detail))
    return problems


def _unreadable(name: str, error: OSError) -> Problem:
    if error.errno in _NOT_THE_STORE:
        raise error
    return Problem(file=name, kind="unreadable", detail=error.strerror or str(error))
