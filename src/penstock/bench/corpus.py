"""The documents that everybody is measured on, and their vocabulary.

In: `--input` words, or nothing: then the packages installed beside this one and Python's own library, hundreds of MB of
code and text that every machine with the peers has. Out: sources for `prepare`, or the same documents as bytes in
memory for those who start from there. Each process makes its own from the words; reading takes seconds.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from penstock import fs
from penstock.sources import (
    DEFAULT_UNIT_BYTES,
    STANDARD_LIBRARY,
    FileOptions,
    FilesSource,
    Source,
    sources_from_inputs,
)
from penstock.tokenize import Tokenizer, load_tokenizer, train_tokenizer

__all__ = ["batches_of", "corpus_documents", "corpus_sources", "evenly_sampled", "tokenizer_path"]

INCLUDED = ("*.py", "*.h", "*.hpp", "*.cuh", "*.md", "*.rst", "*.txt", "*.js", "*.json")
VOCABULARY_SAMPLE_BYTES = 48 * 2**20


def corpus_sources(inputs: Sequence[str]) -> list[Source]:
    """The sources of the corpus."""
    if inputs:
        return sources_from_inputs(inputs)
    packages = FilesSource(
        name="site-packages",
        root=sysconfig.get_path("purelib"),
        options=FileOptions(vendored=True, include=INCLUDED),
    )
    return [packages, *sources_from_inputs([STANDARD_LIBRARY])]


def corpus_documents(inputs: Sequence[str]) -> list[bytes]:
    """The corpus in memory, a document each, as `prepare` reads them."""
    return [
        b"".join(part.data for part in document.parts)
        for source in corpus_sources(inputs)
        for unit in source.units(DEFAULT_UNIT_BYTES)
        for document in source.read(unit).documents
    ]


def evenly_sampled(documents: Sequence[bytes], num_bytes: int) -> list[bytes]:
    """Every k-th document, so that about `num_bytes` come together from all over the corpus."""
    total = sum(map(len, documents))
    step = max(1, round(total / num_bytes))
    return list(documents[step // 2 :: step])


def batches_of(documents: Iterable[bytes], batch_bytes: int) -> Iterator[list[bytes]]:
    """Runs of documents of at least `batch_bytes`, the last perhaps less."""
    batch: list[bytes] = []
    size = 0
    for document in documents:
        batch.append(document)
        size += len(document)
        if size >= batch_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def tokenizer_path(value: str | None, inputs: Sequence[str], folder: Path) -> tuple[Path, Tokenizer]:
    """The tokenizer for all sides: the one given, else one trained on a sample of the corpus, kept in `folder`."""
    if value is not None:
        return Path(value).resolve(), load_tokenizer(value)
    tokenizer = train_tokenizer(evenly_sampled(corpus_documents(inputs), VOCABULARY_SAMPLE_BYTES))
    path = folder / "trained.tokenizer.json"
    fs.write_atomic(path, tokenizer.spec.source_json)
    return path, tokenizer
