"""`hf:NAME[/config][:split]` to the tables of a Hugging Face data set.

In: the word. Out: a `TablesSource` over local files. NAME is a preset, `ORG/NAME` or `NAME`; a word of two parts is
read as a preset with a config, then as ORG/NAME, then as NAME/config, and the first reading of which something usable
is cached wins. For each name the processed cache of the `datasets` library is looked into first, then the hub cache of
raw files. Only when neither has it whole, and only with the network allowed, the hub is asked, through
`huggingface_hub`, for just the files of the splits wanted.

Keys of documents hold the split and the file's path in the data set, never the cache's folder or the revision. Data
sets that are made by a program of their repository are refused; nothing is ever run.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from penstock.errors import InputError, nearest_first
from penstock.sources.document import SkipTally, printable
from penstock.sources.huggingface.cache import (
    CachedConfig,
    CachedDataSet,
    CachedFile,
    CacheFolders,
    Scan,
    cache_folders,
    cached_names,
    first_names,
)
from penstock.sources.huggingface.processed import find_processed
from penstock.sources.huggingface.repository import HubDataSet, find_hub
from penstock.sources.rows import RowRenderer
from penstock.sources.source import Source
from penstock.sources.tables.source import TableOptions

__all__ = ["PRESETS", "SCHEME", "Preset", "Reading", "readings_of", "source_from_word"]

SCHEME = "hf:"
MAX_NAMES_SHOWN = 12
ALL_SPLITS = "all"
OFFLINE_HINT = "HF_HUB_OFFLINE (or HF_DATASETS_OFFLINE) forbids to ask the hub: unset it, or choose a cached data set"
_PART = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_SPLITS = re.compile(r"\w+(?:\.\w+)*(?:\+\w+(?:\.\w+)*)*")


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A short name for a data set.

    Attributes:
        names: full names, today's first; the others are what older caches call it.
        config: meant when none is named.
        text_field: its column of text.
        about: one line for people.
    """

    names: tuple[str, ...]
    config: str | None
    text_field: str
    about: str


_FINEWEB_EDU = Preset(
    names=("HuggingFaceFW/fineweb-edu",),
    config="sample-10BT",
    text_field="text",
    about="educational web pages, a sample of 10 billion tokens (28 GB)",
)
PRESETS = {
    "fineweb-edu": _FINEWEB_EDU,
    "finewebedu": _FINEWEB_EDU,
    "wikitext-103": Preset(
        names=("Salesforce/wikitext", "wikitext"),
        config="wikitext-103-raw-v1",
        text_field="text",
        about="good and featured articles of Wikipedia, one line a row",
    ),
    "tinystories": Preset(
        names=("roneneldan/TinyStories",),
        config=None,
        text_field="text",
        about="short stories for small models, written by a model",
    ),
    "openwebtext": Preset(
        names=("Skylion007/openwebtext", "openwebtext"),
        config=None,
        text_field="text",
        about="web pages linked from Reddit, an open copy of WebText",
    ),
}


@dataclass(frozen=True, kw_only=True)
class Reading:
    """One way to read a word.

    Attributes:
        names: the data set, under each of its names; the first one names the source.
        config: None: the data set's default.
        splits: None: train, or the only one; `all`, or names joined by `+`.
        text_field: None: found by name.
    """

    names: tuple[str, ...]
    config: str | None
    splits: str | None
    text_field: str | None = None


@dataclass(frozen=True, kw_only=True)
class _Chosen:
    """What was found: the data set, its config, and the files of the splits wanted with the names they get in keys."""

    data_set: CachedDataSet
    config: CachedConfig
    splits: tuple[str, ...]
    files: tuple[tuple[bytes, str], ...]

    @property
    def facts(self) -> dict[bytes, dict[str, str]]:
        """What each file's rows have in common."""
        common = {"dataset": self.data_set.name, "config": self.config.name}
        return {name: {**common, "split": os.fsdecode(name.partition(b"/")[0])} for name, _ in self.files}

    @property
    def skips(self) -> SkipTally:
        """The files of the splits that nobody named and that aren't the one meant by default."""
        tally = SkipTally()
        for name, split in self.config.splits.items():
            for file in split.files if name not in self.splits else ():
                tally.add("other-split", _keyed(name, file)[0])
        return tally


def source_from_word(
    word: str,
    *,
    name: str = "",
    tables: TableOptions | None = None,
    renderer: RowRenderer | None = None,
    network: bool = False,
) -> Source:
    """The tables that an `hf:` word names.

    Args:
        word: `hf:NAME[/config][:split]`.
        name: of the source; empty: the data set's, with `--` for the slash.
        tables: how rows become documents; a preset fills in its column of text.
        renderer: makes documents of rows; None: a column of text.
        network: whether the hub may be asked for what isn't cached.

    Raises:
        InputError: there is no such data set, config or split here, or not all of it.
        MissingExtraError: a download needs `huggingface_hub`.
    """
    from penstock.sources.tables.source import TablesSource

    readings = readings_of(word)
    folders = cache_folders()
    reading, chosen = _cached(word, readings, folders, network=network) or _downloaded(word, readings, folders)
    options = tables or TableOptions()
    if options.text_field is None and renderer is None:
        options = replace(options, text_field=reading.text_field)
    return TablesSource(
        name=name or reading.names[0].replace("/", "--"),
        location=printable(os.fsencode(chosen.config.folder)),
        files=chosen.files,
        options=options,
        renderer=renderer,
        facts=chosen.facts,
        skips=chosen.skips if reading.splits is None else None,
    )


def readings_of(word: str) -> list[Reading]:
    """The ways to read a word, the likeliest first.

    Raises:
        InputError: it is no name of a data set.
    """
    path, colon, split = word.removeprefix(SCHEME).partition(":")
    parts = path.split("/")
    if len(parts) > 3 or not all(_PART.fullmatch(part) for part in parts):
        raise InputError(
            f"input {word!r} names no data set; expected hf:NAME[/config][:split]",
            hint="for instance hf:roneneldan/TinyStories:train; `penstock datasets` lists what is cached",
        )
    if colon and not _SPLITS.fullmatch(split):
        raise InputError(
            f"input {word!r}: {split!r} is no name of a split",
            hint="name one split, several as train+test, or all; parts of a split can't be named",
        )
    splits = split or None
    if len(parts) == 3:
        return [Reading(names=("/".join(parts[:2]),), config=parts[2], splits=splits)]
    config = parts[1] if len(parts) == 2 else None
    if preset := PRESETS.get(parts[0].lower()):
        known = Reading(names=preset.names, config=config or preset.config, splits=splits, text_field=preset.text_field)
        return [known, Reading(names=(path,), config=None, splits=splits)]
    readings = [Reading(names=(path,), config=None, splits=splits)]
    return readings + ([Reading(names=(parts[0],), config=config, splits=splits)] if config else [])


def _cached(
    word: str, readings: Sequence[Reading], folders: CacheFolders, *, network: bool
) -> tuple[Reading, _Chosen] | None:
    """What the caches have; None when the hub has to be asked and may be."""
    refused: list[InputError] = []
    for reading in readings:
        for name in reading.names:
            for find, root in ((find_processed, folders.processed), (find_hub, folders.hub)):
                scan = Scan()
                data_set = find(root, name, scan)
                try:
                    if data_set is not None:
                        return reading, _chosen(reading, data_set, scan)
                except InputError as error:
                    refused.append(error)
    if network and not _is_offline():
        return None
    if refused:
        message = "; ".join(dict.fromkeys(error.message for error in refused))
        raise InputError(message, hint=OFFLINE_HINT if network else refused[0].hint)
    raise _not_cached(word, readings, folders, network=network)


def _is_offline() -> bool:
    words = (os.environ.get("HF_HUB_OFFLINE") or "", os.environ.get("HF_DATASETS_OFFLINE") or "")
    return any(word.upper() in ("1", "ON", "YES", "TRUE") for word in words)


def _not_cached(word: str, readings: Sequence[Reading], folders: CacheFolders, *, network: bool) -> InputError:
    wanted = readings[0].names[0]
    known = sorted({name for _, name in cached_names(folders, Scan())})
    shown = nearest_first(wanted, known).split(", ")
    names = first_names(shown, shown=MAX_NAMES_SHOWN) if known else "none"
    hint = "add --network to download it, or set HF_HOME to the cache that has it"
    message = f"data set {wanted!r} (input {word!r}) isn't cached; cached here: {names}"
    return InputError(message, hint=OFFLINE_HINT if network else hint)


def _chosen(reading: Reading, data_set: CachedDataSet, scan: Scan) -> _Chosen:
    """The files of the splits wanted, all there."""
    where = f"data set {data_set.name!r} in the {data_set.cache} cache"
    if scan.unseen:
        raise InputError(
            f"{where}: not all of it can be seen: {scan.unseen}",
            hint="check that folder, or give the data set a cache of its own and name it with HF_HOME",
        )
    if data_set.problem:
        raise InputError(f"{where}: {data_set.problem}", hint=_hint(data_set.problem))
    config = data_set.config(reading.config)
    if config is None:
        known = first_names(list(data_set.configs), shown=MAX_NAMES_SHOWN)
        if not known:
            raise InputError(f"{where}: none of its tables is here", hint=_hint("missing"))
        if reading.config:
            raise InputError(
                f"{where} has no config {reading.config!r}; here: {known}",
                hint="name one of these, or add --network to download the one named",
            )
        example = next(iter(data_set.configs), "CONFIG")
        raise InputError(
            f"{where} has no default config; here: {known}", hint=f"name one: {SCHEME}{data_set.name}/{example}"
        )
    if config.problem:
        raise InputError(f"{where}, config {config.name!r}: {config.problem}", hint=_hint(config.problem))
    splits = chosen_splits(reading, list(config.splits), where=f"{where}, config {config.name!r}")
    for split in splits:
        if problem := config.splits[split].problem:
            raise InputError(f"{where}, config {config.name!r}, split {split!r}: {problem}", hint=_hint(problem))
    files = tuple(_keyed(split, file) for split in splits for file in config.splits[split].files)
    return _Chosen(data_set=data_set, config=config, splits=splits, files=tuple(sorted(files)))


def _hint(problem: str) -> str:
    if "program" in problem:
        return "use a copy of the data set in Parquet, or process it with the datasets library first"
    if "blobs/*.incomplete" in problem:
        return "add --network to finish the download; if it was given up, remove those files"
    return "add --network to download what is missing, or remove that data set from the cache"


def _keyed(split: str, file: CachedFile) -> tuple[bytes, str]:
    # The whole path and not the last part: the dumps of fineweb have files of the same names.
    return split.encode() + b"/" + file.name, file.location


def chosen_splits(reading: Reading, known: Sequence[str], *, where: str) -> tuple[str, ...]:
    """The splits that a word asks for.

    Raises:
        InputError: one of them isn't there, or none was named and there is no telling which is meant.
    """
    if reading.splits == ALL_SPLITS and ALL_SPLITS not in known:
        return tuple(known)
    if reading.splits is None:
        if "train" in known or len(known) == 1:
            return ("train",) if "train" in known else tuple(known)
        raise InputError(
            f"{where}: no split was named and there is no 'train'; here: {', '.join(known) or 'none'}",
            hint=f"name one: …:{known[0] if known else 'train'}, or all of them: …:{ALL_SPLITS}",
        )
    wanted = tuple(dict.fromkeys(reading.splits.split("+")))
    for split in wanted:
        if split not in known:
            raise InputError(
                f"{where}: no split {split!r}; here: {', '.join(known) or 'none'}",
                hint=f"name one of: {nearest_first(split, known) or 'none'}",
            )
    return wanted


def _downloaded(word: str, readings: Sequence[Reading], folders: CacheFolders) -> tuple[Reading, _Chosen]:
    """Fetches the files of the first reading that the hub knows, and finds them in the cache."""
    from penstock.sources.huggingface.download import download

    reading, name = download(word, readings, folders.hub)
    scan = Scan()
    data_set = find_hub(folders.hub, name, scan)
    if not isinstance(data_set, HubDataSet):
        raise InputError(
            f"data set {name!r} was downloaded, but {folders.hub} doesn't hold it", hint="check HF_HUB_CACHE"
        )
    return reading, _chosen(reading, data_set, scan)
