"""The slow reference: what an export must hold, from plain lists, one token at a time. Shares nothing with the code."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from penstock.store import Store, document_origin

IGNORED = -100


@dataclass(frozen=True)
class Expected:
    """A kept document: its origin, its tokens and which of them carry loss."""

    origin: Any
    tokens: list[int]
    carries: list[bool]

    @property
    def labels(self) -> list[int]:
        return [token if carries else IGNORED for token, carries in zip(self.tokens, self.carries, strict=True)]


_KNOWN: dict[tuple[str, str], list[Expected]] = {}


def expected_documents(store: Store, split: str) -> list[Expected]:
    """The kept documents of a split in canonical order; worked out once per store."""
    key = (store.digest, split)
    if key not in _KNOWN:
        _KNOWN[key] = _expected_documents(store, split)
    return _KNOWN[key]


def _expected_documents(store: Store, split: str) -> list[Expected]:
    runs = {}
    arrays = store.arrays
    for number, document in enumerate(arrays["loss_documents"].tolist()):
        first, last = arrays["loss_starts"][number : number + 2].tolist()
        runs[document] = arrays["loss_runs"].tolist()[2 * first : 2 * last]
    documents = []
    for number in range(store.num_documents):
        origin = document_origin(store, number)
        if origin.status != "kept" or origin.split != split:
            continue
        tokens = store.document_tokens(number).tolist()
        carries = [number not in runs] * len(tokens)
        pairs = runs.get(number, [])
        for first, count in zip(pairs[::2], pairs[1::2], strict=True):
            carries[first : first + count] = [True] * count
        documents.append(Expected(origin, tokens, carries))
    return documents


@dataclass(frozen=True)
class Row:
    tokens: list[int]
    carries: list[bool]
    starts: list[int]

    def labels(self, *, boundaries: bool = True) -> list[int]:
        return [
            token if carries and place and not (boundaries and place in self.starts) else IGNORED
            for place, (token, carries) in enumerate(zip(self.tokens, self.carries, strict=True))
        ]


def expected_rows(documents: list[Expected], seq_len: int, overlap: int = 0) -> list[Row]:
    """Rows without padding; the last may be shorter."""
    stream = [token for document in documents for token in document.tokens]
    carries = [flag for document in documents for flag in document.carries]
    begins = {sum(len(document.tokens) for document in documents[:number]) for number in range(len(documents))}
    rows: list[Row] = []
    start = 0
    while stream:
        span = range(start, min(start + seq_len, len(stream)))
        loss = [carries[place] and not (rows and place - start < overlap) for place in span]
        rows.append(Row([stream[place] for place in span], loss, [place - start for place in span if place in begins]))
        if start + seq_len >= len(stream):
            break
        start += seq_len - overlap
    return rows


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
