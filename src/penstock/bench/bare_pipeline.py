"""The least that turns files into tokens on disk with gigatoken: what a user would write in forty lines.

A thread reads, gigatoken encodes 32 MB a call on its own pool, numpy puts an end token behind each document, a thread
writes one flat file, flushed at the end. Nothing is checked, hashed, searched, split or written down, and a kill leaves
a file of any length: what `prepare` takes longer for is what it promises, what it takes less for is its pipeline.
Memory: three batches of text and of ids.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Queue
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from penstock.bench.corpus import batches_of, corpus_sources
from penstock.hardware import peak_memory_bytes
from penstock.sources import FilesSource
from penstock.tokenize import load_tokenizer

__all__ = ["tokens_to_file"]

BATCH_BYTES = 32 * 2**20
WAITING = 2

Ids = npt.NDArray[Any]


def tokens_to_file(*, inputs: Sequence[str], tokenizer: str, out: str) -> dict[str, Any]:
    """The rate from opening the vocabulary to the flushed file; RAYON_NUM_THREADS says on how many threads."""
    import awkward  # type: ignore[import-untyped]  # noqa: F401  not counted on our side either
    from gigatoken import Tokenizer

    sources = corpus_sources(inputs)
    if not all(isinstance(source, FilesSource) for source in sources):
        return {"missing": "the inputs aren't files"}
    own = load_tokenizer(tokenizer)
    started = time.perf_counter()
    encoder = Tokenizer.from_json(own.spec.encoder_json)
    texts: Queue[list[bytes] | None] = Queue(WAITING)
    ids: Queue[Ids | None] = Queue(WAITING)
    documents, size, tokens = 0, 0, 0
    with Path(out).open("wb") as file, ThreadPoolExecutor(2) as threads:
        reading = threads.submit(_read, [source.location for source in sources], texts)
        writing = threads.submit(_write, ids, file)
        while (batch := texts.get()) is not None:
            layout = encoder.encode_batch(batch, parallel=True).layout
            ended = np.empty(len(layout.content.data) + len(batch), own.dtype)
            _put_ids(ended, np.asarray(layout.content.data), np.asarray(layout.offsets.data), own.end_id)
            ids.put(ended)
            documents += len(batch)
            size += sum(map(len, batch))
            tokens += len(ended)
        ids.put(None)
        reading.result()
        writing.result()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - started
    Path(out).unlink()
    return {
        "megabytes_per_second": size / 1e6 / seconds,
        "seconds": seconds,
        "documents": documents,
        "document_bytes": size,
        "tokens": tokens,
        "peak_memory_bytes": peak_memory_bytes(),
    }


def _read(roots: Sequence[str], texts: Queue[list[bytes] | None]) -> None:
    try:
        for batch in batches_of(_contents(roots), BATCH_BYTES):
            texts.put(batch)
    finally:
        texts.put(None)


def _contents(roots: Sequence[str]) -> Iterator[bytes]:
    for root in roots:
        for folder, folders, names in os.walk(root):
            folders.sort()
            for name in sorted(names):
                with Path(folder, name).open("rb") as file:
                    yield file.read()


def _put_ids(ended: Ids, ids: Ids, borders: Ids, end_id: int) -> None:
    """The ids of all documents, with an end token behind each."""
    is_text = np.ones(len(ended), bool)
    is_text[borders[1:] + np.arange(len(borders) - 1)] = False
    ended[is_text] = ids
    ended[~is_text] = end_id


def _write(ids: Queue[Ids | None], file: IO[bytes]) -> None:
    try:
        while (some := ids.get()) is not None:
            file.write(some.data)
        file.flush()
    except OSError:
        while ids.get() is not None:  # nobody must wait for room
            pass
        raise
