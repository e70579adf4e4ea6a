"""Real variation at load time: the same store, other views of it each pass.

A transform changes batches in place: tokens, loss mask and borders, never their shape. What it does to a row follows
from (seed, row, pass) alone: each row comes with a key, a 64-bit word mixed from these, and draws numbers from it with
`draws`. So a stream with transforms is resumed, shared among ranks and read by any framework like one without. Name,
version and settings are part of the stream's identity: a state saved with other transforms is refused.

    FillInTheMiddle   some documents become prefix, suffix, middle (PSM) or suffix, prefix, middle (SPM)
    RandomCrop        some rows are cut down to a random stretch of themselves
    OwnTransform      a function of yours: `function(batch, rng_key)`

Costs about 10 µs per document that is changed; rows that are not cost nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from penstock.errors import ConfigError, TokenizerError
from penstock.load.gather import Batch
from penstock.load.order import mixed_words
from penstock.pack import Plan

__all__ = ["Counts", "FillInTheMiddle", "OwnTransform", "RandomCrop", "Transform", "draws", "row_keys"]

Keys = npt.NDArray[np.uint64]

# The names that families of tokenizers give to prefix, suffix and middle.
FIM_NAMES = (
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),  # cl100k, o200k, Qwen, Gemma, Codestral-like
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),  # StarCoder
    ("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),  # SantaCoder
    ("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),  # DeepSeek-Coder
    ("▁<PRE>", "▁<SUF>", "▁<MID>"),  # Code Llama
    ("[PREFIX]", "[SUFFIX]", "[MIDDLE]"),  # Mistral
)
FIM_SENTINELS = 3
_GOLDEN = 0x9E3779B97F4A7C15
_MASK_64 = 2**64 - 1


class Counts(dict[str, int]):
    """What a transform did in this process, by name, to batches filled ahead as well; several threads may add."""

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.Lock()

    def add(self, name: str, number: int = 1) -> None:
        """Counts `number` more."""
        with self._lock:
            self[name] = self.get(name, 0) + number

    def __reduce__(self) -> tuple[type[Counts], tuple[()]]:
        return Counts, ()  # another process counts for itself


class Transform(Protocol):
    """Changes batches in place; see the module's docstring."""

    @property
    def identity(self) -> dict[str, Any]:
        """Name, version and settings, as plain JSON values."""

    @property
    def extra_borders_per_row(self) -> int:
        """How many borders it may add to a row, so that `cu_seqlens` has room."""

    @property
    def counts(self) -> Mapping[str, int]:
        """What it did so far."""

    def __call__(self, batch: Batch, rng_key: Keys) -> None:
        """Changes a batch; `rng_key` holds one key per row."""


def row_keys(seed: int, rows: npt.NDArray[np.int64], passes: npt.NDArray[np.int64], *, salt: int) -> Keys:
    """[rows] keys, each a function of (seed, row, pass) and of the transform's place in the list."""
    start = np.array([(seed * _GOLDEN + 2 * salt + 1) & _MASK_64], np.uint64)
    keys = mixed_words(mixed_words(start) ^ passes.astype(np.uint64))
    return mixed_words(keys + (rows.astype(np.uint64) + np.uint64(1)) * np.uint64(_GOLDEN))


def draws(key: int | np.uint64, count: int, *, salt: int = 0) -> npt.NDArray[np.float64]:
    """`count` numbers in [0, 1), the same on every machine; another `salt` gives others for the same key."""
    first = np.uint64((int(key) ^ (salt * 0xD1342543DE82EF95 & _MASK_64)) & _MASK_64)
    words = mixed_words(mixed_words(first + np.arange(1, count + 1, dtype=np.uint64) * np.uint64(_GOLDEN)))
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def row_borders(batch: Batch) -> list[npt.NDArray[np.int64]]:
    """Of each row the places at which a document begins, the first of them 0, then T."""
    num_rows, seq_len = batch.loss_mask.shape
    borders = batch.cu_seqlens.astype(np.int64)
    cuts = np.searchsorted(borders, np.arange(num_rows + 1) * seq_len)
    return [
        np.append(borders[cuts[row] : cuts[row + 1]] - row * seq_len, seq_len).astype(np.int64)
        for row in range(num_rows)
    ]


@dataclass(frozen=True, kw_only=True, eq=False)
class FillInTheMiddle:
    """Teaches a model to fill gaps (Bavarian et al. 2022): prefix and suffix first, the middle last.

    Each document of a row is treated apart, by its part in this row. With `rate` it is cut at two random places and
    becomes `P prefix S suffix M middle` (PSM) or, for a share `spm_rate` of them, `P S suffix M prefix middle` (SPM).
    The row keeps its length: the three marks take the place of the part's last three tokens before its end token,
    which are left out in this pass and counted (`tokens_cut`). Begin and end tokens stay where they are. Left as they
    are, and counted: parts shorter than `smallest_tokens`, and parts in which some tokens carry no loss (a
    conversation). Every label of a changed part counts, the marks among them. Make one with `for_plan`.

    Attributes:
        prefix_id, suffix_id, middle_id: the marks.
        end_id: the store's end token.
        begin_ids: what the store puts before each document.
        boundaries: whether the plan's borders tell documents apart; otherwise end tokens do.
    """

    prefix_id: int
    suffix_id: int
    middle_id: int
    end_id: int
    begin_ids: tuple[int, ...] = ()
    boundaries: bool = True
    rate: float = 0.5
    spm_rate: float = 0.5
    smallest_tokens: int = 10
    counts: Counts = field(default_factory=Counts)
    extra_borders_per_row: int = 0

    @classmethod
    def for_plan(
        cls, plan: Plan, *, rate: float = 0.5, spm_rate: float = 0.5, names: tuple[str, str, str] | None = None
    ) -> FillInTheMiddle:
        """With the marks of the store's tokenizer.

        Args:
            plan: the rows.
            rate: share of the documents that are changed.
            spm_rate: share of those that have the suffix first.
            names: what the tokenizer calls prefix, suffix and middle, where it is none of the usual names.

        Raises:
            TokenizerError: the tokenizer has no such tokens; those looked for are named.
            ConfigError: a rate is no share.
        """
        for name, value in (("rate", rate), ("spm_rate", spm_rate)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}, a share is wanted", hint="choose a number from 0 to 1")
        tokenizer = plan.store.manifest.tokenizer
        prefix_id, suffix_id, middle_id = _fim_ids(tokenizer["control_tokens"], names)
        return cls(
            prefix_id=prefix_id,
            suffix_id=suffix_id,
            middle_id=middle_id,
            end_id=tokenizer["end_id"],
            begin_ids=tuple(tokenizer.get("begin_ids", ())),
            boundaries=plan.boundaries,
            rate=rate,
            spm_rate=spm_rate,
        )

    @property
    def identity(self) -> dict[str, Any]:
        """See `Transform`."""
        return {
            "name": "fill-in-the-middle",
            "version": 1,
            "rate": self.rate,
            "spm_rate": self.spm_rate,
            "smallest_tokens": self.smallest_tokens,
            "marks": [self.prefix_id, self.suffix_id, self.middle_id],
        }

    def __call__(self, batch: Batch, rng_key: Keys) -> None:
        """See `Transform`."""
        borders = row_borders(batch) if self.boundaries else None
        for row, key in enumerate(rng_key.tolist()):
            tokens, mask = batch.tokens[row], batch.loss_mask[row]
            begins = self._begins(tokens) if borders is None else borders[row]
            for number in np.flatnonzero(draws(key, len(begins) - 1) < self.rate).tolist():
                cuts = draws(key, 3, salt=number + 1)
                self._change(tokens, mask, int(begins[number]), int(begins[number + 1]), cuts)

    def _begins(self, tokens: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Documents told apart by their end tokens, where the plan has no borders."""
        seq_len = len(tokens) - 1
        after_ends = np.flatnonzero(tokens[: seq_len - 1] == self.end_id) + 1
        return np.concatenate([[0], after_ends, [seq_len]])

    def _change(
        self, tokens: npt.NDArray[Any], mask: npt.NDArray[np.bool_], begin: int, end: int, drawn: npt.NDArray[Any]
    ) -> None:
        """Rearranges the document part at [begin, end) of a row; the row's last label belongs to the last part, unless
        that ends before it and the label is the first token of another document."""
        if end == len(mask) and mask[end - 1] and tokens[end - 1] != self.end_id:
            end += 1
        if not mask[begin : end - 1].all():
            self.counts.add("parts_without_loss_kept")
            return
        if tuple(tokens[begin : begin + len(self.begin_ids)].tolist()) == self.begin_ids:
            begin += len(self.begin_ids)
        if end > begin and tokens[end - 1] == self.end_id:
            end -= 1
        if end - begin < max(self.smallest_tokens, FIM_SENTINELS):
            self.counts.add("parts_too_short")
            return
        body = tokens[begin : end - FIM_SENTINELS].copy()
        first, second = sorted(int(value * (len(body) + 1)) for value in drawn[:2])
        is_spm = bool(drawn[2] < self.spm_rate)
        self._write(tokens[begin:end], body, first, second, is_spm=is_spm)
        self.counts.add("parts_suffix_first" if is_spm else "parts_prefix_first")
        self.counts.add("tokens_cut", FIM_SENTINELS)

    def _write(self, out: npt.NDArray[Any], body: npt.NDArray[Any], first: int, second: int, *, is_spm: bool) -> None:
        prefix, middle, suffix = body[:first], body[first:second], body[second:]
        mark_p, mark_s, mark_m = (
            np.array([token], out.dtype) for token in (self.prefix_id, self.suffix_id, self.middle_id)
        )
        if is_spm:
            parts = [mark_p, mark_s, suffix, mark_m, prefix, middle]
        else:
            parts = [mark_p, prefix, mark_s, suffix, mark_m, middle]
        np.concatenate(parts, out=out)


def _fim_ids(control_tokens: Mapping[str, int], names: tuple[str, str, str] | None) -> tuple[int, int, int]:
    families = FIM_NAMES if names is None else (names,)
    for prefix, suffix, middle in families:
        if all(name in control_tokens for name in (prefix, suffix, middle)):
            return control_tokens[prefix], control_tokens[suffix], control_tokens[middle]
    looked_for = "; ".join(" ".join(family) for family in families)
    raise TokenizerError(
        f"the store's tokenizer has no fill-in-the-middle tokens; looked for: {looked_for}",
        hint=f"its control tokens are: {' '.join(sorted(control_tokens)) or '(none)'}; name three of them with "
        "fim_tokens, or prepare with a tokenizer that has them (penstock tokenizer train --control …)",
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class RandomCrop:
    """Cuts some rows down to a random stretch, so that a model meets documents from any place on.

    With `rate` a row keeps a stretch of at least `smallest_share` of its length, beginning at a random place. The
    stretch moves to the row's front; behind it stands padding, a document of its own without labels. The tokens left
    out in this pass are counted (`tokens_cut`, the plan's own padding among them).
    """

    pad_id: int
    rate: float = 0.5
    smallest_share: float = 0.5
    counts: Counts = field(default_factory=Counts)
    extra_borders_per_row: int = 1

    @classmethod
    def for_plan(cls, plan: Plan, *, rate: float = 0.5, smallest_share: float = 0.5) -> RandomCrop:
        """With the store's end token as padding.

        Raises:
            ConfigError: a number is no share.
        """
        for name, value in (("rate", rate), ("smallest_share", smallest_share)):
            if not 0 <= value <= 1:
                raise ConfigError(f"{name} is {value}, a share is wanted", hint="choose a number from 0 to 1")
        return cls(pad_id=plan.store.manifest.tokenizer["end_id"], rate=rate, smallest_share=smallest_share)

    @property
    def identity(self) -> dict[str, Any]:
        """See `Transform`."""
        return {"name": "random-crop", "version": 1, "rate": self.rate, "smallest_share": self.smallest_share}

    def __call__(self, batch: Batch, rng_key: Keys) -> None:
        """See `Transform`."""
        seq_len = batch.loss_mask.shape[1]
        borders = row_borders(batch)
        for row, key in enumerate(rng_key.tolist()):
            drawn = draws(key, 3)
            share = self.smallest_share + (1 - self.smallest_share) * drawn[1]
            length = max(1, int(share * seq_len))
            if drawn[0] < self.rate and length < seq_len:
                begin = int(drawn[2] * (seq_len - length + 1))
                borders[row] = self._crop(batch.tokens[row], batch.loss_mask[row], borders[row], begin, begin + length)
        flat = np.concatenate([places[:-1] + row * seq_len for row, places in enumerate(borders)])
        batch.cu_seqlens.fill(len(borders) * seq_len)
        batch.cu_seqlens[: len(flat)] = flat

    def _crop(
        self,
        tokens: npt.NDArray[Any],
        mask: npt.NDArray[np.bool_],
        borders: npt.NDArray[np.int64],
        begin: int,
        end: int,
    ) -> npt.NDArray[np.int64]:
        seq_len, length = len(mask), end - begin
        tokens[: length + 1] = tokens[begin : end + 1].copy()
        tokens[length + 1 :] = self.pad_id
        mask[:length] = mask[begin:end].copy()
        mask[length:] = False
        self.counts.add("rows_cropped")
        self.counts.add("tokens_cut", seq_len - length)
        inside = borders[(borders > begin) & (borders < end)] - begin
        return np.concatenate([[0], inside, [length, seq_len]])


@dataclass(frozen=True, kw_only=True, eq=False)
class OwnTransform:
    """A function of yours in the stream.

    `function(batch, rng_key)` changes `batch.tokens` [rows, T + 1], `batch.loss_mask` [rows, T] and `batch.cu_seqlens`
    in place; `rng_key` is [rows] uint64, one key per row, a function of (seed, row, pass). Draw from it with
    `draws(rng_key[i], count)`, never from a generator of your own: then resume, ranks and workers stay exact. Change
    `version` whenever you change what the function does. For worker processes it must be a function of a module.

    Attributes:
        name: what it is called in states and reports.
        version: of what it does.
        settings: plain JSON values that it depends on.
    """

    function: Callable[[Batch, Keys], None]
    name: str
    version: int = 1
    settings: Mapping[str, Any] = field(default_factory=dict)
    counts: Counts = field(default_factory=Counts)
    extra_borders_per_row: int = 0

    @property
    def identity(self) -> dict[str, Any]:
        """See `Transform`."""
        return {"name": self.name, "version": self.version, "settings": dict(self.settings)}

    def __call__(self, batch: Batch, rng_key: Keys) -> None:
        """See `Transform`."""
        self.function(batch, rng_key)
