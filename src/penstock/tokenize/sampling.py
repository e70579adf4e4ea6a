"""Which documents a vocabulary is trained on, and which it is judged on.

In: sources. Out: the texts of a sample of about so many bytes, in canonical order, and of some documents kept out of
it. A document's own key decides, by a hash, so that the sample is the same on every machine and for every unit size.
Texts are read as they are asked for; units are listed once for the total size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from penstock.errors import InputError
from penstock.hashing import strong_hash
from penstock.sources import Source, Unit
from penstock.sources.source import DEFAULT_UNIT_BYTES

__all__ = ["VocabularySample"]

HELD_OUT_BYTES = 4 * 2**20
# Of a small corpus no more than this is kept out.
LARGEST_HELD_OUT_SHARE = 1 / 20


class VocabularySample:
    """A split of the documents of some sources into a sample, documents held out, and the rest."""

    def __init__(self, sources: Sequence[Source], *, sample_bytes: int) -> None:
        self._sources = sorted(sources, key=lambda source: source.name)
        self._units = {source.name: list(source.units(DEFAULT_UNIT_BYTES)) for source in self._sources}
        total = sum(unit.input_bytes for units in self._units.values() for unit in units)
        if not any(unit.items for units in self._units.values() for unit in units):
            raise InputError(
                f"no documents in {', '.join(source.location for source in sources)}",
                hint="check the path, or name a folder that holds text or code",
            )
        held_out = min(HELD_OUT_BYTES / max(total, 1), LARGEST_HELD_OUT_SHARE)
        self._first_held_out = 1 - held_out
        self._sample_end = min(sample_bytes / max(total, 1), self._first_held_out)

    def texts(self) -> Iterator[bytes]:
        """The sample."""
        return self._read(lambda place: place < self._sample_end)

    def held_out(self) -> Iterator[bytes]:
        """The documents that are in no sample."""
        return self._read(lambda place: place >= self._first_held_out)

    def _read(self, is_wanted: Callable[[float], bool]) -> Iterator[bytes]:
        def wanted(key: bytes) -> bool:
            return is_wanted(int.from_bytes(strong_hash(b"vocabulary " + key)[:8], "little") / 2**64)

        for source in self._sources:
            for unit in self._units[source.name]:
                yield from self._unit_texts(source, unit, wanted)

    @staticmethod
    def _unit_texts(source: Source, unit: Unit, wanted: Callable[[bytes], bool]) -> Iterator[bytes]:
        for document in source.read(unit, wanted=wanted).documents:
            yield b"".join(part.data for part in document.parts)
