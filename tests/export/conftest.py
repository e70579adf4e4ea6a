"""Small real stores, made once per worker by `prepare`.

plain   Python modules, duplicates left out, several segments
wide    ids above 65,535, stored in four bytes
parts   documents of parts with and without loss, one of them without any
some    one document of fifty has a part without loss
single  one document: two of three splits are empty
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from penstock.export import ExportOptions, ExportResult, export_store
from penstock.sources import Document, Part, PartKind, SkipTally, Unit, UnitText
from penstock.store import PrepareOptions, Store, open_store, prepare
from penstock.tokenize import Tokenizer, TokenizerSpec
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import character_of_byte

STORES = ("plain", "wide", "parts", "some", "single")


class MemorySource:
    """Documents made by a test, three to a unit."""

    name = "memory"
    location = "(memory)"

    def __init__(self, documents: dict[bytes, tuple[Part, ...]]) -> None:
        self._documents = documents

    def options(self) -> dict[str, Any]:
        return {"kind": "memory"}

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        keys = sorted(self._documents)
        for start in range(0, len(keys), 3):
            items = tuple(keys[start : start + 3])
            yield Unit(source=self.name, items=items, input_bytes=1, fingerprint=str(start), newest_change_ns=0)

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        documents = []
        for key in unit.items:
            parts = self._documents[key]
            size = sum(len(part.data) for part in parts)
            facts = '{"licence":"MIT","number":3}' if key.endswith(b"7") else ""
            documents.append(
                Document(key=key, group=key, path=b"a\xffb\n", byte_start=0, byte_end=size, parts=parts, facts=facts)
            )
        return UnitText(documents=documents, skips=SkipTally())

    def close(self) -> None:
        pass


def text(chance: random.Random, size: int) -> bytes:
    return bytes(chance.choices(b"abcde fg\n", k=size))


def byte_tokenizer(*, wide: bool = False) -> Tokenizer:
    vocabulary = {character: byte for byte, character in enumerate(character_of_byte)}
    merges: list[tuple[str, str]] = []
    controls = {"<|endoftext|>": 256, "<|assistant|>": 257}
    if wide:
        vocabulary |= {f"filler{token}": token for token in range(256, 70_000)} | {"ab": 70_000}
        merges, controls = [("a", "b")], {"<|endoftext|>": 70_001}
    source = byte_level_json(vocabulary, merges, controls, pattern=GPT2_PATTERN)
    return Tokenizer(TokenizerSpec.from_json(source, origin="test"), origin="test")


def part_documents() -> dict[bytes, tuple[Part, ...]]:
    chance = random.Random(2)
    assistant = Part(data=b"<|assistant|>", kind=PartKind.CONTROL, loss=False)
    documents: dict[bytes, tuple[Part, ...]] = {}
    for number in range(60):
        asked = Part(data=text(chance, chance.randint(1, 20)), loss=False)
        answered = Part(data=text(chance, chance.randint(1, 20)))
        kinds = [(asked, answered), (asked, assistant, answered, asked, answered), (answered,), (asked,)]
        documents[b"memory/%03d" % number] = tuple(kinds[number % 4])
    return documents


def build(path: Path, documents: dict[bytes, tuple[Part, ...]], *, wide: bool = False) -> Path:
    options = PrepareOptions(split="train=60,val=25,test=15", dedup="off")
    prepare([MemorySource(documents)], path, tokenizer=byte_tokenizer(wide=wide), options=options)
    return path


@pytest.fixture
def tmp_path(scratch: Path) -> Path:
    """Tests of hundreds of small exports would wait for the disk."""
    return scratch


@pytest.fixture(scope="session")
def store_paths(store_path: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("export-stores")
    chance = random.Random(3)
    plain = {b"memory/%03d" % number: (Part(data=text(chance, chance.randint(1, 70))),) for number in range(50)}
    return {
        "plain": store_path,
        "wide": build(folder / "wide", plain, wide=True),
        "parts": build(folder / "parts", part_documents()),
        "some": build(
            folder / "some", plain | {b"memory/000": (Part(data=b"asked", loss=False), Part(data=b"answered"))}
        ),
        "single": build(folder / "single", {b"memory/only": (Part(data=b"Hello, world"),)}),
    }


@pytest.fixture(params=STORES)
def any_store(request, store_paths) -> Iterator[Store]:
    with open_store(store_paths[request.param]) as opened:
        yield opened


@pytest.fixture
def opened(store_paths) -> Iterator[Callable[[str], Store]]:
    stores = []

    def get(name: str) -> Store:
        stores.append(open_store(store_paths[name]))
        return stores[-1]

    yield get
    for store in stores:
        store.close()


@pytest.fixture
def export(tmp_path) -> Callable[..., ExportResult]:
    """Exports to tmp_path/out."""

    def run(store: Store, *, out: str = "out", force: bool = False, **options: Any) -> ExportResult:
        return export_store(store, tmp_path / out, options=ExportOptions(**options), force=force)

    return run
