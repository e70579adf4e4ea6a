"""Copies stretches of segments into rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.pack import Stretches
from penstock.pack.plan import Integers
from penstock.store import Store

__all__ = ["TokenCopier"]


class TokenCopier:
    """Copies tokens of one store into rows of one length."""

    def __init__(self, store: Store, *, row_tokens: int) -> None:
        self._store = store
        self._row_tokens = row_tokens
        self._pad_id = store.manifest.tokenizer["end_id"]
        self._windows: dict[int, npt.NDArray[Any]] = {}

    def copy(self, stretches: Stretches, row_ends: Integers, out: npt.NDArray[Any]) -> None:
        """Fills `out`, [rows, T + 1]: the stretches, then padding from each row's end."""
        segments, offsets, lengths = stretches.segment, stretches.offset, stretches.length
        for i in np.flatnonzero(self._store.unchecked(segments, offsets, lengths)).tolist():
            self._store.read(int(segments[i]), int(offsets[i]), int(lengths[i]))
        whole = lengths == self._row_tokens
        for segment, places in _by_value(segments, np.flatnonzero(whole)):
            out[stretches.row[places]] = self._rows_of(segment)[offsets[places]]
        self._copy_parts(stretches, np.flatnonzero(~whole), out.reshape(-1))
        for row in np.flatnonzero(row_ends < self._row_tokens).tolist():
            out[row, row_ends[row] :] = self._pad_id

    def _copy_parts(self, stretches: Stretches, parts: Integers, out: npt.NDArray[Any]) -> None:
        to = (stretches.row * self._row_tokens + stretches.place)[parts]
        lengths = stretches.length[parts]
        offsets = stretches.offset[parts]
        sources = [
            self._store.segment(n).tokens if n in used else None
            for used in [set(stretches.segment[parts].tolist())]
            for n in range(max(used, default=-1) + 1)
        ]
        for segment, begin, end, offset, last in zip(
            stretches.segment[parts].tolist(),
            to.tolist(),
            (to + lengths).tolist(),
            offsets.tolist(),
            (offsets + lengths).tolist(),
            strict=True,
        ):
            out[begin:end] = sources[segment][offset:last]

    def _rows_of(self, segment: int) -> npt.NDArray[Any]:
        """A view of a segment in which entry i is the row of T + 1 tokens that begins at token i."""
        windows = self._windows.get(segment)
        if windows is None:
            tokens = self._store.segment(segment).tokens
            windows = np.lib.stride_tricks.sliding_window_view(tokens, self._row_tokens)
            self._windows[segment] = windows
        return windows


def _by_value(values: Integers, places: Integers) -> list[tuple[int, Integers]]:
    """The places grouped by the value there."""
    ordered = places[np.argsort(values[places], kind="stable")]
    cuts = np.flatnonzero(np.diff(values[ordered])) + 1
    return [(int(values[group[0]]), group) for group in np.split(ordered, cuts) if len(group)]
