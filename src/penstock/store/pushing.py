"""Puts a version of a local store behind a URL: `penstock push`.

In: a store and an address. Out: its files there, each checked before it leaves, the manifest last and only if absent:
that is the commit, so a reader finds the whole version or none of it. What a killed push has put there already is kept
if its size and checksum are right. Memory: a chunk, and what the client library sends at once.
"""

from __future__ import annotations

import collections
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from penstock.errors import DamagedStoreError, StoreError
from penstock.store.layout import MANIFESTS, FileEntry, SegmentEntry, manifest_name
from penstock.store.mirror import blocks_entry, checked_blocks, checked_chunks, tokens_name
from penstock.store.objects import ObjectFolder
from penstock.store.reader import LARGEST_MANIFEST_BYTES, list_versions, open_store, version_numbers
from penstock.store.urls import is_url, split_url
from penstock.store.verification import examine_entry

__all__ = ["Pushed", "push"]

Progress = Callable[[int, int], None]

_PLAIN_TAG = re.compile(r"[0-9a-f]{32}")


@dataclass(frozen=True, kw_only=True)
class Pushed:
    """What a push did.

    Attributes:
        files: sent by this run, the manifest not counted.
        files_there: found there as they should be.
        was_committed: whether the version was there already.
    """

    url: str
    version: int
    digest: str
    files: int
    bytes: int
    files_there: int
    bytes_there: int
    was_committed: bool
    seconds: float


def push(store: Path | str, url: str, *, on_progress: Progress | None = None) -> Pushed:
    """Copies a version to a URL under the same number; run it again after a failure and it goes on.

    Args:
        store: a local store, `PATH@3` for an older version.
        url: where to, for instance `s3://bucket/store`. Versions of one store may share an address.
        on_progress: given bytes done and in all.

    Raises:
        StoreError: the address holds another store's versions, or can't be reached.
        DamagedStoreError: the local store is damaged; nothing damaged is sent.
    """
    started = time.perf_counter()
    if is_url(str(store)) or not is_url(url):
        raise StoreError(
            f"a push goes from a folder to an address, not from {str(store)!r} to {url!r}",
            hint="penstock push STORE s3://BUCKET/NAME",
        )
    if split_url(url)[1] is not None:
        raise StoreError(f"{url!r} names a version", hint="say which version to push behind the store: STORE@N")
    remote = ObjectFolder(url)
    remote.check_writable()
    with open_store(store) as opened:
        manifest, path, version = opened.manifest, opened.path, opened.version
        _refuse_foreign(remote, path)
        name = f"{MANIFESTS}/{manifest_name(version)}"
        data = (path / name).read_bytes()
        was_committed = _is_committed(remote, name, data)
        files = [*manifest.index, manifest.tokenizer_file]
        total = sum(entry.bytes for entry in files) + sum(entry.bytes for entry in manifest.segments)
        run = _Push(path, remote, total)
        run.on_progress = on_progress
        for segment in manifest.segments:
            run.segment(segment)
        for entry in files:
            run.file(entry)
        if not was_committed and not remote.create(name, data) and not _is_committed(remote, name, data):
            raise StoreError(f"{url}/{name} vanished while it was written", hint="run the same command again")
    return Pushed(
        url=remote.url,
        version=version,
        digest=manifest.digest,
        files=run.files,
        bytes=run.bytes,
        files_there=run.files_there,
        bytes_there=run.bytes_there,
        was_committed=was_committed,
        seconds=time.perf_counter() - started,
    )


def _refuse_foreign(remote: ObjectFolder, store: Path) -> None:
    """Versions of one store may share an address; those of two would be taken for one history.

    What this store pruned the address may still have. Later versions than its own latest it can't have made.
    """
    own, there = list_versions(store), version_numbers(remote.sizes(MANIFESTS))
    for version in sorted({*own} & {*there}):
        name = f"{MANIFESTS}/{manifest_name(version)}"
        _is_committed(remote, name, (store / name).read_bytes())
    if there and there[-1] > own[-1]:
        raise StoreError(
            f"{remote.url} has a version {there[-1]}, the latest of {store} is {own[-1]}",
            hint="it is another store's, or this copy is old: push to an address of its own",
        )


def _is_committed(remote: ObjectFolder, name: str, data: bytes) -> bool:
    if remote.tag(name) is None:
        return False
    if remote.read(name, most=LARGEST_MANIFEST_BYTES) != data:
        raise StoreError(
            f"{remote.url} has another version of that number: {name} differs",
            hint="push to an address of its own; committed versions aren't replaced",
        )
    return True


class _Push:
    """The files of one version on their way."""

    def __init__(self, path: Path, remote: ObjectFolder, total: int) -> None:
        self._path = path
        self._remote = remote
        self._total = total
        self.on_progress: Progress | None = None
        self.files = self.bytes = self.files_there = self.bytes_there = 0

    def segment(self, entry: SegmentEntry) -> None:
        """Both files of a segment."""
        self._refuse_damage(entry)
        blocks = blocks_entry(entry)
        self._send(blocks, lambda: _drained(checked_chunks(self._remote, blocks)))
        checksums = np.frombuffer((self._path / blocks.name).read_bytes(), "<u8")
        tokens = FileEntry(name=tokens_name(entry), bytes=entry.bytes, checksum="")
        self._send(tokens, lambda: _drained(checked_blocks(self._remote, entry, checksums)))

    def file(self, entry: FileEntry) -> None:
        """A file that the manifest names itself."""
        self._refuse_damage(entry)
        self._send(entry, lambda: _drained(checked_chunks(self._remote, entry)))

    def _refuse_damage(self, entry: FileEntry | SegmentEntry) -> None:
        if problems := examine_entry(self._path, entry):
            raise DamagedStoreError(
                f"{self._path / problems[0].file} is damaged: {problems[0].detail}",
                hint="`penstock verify STORE` lists all damage; restore the file or prepare again, then push",
            )

    def _send(self, entry: FileEntry, read_back: Callable[[], None]) -> None:
        if self._is_there(entry, read_back):
            self.files_there += 1
            self.bytes_there += entry.bytes
        else:
            self._remote.put(entry.name, self._path / entry.name)
            found = self._remote.tag(entry.name)
            if found is None or found[0] != entry.bytes:
                raise self._remote.damaged(entry.name, f"after sending {entry.bytes} bytes, {found} is there")
            self.files += 1
            self.bytes += entry.bytes
        if self.on_progress is not None:
            self.on_progress(min(self.bytes + self.bytes_there, self._total), self._total)

    def _is_there(self, entry: FileEntry, read_back: Callable[[], None]) -> bool:
        found = self._remote.tag(entry.name)
        if found is None or found[0] != entry.bytes:
            return False
        if _PLAIN_TAG.fullmatch(found[1]):  # S3's tag of an object that was sent in one piece is its MD5
            with (self._path / entry.name).open("rb") as file:
                if hashlib.file_digest(file, _md5).hexdigest() == found[1]:
                    return True
        try:
            read_back()
        except DamagedStoreError:
            return False
        return True


def _md5() -> Any:
    return hashlib.md5(usedforsecurity=False)


def _drained(chunks: Iterator[bytes]) -> None:
    collections.deque(chunks, maxlen=0)
