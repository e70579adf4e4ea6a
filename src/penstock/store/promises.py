"""What a version promises beyond its checksums: the digest follows from the content, the counts add up, keys are in
order, the tokenizer is the one it says, no two documents share tokens by accident, no content is in two splits.

In: an open store, all of whose files are as committed. Out: (kind, detail) of each promise that is broken. All of it is
numpy and Arrow over the index; memory: about 100 bytes per document.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute

from penstock.hashing import STRONG_HASH_BYTES, TOKEN_HASH_BYTES
from penstock.store.index import KEPT, digest_columns, joined_values, perhaps_repeated
from penstock.store.layout import DOCUMENTS_COLUMNS, store_digest
from penstock.store.near import leaking_pairs
from penstock.store.reader import Store
from penstock.tokenize import Tokenizer

__all__ = ["Broken", "DocumentColumns", "broken_promises", "read_document_columns"]

Broken = tuple[str, str]

_TOKENIZER_FACTS = ("digest", "vocab_size", "end_id")


@dataclass(frozen=True, kw_only=True)
class DocumentColumns:
    """What is needed of the table of documents.

    Attributes:
        table: key, content_hash and token_hash.
        content_hashes: [documents, 4]
        token_hashes: [documents, 16]
    """

    table: pa.Table
    content_hashes: npt.NDArray[np.uint64]
    token_hashes: npt.NDArray[np.uint8]


def read_document_columns(store: Store) -> DocumentColumns:
    """All columns are decoded, so that one that can't be is found; three of them stay in memory.

    Raises:
        DamagedStoreError: it isn't the table of these documents.
    """
    kinds = {
        "key": pa.binary(),
        "content_hash": pa.binary(STRONG_HASH_BYTES),
        "token_hash": pa.binary(TOKEN_HASH_BYTES),
    }
    batches = [batch.select(list(kinds)) for batch in store.provenance_batches(list(DOCUMENTS_COLUMNS))]
    table = pa.Table.from_batches(batches, schema=pa.schema(list(kinds.items())))
    return DocumentColumns(
        table=table,
        content_hashes=np.frombuffer(joined_values(table["content_hash"]), "<u8").reshape(-1, STRONG_HASH_BYTES // 8),
        token_hashes=np.frombuffer(joined_values(table["token_hash"]), np.uint8).reshape(-1, TOKEN_HASH_BYTES),
    )


def broken_promises(store: Store, columns: DocumentColumns, tokenizer: Tokenizer) -> Iterator[Broken]:
    """Every promise that the index, the table and the tokenizer don't keep."""
    digest = store_digest(
        tokenizer_digest=tokenizer.digest,
        options=store.manifest.options,
        columns=digest_columns(columns.table, store.arrays),
    )
    if digest != store.digest:
        yield "digest", f"the content gives {digest}, it says {store.digest}"
    facts = tokenizer.describe()
    for name in _TOKENIZER_FACTS:
        if store.manifest.tokenizer.get(name) != facts[name]:
            yield "tokenizer", f"its {name} is {facts[name]}, the manifest says {store.manifest.tokenizer.get(name)!r}"
    if _split_names(store.manifest.options.get("split")) != store.manifest.splits:
        yield "splits", "their names aren't those of the options"
    yield from _wrong_order(columns)
    yield from _wrong_counts(store)
    yield from (("leak", detail) for detail in _leaks(store, columns))


def _split_names(pairs: object) -> list[object]:
    """The names in the options' list of (name, share), which is part of the digest."""
    return [pair[0] for pair in pairs if isinstance(pair, list) and pair] if isinstance(pairs, list) else []


def _wrong_order(columns: DocumentColumns) -> Iterator[Broken]:
    keys = columns.table["key"]
    falling = pa.compute.greater_equal(keys.slice(0, max(len(keys) - 1, 0)), keys.slice(1))
    if pa.compute.any(falling).as_py():
        place = pa.compute.index(falling, True).as_py()
        yield "order", f"the key of document {place} isn't less than that of document {place + 1}"


def _wrong_counts(store: Store) -> Iterator[Broken]:
    counts, kept = store.manifest.counts, store.arrays["reason"] == KEPT
    chosen = {name: kept & (store.arrays["split"] == number) for number, name in enumerate(store.manifest.splits)}
    expected = [
        ("", counts, kept),
        *((f" of {name}", counts["splits"].get(name), mask) for name, mask in chosen.items()),
    ]
    for where, said, mask in expected:
        found = {"documents": int(mask.sum()), "tokens": int(store.arrays["length"][mask].sum(dtype=np.uint64))}
        for name, number in found.items():
            if not isinstance(said, dict) or said.get(name) != number:
                answer = said.get(name) if isinstance(said, dict) else None
                yield "counts", f"there are {number} {name}{where}, the manifest says {answer!r}"


def _leaks(store: Store, columns: DocumentColumns) -> Iterator[str]:
    """Contents that stand in more than one split, and near copies that do where they were to be excluded."""
    yield from _equal_across_splits(store, columns)
    near = store.manifest.options.get("near")
    if near is not None:
        threshold = near.get("threshold") if isinstance(near, dict) else None
        if isinstance(threshold, int | float):
            yield from _alike_across_splits(store, float(threshold))
        else:
            yield f"the options name no threshold of near copies, but {near!r:.80}"


def _alike_across_splits(store: Store, threshold: float) -> Iterator[str]:
    signatures = store.signatures()
    if signatures is None:
        yield "the options say that near copies were excluded, but the index has no signatures"
        return
    splits, names = store.arrays["split"], store.manifest.splits
    kept = store.arrays["reason"] == KEPT
    for one, other, alike in leaking_pairs(signatures, splits, kept, threshold=threshold):
        where = f"in {names[splits[one]]} and {names[splits[other]]}"
        yield f"documents {one} and {other} are near copies ({alike:.2f}), {where}"


def _equal_across_splits(store: Store, columns: DocumentColumns) -> Iterator[str]:
    kept = np.flatnonzero(store.arrays["reason"] == KEPT)
    kept = kept[perhaps_repeated(columns.content_hashes[kept, 0])]
    if not len(kept):
        return
    hashes = columns.content_hashes[kept]
    order = np.lexsort((kept, *hashes.T))
    kept, hashes = kept[order], hashes[order]
    begins = np.concatenate([[True], (hashes[1:] != hashes[:-1]).any(axis=1)])
    first = kept[np.flatnonzero(begins)][np.cumsum(begins) - 1]  # of each group of equal contents
    splits, names = store.arrays["split"], store.manifest.splits
    leaking = np.flatnonzero(splits[kept] != splits[first])
    for place in leaking[np.argsort(kept[leaking])].tolist():
        one, other = int(first[place]), int(kept[place])
        yield f"documents {one} and {other} are equal, in {names[splits[one]]} and {names[splits[other]]}"
