"""Downloads the tables of a data set into the hub cache, through `huggingface_hub`. The only part that opens sockets.

In: readings of an `hf:` word. Out: the reading that the hub knows and the name it knows it by; its README and the files
of the splits wanted lie in the cache, as that library lays them out. Memory: the repository's list of files.
"""

from __future__ import annotations

import glob
import os
import sys
from collections.abc import Sequence
from typing import Any

from penstock.errors import InputError, MissingExtraError
from penstock.sources.huggingface.files import Card, parse_card, split_names, splits_of, tables_among
from penstock.sources.huggingface.repository import MAX_README_BYTES, script_of
from penstock.sources.huggingface.words import Reading, chosen_splits

__all__ = ["download"]


def download(word: str, readings: Sequence[Reading], cache: str) -> tuple[Reading, str]:
    """Fetches what the first reading known to the hub asks for.

    Raises:
        InputError: the hub knows none of them, refuses, can't be reached, or has no such config or split.
        MissingExtraError: `huggingface_hub` isn't installed.
    """
    try:
        import huggingface_hub
        import huggingface_hub.utils
        from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError
    except ImportError:
        raise MissingExtraError("huggingface_hub", extra="hf", wanted_for=f"the download of {word!r}") from None
    hub: Any = huggingface_hub
    http_error: type[Exception] = HfHubHTTPError.__mro__[1]  # of the HTTP library that this version uses
    if not sys.stderr.isatty():
        hub.utils.disable_progress_bars()
    for reading in readings:
        for name in reading.names:
            try:
                _fetch(hub, reading, name, cache)
            except GatedRepoError:
                raise InputError(
                    f"data set {name!r} is gated: the hub gives it to those who accepted its terms",
                    hint=f"accept them on the hub's page of {name}, then log in with `hf auth login`",
                ) from None
            except RepositoryNotFoundError:
                continue
            except (OSError, http_error) as error:
                raise InputError(
                    f"data set {name!r} can't be downloaded: {_reason(error)}",
                    hint="check the connection and run the same command again; finished files are kept",
                ) from error
            return reading, name
    names = ", ".join(dict.fromkeys(name for reading in readings for name in reading.names))
    raise InputError(
        f"the hub knows no data set {names} (input {word!r})",
        hint="check the name; a private one needs `hf auth login`",
    )


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no reason given'}"


def _fetch(hub: Any, reading: Reading, name: str, cache: str) -> None:
    endpoint = os.environ.get("HF_ENDPOINT") or None
    where = {"repo_type": "dataset", "cache_dir": cache, "endpoint": endpoint}
    paths = [file.rfilename for file in hub.HfApi(endpoint=endpoint).dataset_info(name).siblings or []]
    card = Card()
    if "README.md" in paths:
        with open(hub.hf_hub_download(name, "README.md", **where), "rb") as file:
            card = parse_card(file.read(MAX_README_BYTES).decode("utf-8", "replace"))
    wanted = _wanted(reading, name, paths, card)
    # Whole paths, not patterns: each is escaped and matches only itself.
    hub.snapshot_download(name, allow_patterns=[glob.escape(path) for path in ["README.md", *wanted]], **where)


def _wanted(reading: Reading, name: str, paths: Sequence[str], card: Card) -> list[str]:
    """The repository's files of the splits wanted."""
    if script := script_of(name, paths, card):
        raise InputError(
            f"data set {name!r} is made by a program, {script}, which penstock never runs",
            hint="use a copy of the data set in Parquet, or process it with the datasets library first",
        )
    splits = splits_of(tables_among(paths), card, reading.config)
    if not splits:
        known = ", ".join(card.configs) or "none"
        met = f"has no tables of config {reading.config!r}" if reading.config else "names no default config"
        note = f"; {card.problem}" if card.problem else ""
        raise InputError(f"data set {name!r} {met}; its configs: {known}{note}", hint=f"name one: hf:{name}/CONFIG")
    chosen = chosen_splits(reading, split_names(splits), where=f"data set {name!r} on the hub")
    return [path for split in chosen for path in splits[split]]
