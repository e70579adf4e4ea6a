"""Reads a committed version over memory maps.

At open: the manifest's own checksum, the size of every file it names, the checksums of the index arrays and whether
their numbers point into the store (0.2 s per 10 M documents). On first touch of a block of tokens: that block's
checksum, remembered in a bitmap, so that no token reaches a model unchecked and later passes cost nothing. Nothing is
ever written through a map.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import resource
import stat
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DamagedStoreError, DiskError, NotAStoreError, StoreError
from penstock.hashing import RunningChecksum, checksum, checksum_hex
from penstock.store.layout import (
    BLOCK_BYTES,
    DOCUMENTS_COLUMNS,
    DOCUMENTS_TABLE,
    INDEX_ARRAYS,
    MANIFESTS,
    REASONS,
    SEGMENTS,
    FileEntry,
    Manifest,
    SegmentEntry,
    decode_manifest,
    manifest_name,
)
from penstock.store.urls import is_url
from penstock.tokenize import Tokenizer, TokenizerSpec

__all__ = ["Segment", "Store", "is_a_version", "list_versions", "no_store", "open_store", "read_manifest"]

TABLE_BATCH_ROWS = 2**16
SIGNATURES = "signatures.array"
SIGNATURE_NUMBERS = 128
# A hundred thousand segments are a fifth of this; what is larger wasn't written by us and isn't read into memory.
LARGEST_MANIFEST_BYTES = 2**26
# A table of documents shrinks to a tenth or so; one that would grow this much is made to fill the memory.
LEAST_TABLE_LIMIT = 2**25
LARGEST_TABLE_RATIO = 300
_CHECK_BYTES = 2**20


def list_versions(path: Path) -> list[int]:
    """The committed versions of a store, oldest first.

    Raises:
        DiskError: the folder can't be read.
    """
    folder = path / MANIFESTS
    with _reading(folder):
        if not folder.is_dir():
            return []
        names = [entry.name for entry in folder.iterdir()]
    return version_numbers(names)


def version_numbers(names: Iterable[str]) -> list[int]:
    """The versions whose manifests are among some file names, oldest first."""
    names = [name for name in names if re.fullmatch(r"[0-9]{6,18}\.json", name)]
    versions = {int(name.removesuffix(".json")): name for name in names}
    return sorted(version for version, name in versions.items() if name == manifest_name(version))


def is_a_version(path: Path) -> bool:
    """Whether a path is no folder but names a version of a store, as `PATH@3`."""
    folder, version = _split_version(os.fspath(path), None)
    return version is not None and bool(list_versions(folder))


def no_store(path: Path) -> NotAStoreError:
    """What to say of a path at which there is no committed version."""
    if is_a_version(path):
        store = str(path).rpartition("@")[0]
        return NotAStoreError(
            f"{str(path)!r} is a version, and a whole store is expected", hint=f"name the store: {store}"
        )
    if not path.is_dir():
        state = "is a file, not a store" if path.exists() else "doesn't exist"
    elif not (path / MANIFESTS).is_dir() and any(path.iterdir()):
        state = "is a folder of other things, not a store"
    else:
        return NotAStoreError(
            f"{str(path)!r} holds no committed version", hint=f"make one: penstock prepare INPUT --out {path}"
        )
    return NotAStoreError(
        f"{str(path)!r} {state}",
        hint=f"name a store; to make one: penstock prepare INPUT --out {'NEW-FOLDER' if path.exists() else path}",
    )


def open_store(path: Path | str, *, version: int | None = None) -> Store:
    """Opens a store; `PATH@3` or `version=3` opens an older version.

    A URL (`s3://bucket/store`) is read through a local copy of what is used; see `penstock.store.remote`.

    Raises:
        NotAStoreError: there is no store.
        StoreError: it has no such version.
        DamagedStoreError: what is on disk isn't what was committed.
    """
    if is_url(os.fspath(path)):
        from penstock.store.remote import open_remote

        return open_remote(os.fspath(path), version=version)
    folder, version = _split_version(os.fspath(path), version)
    versions = list_versions(folder)
    if not versions:
        raise no_store(folder)
    if version is not None and version not in versions:
        raise StoreError(
            f"{folder} has no version {version}", hint=f"versions: {', '.join(map(str, versions))} (write {folder}@N)"
        )
    return Store(folder, version if version is not None else versions[-1])


def _split_version(text: str, version: int | None) -> tuple[Path, int | None]:
    named = re.fullmatch(r"(.+)@([0-9]{1,18})", text, re.DOTALL)
    if named and not Path(text).exists():
        return Path(named[1]), int(named[2])
    return Path(text), version


def read_manifest(path: Path, version: int) -> Manifest:
    """The manifest of a version.

    Raises:
        DamagedStoreError: it isn't what was committed.
        DiskError: it can't be read.
    """
    file = path / MANIFESTS / manifest_name(version)
    if link := link_on_the_way(path, f"{MANIFESTS}/{file.name}"):
        raise _damaged(file, f"{link} is a link")
    with _reading(file):
        found = file.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise _damaged(file, "it is no file")
        if found.st_size > LARGEST_MANIFEST_BYTES:
            raise _damaged(file, f"it has {found.st_size} bytes, at most {LARGEST_MANIFEST_BYTES} are a manifest")
        data = file.read_bytes()
    manifest = decode_manifest(data, path=file)
    if manifest.version != version:
        raise _damaged(file, f"it is the manifest of version {manifest.version}")
    for names in ([entry.name for entry in manifest.segments], [entry.name for entry in manifest.index]):
        if len(set(names)) < len(names):
            raise _damaged(file, "it names a file twice")
    return manifest


def link_on_the_way(path: Path, name: str) -> str | None:
    """The part of a store's own file name that is a symbolic link, if one is: it could lead anywhere."""
    place = path
    for part in name.split("/"):
        place = place / part
        if place.is_symlink():
            return str(place.relative_to(path))
    return None


class Segment:
    """The tokens of one segment, mapped; every block is checked the first time it is touched."""

    def __init__(self, store: Path, entry: SegmentEntry, dtype: np.dtype[Any], seen: npt.NDArray[np.bool_]) -> None:
        self.path = store / SEGMENTS / f"{entry.name}.tokens"
        blocks_path = self.path.with_suffix(".blocks")
        with _reading(blocks_path):
            blocks = blocks_path.read_bytes()
        if checksum_hex(blocks) != entry.checksum:
            raise _damaged(blocks_path, "its checksum isn't the manifest's")
        self._checksums = np.frombuffer(blocks, "<u8")
        self._map = _mapped(self.path, entry.bytes)
        self._bytes = memoryview(self._map)
        self.tokens: npt.NDArray[Any] = np.frombuffer(self._map, dtype)
        self._seen = seen

    def check_blocks(self, blocks: Iterable[int]) -> None:
        """Compares blocks with their checksums, those not seen before."""
        for block in blocks:
            if self._seen[block]:
                continue
            start = block * BLOCK_BYTES
            if checksum(self._bytes[start : start + BLOCK_BYTES]) != self._checksums[block]:
                raise _damaged(self.path, f"the 64 KiB block at byte {start} isn't what was committed")
            self._seen[block] = True

    def check(self, offset: int, length: int) -> None:
        """The same for the blocks of a span."""
        first, last = offset * self.tokens.itemsize, (offset + length) * self.tokens.itemsize
        self.check_blocks(range(first // BLOCK_BYTES, -(-last // BLOCK_BYTES)))

    def close(self) -> None:
        """Gives the map back once nothing views it any more."""
        self.tokens = np.empty(0, self.tokens.dtype)
        self._bytes.release()
        with contextlib.suppress(BufferError):  # somebody still holds a view; it goes when the view does
            self._map.close()


class Store:
    """A committed version of a store. Get one from `open_store`; close it or use it as a context manager.

    Attributes:
        is_swept: whether a reader visits its segments one after another because not all of them may be here at once.
    """

    is_swept = False

    def __init__(self, path: Path, version: int) -> None:
        self.path = path
        self.version = version
        self.manifest = read_manifest(path, version)
        self.dtype = np.dtype(self.manifest.dtype)
        self._check_sizes()
        self.arrays: dict[str, npt.NDArray[Any]] = self._read_arrays()
        if problem := index_problem(self.manifest, self.arrays):
            raise _damaged(path / self.manifest.index[0].name.rpartition("/")[0], problem)
        self._segments: list[Segment | None] = [None] * len(self.manifest.segments)
        blocks = [-(-entry.bytes // BLOCK_BYTES) for entry in self.manifest.segments]
        self._first_block = np.concatenate([[0], np.cumsum(blocks, dtype=np.int64)])
        self._seen = np.zeros(int(self._first_block[-1]), np.bool_)

    @property
    def location(self) -> str:
        """What `open_store` finds this store by: its folder, or the URL of a remote one."""
        return str(self.path)

    @property
    def cache_bytes(self) -> int | None:
        """Bound on how much of its segments is kept on this machine; None where all of them are."""
        return None

    @property
    def digest(self) -> str:
        """The store digest of this version."""
        return self.manifest.digest

    @property
    def num_documents(self) -> int:
        """Documents in the index, excluded ones among them."""
        return self.manifest.num_documents

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the tokens, from the copy in the store."""
        entry = self.manifest.tokenizer_file
        data = self._checked_bytes(entry)
        end_token = next(
            (
                name
                for name, token in self.manifest.tokenizer["control_tokens"].items()
                if token == self.manifest.tokenizer["end_id"]
            ),
            None,
        )
        spec = TokenizerSpec.from_json(data, origin=str(self.path / entry.name), end_token=end_token)
        return Tokenizer(spec, origin=self.manifest.tokenizer["origin"])

    def split_number(self, split: str) -> int:
        """Number of a split in the `split` array."""
        if split not in self.manifest.splits:
            raise StoreError(f"the store has no split {split!r}", hint=f"splits: {', '.join(self.manifest.splits)}")
        return self.manifest.splits.index(split)

    def kept_documents(self, split: str | None = None) -> npt.NDArray[np.int64]:
        """Numbers of the documents in the data, in canonical order; of one split when named."""
        chosen = self.arrays["reason"] == REASONS.index("kept")
        if split is not None:
            chosen = chosen & (self.arrays["split"] == self.split_number(split))
        return np.flatnonzero(chosen)

    def segment(self, number: int) -> Segment:
        """A segment, opened on first use."""
        segment = self._segments[number]
        if segment is None:
            segment = self._segments[number] = self._mapped_segment(number)
        return segment

    def _mapped_segment(self, number: int) -> Segment:
        seen = self._seen[self._first_block[number] : self._first_block[number + 1]]
        return Segment(self.path, self.manifest.segments[number], self.dtype, seen)

    def segments(self, numbers: Iterable[int]) -> list[Segment]:
        """Several of them; those that are open already cost nearly nothing, which counts for one who asks for all of
        them again and again because they may have been let go of."""
        opened = self._segments
        return [opened[number] or self.segment(number) for number in numbers]

    def present(self, numbers: Container[int]) -> list[int]:
        """Which of some segments are on this machine now."""
        return [number for number in range(len(self._segments)) if number in numbers]

    def visit(self, number: int, read: Callable[[Segment], None], *, is_cancelled: Callable[[], bool]) -> None:
        """Has a segment read that nobody needs to keep afterwards.

        Args:
            number: the segment.
            read: gets it; checks what it reads, and keeps nothing that refers to it. May be asked twice.
            is_cancelled: asked while the segment is fetched, where it has to be.
        """
        read(self.segment(number))

    def expect(self, documents: npt.NDArray[np.int64]) -> None:
        """Says which documents will be read, in order; a remote store begins to fetch them. Here there is no need."""

    def unchecked(
        self,
        segments: npt.NDArray[np.int64],
        offsets: npt.NDArray[np.int64],
        lengths: npt.NDArray[np.int64] | np.int64,
    ) -> npt.NDArray[np.bool_]:
        """Which spans must still go through `read`, because a block of theirs may not have been checked yet. One length
        will do for all."""
        block_tokens = BLOCK_BYTES // self.dtype.itemsize
        first, last = offsets // block_tokens, (offsets + (lengths - 1)) // block_tokens
        base = self._first_block[segments]
        checked: npt.NDArray[np.bool_] = self._seen[base + first] & self._seen[base + last]
        if not isinstance(lengths, np.int64) or lengths > block_tokens:
            # Spans of three blocks and more are long enough that asking `read` each time costs nothing by comparison.
            checked &= last - first < 2
        return ~checked

    def read(self, segment: int, offset: int, length: int) -> npt.NDArray[Any]:
        """Checked tokens of a span, as a read-only view."""
        opened = self.segment(segment)
        opened.check(offset, length)
        return opened.tokens[offset : offset + length]

    def document_tokens(self, document: int) -> npt.NDArray[Any]:
        """Checked tokens of a document, begin and end tokens included.

        Raises:
            StoreError: there is no document of that number.
        """
        self.check_document(document)
        return self.read(*(int(self.arrays[name][document]) for name in ("segment", "offset", "length")))

    def check_document(self, document: int) -> None:
        """Refuses a number that no document has."""
        if not 0 <= document < self.num_documents:
            raise StoreError(
                f"the store has no document {document}", hint=f"documents are numbered 0 to {self.num_documents - 1}"
            )

    @cached_property
    def _provenance(self) -> Any:
        import pyarrow as pa

        entry = self._documents_entry()
        with self._decoding(entry):
            # In this thread: with Arrow's own, one of twelve short commands aborted while Python was ending.
            table = self._opened_table(self._checked_bytes(entry), entry).read(use_threads=False)
            table.validate(full=True)
            if table.num_rows != self.num_documents or any(column.null_count for column in table.columns):
                raise pa.ArrowInvalid("values are missing")
        return table

    @contextlib.contextmanager
    def _decoding(self, entry: FileEntry) -> Iterator[None]:
        import pyarrow as pa

        try:
            yield
        except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
            first_line = str(error).partition("\n")[0]
            raise _damaged(self.path / entry.name, f"it isn't a Parquet table ({first_line})") from None

    def _opened_table(self, content: Any, entry: FileEntry) -> Any:
        """The Parquet file of the documents, of which nothing is decoded before columns, rows and sizes are right."""
        import pyarrow as pa
        import pyarrow.parquet

        file = pa.parquet.ParquetFile(pa.BufferReader(content), pre_buffer=False)
        found = {column.name: str(column.type) for column in file.schema_arrow}
        groups = [file.metadata.row_group(number) for number in range(file.metadata.num_row_groups)]
        rows = sum(group.num_rows for group in groups)
        is_named = found == DOCUMENTS_COLUMNS and len(file.schema_arrow) == len(found)
        if not is_named or not rows == file.metadata.num_rows == self.num_documents:
            raise _damaged(self.path / entry.name, f"it isn't the table of {self.num_documents} documents")
        num_bytes = sum(group.total_byte_size for group in groups)
        if num_bytes > LEAST_TABLE_LIMIT + LARGEST_TABLE_RATIO * entry.bytes:
            raise _damaged(self.path / entry.name, f"its {entry.bytes} bytes would become {num_bytes}")
        return file

    def _documents_entry(self) -> FileEntry:
        for entry in self.manifest.index:
            if entry.name.endswith(f"/{DOCUMENTS_TABLE}"):
                return entry
        raise _damaged(self.path, f"the index lacks {DOCUMENTS_TABLE}")

    def provenance(self) -> Any:
        """The documents table (pyarrow), row i for document i; checked and read on first use."""
        return self._provenance

    def provenance_batches(self, columns: Sequence[str]) -> Iterator[Any]:
        """Some columns of the documents table in batches (pyarrow), checked, without the rest of it in memory."""
        import pyarrow as pa

        entry = self._documents_entry()
        with _reading(self.path / entry.name):
            mapped = pa.memory_map(os.fsencode(self.path / entry.name))
        with mapped as file:
            content = file.read_buffer()
            if content.size != entry.bytes or checksum_hex(content) != entry.checksum:
                raise _damaged(self.path / entry.name, "its checksum isn't the manifest's")
            with self._decoding(entry):
                table = self._opened_table(content, entry)
                num_rows = 0
                for batch in table.iter_batches(TABLE_BATCH_ROWS, columns=list(columns), use_threads=False):
                    batch.validate(full=True)
                    num_rows += batch.num_rows
                    if any(column.null_count for column in batch.columns):
                        raise pa.ArrowInvalid("values are missing")
                    yield batch
                if num_rows != self.num_documents:
                    raise pa.ArrowInvalid(f"{num_rows} rows are there")

    def signatures(self) -> npt.NDArray[np.uint16] | None:
        """[documents, 128] numbers by which near copies are known, mapped; None in a store that has none.

        Raises:
            DamagedStoreError: they aren't what was committed; all of them are checked on first use.
        """
        return self._signatures

    @cached_property
    def _signatures(self) -> npt.NDArray[np.uint16] | None:
        entry = next((entry for entry in self.manifest.index if entry.name.endswith(f"/{SIGNATURES}")), None)
        if entry is None:
            return None
        path, width = self.path / entry.name, 2 * SIGNATURE_NUMBERS
        if entry.bytes != width * self.num_documents:
            raise _damaged(path, f"its {entry.bytes} bytes aren't {width} for each of {self.num_documents} documents")
        if not entry.bytes:  # nothing can't be mapped
            return np.empty((0, SIGNATURE_NUMBERS), "<u2")
        content = _mapped(path, entry.bytes)
        found = RunningChecksum()
        for start in range(0, entry.bytes, _CHECK_BYTES):
            found.update(memoryview(content)[start : start + _CHECK_BYTES])
        if found.hex() != entry.checksum:
            raise _damaged(path, "its checksum isn't the manifest's")
        return np.frombuffer(content, "<u2").reshape(-1, SIGNATURE_NUMBERS)

    def close(self) -> None:
        """Unmaps the segments."""
        for segment in self._segments:
            if segment is not None:
                segment.close()
        self._segments = [None] * len(self.manifest.segments)

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_sizes(self) -> None:
        sizes = [(entry.name, entry.bytes) for entry in [*self.manifest.index, self.manifest.tokenizer_file]]
        sizes += [(f"{SEGMENTS}/{entry.name}.tokens", entry.bytes) for entry in self.manifest.segments]
        sizes += [(f"{SEGMENTS}/{e.name}.blocks", 8 * -(-e.bytes // BLOCK_BYTES)) for e in self.manifest.segments]
        for folder in sorted({name.rpartition("/")[0] for name, _ in sizes}):
            if link := link_on_the_way(self.path, folder):
                raise _damaged(self.path / link, "it is a link")
        for name, expected in sizes:
            self._check_size(name, expected)

    def _check_size(self, name: str, expected: int) -> None:
        path = self.path / name
        with _reading(path):
            # A link could lead anywhere; the store's own files are plain files inside it.
            found = path.stat(follow_symlinks=False)
        if not stat.S_ISREG(found.st_mode):
            raise _damaged(path, "it is a link or no file at all")
        if found.st_size != expected:
            raise _damaged(path, f"it has {found.st_size} bytes, committed were {expected}")

    def _read_arrays(self) -> dict[str, npt.NDArray[Any]]:
        arrays: dict[str, npt.NDArray[Any]] = {}
        for entry in self.manifest.index:
            name = Path(entry.name).stem
            if entry.name.endswith(".array") and name in INDEX_ARRAYS:
                data = self._checked_bytes(entry)
                if len(data) % np.dtype(INDEX_ARRAYS[name]).itemsize:
                    raise _damaged(self.path / entry.name, f"its {len(data)} bytes are no whole number of rows")
                array = np.frombuffer(data, INDEX_ARRAYS[name])
                if not name.startswith("loss") and len(array) != self.num_documents:
                    raise _damaged(
                        self.path / entry.name, f"it has {len(array)} rows for {self.num_documents} documents"
                    )
                arrays[name] = array
        if missing := INDEX_ARRAYS.keys() - arrays.keys():
            raise _damaged(self.path, f"the index lacks {', '.join(sorted(missing))}")
        return arrays

    def _checked_bytes(self, entry: FileEntry) -> bytes:
        path = self.path / entry.name
        with _reading(path):
            data = path.read_bytes()
        if len(data) != entry.bytes or checksum_hex(data) != entry.checksum:
            raise _damaged(path, "its checksum isn't the manifest's")
        return data


def index_problem(manifest: Manifest, arrays: dict[str, npt.NDArray[Any]]) -> str | None:
    """The first number of the index that points nowhere, in words; None where all is well.

    Checksums find accidents; this finds an index that was written wrong, before anything reads beside a map.
    """
    limits = {"segment": len(manifest.segments), "split": len(manifest.splits), "source": len(manifest.sources)}
    for name, limit in {**limits, "reason": len(REASONS)}.items():
        if manifest.num_documents and int(arrays[name].max()) >= limit:
            return f"document {int(arrays[name].argmax())} has {name} {int(arrays[name].max())} of {limit}"
    sizes = np.array([entry.tokens for entry in manifest.segments], np.uint64)[arrays["segment"]]
    # Subtracted, not added: offset + length may pass 2**64 and look small.
    outside = (arrays["offset"] > sizes) | (arrays["length"] > sizes - arrays["offset"])
    if outside.any():
        return f"document {int(outside.argmax())} lies outside its segment"
    return _loss_problem(arrays)


def _loss_problem(arrays: dict[str, npt.NDArray[Any]]) -> str | None:
    documents, starts = arrays["loss_documents"], arrays["loss_starts"]
    if len(starts) != len(documents) + 1 or starts[0] != 0 or 2 * int(starts[-1]) != len(arrays["loss_runs"]):
        return "the loss runs don't fit their documents"
    if (starts[1:] < starts[:-1]).any() or (documents[1:] <= documents[:-1]).any():
        return "the loss runs aren't in the order of the documents"
    if not len(documents):
        return None
    if int(documents[-1]) >= len(arrays["length"]):
        return f"there are loss runs for document {documents[-1]} of {len(arrays['length'])}"
    runs = arrays["loss_runs"].reshape(-1, 2).astype(np.uint64)
    lengths = np.repeat(arrays["length"][documents], np.diff(starts).astype(np.int64))
    return "a loss run ends after its document" if (runs.sum(axis=1) > lengths).any() else None


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """A file that isn't there is damage; what else the system refuses is said in its own words."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise _damaged(path, "it is missing") from None
    except OSError as error:
        hints = {
            errno.EMFILE: "raise the limit of open files, `ulimit -n 65536`, and run the same command again",
            errno.EACCES: f"check who may read it: ls -l {path}",
            errno.EPERM: f"check who may read it: ls -l {path}",
            errno.EIO: "the disk reported an I/O error: check it (dmesg), then restore the file or prepare again",
        }
        raise DiskError(
            f"reading {str(path)!r} failed: {error.strerror or error}",
            hint=hints.get(error.errno or 0, "mend the cause and run the same command again; nothing was changed"),
        ) from error


def _mapped(path: Path, num_bytes: int) -> mmap.mmap:
    """A file of a known size, mapped for reading. The map keeps a file open; there may be thousands of segments."""
    with _reading(path):
        try:
            return _map(path, num_bytes)
        except OSError as error:
            if error.errno != errno.EMFILE or not _raise_file_limit():
                raise
            return _map(path, num_bytes)


def _map(path: Path, num_bytes: int) -> mmap.mmap:
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size != num_bytes:
            raise _damaged(path, f"it isn't {num_bytes} bytes long")
        return mmap.mmap(file.fileno(), num_bytes, access=mmap.ACCESS_READ)


def _raise_file_limit() -> bool:
    """Raises this process's limit of open files as far as the system lets it; False where it is there already."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == hard:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return True


def _damaged(path: Path, problem: str) -> DamagedStoreError:
    return DamagedStoreError(
        f"{path} is damaged: {problem}",
        hint="`penstock verify STORE` lists all damage; restore the file or prepare again",
    )
