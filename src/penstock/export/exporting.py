"""A version of a store to a folder of another program's format: options, splits one after another, manifest.

The only part that knows all formats. What a format gets is a `SplitJob`; what it gives back are facts for the manifest.
Runs in one thread: the binary formats are bound by memory and disk, JSONL by the spelling of digits.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import StoreError
from penstock.export import arrow, chunks, flat, jsonl, megatron
from penstock.export.folder import open_export_folder
from penstock.export.options import ExportOptions, checked
from penstock.export.split import SplitJob
from penstock.export.stream import TokenStream
from penstock.store import Store

__all__ = ["ExportResult", "export_store"]

_WRITERS: dict[str, Callable[[SplitJob], dict[str, Any]]] = {
    "jsonl": jsonl.write_split,
    "arrow": arrow.write_split,
    "chunks": chunks.write_split,
    "megatron": megatron.write_split,
    "bin": flat.write_split,
}
# Formats whose files carry the split in their name; the others get a folder per split.
_NAMED_BY_SPLIT = ("jsonl", "megatron", "bin")

OnProgress = Callable[[int, int, str], None]


@dataclass(frozen=True, kw_only=True)
class ExportResult:
    """What was written.

    Attributes:
        splits: per split documents, tokens, rows where there are any, and the format's own facts.
    """

    out: Path
    format: str
    splits: dict[str, dict[str, Any]]
    num_files: int
    num_bytes: int
    seconds: float


def export_store(
    store: Store, out: Path, *, options: ExportOptions, force: bool = False, on_progress: OnProgress | None = None
) -> ExportResult:
    """Writes a version of a store to `out`, which appears whole or not at all.

    Args:
        store: what to export.
        out: a folder that isn't there, is empty, or, with `force`, holds an earlier export.
        options: format and what belongs to it.
        force: replace an earlier export.
        on_progress: called with tokens done, tokens in all and the split.

    Raises:
        ConfigError: the options don't fit each other or the format.
        StoreError: `out` can't be used, or the store has no such split.
        DamagedStoreError: a block of the store isn't what was committed; nothing is left.
    """
    started = time.monotonic()
    options = checked(options)
    names = [options.split] if options.split is not None else store.manifest.splits
    streams = [TokenStream(store, name) for name in names]
    for name in names:
        _check_name(name)
    progress = _Progress(streams, on_progress)
    splits: dict[str, dict[str, Any]] = {}
    with open_export_folder(out, store=store.path, force=force) as folder:
        for stream in streams:
            in_folder = options.split is None and options.format not in _NAMED_BY_SPLIT
            job = SplitJob(
                stream=stream,
                folder=folder,
                options=options,
                prefix=f"{stream.split}/" if in_folder else "",
                advance=progress.of(stream),
            )
            counts = {"documents": stream.num_documents, "tokens": stream.num_tokens}
            splits[stream.split] = {**counts, **_WRITERS[options.format](job)}
        if options.format == "bin":
            flat.write_summary(folder, splits, job.tokenizer_facts())
        if options.format == "arrow" and options.split is None:
            arrow.write_summary(folder, splits)
        folder.write_manifest(_manifest(store, options, splits, job))
    return ExportResult(
        out=out,
        format=options.format,
        splits=splits,
        num_files=len(folder.entries),
        num_bytes=sum(entry.bytes for entry in folder.entries),
        seconds=time.monotonic() - started,
    )


def _manifest(store: Store, options: ExportOptions, splits: dict[str, Any], job: SplitJob) -> dict[str, Any]:
    return {
        "store": {"digest": store.digest, "version": store.version},
        "tokenizer": job.tokenizer_facts(),
        "options": asdict(options),
        "splits": splits,
    }


def _check_name(split: str) -> None:
    """A split's name becomes part of a file's name; a store written by hand could say anything."""
    if not re.fullmatch(r"[\w-]{1,100}", split):
        raise StoreError(
            f"the split {split!r} has a name that no file can have", hint="choose another with --split NAME"
        )


class _Progress:
    """Adds up the tokens of all splits."""

    def __init__(self, streams: list[TokenStream], report: OnProgress | None) -> None:
        self._total = sum(stream.num_tokens for stream in streams)
        self._report = report
        self._done = 0

    def of(self, stream: TokenStream) -> Callable[[int], None]:
        """What a split's writer calls."""

        def advance(tokens: int) -> None:
            self._done = min(self._done + tokens, self._total)
            if self._report is not None:
                width = stream.dtype.itemsize
                self._report(self._done * width, self._total * width, stream.split)

        return advance
