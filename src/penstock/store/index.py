"""The index of a version: every decision that needs the whole corpus.

In: the records of all units and of what is taken over. Out: documents in canonical order (by key), each with its place
in a segment, its split and whether it is kept; counts; the store digest. Tokens are read only to sign documents of
older versions, where near copies are looked for. Memory: about 250 bytes per document, 500 with signatures.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute  # sorting needs it; imported here, where nobody waits for it
import pyarrow.parquet

from penstock.errors import InputError
from penstock.hashing import STRONG_HASH_BYTES
from penstock.sources import SkipTally, printable
from penstock.store.decisions import Decisions, times_of
from penstock.store.known import SegmentTokens
from penstock.store.layout import (
    DOCUMENTS_COLUMNS,
    DOCUMENTS_TABLE,
    INDEX_ARRAYS,
    REASONS,
    SIGNATURES_ARRAY,
    Manifest,
    SegmentEntry,
    store_digest,
)
from penstock.store.near import SIGNATURE_BINS, cluster_figures, near_exclusions, signatures
from penstock.store.splits import split_numbers, splits_of_sources
from penstock.store.writer import UnitRecord, arrow_array

__all__ = [
    "VersionIndex",
    "build_index",
    "digest_columns",
    "exclusion_reasons",
    "joined_values",
    "numbers_of",
    "perhaps_repeated",
    "skips_before_index",
]

KEPT, DUPLICATE, COPY_ACROSS_SPLITS, NEAR_DUPLICATE = (
    REASONS.index(name) for name in ("kept", "duplicate", "copy-across-splits", "near-duplicate")
)
SIGNED_AT_ONCE = 2**22
REPEATING_COLUMNS = ["byte_start", "exact", "language", "facts"]


@dataclass(frozen=True, kw_only=True)
class VersionIndex:
    """An index ready to be written."""

    arrays: dict[str, npt.NDArray[Any]]
    provenance: pa.Table
    segments: list[SegmentEntry]
    options: dict[str, Any]
    digest: str
    counts: dict[str, Any]
    signatures: npt.NDArray[np.uint16] | None = None

    def files(self) -> dict[str, bytes]:
        """The files of the index by name."""
        files = {f"{name}.array": array.tobytes() for name, array in self.arrays.items()}
        if self.signatures is not None:
            files[SIGNATURES_ARRAY] = self.signatures.tobytes()
        sink = pa.BufferOutputStream()
        # Hashes neither repeat nor shrink: to look for it took most of the time.
        plain = {"content_hash", "token_hash", "group_hash"}
        compression = {name: "none" if name in plain else "zstd" for name in self.provenance.column_names}
        pa.parquet.write_table(self.provenance, sink, compression=compression, use_dictionary=REPEATING_COLUMNS)
        files[DOCUMENTS_TABLE] = sink.getvalue().to_pybytes()
        return files


def build_index(
    records: Sequence[UnitRecord],
    *,
    known_segments: Mapping[str, SegmentEntry],
    sources: Sequence[str],
    decisions: Decisions,
    tokenizer_digest: str,
    source_options: Sequence[Mapping[str, Any]],
    read_tokens: SegmentTokens,
) -> VersionIndex:
    """Orders, splits and deduplicates.

    Args:
        records: every unit of the version, and what is taken over.
        known_segments: segments of earlier versions that records may point into.
        sources: source names, in the manifest's order.
        decisions: how to split, which copies go.
        tokenizer_digest: for the digest.
        source_options: for the digest.
        read_tokens: gives the tokens of documents that have no signature yet.
    """
    documents = pa.concat_tables(record.documents for record in records).sort_by("key").combine_chunks()
    _refuse_equal_keys(documents)
    available = {**known_segments, **{entry.name: entry for record in records for entry in record.segments}}
    used = sorted(set(documents["segment"].unique().to_pylist()))
    decisions, split = _splits(documents, decisions)
    reason = exclusion_reasons(_hashes(documents), split, drop_duplicates=decisions.dedup != "off")
    signed, near_figures = None, None
    if decisions.near_threshold is not None:
        signed = _all_signatures(documents, available, read_tokens)
        near_figures = _exclude_near_copies(signed, split, reason, threshold=decisions.near_threshold)
    arrays = {
        "segment": _positions(documents["segment"], used),
        "offset": numbers_of(documents["offset"]),
        "length": numbers_of(documents["length"]),
        "split": split,
        "source": _positions(documents["source"], list(sources)),
        "reason": reason,
        **_loss_arrays(documents["loss_runs"]),
    }
    arrays = {name: np.ascontiguousarray(array, dtype=INDEX_ARRAYS[name]) for name, array in arrays.items()}
    provenance = documents.select(list(DOCUMENTS_COLUMNS))
    options = {"sources": list(source_options), **decisions.options()}
    return VersionIndex(
        arrays=arrays,
        provenance=provenance,
        segments=[available[name] for name in used],
        options=options,
        digest=store_digest(
            tokenizer_digest=tokenizer_digest, options=options, columns=digest_columns(provenance, arrays)
        ),
        counts=_counts(records, arrays, provenance, list(decisions.shares), near_figures),
        signatures=signed,
    )


def _splits(documents: pa.Table, decisions: Decisions) -> tuple[Decisions, npt.NDArray[np.uint8]]:
    """Each document's split; cuts in time that weren't recorded before are drawn now, once and for all."""
    if decisions.by_source:
        return decisions, splits_of_sources(documents["source"].to_pylist(), decisions.shares)
    if decisions.time is None:
        return decisions, split_numbers(numbers_of(documents["group_hash"]), decisions.shares)
    times = times_of(documents["facts"].to_pylist(), decisions.time.fact)
    if decisions.time.cuts is None:
        drawn = decisions.time.drawn(times, numbers_of(documents["length"]), decisions.shares)
        decisions = dataclasses.replace(decisions, time=drawn)
    return decisions, decisions.time.splits(times)  # type: ignore[union-attr]


def _all_signatures(
    documents: pa.Table, segments: Mapping[str, SegmentEntry], read_tokens: SegmentTokens
) -> npt.NDArray[np.uint16]:
    """One signature per document; those that no record brought are made from the stored tokens."""
    lengths, joined = _binary(documents["signature"])
    signed = np.zeros((documents.num_rows, SIGNATURE_BINS), np.uint16)
    has_one = lengths > 0
    signed[has_one] = np.frombuffer(joined, np.uint16).reshape(-1, SIGNATURE_BINS)
    missing = np.flatnonzero(~has_one)
    if not len(missing):
        return signed
    rows = documents.select(["segment", "offset", "length"]).take(arrow_array(missing, pa.int64()))
    places = zip(*(rows[name].to_pylist() for name in rows.column_names), strict=True)
    for batch in _batches(list(zip(missing.tolist(), places, strict=True))):
        tokens = [read_tokens(segments[segment], offset, length) for _, (segment, offset, length) in batch]
        borders = np.concatenate([[0], np.cumsum([len(one) for one in tokens], dtype=np.int64)])
        signed[[number for number, _ in batch]] = signatures(np.concatenate(tokens), borders)
    return signed


def _batches(entries: list[tuple[int, tuple[str, int, int]]]) -> Iterator[list[tuple[int, tuple[str, int, int]]]]:
    """Runs of documents of about `SIGNED_AT_ONCE` tokens."""
    batch, size = [], 0
    for entry in entries:
        batch.append(entry)
        size += entry[1][2]
        if size >= SIGNED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _exclude_near_copies(
    signed: npt.NDArray[np.uint16], split: npt.NDArray[np.uint8], reason: npt.NDArray[np.uint8], *, threshold: float
) -> dict[str, Any]:
    """Marks near copies in `reason`; returns the figures that the version records about them."""
    eligible = reason == KEPT
    excluded, stands_for = near_exclusions(signed, split, eligible, threshold=threshold)
    crosses = split != split[stands_for]
    reason[excluded & crosses] = COPY_ACROSS_SPLITS
    reason[excluded & ~crosses] = NEAR_DUPLICATE
    return {
        "threshold": threshold,
        "excluded": int(excluded.sum()),
        "across_splits": int((excluded & crosses).sum()),
        **cluster_figures(stands_for, excluded, eligible=eligible),
    }


def digest_columns(provenance: pa.Table, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, bytes]:
    """The canonical sequence (key, content, tokens, loss runs, split, reason), one byte string per column."""
    lengths, keys = _binary(provenance["key"])
    return {
        "key_lengths": lengths.astype("<u8").tobytes(),
        "keys": keys,
        "content": joined_values(provenance["content_hash"]),
        "tokens": joined_values(provenance["token_hash"]),
        **{name: arrays[name].tobytes() for name in ("loss_documents", "loss_starts", "loss_runs", "split", "reason")},
    }


def exclusion_reasons(
    content_hashes: npt.NDArray[np.uint64], split: npt.NDArray[np.uint8], *, drop_duplicates: bool
) -> npt.NDArray[np.uint8]:
    """Which copies go: of equal documents the first in the most protected split stays.

    Copies in other splits go whatever the setting, because no copy may ever be in two splits; copies in the same split
    go when `drop_duplicates` is set.

    Args:
        content_hashes: [documents, 4], the 32 bytes of each content hash.
        split: [documents], larger is more protected.
        drop_duplicates: whether copies within a split go as well.
    """
    reason = np.full(len(split), KEPT, np.uint8)
    repeated = perhaps_repeated(content_hashes[:, 0])
    if not len(repeated):
        return reason
    # Of documents with equal hashes, the most protected comes first, then canonical order.
    order = repeated[np.lexsort((repeated, -split[repeated].astype(np.int16), *content_hashes[repeated].T))]
    ordered = content_hashes[order]
    starts_group = np.concatenate([[True], (ordered[1:] != ordered[:-1]).any(axis=1)])
    stays = order[np.flatnonzero(starts_group)][np.cumsum(starts_group) - 1]  # the one kept, per ordered document
    is_copy = order != stays
    crosses = split[order] != split[stays]
    reason[order[is_copy & crosses]] = COPY_ACROSS_SPLITS
    if drop_duplicates:
        reason[order[is_copy & ~crosses]] = DUPLICATE
    return reason


def skips_before_index(manifest: Manifest) -> SkipTally:
    """What a version left out before its index was made; copies are counted anew with every index."""
    counts = {reason: count for reason, count in manifest.counts["skipped"].items() if reason not in REASONS}
    examples = {reason: list(keys) for reason, keys in manifest.skipped_examples.items() if reason in counts}
    return SkipTally(counts, examples)


def perhaps_repeated(words: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Where a value stands that stands elsewhere too. Most contents stand alone, and one word of the hash shows it."""
    ordered = np.sort(words)
    repeated = ordered[1:][ordered[1:] == ordered[:-1]]
    if not len(repeated):
        return np.empty(0, np.int64)
    places = np.minimum(np.searchsorted(repeated, words), len(repeated) - 1)
    return np.flatnonzero(repeated[places] == words)


def _refuse_equal_keys(documents: pa.Table) -> None:
    keys = documents["key"]
    equal = pa.compute.equal(keys.slice(1), keys.slice(0, max(len(keys) - 1, 0)))
    if pa.compute.any(equal).as_py():
        left = keys[pa.compute.index(equal, True).as_py()].as_py()
        raise InputError(
            f"two documents have the key {printable(left)!r}",
            hint="give each input a name of its own (NAME=PATH); in a table, --id-field must name a column of "
            "which no value is repeated",
        )


def numbers_of(column: pa.ChunkedArray | pa.Array) -> npt.NDArray[Any]:
    """A column as an array, by its buffer: Arrow's own conversion imports pandas where that is installed."""
    array = column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
    kind = np.dtype(array.type.to_pandas_dtype())
    return np.frombuffer(array.buffers()[1], kind)[array.offset : array.offset + len(array)]


def _positions(column: pa.ChunkedArray, names: list[str]) -> npt.NDArray[Any]:
    """Each value's position in `names`."""
    return numbers_of(pa.compute.index_in(column, value_set=arrow_array(names, pa.string())))


def _binary(column: pa.ChunkedArray) -> tuple[npt.NDArray[np.uint64], bytes]:
    """The lengths and the joined bytes of a column of binary values, by its buffers."""
    lengths, pieces = [np.empty(0, np.uint64)], []
    for chunk in column.chunks:
        _, offsets, data = chunk.buffers()
        borders = np.frombuffer(offsets, np.int32)[chunk.offset : chunk.offset + len(chunk) + 1]
        lengths.append(np.diff(borders).astype(np.uint64))
        pieces.append(memoryview(data)[borders[0] : borders[-1]] if data is not None else b"")
    return np.concatenate(lengths), b"".join(pieces)


def joined_values(column: pa.ChunkedArray) -> bytes:
    """The joined bytes of a column of values of one width, by its buffers."""
    width = column.type.byte_width
    return b"".join(
        memoryview(chunk.buffers()[1])[chunk.offset * width : (chunk.offset + len(chunk)) * width]
        for chunk in column.chunks
        if len(chunk)
    )


def _hashes(documents: pa.Table) -> npt.NDArray[np.uint64]:
    """Content hashes as [documents, 4] integers."""
    return np.frombuffer(joined_values(documents["content_hash"]), "<u8").reshape(-1, STRONG_HASH_BYTES // 8)


def _loss_arrays(column: pa.ChunkedArray) -> dict[str, npt.NDArray[Any]]:
    everything = column.null_count == len(column)  # nearly always
    rows = [] if everything else [(n, runs) for n, runs in enumerate(column.to_pylist()) if runs is not None]
    lengths = [len(runs) // 2 for _, runs in rows]
    return {
        "loss_documents": np.array([number for number, _ in rows], np.uint64),
        "loss_starts": np.concatenate([[0], np.cumsum(lengths)]).astype(np.uint64),
        "loss_runs": np.array([value for _, runs in rows for value in runs], np.uint32),
    }


def _counts(
    records: Sequence[UnitRecord],
    arrays: Mapping[str, npt.NDArray[Any]],
    provenance: pa.Table,
    splits: list[str],
    near_figures: dict[str, Any] | None,
) -> dict[str, Any]:
    kept = arrays["reason"] == KEPT
    length = arrays["length"].astype(np.uint64)
    size = numbers_of(provenance["text_bytes"])
    skipped: dict[str, int] = {}
    for record in records:
        for reason, count in record.skips.counts.items():
            skipped[reason] = skipped.get(reason, 0) + count
    for number, name in enumerate(REASONS):
        excluded = int((arrays["reason"] == number).sum())
        if number != KEPT and excluded:
            skipped[name] = excluded
    per_split = {}
    for number, name in enumerate(splits):
        chosen = kept & (arrays["split"] == number)
        per_split[name] = {
            "documents": int(chosen.sum()),
            "tokens": int(length[chosen].sum()),
            "bytes": int(size[chosen].sum()),
        }
    documents = int(kept.sum())
    counts = {
        "found": documents + sum(skipped.values()),
        "documents": documents,
        "tokens": int(length[kept].sum()),
        "bytes": int(size[kept].sum()),
        "splits": per_split,
        "skipped": dict(sorted(skipped.items())),
        "secrets": _redacted(provenance, kept),
    }
    return counts if near_figures is None else {**counts, "near": near_figures}


def _redacted(provenance: pa.Table, kept: npt.NDArray[np.bool_]) -> dict[str, Any]:
    """How many secrets were taken out of the kept documents, by kind; each document's facts say it."""
    marked = pa.compute.match_substring(provenance["facts"], '"secrets":{').combine_chunks()
    numbers = [n for n in numbers_of(pa.compute.indices_nonzero(marked)).tolist() if kept[n]]
    kinds: dict[str, int] = {}
    documents = 0
    for facts in provenance["facts"].take(arrow_array(numbers, pa.int64())).to_pylist():
        found = json.loads(facts).get("secrets")
        if isinstance(found, dict) and all(type(count) is int for count in found.values()):
            documents += 1
            for kind, count in found.items():
                kinds[kind] = kinds.get(kind, 0) + count
    return {"documents": documents, "redacted": dict(sorted(kinds.items()))}
