"""From a token, a document or a stretch of tokens back to the file and bytes it came from.

Token numbers count the kept documents in canonical order, of one split or of all. For byte-level vocabularies a token's
bytes are the file's bytes (`exact`); otherwise, and where the document was unescaped or rendered, its whole range is
given with `exact: false`. So is a document of a vocabulary that doesn't keep bytes: its tokens aren't those bytes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DamagedStoreError, StoreError
from penstock.sources import printable
from penstock.store.layout import REASONS
from penstock.store.reader import Store
from penstock.tokenize import Tokenizer

__all__ = ["DocumentOrigin", "byte_range", "document_origin", "document_text", "summary", "token_origin"]


@dataclass(frozen=True, kw_only=True)
class DocumentOrigin:
    """Where a document came from and where it is; `exact` where its tokens are those bytes of the file.

    Attributes:
        content_hash: what a rule `content:HEX` of the blocklist names, in hexadecimal.
    """

    document: int
    key: str
    source: str
    file: str
    byte_start: int
    byte_end: int
    exact: bool
    text_bytes: int
    language: str
    facts: dict[str, Any]
    split: str
    status: str
    tokens: int
    content_hash: str


def summary(store: Store) -> dict[str, Any]:
    """Counts, splits and tokenizer of a version."""
    manifest = store.manifest
    return {
        "store": store.location,
        "version": store.version,
        "created": manifest.created,
        "digest": store.digest,
        **manifest.counts,
        "tokenizer": manifest.tokenizer,
        "dtype": manifest.dtype,
        "segments": len(manifest.segments),
        "sources": manifest.sources,
        "options": manifest.options,
        "skipped_examples": manifest.skipped_examples,
    }


def document_origin(store: Store, document: int) -> DocumentOrigin:
    """Facts of a document by its number in canonical order."""
    store.check_document(document)
    row = store.provenance().slice(document, 1).to_pylist()[0]
    source = store.manifest.sources[int(store.arrays["source"][document])]
    return DocumentOrigin(
        document=document,
        key=printable(row["key"]),
        source=source["name"],
        file=_file(source["location"], row["path"]),
        byte_start=row["byte_start"],
        byte_end=row["byte_end"],
        exact=bool(row["exact"]) and store.manifest.tokenizer.get("byte_exact") is True,
        text_bytes=row["text_bytes"],
        language=row["language"],
        facts=_facts(store, document, row["facts"]),
        split=store.manifest.splits[int(store.arrays["split"][document])],
        status=REASONS[int(store.arrays["reason"][document])],
        tokens=int(store.arrays["length"][document]),
        content_hash=row["content_hash"].hex(),
    )


def _facts(store: Store, document: int, text: str) -> dict[str, Any]:
    try:
        facts = json.loads(text or "{}")
    except (ValueError, RecursionError):
        facts = None
    if isinstance(facts, dict):
        return facts
    raise DamagedStoreError(
        f"{store.path} is damaged: the facts of document {document} are no JSON object",
        hint="prepare the data again, or open an older version: STORE@N",
    )


def _file(location: str, path: bytes) -> str:
    return printable(os.path.join(os.fsencode(location), path) if path else os.fsencode(location))


def document_text(store: Store, document: int, tokenizer: Tokenizer) -> str:
    """A document decoded, without the tokens around it."""
    tokens = store.document_tokens(document)
    begin = tokenizer.spec.begin_ids
    # A framed document (a chat) spells its own beginning, which needn't be the tokenizer's.
    start = len(begin) if tuple(tokens[: len(begin)].tolist()) == begin else 0
    return tokenizer.decode(tokens[start:-1])


def token_origin(store: Store, token: int, *, split: str | None = None) -> dict[str, Any]:
    """The document, file and byte range of the token with this number."""
    documents = store.kept_documents(split)
    ends = np.cumsum(store.arrays["length"][documents].astype(np.int64))
    total = int(ends[-1]) if len(ends) else 0
    if not 0 <= token < total:
        where = f"split {split!r}" if split else "the store"
        raise StoreError(f"{where} has no token {token}", hint=f"tokens are numbered 0 to {total - 1}")
    place = int(np.searchsorted(ends, token, side="right"))
    document = int(documents[place])
    tokens = store.document_tokens(document)
    within = token - (int(ends[place]) - len(tokens))
    tokenizer = store.tokenizer()
    origin = document_origin(store, document)
    start, end, exact = byte_range(tokenizer, tokens, origin, first=within, end=within + 1)
    return {
        "token": token,
        "id": int(tokens[within]),
        "text": tokenizer.decode(tokens[within : within + 1]),
        "index_in_document": within,
        **{name: value for name, value in asdict(origin).items() if name != "tokens"},
        "byte_start": start,
        "byte_end": end,
        "exact": exact,
    }


def byte_range(
    tokenizer: Tokenizer, tokens: npt.NDArray[Any], origin: DocumentOrigin, *, first: int, end: int
) -> tuple[int, int, bool]:
    """Bytes of the file that tokens `first` to `end` of a document stand for, and whether that is exact.

    Args:
        tokenizer: the store's.
        tokens: all of the document's.
        origin: the document's; where it isn't exact, its whole range is given.
        first: the first token.
        end: one past the last.
    """
    if not origin.exact:
        return origin.byte_start, origin.byte_end, False
    lengths = tokenizer.token_byte_lengths()[tokens[:end]].astype(np.int64)
    start = origin.byte_start + int(lengths[:first].sum())
    return start, start + int(lengths[first:].sum()), True
