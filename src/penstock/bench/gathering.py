"""A corpus of distinct documents, gathered once, for benchmarks that set `prepare` against the encoder alone.

In: the `--input` words of a benchmark, or nothing for the packages installed here. Out: a folder with a copy of every
file that `prepare` would encode, each content once, and the words that name it. Without that the two sides wouldn't do
the same: `prepare` reads copies and generated files and leaves them out, the encoder with documents in memory encodes
them. Where an input isn't files (a table, a repository) the words stay what they are. Memory: one unit, and a hash per
document; as much disk as the corpus.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from penstock import fs
from penstock.bench.corpus import corpus_sources
from penstock.bench.options import CorpusOptions
from penstock.bench.processes import Tell, run_own
from penstock.hashing import strong_hash
from penstock.sources import DEFAULT_UNIT_BYTES, FilesSource
from penstock.sources.hygiene import VENDORED_FOLDERS, Cleaning, CleaningOptions

__all__ = ["gather_files", "with_gathered_inputs"]

Chosen = TypeVar("Chosen", bound=CorpusOptions)


def with_gathered_inputs(options: Chosen, folder: Path, tell: Tell) -> tuple[Chosen, dict[str, Any]]:
    """The options with the gathered corpus as their inputs, and what a result's settings say about it."""
    tell("corpus: copies of all distinct files")
    settings = {"inputs": list(options.inputs), "folder": str(folder / "corpus")}
    gathered = run_own("gathering:gather_files", settings, folder=folder)
    inputs = tuple(gathered.pop("inputs"))
    names = [source.name for source in corpus_sources(options.inputs)]
    return replace(options, inputs=inputs), {"corpus": names, "distinct_documents": gathered}


def gather_files(*, inputs: Sequence[str], folder: str) -> dict[str, Any]:
    """Copies the distinct files of the inputs to `folder`, which is new.

    Returns:
        `inputs`, the words for what was gathered; documents and megabytes; megabytes left out, by reason.
    """
    sources = corpus_sources(inputs)
    if not all(isinstance(source, FilesSource) for source in sources):
        return {"inputs": list(inputs), "documents": None, "megabytes": None, "left_out": {}}
    cleaning = Cleaning(CleaningOptions(), is_code=True)
    seen: set[bytes] = set()
    sizes = {"gathered": 0, "copies": 0, "generated or minified": 0}
    for source in sources:
        for unit in source.units(DEFAULT_UNIT_BYTES):
            text = source.read(unit)
            before = {document.key: (document.path, document.parts[0].data) for document in text.documents}
            kept = {document.key for document in cleaning.clean(text).documents}
            for key, (path, data) in before.items():
                content = strong_hash(data)
                is_copy = content in seen
                sizes["generated or minified" if key not in kept else "copies" if is_copy else "gathered"] += len(data)
                if key in kept and not is_copy:
                    seen.add(content)
                    _copy(data, Path(folder, source.name, os.fsdecode(_plain(path))))
    os.sync()  # what is written back later would fall into somebody's measurement
    megabytes = {name: round(size / 1e6, 1) for name, size in sizes.items()}
    return {
        "inputs": [f"{source.name}={Path(folder, source.name)}" for source in sources],
        "documents": len(seen),
        "megabytes": megabytes.pop("gathered"),
        "left_out": megabytes,
    }


def _copy(data: bytes, path: Path) -> None:
    if not path.parent.is_dir():
        fs.make_folder(path.parent)
    with path.open("xb") as file:  # thousands of files, used up in minutes: no fsync each
        file.write(data)


def _plain(path: bytes) -> bytes:
    """The path with a word before the names of folders and files that `prepare` passes over by default."""
    names = (path or b"file").split(b"/")
    return b"/".join(b"kept" + name if name.startswith(b".") or name in VENDORED_FOLDERS else name for name in names)
