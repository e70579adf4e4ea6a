"""Taking things out of a store: documents by rule, old versions, and the bytes that nothing refers to any more.

    remove   a new version without the documents that a rule matches; the rule is recorded, and later runs honour it
    prune    old versions and what only they referred to; with `compact`, the dead stretches inside segments as well

Like every change, each is a commit: killed at any time, the store is as before or as after. `remove` and `prune`
touch index and segments only; no document is read or encoded again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from penstock import fs
from penstock.errors import ConfigError
from penstock.sources import SkipTally, printable
from penstock.store.blocklist import REMOVED, Blocklist, recorded_rules
from penstock.store.cleanup import remove_strangers
from penstock.store.commit import commit_version
from penstock.store.decisions import Decisions
from penstock.store.index import build_index, skips_before_index
from penstock.store.known import SegmentTokens, document_rows
from penstock.store.layout import LOCK, MANIFESTS, Manifest, SegmentEntry, manifest_name
from penstock.store.reader import Store, list_versions, no_store, open_store
from penstock.store.writer import DOCUMENT_SCHEMA, UnitRecord, arrow_array, write_segment

__all__ = ["Pruned", "Removed", "prune", "remove"]

COMPACTED_SEGMENT_TOKENS = 2**24


@dataclass(frozen=True, kw_only=True)
class Removed:
    """What `remove` did."""

    manifest: Manifest
    documents: int
    examples: list[str]
    committed: bool


@dataclass(frozen=True, kw_only=True)
class Pruned:
    """What `prune` did; `dead_bytes` are those that no version refers to but that lie inside segments in use."""

    versions_removed: list[int]
    versions_left: list[int]
    bytes_before: int
    bytes_after: int
    dead_bytes: int
    compacted: bool


def remove(store: Path, rules: Sequence[str], *, break_lock: bool = False) -> Removed:
    """Commits a version without the documents that the rules match, and adds the rules to the blocklist.

    Raises:
        NotAStoreError: there is no store.
        ConfigError: a rule can't be understood, or it matches everything.
    """
    added = Blocklist(rules)  # refused before the lock is taken
    _refuse_no_store(store)
    with fs.fail_as_disk_error(f"changing the store {store}"), fs.FolderLock(store / LOCK, break_lock=break_lock):
        fs.remove_leftovers(store)
        with open_store(store) as latest:
            blocklist = Blocklist([*recorded_rules(latest), *added.rules])
            provenance = latest.provenance()
            keys, contents = (provenance[name].to_pylist() for name in ("key", "content_hash"))
            pairs = enumerate(zip(keys, contents, strict=True))
            matched = [number for number, (key, content) in pairs if blocklist.blocks(key, content)]
            if len(matched) == latest.num_documents:
                raise ConfigError(
                    f"{', '.join(added.rules)} matches all {len(matched)} documents",
                    hint="a store without documents can't be; delete the folder instead",
                )
            examples = [printable(keys[number]) for number in matched[:10]]
            if not matched and blocklist.rules == recorded_rules(latest):
                return Removed(manifest=latest.manifest, documents=0, examples=[], committed=False)
            left = np.setdiff1d(np.arange(latest.num_documents), np.array(matched, np.int64), assume_unique=True)
            documents = document_rows(latest, left)
            skips = skips_before_index(latest.manifest)
            for number in matched:
                skips.add(REMOVED, keys[number])
            manifest = _commit_rows(latest, documents, skips=skips, blocklist=blocklist, segments=_segments_of(latest))
        remove_strangers(store)
        return Removed(manifest=manifest, documents=len(matched), examples=examples, committed=True)


def prune(store: Path, *, keep: int = 1, compact: bool = False, break_lock: bool = False) -> Pruned:
    """Removes all versions but the newest `keep`, and what only the others referred to.

    With `compact`, segments of the latest version that hold dead tokens are written anew, as a version of the same
    digest: what was removed from the store is then gone from the disk.
    """
    if keep < 1:
        raise ConfigError(f"--keep is {keep}, expected is 1 or more", hint="the latest version always stays")
    _refuse_no_store(store)
    lock = fs.FolderLock(store / LOCK, break_lock=break_lock, frees_space=True)
    with fs.fail_as_disk_error(f"pruning the store {store}"), lock:
        fs.remove_leftovers(store)
        before = _bytes_of(store)
        compacted = compact and _compact(store)
        versions = list_versions(store)
        doomed = versions[:-keep]
        for version in doomed:  # the manifest first: from then on the version doesn't exist
            fs.remove_file(store / MANIFESTS / manifest_name(version))
        remove_strangers(store)
        return Pruned(
            versions_removed=doomed,
            versions_left=versions[-keep:],
            bytes_before=before,
            bytes_after=_bytes_of(store),
            dead_bytes=_dead_bytes(store),
            compacted=compacted,
        )


def _compact(store: Path) -> bool:
    """Commits the latest version over segments without dead tokens; False where there are none."""
    with open_store(store) as latest:
        live = _live_tokens(latest)
        sizes = np.array([entry.tokens for entry in latest.manifest.segments], np.int64)
        dirty = np.flatnonzero(live < sizes)
        if not len(dirty):
            return False
        numbers = np.flatnonzero(np.isin(latest.arrays["segment"], dirty))
        documents = document_rows(latest, np.arange(latest.num_documents))
        names, entries = documents["segment"].to_pylist(), _segments_of(latest)
        offsets = latest.arrays["offset"].astype(np.int64).copy()
        for batch in _batches(latest, numbers):
            places = {(int(latest.arrays["segment"][n]), int(latest.arrays["offset"][n])): n for n in batch}
            payload = np.concatenate([latest.document_tokens(number) for number in places.values()])
            entry = write_segment(store, payload)
            entries[entry.name] = entry
            starts = np.cumsum([0, *(int(latest.arrays["length"][number]) for number in places.values())]).tolist()
            new_offset = dict(zip(places, starts, strict=False))
            for number in batch:
                place = (int(latest.arrays["segment"][number]), int(latest.arrays["offset"][number]))
                names[number], offsets[number] = entry.name, new_offset[place]
        columns = {name: documents[name] for name in documents.column_names}
        columns["segment"] = arrow_array(names, pa.string())
        columns["offset"] = arrow_array(offsets, pa.uint64())
        moved = pa.table([columns[field.name] for field in DOCUMENT_SCHEMA], schema=DOCUMENT_SCHEMA)
        blocklist = Blocklist(recorded_rules(latest))
        _commit_rows(latest, moved, skips=skips_before_index(latest.manifest), blocklist=blocklist, segments=entries)
        return True


def _batches(store: Store, numbers: npt.NDArray[np.int64]) -> list[list[int]]:
    """Documents in the order of their tokens, copies together, in runs of about a segment."""
    order = np.lexsort((store.arrays["offset"][numbers], store.arrays["segment"][numbers]))
    batches: list[list[int]] = [[]]
    size, last = 0, (-1, -1)
    for number in numbers[order].tolist():
        place = (int(store.arrays["segment"][number]), int(store.arrays["offset"][number]))
        if place != last and size >= COMPACTED_SEGMENT_TOKENS:
            batches.append([])
            size = 0
        size += int(store.arrays["length"][number]) if place != last else 0
        batches[-1].append(number)
        last = place
    return [batch for batch in batches if batch]


def _commit_rows(
    latest: Store,
    documents: pa.Table,
    *,
    skips: SkipTally,
    blocklist: Blocklist,
    segments: dict[str, SegmentEntry],
) -> Manifest:
    """A version after `latest` of these documents, decided as that one was, but for the blocklist."""
    manifest = latest.manifest
    index = build_index(
        [UnitRecord(documents=documents, segments=[], skips=skips)],
        known_segments=segments,
        sources=[source["name"] for source in manifest.sources],
        decisions=Decisions.from_recorded(manifest.options, blocklist=blocklist),
        tokenizer_digest=manifest.tokenizer["digest"],
        source_options=manifest.options["sources"],
        read_tokens=SegmentTokens(latest.path, latest.dtype),
    )
    return commit_version(
        latest.path,
        index,
        version=latest.version + 1,
        dtype=manifest.dtype,
        tokenizer=manifest.tokenizer,
        tokenizer_file=manifest.tokenizer_file,
        sources=manifest.sources,
        splits=manifest.splits,
        skipped_examples=skips.examples,
    )


def _segments_of(store: Store) -> dict[str, SegmentEntry]:
    return {entry.name: entry for entry in store.manifest.segments}


def _live_tokens(store: Store) -> npt.NDArray[np.int64]:
    """Per segment, the tokens that some document of the version refers to."""
    places = np.stack([store.arrays["segment"].astype(np.uint64), store.arrays["offset"]], axis=1)
    _, first = np.unique(places, axis=0, return_index=True)  # copies share their tokens
    return np.bincount(
        store.arrays["segment"][first],
        weights=store.arrays["length"][first].astype(np.float64),
        minlength=len(store.manifest.segments),
    ).astype(np.int64)


def _dead_bytes(store: Path) -> int:
    with open_store(store) as latest:
        sizes = np.array([entry.tokens for entry in latest.manifest.segments], np.int64)
        return int((sizes - _live_tokens(latest)).sum()) * latest.dtype.itemsize


def _bytes_of(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*") if path.is_file())


def _refuse_no_store(store: Path) -> None:
    if not list_versions(store):
        raise no_store(store)
