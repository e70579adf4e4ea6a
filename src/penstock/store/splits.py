"""Which split a document is in: a hash of its group key against cumulative shares, and nothing else.

Adding or removing data moves nothing. Shares are exact in expectation; the achieved ones are printed. The last split
named is the most protected (train < val < test): where copies span splits, the copy there stays. Where whoever made the
data split it already (`train.jsonl`, `val.jsonl`), a source named after a split is that split.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError
from penstock.hashing import strong_hash

__all__ = ["DEFAULT_SPLIT", "group_hash", "parse_split", "split_numbers", "splits_of_sources"]

DEFAULT_SPLIT = "train=85,val=10,test=5"
MAX_SPLITS = 255


def parse_split(text: str) -> dict[str, float]:
    """`train=85,val=10,test=5` to shares that add up to 1."""
    hint = f"write names and shares, most protected last: --split {DEFAULT_SPLIT}"
    shares: dict[str, float] = {}
    for item in text.split(","):
        name, _, value = item.strip().partition("=")
        try:
            share = float(value)
        except ValueError:
            raise ConfigError(f"split {item.strip()!r} has no share", hint=hint) from None
        if not name.replace("-", "_").isidentifier() or name in shares or not math.isfinite(share) or share < 0:
            raise ConfigError(f"split {item.strip()!r} is no new name with a share of 0 or more", hint=hint)
        shares[name] = share
    total = sum(shares.values())
    if not 0 < total < math.inf:
        raise ConfigError(f"the shares in {text!r} add up to {total:g}", hint=hint)
    if len(shares) > MAX_SPLITS:
        raise ConfigError(f"{len(shares)} splits are named, {MAX_SPLITS} are possible", hint=hint)
    return {name: share / total for name, share in shares.items()}


def group_hash(group: bytes, *, seed: int) -> int:
    """64 bits that place a group between 0 and 1."""
    return int.from_bytes(strong_hash(b"split %d " % seed + group)[:8], "little")


def split_numbers(group_hashes: npt.NDArray[np.uint64], shares: Mapping[str, float]) -> npt.NDArray[np.uint8]:
    """The split's position in `shares` for each group hash."""
    # A split without a share has no place on the line, not even a point: rounded sums would leave it one.
    positions = np.array([number for number, share in enumerate(shares.values()) if share > 0], np.uint8)
    borders = np.cumsum([share for share in shares.values() if share > 0])[:-1]
    # 2**64 times a border, as integers: floats near the top would round up to 2**64 and overflow.
    limits = np.array([min(int(border * 2**64), 2**64 - 1) for border in borders], np.uint64)
    chosen: npt.NDArray[np.uint8] = positions[np.searchsorted(limits, group_hashes, side="right")]
    return chosen


def splits_of_sources(sources: Sequence[str], shares: Mapping[str, float]) -> npt.NDArray[np.uint8]:
    """The split's position in `shares` for each document's source, which must be named after one."""
    numbers = {name: number for number, name in enumerate(shares)}
    for source in sorted(set(sources)):
        if source not in numbers:
            raise ConfigError(
                f"--split-by source: source {source!r} is named after none of the splits {', '.join(shares)}",
                hint=f"name inputs after splits: {next(iter(shares))}=PATH",
            )
    return np.array([numbers[source] for source in sources], np.uint8)
