"""How to prepare: what decides the result, and what only decides how the work is shared."""

from __future__ import annotations

from dataclasses import dataclass, field

from penstock.sources import DEFAULT_UNIT_BYTES
from penstock.sources.hygiene import CleaningOptions
from penstock.store.near import NEAR_THRESHOLD
from penstock.store.splits import DEFAULT_SPLIT
from penstock.tokenize import DEFAULT_VOCAB_SIZE

__all__ = ["PrepareOptions"]


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How to prepare. The first group decides the result; the second doesn't touch it.

    Attributes:
        split: names and shares, the most protected last.
        split_by: `group`, by the hash of each document's group; `time`, oldest first; or `source`, by its name.
        split_at: for `time`, the moment each split but the first begins (`val=2025-01-01,test=2025-07-01`); None: those
            that the store recorded, or else such as give each split its share.
        time_field: the fact of documents that is their time.
        dedup: which copies go besides those across splits: `exact`, `near` or `off`.
        near_threshold: from which similarity on documents are near copies.
        seed: of the splits.
        cleaning: which content stays out, and what is done with secrets.
        block: rules added to the store's blocklist.
        workers, unit_bytes: how the work is cut and shared.
        processes: whether workers are processes where they can be forked; None: if there are several.
        vocab_size: of a vocabulary that must be trained.
        end_token: name of the token after each document, of a vocabulary that must be trained.
        control_tokens: that a trained vocabulary must have besides its own.
        reread: read every input, whatever the store remembers of it.
        break_lock: take over the lock of another host.
    """

    split: str = DEFAULT_SPLIT
    split_by: str = "group"
    split_at: str | None = None
    time_field: str = "time"
    dedup: str = "exact"
    near_threshold: float = NEAR_THRESHOLD
    seed: int = 0
    cleaning: CleaningOptions = field(default_factory=CleaningOptions)
    block: tuple[str, ...] = ()
    workers: int = 1
    processes: bool | None = None
    unit_bytes: int = DEFAULT_UNIT_BYTES
    vocab_size: int = DEFAULT_VOCAB_SIZE
    end_token: str | None = None
    control_tokens: tuple[str, ...] = ()
    reread: bool = False
    break_lock: bool = False
