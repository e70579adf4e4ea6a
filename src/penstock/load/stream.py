"""The settings of a stream, as a config or a command line has them: which order, which transforms.

In: plain values, of a config or of the records of a run. Out: the options of every reader (`shuffle`, `order`,
`transforms`), for a plan or a mixture; so what trains and what lists a step afterwards read the same rows. Settings
that would do nothing are refused by name. Cost: that of the order; see `order` and `ranks`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from penstock.errors import ConfigError, nearest_first
from penstock.load.mixed import seed_of_source
from penstock.load.order import (
    WINDOW_SEGMENTS,
    BySegments,
    Curriculum,
    GroupedByLength,
    Order,
    row_segments,
    window_of,
)
from penstock.load.ranks import DOCUMENT_LENGTH, ROW_LENGTH, row_ranks
from penstock.load.transforms import FillInTheMiddle, RandomCrop, Transform
from penstock.pack import Plan
from penstock.pack.mixture import Mixture

__all__ = ["ORDERS", "StreamSettings"]

ORDERS = ("shuffled", "sequential", "group-by-length", "curriculum", "segments")
GROUP_BATCHES = 32
LEAST_GROUP_ROWS = 2048


@dataclass(frozen=True, kw_only=True)
class StreamSettings:
    """See the module's docstring. None is the usual value of a setting that another one switches on.

    Attributes:
        order: one of `ORDERS`.
        curriculum_by: what a curriculum sorts by, lowest first: `document-length`, or a fact of the documents.
        window_segments: of the order `segments`: how many of them its rows are drawn from at a time; None: 8.
        fim_rate: share of the documents that become fill-in-the-middle.
        fim_spm_rate: share of those that have the suffix first; None: 0.5.
        fim_tokens: what the tokenizer calls prefix, suffix and middle; None: the usual names are looked for.
        random_crop: share of the rows that are cut down to a stretch of themselves.
        random_crop_smallest: the smallest stretch, as a share of the row; None: 0.5.
    """

    order: str = "shuffled"
    curriculum_by: str | None = None
    window_segments: int | None = None
    fim_rate: float = 0.0
    fim_spm_rate: float | None = None
    fim_tokens: tuple[str, str, str] | None = None
    random_crop: float = 0.0
    random_crop_smallest: float | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise ConfigError(f"there is no order {self.order!r}", hint=f"orders: {nearest_first(self.order, ORDERS)}")
        for name, owner, is_on, way in (
            ("curriculum_by", "order", self.order == "curriculum", "order=curriculum"),
            ("window_segments", "order", self.order == "segments", "order=segments"),
            ("fim_spm_rate", "fim_rate", self.fim_rate > 0, "fim_rate above 0"),
            ("fim_tokens", "fim_rate", self.fim_rate > 0, "fim_rate above 0"),
            ("random_crop_smallest", "random_crop", self.random_crop > 0, "random_crop above 0"),
        ):
            value = getattr(self, name)
            if value is not None and not is_on:
                raise ConfigError(
                    f"{name} is {value!r}, which does nothing with {owner} {getattr(self, owner)!r}",
                    hint=f"leave {name} out, or set {way}",
                )

    @classmethod
    def of(cls, settings: Mapping[str, Any]) -> StreamSettings:
        """Those among many settings, of a config or a record; what isn't there has its usual value."""
        found = {one.name: settings[one.name] for one in fields(cls) if settings.get(one.name) is not None}
        if "fim_tokens" in found:
            found["fim_tokens"] = tuple(found["fim_tokens"])
        return cls(**found)

    def options(self, rows: Plan | Mixture, *, seed: int, batch_rows: int) -> dict[str, Any]:
        """`shuffle`, `order` and `transforms` of a reader.

        Args:
            rows: what is read.
            seed: of the stream.
            batch_rows: rows per global batch; groups of like length are some tens of batches.

        Raises:
            ConfigError: an order that a mixture can't have, or a fact that no document has.
            TokenizerError: fill-in-the-middle with a tokenizer that has no marks for it.
        """
        chosen: dict[str, Any] = {"shuffle": self.order != "sequential", "transforms": list(self._transforms(rows))}
        if self.order not in ("shuffled", "sequential"):
            chosen["order"] = self._order(rows, seed=seed, batch_rows=batch_rows)
        return chosen

    def _order(self, rows: Plan | Mixture, *, seed: int, batch_rows: int) -> Order | list[Order]:
        by = self.curriculum_by or DOCUMENT_LENGTH
        if isinstance(rows, Mixture):
            if self.order == "group-by-length":
                raise ConfigError(
                    "the order 'group-by-length' is one of a single plan: a batch of a mixture has rows of all sources",
                    hint="leave out mix, or set order=shuffled; pack=best-fit wastes nothing on padding either",
                )
            seeds = [seed_of_source(seed, number) for number in range(len(rows.sources))]
            if self.order == "segments":
                return [self._by_segments(one.plan, seed=own) for one, own in zip(rows.sources, seeds, strict=True)]
            return [
                Curriculum(row_ranks(one.plan, by, bucket=one.bucket), seed=own)
                for one, own in zip(rows.sources, seeds, strict=True)
            ]
        if self.order == "segments":
            return self._by_segments(rows, seed=seed)
        if self.order == "curriculum":
            return Curriculum(row_ranks(rows, by), seed=seed)
        group_rows = max(LEAST_GROUP_ROWS, GROUP_BATCHES * batch_rows)
        return GroupedByLength(row_ranks(rows, ROW_LENGTH), seed=seed, group_rows=group_rows)

    def _by_segments(self, plan: Plan, *, seed: int) -> Order:
        window = WINDOW_SEGMENTS if self.window_segments is None else self.window_segments
        return BySegments(row_segments(plan), seed=seed, window_segments=window)

    def _transforms(self, rows: Any) -> Iterator[Transform]:
        if self.fim_rate:
            spm_rate = 0.5 if self.fim_spm_rate is None else self.fim_spm_rate
            yield FillInTheMiddle.for_plan(rows, rate=self.fim_rate, spm_rate=spm_rate, names=self.fim_tokens)
        if self.random_crop:
            smallest = 0.5 if self.random_crop_smallest is None else self.random_crop_smallest
            yield RandomCrop.for_plan(rows, rate=self.random_crop, smallest_share=smallest)

    def choices(self) -> list[tuple[str, str, str]]:
        """Name, value and reason of what a run records; nothing of transforms that are off."""
        asked = self.window_segments or WINDOW_SEGMENTS
        run, window = window_of(asked)
        rounded = "" if window == asked else f": {asked} made whole runs of {run}"
        reasons = {
            "shuffled": "another permutation of all rows each pass, by the seed",
            "sequential": "the plan's own order, as set",
            "group-by-length": "rows of like length together, in another arrangement each pass, as set",
            "curriculum": f"lowest {self.curriculum_by or DOCUMENT_LENGTH} first, every pass, as set",
            "segments": f"rows of {window} segments at a time shuffled, as set{rounded}",
        }
        told = [("order", self.order, reasons[self.order])]
        if self.fim_rate:
            spm_rate = 0.5 if self.fim_spm_rate is None else self.fim_spm_rate
            told.append(("fill_in_the_middle", f"{self.fim_rate:g}", f"share of documents, {spm_rate:g} suffix first"))
        if self.random_crop:
            smallest = 0.5 if self.random_crop_smallest is None else self.random_crop_smallest
            told.append(("random_crop", f"{self.random_crop:g}", f"share of rows, at least {smallest:g} of each stays"))
        return told
