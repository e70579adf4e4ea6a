"""A folder prepared, changed a little and prepared again, timed: the task of the rerun benchmark."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench.corpus import corpus_sources
from penstock.errors import StoreError
from penstock.sources import DEFAULT_UNIT_BYTES, FilesSource
from penstock.store import PrepareOptions, PrepareResult, prepare, verify
from penstock.tokenize import Tokenizer, load_tokenizer

__all__ = ["make_folder_of_files", "prepare_change_prepare"]

FILES_PER_FOLDER = 200
SMALLEST_FILE_BYTES = 2048


def make_folder_of_files(*, inputs: Sequence[str], count: int, out: str) -> dict[str, Any]:
    """Real documents as files of their own, repeated under other names with a line of their own until there are enough.

    Those of 2 KB and more, so that the mean is about that of Linux's source, 19 KB. Written plainly, without fsync:
    they are the benchmark's, not a user's.
    """
    documents = [
        (Path(os.fsdecode(document.path)).suffix or ".txt", document.parts[0].data)
        for source in corpus_sources(inputs)
        for unit in source.units(DEFAULT_UNIT_BYTES)
        for document in source.read(unit).documents
        if document.num_bytes >= SMALLEST_FILE_BYTES
    ]
    root, size = Path(out), 0
    for number in range(count):
        folder = root / f"{number // FILES_PER_FOLDER:04d}"
        if number % FILES_PER_FOLDER == 0:
            fs.make_folder(folder)
        ending, data = documents[number % len(documents)]
        data += f"\n# file {number}\n".encode()
        (folder / f"{number:06d}{ending}").write_bytes(data)
        size += len(data)
    return {"bytes": size, "files": count}


def prepare_change_prepare(*, folder: str, tokenizer: str, workers: int, out: str, share: float) -> dict[str, Any]:
    """Seconds of a first run, of one after nothing changed, after one file was touched, after a share changed.

    The digest of the last is compared with that of a store made afresh from the changed files.
    """
    import awkward  # type: ignore[import-untyped]  # noqa: F401  gigatoken imports it at its first batch

    paths = sorted(path for path in Path(folder).rglob("*") if path.is_file())
    store, fresh = Path(out), Path(f"{out}-fresh")
    time.sleep(3)  # files younger than the clock's grain aren't believed
    opened = load_tokenizer(tokenizer)
    seconds: dict[str, float] = {}

    def run(name: str, target: Path) -> PrepareResult:
        source = FilesSource(name="files", root=folder)
        started = time.perf_counter()
        result = _prepared(source, target, opened, workers)
        seconds[name] = time.perf_counter() - started
        return result

    first = run("first", store)
    unchanged = run("unchanged", store)
    os.utime(paths[len(paths) // 2])
    touched = run("touched", store)
    chosen = [path for path in paths if _is_chosen(path.name, share)]
    for path in chosen:
        path.write_bytes(path.read_bytes() + b"# changed\n")
    changed = run("changed", store)
    again = run("fresh", fresh)
    if (
        unchanged.committed
        or touched.committed
        or not changed.committed
        or changed.manifest.digest != again.manifest.digest
    ):
        raise StoreError("a rerun doesn't agree with a fresh build", hint="this is a bug; report it")
    if verify(store):
        raise StoreError("the store isn't whole after a rerun", hint="this is a bug; report it")
    fs.remove_tree(store)
    fs.remove_tree(fresh)
    return {
        **{f"{name}_seconds": value for name, value in seconds.items()},
        "files": len(paths),
        "changed_files": len(chosen),
        "documents": first.manifest.num_documents,
        "bytes": first.manifest.counts["bytes"],
        "documents_reused": changed.documents_reused,
    }


def _prepared(source: FilesSource, target: Path, tokenizer: Tokenizer, workers: int) -> PrepareResult:
    return prepare([source], target, tokenizer=tokenizer, options=PrepareOptions(workers=workers, processes=True))


def _is_chosen(name: str, share: float) -> bool:
    """About this share of names, spread evenly, the same in every round."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "little") < share * 2**32
