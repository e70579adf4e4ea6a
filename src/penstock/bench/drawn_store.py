"""A store of any size in seconds: documents whose lengths and tokens are drawn, written by the store's own writer.

In: a number of tokens and a store whose tokenizer it borrows. Out: a committed store that `penstock verify` finds
nothing wrong with, all of it in the split `train`. Lengths are those of `planning`; tokens are any but the tokenizer's
control tokens, so that documents end where they should. Memory: one segment of 2^24 tokens and the index; a billion
tokens take about a minute and 2 GB of disk.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock import fs
from penstock.bench.planning import MEAN_OF_LOGARITHM, SPREAD_OF_LOGARITHM
from penstock.hashing import strong_hash, token_hash
from penstock.sources import SkipTally
from penstock.store import open_store
from penstock.store.commit import commit_version, write_tokenizer
from penstock.store.decisions import Decisions
from penstock.store.index import build_index
from penstock.store.known import SegmentTokens
from penstock.store.layout import INDEX, MANIFESTS, SEGMENTS, WORK
from penstock.store.splits import group_hash
from penstock.store.writer import EncodedUnit, UnitRecord, write_unit
from penstock.tokenize import Tokenizer

__all__ = ["write_drawn_store"]

SEGMENT_TOKENS = 2**24
SOURCE = "drawn"
# Room for the store and as much again twice: a benchmark never fills a disk.
FREE_TIMES = 3


def write_drawn_store(*, tokenizer_of: str, num_tokens: int, out: str) -> dict[str, Any]:
    """Writes the store, or says why not: `missing`."""
    tokenizer = open_store(tokenizer_of).tokenizer()
    wanted = FREE_TIMES * num_tokens * tokenizer.dtype.itemsize
    free = shutil.disk_usage(Path(out).parent).free
    if free < wanted:
        return {"missing": f"{free / 1e9:.1f} GB of disk are free, {wanted / 1e9:.1f} GB are asked for"}
    started = time.perf_counter()
    store = Path(out)
    for folder in (SEGMENTS, MANIFESTS, INDEX, WORK):
        fs.make_folder(store / folder)
    records = list(_records(store, tokenizer, num_tokens))
    decisions = Decisions(shares={"train": 1.0}, seed=0, dedup="exact")
    index = build_index(
        records,
        known_segments={},
        sources=[SOURCE],
        decisions=decisions,
        tokenizer_digest=tokenizer.digest,
        source_options=[{"name": SOURCE}],
        read_tokens=SegmentTokens(store, tokenizer.dtype),
    )
    manifest = commit_version(
        store,
        index,
        version=1,
        dtype=tokenizer.dtype.str,
        tokenizer=tokenizer.describe(),
        tokenizer_file=write_tokenizer(store, tokenizer.spec.source_json),
        sources=[{"name": SOURCE, "location": SOURCE}],
        splits=list(decisions.shares),
        skipped_examples={},
    )
    fs.remove_tree(store / WORK)
    return {
        "seconds": time.perf_counter() - started,
        "documents": manifest.num_documents,
        "tokens": sum(entry.tokens for entry in manifest.segments),
    }


def _records(store: Path, tokenizer: Tokenizer, num_tokens: int) -> Iterator[UnitRecord]:
    chance = np.random.default_rng(0)
    documents, written = 0, 0
    while written < num_tokens:
        size = min(SEGMENT_TOKENS, num_tokens - written)
        unit = _unit(tokenizer, chance, num_tokens=size, first_document=documents)
        yield write_unit(store, store / WORK / f"{written}.arrow", unit)
        documents += len(unit.columns["key"])
        written += size


def _lengths(chance: np.random.Generator, num_tokens: int, *, shortest: int) -> npt.NDArray[np.int64]:
    """Lengths of documents that fill a segment: the last is what is left, joined to the one before if too short."""
    drawn = chance.lognormal(MEAN_OF_LOGARITHM, SPREAD_OF_LOGARITHM, num_tokens // 256 + 16).astype(np.int64)
    ends = np.cumsum(drawn + shortest)
    ends = np.append(ends[ends <= num_tokens - shortest], num_tokens)
    return np.diff(ends, prepend=0)


def _unit(tokenizer: Tokenizer, chance: np.random.Generator, *, num_tokens: int, first_document: int) -> EncodedUnit:
    spec = tokenizer.spec
    ordinary = np.setdiff1d(
        np.arange(spec.vocab_size), np.array(sorted(spec.control_tokens.values()), np.int64)
    ).astype(tokenizer.dtype)
    payload = ordinary[chance.integers(0, len(ordinary), num_tokens, dtype=np.uint32)]
    begin = list(spec.begin_ids)
    lengths = _lengths(chance, num_tokens, shortest=len(begin) + 2)
    ends = np.cumsum(lengths)
    starts = ends - lengths
    for place, token in enumerate(begin):
        payload[starts + place] = token
    payload[ends - 1] = spec.end_id
    count = len(lengths)
    keys = [b"%s/%012d" % (SOURCE.encode(), first_document + number) for number in range(count)]
    pairs = zip(starts.tolist(), ends.tolist(), strict=True)
    columns: dict[str, list[Any]] = {
        "key": keys,
        "group_hash": [group_hash(key, seed=0) for key in keys],
        "source": [SOURCE] * count,
        "path": [b""] * count,
        "byte_start": [0] * count,
        "byte_end": [0] * count,
        "text_bytes": lengths.tolist(),
        "exact": [0] * count,
        "language": [""] * count,
        "facts": [""] * count,
        "content_hash": [strong_hash(key) for key in keys],
        "token_hash": [token_hash(payload[start:end]) for start, end in pairs],
        "segment": [None] * count,
        "offset": starts.tolist(),
        "length": lengths.tolist(),
        "loss_runs": [None] * count,
        "signature": [b""] * count,
    }
    return EncodedUnit(payload=payload, columns=columns, skips=SkipTally(), input_bytes=0, started_ns=0)
