"""Small real stores, made once per worker by `prepare`, each with the plain lists of tokens it must hold.

letters  one byte per token; hundreds of pieces: short units, interleaved splits, copies left out, a few long files
grown    the same files, prepared in two steps, so that documents lie in segments of two versions
wide     ids above 65,535, stored in four bytes
parts    documents of parts with and without loss, some of a single token
blocks   documents that span several 64 KiB blocks
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from penstock.sources import Document, FilesSource, Part, PartKind, SkipTally, Unit, UnitText
from penstock.store import PrepareOptions, Store, document_origin, open_store, prepare
from penstock.tokenize import Tokenizer, TokenizerSpec
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import character_of_byte

from .reference import Reference, ReferenceDocument

STORE_NAMES = ("letters", "grown", "wide", "parts", "blocks")
SMALL_STORE_NAMES = ("letters", "grown", "wide", "parts")
SPLIT = "train=60,val=25,test=15"
END_ID = 256
ASSISTANT_ID = 257
WIDE_PAIR_ID, WIDE_END_ID = 70_000, 70_001


@dataclass(frozen=True)
class Sample:
    """An open store and, for each of its splits, the reference."""

    store: Store
    path: Path
    splits: dict[str, Reference]

    @property
    def train(self) -> Reference:
        return self.splits["train"]


def byte_tokenizer() -> Tokenizer:
    """Each byte is its own token."""
    vocabulary = {character: byte for byte, character in enumerate(character_of_byte)}
    controls = {"<|endoftext|>": END_ID, "<|assistant|>": ASSISTANT_ID}
    return tokenizer_of(byte_level_json(vocabulary, [], controls, pattern=GPT2_PATTERN))


def wide_tokenizer() -> Tokenizer:
    """Bytes, fillers that no text reaches, and the pair `ab` with an id that two bytes can't hold."""
    vocabulary = {character: byte for byte, character in enumerate(character_of_byte)}
    vocabulary |= {f"filler{token}": token for token in range(256, WIDE_PAIR_ID)} | {"ab": WIDE_PAIR_ID}
    controls = {"<|endoftext|>": WIDE_END_ID}
    return tokenizer_of(byte_level_json(vocabulary, [("a", "b")], controls, pattern=GPT2_PATTERN))


def tokenizer_of(source_json: bytes) -> Tokenizer:
    return Tokenizer(TokenizerSpec.from_json(source_json, origin="test"), origin="test")


def wide_tokens(data: bytes) -> list[int]:
    tokens: list[int] = []
    for byte in data:
        if byte == ord("b") and tokens and tokens[-1] == ord("a"):
            tokens[-1] = WIDE_PAIR_ID
        else:
            tokens.append(byte)
    return tokens


class MemorySource:
    """A source whose documents are lists of parts, a few to a unit."""

    name = "memory"
    location = "(memory)"

    def __init__(self, documents: dict[str, tuple[Part, ...]], *, documents_per_unit: int = 5) -> None:
        self._documents = documents
        self._per_unit = documents_per_unit

    def options(self) -> dict[str, Any]:
        return {"kind": "memory"}

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        keys = sorted(self._documents)
        for start in range(0, len(keys), self._per_unit):
            items = tuple(keys[start : start + self._per_unit])
            yield Unit(source=self.name, items=items, input_bytes=1, fingerprint=str(start), newest_change_ns=0)

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        documents = []
        for key in unit.items:
            name, parts = key.encode(), self._documents[key]
            size = sum(len(part.data) for part in parts)
            documents.append(Document(key=name, group=name, path=b"", byte_start=0, byte_end=size, parts=parts))
        return UnitText(documents=documents, skips=SkipTally())


def random_text(chance: random.Random, num_bytes: int) -> bytes:
    return bytes(chance.choices(b"abcde fg\n", k=num_bytes))


def write_files(folder: Path, files: dict[str, bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (folder / name).write_bytes(data)


def letter_files() -> dict[str, bytes]:
    chance = random.Random(1)
    files = {f"{number:03d}.txt": random_text(chance, chance.randint(1, 49)) for number in range(130)}
    files |= {f"{number:03d}-long.txt": random_text(chance, 200 + 3 * number) for number in range(5, 130, 40)}
    files |= {f"{number:03d}-copy.txt": files[f"{number:03d}.txt"] for number in range(3, 130, 20)}
    return files | {"017-é.txt": "naïve 汉字 🙂 <|endoftext|>".encode()}


def part_documents() -> dict[str, tuple[Part, ...]]:
    chance = random.Random(2)
    assistant = Part(data=b"<|assistant|>", kind=PartKind.CONTROL, loss=False)
    documents: dict[str, tuple[Part, ...]] = {}
    for number in range(120):
        asked = Part(data=random_text(chance, chance.randint(1, 20)), loss=False)
        answered = Part(data=random_text(chance, chance.randint(1, 20)))
        kinds = [(), (asked, answered), (asked, assistant, answered, asked), (answered,), (asked,), (answered, asked)]
        documents[f"memory/{number:03d}"] = tuple(kinds[number % 6])
    long = (Part(data=random_text(chance, 300), loss=False), Part(data=random_text(chance, 300)))
    return documents | {"memory/050-long": long}


def part_tokens(parts: tuple[Part, ...]) -> tuple[list[int], list[bool]]:
    tokens: list[int] = []
    carries: list[bool] = []
    for part in parts:
        ids = list(part.data) if part.kind is PartKind.TEXT else [ASSISTANT_ID]
        tokens += ids
        carries += [part.loss] * len(ids)
    return [*tokens, END_ID], [*carries, True]


def sample_of(path: Path, documents: dict[str, tuple[list[int], list[bool]]], *, pad_id: int) -> Sample:
    """Opens a store; where each document is comes from its provenance, what it holds from `documents`."""
    store = open_store(path)
    splits: dict[str, list[ReferenceDocument]] = {name: [] for name in store.manifest.splits}
    origins = [document_origin(store, number) for number in range(store.num_documents)]
    for origin in sorted(origins, key=lambda origin: origin.key.encode()):
        if origin.status == "kept":
            splits[origin.split].append(ReferenceDocument(origin.key, *documents[origin.key]))
    return Sample(store, path, {name: Reference(kept, pad_id=pad_id) for name, kept in splits.items()})


def plain(files: dict[str, bytes], name: str) -> dict[str, tuple[list[int], list[bool]]]:
    return {f"{name}/{key}": ([*data, END_ID], [True] * (len(data) + 1)) for key, data in files.items()}


def build_letters(folder: Path, *, in_steps: bool) -> Sample:
    files = letter_files()
    source = FilesSource(name="files", root=str(folder / "files"))
    options = PrepareOptions(split=SPLIT, unit_bytes=600)
    if in_steps:
        write_files(folder / "files", {name: data for name, data in files.items() if name[2] in "258"})
        prepare([source], folder / "store", tokenizer=byte_tokenizer(), options=options)
    write_files(folder / "files", files)
    prepare([source], folder / "store", tokenizer=byte_tokenizer(), options=options)
    return sample_of(folder / "store", plain(files, "files"), pad_id=END_ID)


def build_wide(folder: Path) -> Sample:
    chance = random.Random(3)
    files = {f"{number:03d}.txt": random_text(chance, chance.randint(1, 70)) for number in range(90)}
    write_files(folder / "files", files)
    source = FilesSource(name="files", root=str(folder / "files"))
    prepare(
        [source],
        folder / "store",
        tokenizer=wide_tokenizer(),
        options=PrepareOptions(split=SPLIT, unit_bytes=500, dedup="off"),
    )
    tokens = {f"files/{name}": [*wide_tokens(data), WIDE_END_ID] for name, data in files.items()}
    return sample_of(
        folder / "store", {key: (ids, [True] * len(ids)) for key, ids in tokens.items()}, pad_id=WIDE_END_ID
    )


def build_parts(folder: Path) -> Sample:
    documents = part_documents()
    options = PrepareOptions(split=SPLIT, dedup="off")
    prepare([MemorySource(documents)], folder / "store", tokenizer=byte_tokenizer(), options=options)
    return sample_of(folder / "store", {key: part_tokens(parts) for key, parts in documents.items()}, pad_id=END_ID)


def build_blocks(folder: Path) -> Sample:
    chance = random.Random(4)
    sizes = [90_000, 10, 32_767, 40_000, 300, 70_000, 5]
    files = {f"{number}.txt": random_text(chance, size) for number, size in enumerate(sizes)}
    write_files(folder / "files", files)
    source = FilesSource(name="files", root=str(folder / "files"))
    options = PrepareOptions(split="train=1", unit_bytes=120_000)
    prepare([source], folder / "store", tokenizer=byte_tokenizer(), options=options)
    return sample_of(folder / "store", plain(files, "files"), pad_id=END_ID)


@pytest.fixture(scope="session")
def sample(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Sample]]:
    """Gives the sample of a name, made on first use."""
    builders: dict[str, Callable[[Path], Sample]] = {
        "letters": lambda folder: build_letters(folder, in_steps=False),
        "grown": lambda folder: build_letters(folder, in_steps=True),
        "wide": build_wide,
        "parts": build_parts,
        "blocks": build_blocks,
    }
    made: dict[str, Sample] = {}

    def get(name: str) -> Sample:
        if name not in made:
            made[name] = builders[name](tmp_path_factory.mktemp(name))
        return made[name]

    yield get
    for one in made.values():
        one.store.close()
