"""Who reads which rows of a stream: global batches, shared by ranks, each share cut into pieces for worker processes.

Global batch k holds B rows; rank r of R takes rows r * B / R .. (r + 1) * B / R of it. A rank's rows, in this order,
are cut into pieces (one micro-batch each), and worker w of W takes pieces w, w + W, w + 2 W… PyTorch's DataLoader asks
its workers in turn, so that its batches come in the stream's order, whatever W is.

A stream that ends, ends with a pass; its last global batch is short then and shared as evenly as rows allow.
Everything here is arithmetic: any piece is found in constant time.
"""

from __future__ import annotations

from dataclasses import dataclass

from penstock.errors import ConfigError

__all__ = ["Share"]


@dataclass(frozen=True, kw_only=True)
class Share:
    """A rank's part of the positions start .. end (None: endless).

    Attributes:
        batch_rows: rows per global batch.
        piece_rows: rows per piece; divides a rank's share of a batch.
    """

    batch_rows: int
    rank: int
    world_size: int
    piece_rows: int
    start: int = 0
    end: int | None = None

    def __post_init__(self) -> None:
        if self.batch_rows < 1 or self.world_size < 1 or self.batch_rows % self.world_size:
            raise ConfigError(
                f"a global batch of {self.batch_rows} rows can't be shared by {self.world_size} ranks",
                hint="choose a batch size that the number of ranks divides",
            )
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"there is no rank {self.rank} among {self.world_size}", hint=f"ranks are 0 to {self.world_size - 1}"
            )
        if self.piece_rows < 1 or self.rank_rows % self.piece_rows:
            raise ConfigError(
                f"{self.rank_rows} rows per rank can't be cut into micro-batches of {self.piece_rows}",
                hint="choose a micro-batch that divides the global batch over the ranks",
            )

    @property
    def rank_rows(self) -> int:
        """A rank's rows of a whole batch."""
        return self.batch_rows // self.world_size

    @property
    def pieces_per_batch(self) -> int:
        """A rank's pieces of a whole batch."""
        return self.rank_rows // self.piece_rows

    def piece(self, number: int) -> tuple[int, int] | None:
        """First position and number of rows of a piece; None behind the end."""
        batch, part = divmod(number, self.pieces_per_batch)
        first = self.start + batch * self.batch_rows
        low, high = self._own(first)
        begin = low + part * self.piece_rows
        return (first + begin, min(self.piece_rows, high - begin)) if begin < high else None

    def _own(self, first: int) -> tuple[int, int]:
        """The own rows of the global batch that begins at a position, counted from there."""
        rows = self.batch_rows if self.end is None else max(0, min(self.batch_rows, self.end - first))
        return rows * self.rank // self.world_size, rows * (self.rank + 1) // self.world_size

    def num_rows(self) -> int:
        """Own rows from start to end; only of a stream that ends."""
        if self.end is None:
            raise TypeError("an endless stream has no length")
        whole, rest = divmod(max(0, self.end - self.start), self.batch_rows)
        low, high = self._own(self.start + whole * self.batch_rows)
        return whole * self.rank_rows + high - low if rest else whole * self.rank_rows

    def num_pieces(self) -> int:
        """Own pieces from start to end; only of a stream that ends."""
        whole, rest = divmod(self.num_rows(), self.rank_rows)
        return whole * self.pieces_per_batch + -(-rest // self.piece_rows)
