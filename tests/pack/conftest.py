"""Stores of documents whose lengths a test chooses, in memory but for the store itself."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from penstock.sources import Document, Part, SkipTally, Unit, UnitText
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.tokenize import Tokenizer, TokenizerSpec
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import character_of_byte

END_ID = 256

StoreOf = Callable[..., AbstractContextManager[Store]]


class Lengths:
    """A source of documents with these numbers of tokens, end token included; a document of one has no text at all."""

    name = "lengths"
    location = "(memory)"

    def __init__(self, lengths: Sequence[int], per_unit: int) -> None:
        self._lengths = lengths
        self._per_unit = per_unit

    def options(self) -> dict[str, Any]:
        return {"kind": "lengths"}

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        for start in range(0, len(self._lengths), self._per_unit):
            items = tuple(range(start, min(start + self._per_unit, len(self._lengths))))
            yield Unit(source=self.name, items=items, input_bytes=1, fingerprint=str(start), newest_change_ns=0)

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        documents = []
        for number in unit.items:
            key, text = b"lengths/%06d" % number, text_of(number, self._lengths[number])
            parts = (Part(data=text),) if text else ()
            documents.append(Document(key=key, group=key, path=b"", byte_start=0, byte_end=len(text), parts=parts))
        return UnitText(documents=documents, skips=SkipTally())


def text_of(number: int, length: int) -> bytes:
    """Text that differs between documents and along each, so that a token out of place shows."""
    return bytes(33 + (31 * number + 7 * place) % 90 for place in range(length - 1))


def tokens_of(number: int, length: int) -> list[int]:
    return [*text_of(number, length), END_ID]


@pytest.fixture(scope="session")
def store_of(tmp_path_factory: pytest.TempPathFactory) -> StoreOf:
    """Makes a store of documents of given lengths: `with store_of([3, 1, 20], split="a=1") as store`."""
    vocabulary = {character: byte for byte, character in enumerate(character_of_byte)}
    source_json = byte_level_json(vocabulary, [], {"<|endoftext|>": END_ID}, pattern=GPT2_PATTERN)
    tokenizer = Tokenizer(TokenizerSpec.from_json(source_json, origin="bytes"), origin="bytes")

    @contextmanager
    def make(lengths: Sequence[int], *, split: str = "train=1", per_unit: int = 7) -> Iterator[Store]:
        folder: Path = tmp_path_factory.mktemp("lengths")
        options = PrepareOptions(split=split, dedup="off")
        prepare([Lengths(lengths, per_unit)], folder / "store", tokenizer=tokenizer, options=options)
        with open_store(folder / "store") as store:
            yield store
        shutil.rmtree(folder)

    return make
