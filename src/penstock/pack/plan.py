"""A plan: which tokens are in which row, as arithmetic over a virtual stream.

The documents of a split, one after another, form a stream of M tokens. A plan cuts it into rows: row r reads up to
T + 1 tokens from `r * T`, so that it has T inputs and the T next tokens as labels. Nothing is copied: a plan is a few
arrays over the store's index, made in seconds for millions of documents, for any row length.

    documents        [D]      numbers in the store, in stream order
    document_starts  [D + 1]  stream position of each, then M
    piece_*          [P]      stretches that lie together in a segment; neighbours in the store are one piece
    first_document   [N + 1]  the document that holds the first token of each row
    first_piece      [N]      the piece that does
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.hashing import digest_of
from penstock.store import Store

__all__ = ["Plan"]

Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class Plan:
    """Rows over one split of a store; see the module's docstring.

    Attributes:
        policy: how rows were made (`concat`).
        boundaries: whether labels and attention stop at document borders.
        waste_tokens: row positions that hold no token.
    """

    store: Store
    split: str
    policy: str
    seq_len: int
    boundaries: bool
    num_rows: int
    num_tokens: int
    waste_tokens: int
    documents: Integers
    document_starts: Integers
    piece_starts: Integers
    piece_segments: Integers
    piece_offsets: Integers
    first_document: Integers
    first_piece: Integers

    @cached_property
    def identity(self) -> dict[str, Any]:
        """What decides which tokens are in row r; part of every saved position."""
        return {
            "store": self.store.digest,
            "split": self.split,
            "policy": self.policy,
            "seq_len": self.seq_len,
            "boundaries": self.boundaries,
        }

    @cached_property
    def fingerprint(self) -> str:
        """Hash of `identity`."""
        return digest_of(self.identity)

    @cached_property
    def most_documents_in_a_row(self) -> int:
        """The largest number of documents, or parts of them, that share a row (padding counts as one)."""
        if not self.num_rows:
            return 1
        return int(np.diff(self.first_document).max()) + 1

    def row_range(self, row: int) -> tuple[int, int]:
        """First stream position of a row and how many tokens it reads (T + 1, fewer in the last one)."""
        start = row * self.seq_len
        return start, min(self.seq_len + 1, self.num_tokens - start)

    def describe(self) -> dict[str, Any]:
        """The figures that `penstock plan` prints."""
        positions = self.num_rows * self.seq_len
        return {
            **self.identity,
            "rows": self.num_rows,
            "tokens": self.num_tokens,
            "documents": len(self.documents),
            "waste_tokens": self.waste_tokens,
            "waste_percent": round(100 * self.waste_tokens / positions, 4) if positions else 0.0,
            "most_documents_in_a_row": self.most_documents_in_a_row,
        }
