"""Where documents came from, a batch of them at a time: what JSONL's and Arrow's metadata say.

Names are escaped as everywhere; paths are relative to their source, so that exports of equal stores are equal.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.errors import DamagedStoreError
from penstock.export.stream import TokenStream
from penstock.sources import printable

__all__ = ["COLUMNS", "document_keys", "document_metadata", "parsed_facts"]

COLUMNS = {
    "document": "int64",
    "key": "string",
    "source": "string",
    "path": "string",
    "split": "string",
    "language": "string",
    "num_tokens": "int64",
    "num_bytes": "int64",
    "byte_start": "int64",
    "byte_end": "int64",
    "exact": "bool",
    "facts": "string",
}
"""Name and type of each piece of metadata; `facts` is a JSON object."""


def document_metadata(stream: TokenStream, first: int, last: int) -> list[dict[str, Any]]:
    """One dictionary with the keys of `COLUMNS` per place of the stream, facts as text."""
    import pyarrow as pa

    numbers = stream.documents[first:last]
    store = stream.store
    wanted = ["key", "path", "language", "text_bytes", "byte_start", "byte_end", "exact", "facts"]
    rows = store.provenance().select(wanted).take(pa.array(numbers)).to_pylist()
    sources = store.arrays["source"][numbers].tolist()
    lengths = store.arrays["length"][numbers].tolist()
    return [
        {
            "document": number,
            "key": _shown(row["key"]),
            "source": store.manifest.sources[source]["name"],
            "path": _shown(row["path"]),
            "split": stream.split,
            "language": row["language"],
            "num_tokens": length,
            "num_bytes": row["text_bytes"],
            "byte_start": row["byte_start"],
            "byte_end": row["byte_end"],
            "exact": bool(row["exact"]),
            "facts": row["facts"],
        }
        for number, row, source, length in zip(numbers.tolist(), rows, sources, lengths, strict=True)
    ]


def document_keys(stream: TokenStream, documents: npt.NDArray[np.int64]) -> dict[int, str]:
    """The key of each of these documents, by number."""
    import pyarrow as pa

    numbers = np.unique(documents)
    keys = stream.store.provenance().column("key").take(pa.array(numbers)).to_pylist()
    return {number: _shown(key) for number, key in zip(numbers.tolist(), keys, strict=True)}


def _shown(name: bytes) -> str:
    """`printable`, at once where nothing needs an escape: by characters it takes longer than the tokens."""
    try:
        text = name.decode()
    except UnicodeDecodeError:
        return printable(name)
    return text if text.isprintable() else printable(name)


def parsed_facts(metadata: dict[str, Any], stream: TokenStream) -> dict[str, Any]:
    """The metadata with its facts as an object."""
    try:
        facts = json.loads(metadata["facts"] or "{}")
    except (ValueError, RecursionError) as error:
        raise DamagedStoreError(
            f"the facts of document {metadata['document']} in {stream.store.path} aren't JSON ({error})",
            hint="`penstock verify STORE` lists all damage; prepare the data again",
        ) from None
    return {**metadata, "facts": facts}
