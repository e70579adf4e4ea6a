"""What changed between the versions of a store: `penstock log` and `penstock diff`.

In: the manifests, and of two versions the index and three columns of the documents table. Out: documents added,
removed, changed, moved in or out of the data and moved between splits, counted and by name; options in words.
Documents are matched by key. One hash join and a few comparisons of whole columns: no Python per document, and only
the names that are shown become text. Memory: keys and 48 bytes per document of two versions.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DamagedStoreError, StoreError
from penstock.sources import printable
from penstock.store.layout import Manifest
from penstock.store.reader import Store, list_versions, no_store, read_manifest

__all__ = ["Change", "ChangedDocument", "VersionDiff", "VersionEntry", "diff_versions", "log_versions"]

Integers = npt.NDArray[np.int64]
Rows = npt.NDArray[np.uint8]

SHOWN_VALUE = 60


@dataclass(frozen=True, kw_only=True)
class VersionEntry:
    """One version: its figures, and what is new in it.

    Attributes:
        added: documents that the version before doesn't have; like `removed` and `changed` None for the oldest version
            and where one of the two is damaged.
        differences: options and tokenizer that differ from the version before, in words.
        problem: what is wrong with its files, as far as opening it shows; the figures are None if its manifest is.
    """

    version: int
    created: str | None = None
    documents: int | None = None
    tokens: int | None = None
    digest: str | None = None
    tokenizer: str | None = None
    added: int | None = None
    removed: int | None = None
    changed: int | None = None
    differences: tuple[str, ...] = ()
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class ChangedDocument:
    """A document in both versions; what one of them doesn't have is None there."""

    key: str
    document_before: int | None
    document_after: int | None
    split_before: str | None
    split_after: str | None
    status_before: str | None
    status_after: str | None
    tokens_before: int | None
    tokens_after: int | None


@dataclass(frozen=True, kw_only=True)
class Change:
    """Documents that changed in one way.

    Attributes:
        documents: how many, of the index: excluded ones too.
        tokens_before: tokens of those among them that are in the data of the first version.
        tokens_after: the same of the second.
        kinds: the documents by status, by what changed, or by where from and where to.
        shown: the first few in canonical order.
    """

    documents: int
    tokens_before: int
    tokens_after: int
    kinds: dict[str, int]
    shown: tuple[ChangedDocument, ...]


@dataclass(frozen=True, kw_only=True)
class VersionDiff:
    """What became of the documents of version `before` in version `after`.

    Attributes:
        changed: the same key with other content or other tokens.
        moved: in the data before and excluded after, the other way round, or excluded for another reason.
        split_changed: in another split; none unless options that decide splits differ.
        unchanged: documents to which nothing of that happened.
        differences: options and tokenizer that differ, in words.
    """

    store: str
    before: int
    after: int
    digest_before: str
    digest_after: str
    documents_before: int
    documents_after: int
    tokens_before: int
    tokens_after: int
    added: Change
    removed: Change
    changed: Change
    moved: Change
    split_changed: Change
    unchanged: int
    differences: tuple[str, ...]


def log_versions(path: Path) -> list[VersionEntry]:
    """The versions of a store, newest first; a damaged one is listed with its problem.

    Raises:
        NotAStoreError: there is no store.
    """
    entries: list[VersionEntry] = []
    before: tuple[Manifest, _Documents | None] | None = None
    for version in _versions(path):
        try:
            manifest = read_manifest(path, version)
        except (DamagedStoreError, OSError) as error:
            entries.append(VersionEntry(version=version, problem=getattr(error, "message", str(error))))
            continue
        try:
            documents, problem = _Documents.of(path, version), None
        except (StoreError, OSError) as error:
            documents, problem = None, getattr(error, "message", str(error))
        entries.append(_entry(manifest, documents, before, problem))
        before = manifest, documents
    return entries[::-1]


def diff_versions(path: Path, before: int, after: int, *, most: int = 20) -> VersionDiff:
    """What became of the documents of one version in another.

    Args:
        path: the store.
        before: a version.
        after: another, usually newer.
        most: how many documents of each kind to name.

    Raises:
        NotAStoreError: there is no store.
        StoreError: it has no such version, or the version is damaged.
    """
    known = _versions(path)
    for version in (before, after):
        if version not in known:
            raise StoreError(f"{path} has no version {version}", hint=f"versions: {', '.join(map(str, known))}")
    with Store(path, before) as one, Store(path, after) as other:
        return _Comparison(_Documents(one), _Documents(other)).diff(one, other, most=most)


def _versions(path: Path) -> list[int]:
    versions = list_versions(path)
    if not versions:
        raise no_store(path)
    return versions


def _entry(
    manifest: Manifest,
    documents: _Documents | None,
    before: tuple[Manifest, _Documents | None] | None,
    problem: str | None,
) -> VersionEntry:
    figures: dict[str, Any] = {}
    if before is not None and before[1] is not None and documents is not None:
        comparison = _Comparison(before[1], documents)
        names = ("added", "removed", "changed")
        figures = {name: len(getattr(comparison, name)) for name in names}
    return VersionEntry(
        version=manifest.version,
        created=manifest.created,
        documents=manifest.counts["documents"],
        tokens=manifest.counts["tokens"],
        digest=manifest.digest,
        tokenizer=manifest.tokenizer["origin"],
        **figures,
        differences=tuple(differences(before[0], manifest)) if before is not None else (),
        problem=problem,
    )


class _Documents:
    """The columns of a version that are compared, row i for document i."""

    def __init__(self, store: Store) -> None:
        import pyarrow as pa

        batches = list(store.provenance_batches(["key", "content_hash", "token_hash"]))
        self.keys = pa.chunked_array([batch.column("key") for batch in batches], pa.binary())
        self.content = _joined(batches, "content_hash", 32)
        self.tokens = _joined(batches, "token_hash", 16)
        self.arrays = {name: store.arrays[name] for name in ("length", "split", "reason")}

    @classmethod
    def of(cls, path: Path, version: int) -> _Documents:
        with Store(path, version) as store:
            return cls(store)

    def __len__(self) -> int:
        return len(self.keys)


def _joined(batches: Sequence[Any], name: str, width: int) -> Rows:
    """A column of hashes as rows of bytes."""
    parts = [
        np.frombuffer(column.buffers()[1], np.uint8)[column.offset * width : (column.offset + len(column)) * width]
        for column in (batch.column(name) for batch in batches)
        if len(column)
    ]
    return np.concatenate([np.empty(0, np.uint8), *parts]).reshape(-1, width)


class _Comparison:
    """The documents of two versions matched by key.

    Attributes:
        added: numbers in the second version of what the first doesn't have.
        removed: numbers in the first of what the second doesn't have.
        before: numbers in the first version of what both have, and `after`: in the second, in the same order.
        changed: which of those differ in content or tokens, as places in `before` and `after`.
    """

    def __init__(self, one: _Documents, other: _Documents) -> None:
        import pyarrow.compute as pc

        self.one, self.other = one, other
        found = pc.index_in(other.keys, value_set=one.keys).fill_null(-1)
        places = found.to_numpy().astype(np.int64)
        self.added: Integers = np.flatnonzero(places < 0)
        self.after: Integers = np.flatnonzero(places >= 0)
        self.before: Integers = places[self.after]
        is_gone = np.ones(len(one), np.bool_)
        is_gone[self.before] = False
        self.removed: Integers = np.flatnonzero(is_gone)
        self._other_content = (one.content[self.before] != other.content[self.after]).any(axis=1)
        other_tokens = (one.tokens[self.before] != other.tokens[self.after]).any(axis=1)
        self.changed: Integers = np.flatnonzero(self._other_content | other_tokens)

    def diff(self, one: Store, other: Store, *, most: int) -> VersionDiff:
        told = _Teller(self, one, other, most)
        statuses = _Names(
            [(one.manifest.reasons, one.arrays["reason"]), (other.manifest.reasons, other.arrays["reason"])]
        )
        splits = _Names([(one.manifest.splits, one.arrays["split"]), (other.manifest.splits, other.arrays["split"])])
        before, after, changed = self.before, self.after, self.changed
        moved = np.flatnonzero(statuses.codes[0][before] != statuses.codes[1][after])
        split_changed = np.flatnonzero(splits.codes[0][before] != splits.codes[1][after])
        touched = np.unique(np.concatenate([changed, moved, split_changed]))
        counts = one.manifest.counts, other.manifest.counts
        return VersionDiff(
            store=str(one.path),
            before=one.version,
            after=other.version,
            digest_before=one.digest,
            digest_after=other.digest,
            documents_before=counts[0]["documents"],
            documents_after=counts[1]["documents"],
            tokens_before=counts[0]["tokens"],
            tokens_after=counts[1]["tokens"],
            added=told.change(np.full(len(self.added), -1), self.added, statuses.counted(1, self.added)),
            removed=told.change(self.removed, np.full(len(self.removed), -1), statuses.counted(0, self.removed)),
            changed=told.change(before[changed], after[changed], self._what_changed()),
            moved=told.change(before[moved], after[moved], statuses.ways(before[moved], after[moved])),
            split_changed=told.change(
                before[split_changed],
                after[split_changed],
                splits.ways(before[split_changed], after[split_changed]),
            ),
            unchanged=len(before) - len(touched),
            differences=tuple(differences(one.manifest, other.manifest)),
        )

    def _what_changed(self) -> dict[str, int]:
        content = int(np.count_nonzero(self._other_content[self.changed]))
        kinds = {"content": content, "tokens alone": len(self.changed) - content}
        return {kind: count for kind, count in kinds.items() if count}


class _Names:
    """What the numbers of an index array stand for, in two versions that may number them differently."""

    def __init__(self, sides: Sequence[tuple[list[str], npt.NDArray[Any]]]) -> None:
        self._names = list(dict.fromkeys(name for names, _ in sides for name in names))
        self.codes = [np.array([self._names.index(name) for name in names])[array] for names, array in sides]

    def counted(self, side: int, documents: Integers) -> dict[str, int]:
        """Some documents of one version by name."""
        counts = np.bincount(self.codes[side][documents], minlength=len(self._names)).tolist()
        return {name: count for name, count in zip(self._names, counts, strict=True) if count}

    def ways(self, before: Integers, after: Integers) -> dict[str, int]:
        """Some documents of both by name and name: `duplicate to kept`."""
        size = len(self._names)
        counts = np.bincount(self.codes[0][before] * size + self.codes[1][after], minlength=size**2).tolist()
        return {
            f"{self._names[way // size]} to {self._names[way % size]}": count
            for way, count in enumerate(counts)
            if count
        }


class _Teller:
    """Tells one way of changing: counts, tokens, and a few documents by name."""

    def __init__(self, comparison: _Comparison, one: Store, other: Store, most: int) -> None:
        self._sides = ((comparison.one, one), (comparison.other, other))
        self._most = most

    def change(self, before: Integers, after: Integers, kinds: dict[str, int]) -> Change:
        """Documents by their numbers in both versions, -1 where a version lacks them."""
        shown = zip(before[: self._most].tolist(), after[: self._most].tolist(), strict=True)
        return Change(
            documents=len(before),
            tokens_before=self._kept_tokens(0, before),
            tokens_after=self._kept_tokens(1, after),
            kinds=kinds,
            shown=tuple(self._document(one, other) for one, other in shown),
        )

    def _kept_tokens(self, side: int, numbers: Integers) -> int:
        arrays = self._sides[side][0].arrays
        numbers = numbers[numbers >= 0]
        kept = numbers[arrays["reason"][numbers] == 0]
        return int(arrays["length"][kept].sum(dtype=np.int64))

    def _document(self, before: int, after: int) -> ChangedDocument:
        documents, number = (self._sides[1][0], after) if after >= 0 else (self._sides[0][0], before)
        facts: dict[str, Any] = {"key": printable(documents.keys[number].as_py())}
        for (_, store), place, when in zip(self._sides, (before, after), ("before", "after"), strict=True):
            known = place >= 0
            manifest, arrays = store.manifest, store.arrays
            facts[f"document_{when}"] = place if known else None
            facts[f"split_{when}"] = manifest.splits[int(arrays["split"][place])] if known else None
            facts[f"status_{when}"] = manifest.reasons[int(arrays["reason"][place])] if known else None
            facts[f"tokens_{when}"] = int(arrays["length"][place]) if known else None
        return ChangedDocument(**facts)


def differences(before: Manifest, after: Manifest) -> list[str]:
    """Options, sources and tokenizer that differ between two versions, in words."""
    told = []
    if before.tokenizer["digest"] != after.tokenizer["digest"]:
        told.append(f"tokenizer was {_tokenizer(before)}, is {_tokenizer(after)}")
    old, new = _sources(before.options), _sources(after.options)
    told += [f"source {name} is new ({new[name]['kind']})" for name in sorted(new.keys() - old.keys())]
    told += [f"source {name} is gone" for name in sorted(old.keys() - new.keys())]
    shared = sorted(old.keys() & new.keys())
    one = _flat({**before.options, "sources": [old[name] for name in shared]})
    other = _flat({**after.options, "sources": [new[name] for name in shared]})
    for name in sorted(one.keys() | other.keys()):
        if name not in one:
            told.append(f"{name} is new: {_shown(other[name])}")
        elif name not in other:
            told.append(f"{name} is gone, was {_shown(one[name])}")
        elif one[name] != other[name]:
            told.append(f"{name} was {_shown(one[name])}, is {_shown(other[name])}")
    return told


def _tokenizer(manifest: Manifest) -> str:
    return f"{manifest.tokenizer['origin']} ({manifest.tokenizer['digest'][:12]})"


def _sources(options: Mapping[str, Any]) -> dict[str, Any]:
    """The options of each source, by its name."""
    return {str(one["name"]): one for one in options.get("sources", [])}


def _flat(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested options by dotted name; sources by their own names, so that a new one doesn't shift the others."""
    flat: dict[str, Any] = {}
    for name, value in options.items():
        if isinstance(value, list) and value and all(isinstance(one, dict) and "name" in one for one in value):
            named = {str(one["name"]): {key: part for key, part in one.items() if key != "name"} for one in value}
            flat.update(_flat(named, f"{prefix}{name.removesuffix('s')} "))
        elif isinstance(value, dict) and value:
            flat.update(_flat(value, f"{prefix}{name} "))
        else:
            flat[f"{prefix}{name}"] = value
    return flat


def _shown(value: Any) -> str:
    if isinstance(value, list) and value and all(isinstance(one, list) and len(one) == 2 for one in value):
        text = ", ".join(f"{name} {share}" for name, share in value)
    else:
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_VALUE else f"{text[:SHOWN_VALUE]}..."
