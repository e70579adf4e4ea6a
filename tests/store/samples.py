"""Small fixed inputs for the store's tests: a tokenizer of bytes, two corpora, sources made by hand, and damage.

`writer.py`, which runs as a process of its own, takes the same things from here.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet

from penstock.hashing import checksum_hex, digest_of, strong_hash
from penstock.sources import Document, FilesSource, Part, SkipTally, Unit, UnitText
from penstock.sources.files import FileEntry
from penstock.store import PrepareOptions, PrepareResult, Store, prepare
from penstock.store.layout import INDEX_ARRAYS, block_checksums, manifest_name
from penstock.tokenize import Tokenizer, TokenizerSpec
from penstock.tokenize.engines import EngineChoice
from penstock.tokenize.loading import GPT2_PATTERN, byte_level_json
from penstock.tokenize.specification import character_of_byte

CONTROLS = {"<|endoftext|>": 256, "<|user|>": 257}
END = 256
OPTIONS = PrepareOptions(unit_bytes=300, split="train=60,val=20,test=20")
HOUR_NS = 3600 * 10**9
FOLDERS = ["cache", "index", "manifests", "segments", "tokenizers", "work"]

# What `prepare` makes of `write_corpus(…)` and of `CONVERSATION` with `OPTIONS`. A change of one of these is a change
# of the format or of the meaning of an option: every store in the world is then another one.
GOLDEN_FILES = "c0877a318617dac3306cf30b310b12c0cad25cbd65ddcae146d18c5da696939a"
GOLDEN_UPDATED = "4ac4da6a8a96eab413387bd839e95b2e3d70760520fec3f855c9d1c42e89a20c"
GOLDEN_CONVERSATION = "e889a6b6c512e4316ad54bdf39ce908df0e67a0d57a1e9e2e7618c658e4fb85e"


def bytes_tokenizer(
    *, spelling: int | None = None, controls: dict[str, int] = CONTROLS, engine: EngineChoice | None = None
) -> Tokenizer:
    """One id per byte, no merges, two control tokens; `spelling` indents its JSON and changes nothing else."""
    vocabulary = {character: byte for byte, character in enumerate(character_of_byte)}
    source = byte_level_json(vocabulary, [], controls, pattern=GPT2_PATTERN)
    if spelling is not None:
        source = json.dumps(json.loads(source), indent=spelling).encode()
    return Tokenizer(TokenizerSpec.from_json(source, origin="bytes"), origin="bytes", engine=engine)


def write_corpus(folder: Path) -> Path:
    """Eleven documents in three folders, one of them a copy, and three files that are none."""
    for number in range(10):
        path = folder / f"part{number % 3}" / f"{number}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"Document {number} says: <|endoftext|> naïve 汉字 🙂.\n" * (number + 1))
    (folder / "copy.txt").write_bytes((folder / "part0" / "3.txt").read_bytes())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "picture.bin").write_bytes(bytes(range(256)))
    (folder / ".hidden").write_bytes(b"not for training")
    return folder


def update_corpus(folder: Path) -> Path:
    """One file changed, one added, one removed."""
    (folder / "part1" / "4.txt").write_text("Document 4 says something else now.\n")
    (folder / "part2" / "new.txt").write_text("Document 10 is new.\n" * 5)
    (folder / "part0" / "6.txt").unlink()
    return folder


def files(folder: Path, name: str = "corpus") -> FilesSource:
    return FilesSource(name=name, root=str(folder))


class AgedFiles(FilesSource):
    """Files whose disk's clock is an hour behind: none of them looks as if it had changed a moment ago."""

    def units_of(self, entries: Iterable[FileEntry], unit_bytes: int) -> Iterator[Unit]:
        for unit in super().units_of(entries, unit_bytes):
            yield dataclasses.replace(unit, newest_change_ns=unit.newest_change_ns - HOUR_NS)


def aged_files(folder: Path) -> FilesSource:
    return AgedFiles(name="corpus", root=str(folder))


class MemorySource:
    """Documents made by a test, in units of two."""

    def __init__(self, documents: Sequence[Document], *, name: str = "memory") -> None:
        self.name = name
        self.location = "/nowhere"
        self._documents = list(documents)

    def options(self) -> dict[str, Any]:
        return {"kind": "memory", "name": self.name}

    def units(self, unit_bytes: int) -> Iterator[Unit]:
        for start in range(0, len(self._documents), 2):
            chosen = tuple(self._documents[start : start + 2])
            yield Unit(
                source=self.name,
                items=chosen,
                input_bytes=sum(document.byte_end for document in chosen),
                fingerprint=digest_of(repr(chosen)),
                newest_change_ns=0,
            )

    def read(self, unit: Unit, *, wanted: Callable[[bytes], bool] | None = None) -> UnitText:
        chosen = [document for document in unit.items if wanted is None or wanted(document.key)]
        return UnitText(documents=chosen, skips=SkipTally())

    def close(self) -> None:
        pass


def document(key: str, *parts: Part | bytes, group: str | None = None) -> Document:
    """A document of parts; bytes are a text part with loss."""
    whole = tuple(part if isinstance(part, Part) else Part(data=part) for part in parts)
    return Document(
        key=key.encode(),
        group=(group or key).encode(),
        path=b"",
        byte_start=0,
        byte_end=sum(len(part.data) for part in whole),
        parts=whole,
    )


def build(out: Path, *sources: Any, **changes: Any) -> PrepareResult:
    """`prepare` with the tokenizer of bytes and `OPTIONS`."""
    tokenizer = changes.pop("tokenizer", None) or BYTES
    return prepare(sources, out, tokenizer=tokenizer, options=dataclasses.replace(OPTIONS, **changes))


BYTES = bytes_tokenizer()


# What lies on the disk


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below `folder`."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def without_cache(store: Path) -> dict[str, bytes]:
    """Every file of a store but what it remembers of its inputs, which no version names."""
    return {name: data for name, data in contents(store).items() if not name.startswith("cache/")}


def names_in_manifests(store: Path) -> set[str]:
    """Every file that some version of a store is made of, read from the JSON as a stranger would."""
    named = set()
    for path in (store / "manifests").iterdir():
        manifest = json.loads(path.read_bytes())
        named |= {f"manifests/{path.name}", manifest["tokenizer_file"]["name"]}
        named |= {entry["name"] for entry in manifest["index"]}
        named |= {f"segments/{entry['name']}.{end}" for entry in manifest["segments"] for end in ("tokens", "blocks")}
    return named


def stray_files(store: Path) -> set[str]:
    """What no manifest names and the next run has no use for: leftovers."""
    return set(without_cache(store)) ^ names_in_manifests(store)


# Forgery: stores whose checksums all fit


def with_right_checksum(text: bytes) -> bytes:
    """A manifest's bytes with the last string, its checksum, made right."""
    head = text[: len(text) - 64 - len(b'"\n}\n')]
    return head + strong_hash(head + b"0" * 64 + b'"\n}\n').hex().encode() + b'"\n}\n'


def forged_manifest(store: Path, change: Callable[[dict[str, Any]], object], *, version: int = 1) -> None:
    """Changes a manifest and makes its checksum fit again."""
    path = store / "manifests" / manifest_name(version)
    content = json.loads(path.read_bytes())
    del content["checksum"]
    change(content)
    content["checksum"] = "0" * 64
    path.write_bytes(with_right_checksum(json.dumps(content, indent=2).encode() + b"\n"))


def forged_file(store: Path, name: str, data: bytes, *, version: int = 1) -> None:
    """Replaces a file of the index or the tokenizer, and makes its checksums fit."""

    def change(content: dict[str, Any]) -> None:
        for entry in [*content["index"], content["tokenizer_file"]]:
            if entry["name"].endswith(f"/{name}"):
                (store / entry["name"]).write_bytes(data)
                entry.update(bytes=len(data), checksum=checksum_hex(data))

    forged_manifest(store, change, version=version)


def forged_array(store: Path, name: str, change: Callable[[Any], object], *, version: int = 1) -> None:
    """Changes an array of the index in place, and makes all checksums fit."""
    with Store(store, version) as opened:
        array = opened.arrays[name].copy()
    changed = change(array)
    array = array if changed is None else np.asarray(changed, INDEX_ARRAYS[name])
    forged_file(store, f"{name}.array", array.tobytes(), version=version)


def forged_tokens(store: Path, change: Callable[[Any], object]) -> None:
    """Changes the tokens of the first segment, and makes all checksums fit."""
    with Store(store, 1) as opened:
        entry = opened.manifest.segments[0]
        tokens = np.fromfile(store / "segments" / f"{entry.name}.tokens", opened.dtype)
    change(tokens)
    blocks = block_checksums(tokens).tobytes()
    (store / "segments" / f"{entry.name}.tokens").write_bytes(tokens.tobytes())
    (store / "segments" / f"{entry.name}.blocks").write_bytes(blocks)
    forged_manifest(store, lambda content: content["segments"][0].update(checksum=checksum_hex(blocks)))


def forged_digest(store: Path) -> None:
    """Makes the digest fit what the index says, by the definition in docs rather than by our own function."""
    with Store(store, 1) as opened:
        table, arrays, manifest = opened.provenance(), opened.arrays, opened.manifest
    keys = table["key"].to_pylist()
    columns = {
        "key_lengths": b"".join(len(key).to_bytes(8, "little") for key in keys),
        "keys": b"".join(keys),
        "content": b"".join(table["content_hash"].to_pylist()),
        "tokens": b"".join(table["token_hash"].to_pylist()),
        **{name: arrays[name].tobytes() for name in ("loss_documents", "loss_starts", "loss_runs", "split", "reason")},
    }
    digest = digest_of(
        {
            "format": ["penstock-store", 1],
            "tokenizer": manifest.tokenizer["digest"],
            "options": manifest.options,
            "columns": {name: strong_hash(data).hex() for name, data in columns.items()},
        }
    )
    forged_manifest(store, lambda content: content.update(digest=digest))


def forged_table(store: Path, change: Callable[[pa.Table], pa.Table]) -> None:
    """Replaces the table of documents, and makes all checksums fit."""
    with Store(store, 1) as opened:
        table = change(opened.provenance())
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    forged_file(store, "documents.parquet", sink.getvalue().to_pybytes())


# Faults


class FailAt:
    """For `fs.before_operation`: answers operation number `at` with an error, once or from then on."""

    def __init__(self, at: int, code: int = 0, *, for_ever: bool = False) -> None:
        self.at, self.code, self.for_ever = at, code, for_ever
        self.operations: list[str] = []
        self.failed: str | None = None

    def __call__(self, operation: str, path: str) -> None:
        self.operations.append(operation)
        if len(self.operations) == self.at or (self.for_ever and len(self.operations) > self.at):
            self.failed = self.failed or operation
            raise OSError(self.code, os.strerror(self.code))


def spread(count: int, *, over: int) -> list[int]:
    """`count` numbers from 1 to `over`, evenly spread, both ends among them."""
    return sorted({1 + round(step * (over - 1) / (count - 1)) for step in range(count)})


def with_loss_runs(store: Path) -> Path:
    """A store of four documents, two of which don't carry loss throughout."""
    question = Part(data=b"What is it?", loss=False)
    documents = [
        document("memory/0", b"plain"),
        document("memory/1", question, b"An answer."),
        document("memory/2", question, Part(data=b"Another.")),
        document("memory/3", b"plain too"),
    ]
    build(store, MemorySource(documents))
    return store
