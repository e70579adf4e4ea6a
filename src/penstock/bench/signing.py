"""Tasks of `bench near`: signatures of ids in memory, by us and by rensa; the choice of who stays; planted copies.

rensa gets the hashes that ours are made of, in its fastest interface (flat buffers, one thread, 128 permutations);
making them is part of its time. Times are of the processor, all on one thread. Rates are in MB (10^6 bytes) of the
UTF-8 that the ids stand for.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.bench.corpus import batches_of, corpus_documents, evenly_sampled
from penstock.bench.near_copies import measured_recall, source_texts
from penstock.sources import DEFAULT_UNIT_BYTES
from penstock.store.encoding import ENCODE_BATCH_BYTES
from penstock.store.near import near_exclusions
from penstock.store.signatures import CHUNK_TOKENS, SHINGLE_TOKENS, SIGNATURE_BINS, shingle_hashes, signatures
from penstock.tokenize import Tokenizer, load_tokenizer

__all__ = ["choose_staying", "encode_gigatoken", "find_copies", "sign_penstock", "sign_rensa"]

Sign = Callable[[npt.NDArray[Any], npt.NDArray[np.int64]], Any]


def sign_penstock(*, inputs: Sequence[str], tokenizer: str, sample_bytes: int) -> dict[str, Any]:
    """Our signatures, a unit at a time."""
    return _timed(signatures, inputs=inputs, tokenizer=tokenizer, sample_bytes=sample_bytes)


def sign_rensa(*, inputs: Sequence[str], tokenizer: str, sample_bytes: int, kind: str) -> dict[str, Any]:
    """rensa's signatures, R-MinHash (`exact`) or its one-pass sketch (`rho`)."""
    return _timed(_rensa(kind), inputs=inputs, tokenizer=tokenizer, sample_bytes=sample_bytes)


def encode_gigatoken(*, inputs: Sequence[str], tokenizer: str, sample_bytes: int) -> dict[str, Any]:
    """The encoder alone over the same documents, which it hasn't met before."""
    from gigatoken import Tokenizer as Gigatoken

    gigatoken = Gigatoken.from_json(load_tokenizer(tokenizer).spec.encoder_json)
    documents = evenly_sampled(corpus_documents(inputs), sample_bytes)
    batches = list(batches_of(documents, ENCODE_BATCH_BYTES))
    gigatoken.encode_batch(batches[0][:1], parallel=False)
    started = time.process_time()
    for batch in batches:
        gigatoken.encode_batch(batch, parallel=False)
    return {"megabytes_per_second": sum(map(len, documents)) / 1e6 / (time.process_time() - started)}


def choose_staying(*, num_documents: int, kind: str) -> dict[str, Any]:
    """`near_exclusions` over made-up signatures: all `equal`, none alike (`unique`), or each with a near copy."""
    chance = np.random.Generator(np.random.PCG64(0))
    founders = {"equal": 1, "unique": num_documents, "pairs": -(-num_documents // 2)}[kind]
    rows = chance.integers(1, 2**16, (founders, SIGNATURE_BINS), np.uint16)
    rows = np.resize(rows, (num_documents, SIGNATURE_BINS))
    if kind == "pairs":
        for first in range(founders, num_documents, 2**14):
            some = rows[first : first + 2**14]
            some[chance.random(some.shape, np.float32) < 0.1] = 0
            some[some == 0] = chance.integers(1, 2**16, int((some == 0).sum()), np.uint16)
    split = (chance.random(num_documents) < 0.15).astype(np.uint8)
    started = time.process_time()
    excluded, _ = near_exclusions(rows, split, np.ones(num_documents, np.bool_))
    return {"seconds": time.process_time() - started, "excluded": int(excluded.sum())}


def find_copies(*, tokenizer: str, num_texts: int, only_replace: bool) -> dict[str, Any]:
    """Recall and precision on planted copies, as `near_copies.measured_recall` counts them."""
    return measured_recall(load_tokenizer(tokenizer), source_texts(num_texts), only_replace=only_replace)


def _timed(sign: Sign, *, inputs: Sequence[str], tokenizer: str, sample_bytes: int) -> dict[str, Any]:
    documents = evenly_sampled(corpus_documents(inputs), sample_bytes)
    units = list(_units(load_tokenizer(tokenizer), documents))
    sign(*units[0])  # the first call loads what the others use
    started = time.process_time()
    for tokens, starts in units:
        sign(tokens, starts)
    seconds = time.process_time() - started
    megabytes, num_tokens = sum(map(len, documents)) / 1e6, sum(len(tokens) for tokens, _ in units)
    return {
        "megabytes_per_second": megabytes / seconds,
        "tokens_per_second": num_tokens / seconds,
        "megabytes": megabytes,
        "documents": len(documents),
    }


def _units(
    tokenizer: Tokenizer, documents: Sequence[bytes]
) -> Iterator[tuple[npt.NDArray[Any], npt.NDArray[np.int64]]]:
    for batch in batches_of(documents, DEFAULT_UNIT_BYTES):
        tokens, starts = tokenizer.encode(batch)
        yield tokens, np.asarray(starts, np.int64)


def _rensa(kind: str) -> Sign:
    from rensa import RMinHash

    make = {
        "exact": RMinHash.digest_matrix_from_flat_token_hashes,
        "rho": RMinHash.digest_matrix_from_flat_token_hashes_rho,
    }[kind]

    def sign(tokens: npt.NDArray[Any], starts: npt.NDArray[np.int64]) -> Any:
        # Shingles that begin in one document and end in the next are left in: rensa has no mask, and they are few.
        padded = np.append(tokens, np.zeros(SHINGLE_TOKENS - 1, tokens.dtype))
        borders = range(0, len(tokens), CHUNK_TOKENS)
        chunks = (padded[first : first + CHUNK_TOKENS + SHINGLE_TOKENS - 1] for first in borders)
        hashes = np.concatenate([shingle_hashes(chunk) for chunk in chunks])
        return make(hashes.astype(np.uint64), starts.astype(np.uint64), SIGNATURE_BINS, 42)

    return sign
