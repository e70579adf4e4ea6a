"""Documents in memory to ids in memory, timed: tasks of the tokenize and prepare benchmarks.

Every task reads the documents first, warms its tokenizers up on a few of them, then times one pass over all. One pass,
because gigatoken remembers words: a second one over the same documents is half as fast again (`again`, for the record),
which no real corpus is. Rates are in MB (10^6 bytes) of UTF-8 per second.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from penstock.bench.corpus import batches_of, corpus_documents, evenly_sampled
from penstock.tokenize import Tokenizer, load_tokenizer

__all__ = ["encode_gigatoken_pool", "encode_gigatoken_threads", "encode_penstock", "encode_tokenizers"]

WARM_UP_BYTES = 4 * 2**20
THREAD_BATCH_BYTES = 8 * 2**20

Encode = Callable[[list[bytes]], int]
"""Encodes a batch and says how many tokens came out."""


def encode_gigatoken_pool(
    *, inputs: Sequence[str], tokenizer: str, sample_bytes: int | None = None, batch_bytes: int | None = None
) -> dict[str, Any]:
    """gigatoken on its own thread pool, limited by RAYON_NUM_THREADS; without `batch_bytes`, in one call."""
    from gigatoken import Tokenizer as Gigatoken

    gigatoken = Gigatoken.from_json(load_tokenizer(tokenizer).spec.encoder_json)

    def encode(batch: list[bytes]) -> int:
        return len(gigatoken.encode_batch(batch, parallel=True).layout.content.data)

    documents = _documents(inputs, sample_bytes)
    size = sum(map(len, documents)) + 1 if batch_bytes is None else batch_bytes
    return _timed([encode], documents, batch_bytes=size)


def encode_gigatoken_threads(
    *, inputs: Sequence[str], tokenizer: str, workers: int, sample_bytes: int | None = None
) -> dict[str, Any]:
    """gigatoken in Python threads with a tokenizer each; encoding releases the GIL."""
    from gigatoken import Tokenizer as Gigatoken

    encoder_json = load_tokenizer(tokenizer).spec.encoder_json

    def encoder() -> Encode:
        gigatoken = Gigatoken.from_json(encoder_json)
        return lambda batch: len(gigatoken.encode_batch(batch, parallel=False).layout.content.data)

    return _timed([encoder() for _ in range(workers)], _documents(inputs, sample_bytes))


def encode_penstock(
    *, inputs: Sequence[str], tokenizer: str, workers: int, sample_bytes: int | None = None
) -> dict[str, Any]:
    """Our Tokenizer, in as many threads as asked; checks every id."""
    own = load_tokenizer(tokenizer)

    def encoder() -> Encode:
        thread_tokenizer = Tokenizer(own.spec, origin=own.origin, engine=own.engine)
        return lambda batch: len(thread_tokenizer.encode(batch)[0])

    report = _timed([encoder() for _ in range(workers)], _documents(inputs, sample_bytes))
    return {**report, "engine": own.engine.name}


def encode_tokenizers(*, inputs: Sequence[str], tokenizer: str, sample_bytes: int) -> dict[str, Any]:
    """Hugging Face `tokenizers` on its own thread pool, which RAYON_NUM_THREADS limits."""
    from tokenizers import Tokenizer as Reference

    reference = Reference.from_str(load_tokenizer(tokenizer).spec.encoder_json)

    def encode(batch: list[bytes]) -> int:
        texts = [document.decode() for document in batch]
        return sum(map(len, reference.encode_batch_fast(texts, add_special_tokens=False)))

    return _timed([encode], _documents(inputs, sample_bytes), again=False)


def _documents(inputs: Sequence[str], sample_bytes: int | None) -> list[bytes]:
    documents = corpus_documents(inputs)
    return documents if sample_bytes is None else evenly_sampled(documents, sample_bytes)


def _timed(
    encoders: Sequence[Encode],
    documents: Sequence[bytes],
    *,
    batch_bytes: int = THREAD_BATCH_BYTES,
    again: bool = True,
) -> dict[str, Any]:
    """The rate of one pass over the documents, a thread per encoder; the next free one takes the next batch."""
    warm_up = next(batches_of(documents, WARM_UP_BYTES))
    for encode in encoders:
        encode(warm_up[: max(1, len(warm_up) // 4)])
    megabytes = sum(map(len, documents)) / 1e6
    batches = list(batches_of(documents, batch_bytes))
    seconds, tokens = _one_pass(encoders, batches)
    report = {
        "megabytes_per_second": megabytes / seconds,
        "tokens_per_second": tokens / seconds,
        "megabytes": megabytes,
        "tokens": tokens,
        "documents": len(documents),
    }
    if again:
        report["again_megabytes_per_second"] = megabytes / _one_pass(encoders, batches)[0]
    return report


def _one_pass(encoders: Sequence[Encode], batches: Sequence[list[bytes]]) -> tuple[float, int]:
    waiting = iter(batches)
    lock = threading.Lock()
    counts = [0] * len(encoders)

    def work(number: int) -> None:
        while True:
            with lock:
                batch = next(waiting, None)
            if batch is None:
                return
            counts[number] += encoders[number](batch)

    with ThreadPoolExecutor(len(encoders)) as pool:
        started = time.perf_counter()
        done = [pool.submit(work, number) for number in range(len(encoders))]
        for each in done:
            each.result()
        seconds = time.perf_counter() - started
    return seconds, sum(counts)
