"""What a format is given to write: one split, the folder, the options, and a place to tell how far it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from penstock.export.folder import ExportFolder
from penstock.export.options import ExportOptions
from penstock.export.rows import PackedRows, RowCut, Rows
from penstock.export.stream import TokenStream

__all__ = ["SplitJob"]


@dataclass(frozen=True, kw_only=True)
class SplitJob:
    """One split to write.

    Attributes:
        prefix: `train/` where each split gets a folder of its own, empty where a single one was asked for.
        advance: called with the number of tokens written since the last call.
    """

    stream: TokenStream
    folder: ExportFolder
    options: ExportOptions
    prefix: str
    advance: Callable[[int], None]

    @property
    def split(self) -> str:
        """Name of the split."""
        return self.stream.split

    def rows(self) -> Rows | None:
        """The rows asked for; None where documents are."""
        if self.options.seq_len is None:
            return None
        seq_len, overlap = self.options.seq_len, self.options.overlap
        if self.options.pack == "concat" or self.stream.num_tokens < 2:
            return RowCut(self.stream, seq_len=seq_len, overlap=overlap)
        return PackedRows(self.stream, policy=self.options.pack, seq_len=seq_len, overlap=overlap)

    def tokenizer_facts(self) -> dict[str, Any]:
        """What a reader must know about the ids; no paths, so that exports of equal stores are equal."""
        facts = self.stream.store.manifest.tokenizer
        names = ("digest", "vocab_size", "end_id", "begin_ids", "control_tokens")
        return {name: facts[name] for name in names if name in facts}
