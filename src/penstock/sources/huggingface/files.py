"""Which files of a data set's repository make up each split of a config.

In: the paths of a repository's files and the front matter of its README. Out: per split, the paths of its tables. The
rules are those of the hub (https://huggingface.co/docs/hub/datasets-data-files-configuration), in its order: what
`configs:` in the README says; `data/SPLIT-00000-of-00004.parquet`; folders named after a split; files named after one;
everything as `train`. No file is opened here and patterns meet only the paths given, so that a README can't reach
anything outside its repository. Cost: one pass over the paths per pattern.
"""

from __future__ import annotations

import bisect
import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from penstock.sources.tables.files import table_format

__all__ = ["Card", "ConfigCard", "missing_shards", "parse_card", "split_names", "splits_of", "tables_among"]

DEFAULT_CONFIG = "default"
MAX_PATTERN_PARTS = 32
# PyYAML takes 30 µs a byte, and time by the square of the depth of brackets.
MAX_FRONT_MATTER = 2**19
MAX_BRACKET_DEPTH = 32
# More than one format in a split is one table written twice: the one with most files is taken, the first of equals.
FORMAT_ORDER = ("parquet", "arrow", "jsonl", "csv", "tsv")
SPLIT_KEYWORDS = {
    "train": "train|training",
    "validation": "validation|valid|dev|val",
    "test": "test|testing|eval|evaluation",
}
SPLIT_NAME = re.compile(r"\w+(?:\.\w+)*")
_SHARD = re.compile(r"(?P<stem>.*[-._])(?P<number>\d{5,6})-of-(?P<total>\d{5,6})(?=\D)(?P<rest>.*)")
_SHARDED_SPLIT = re.compile(r"(?:data/)?(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}[^/]*\.[^/]*")
_FRONT_MATTER = re.compile(r"\ufeff?---[ \t]*\r?\n(.*?)\r?\n---[ \t]*(?:\r?\n|$)", re.DOTALL)


@dataclass(frozen=True, kw_only=True)
class ConfigCard:
    """What a README says about one config: patterns per split (none: by file names), and below which folder."""

    patterns: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    folder: str = ""


@dataclass(frozen=True, kw_only=True)
class Card:
    """The front matter of a README, as far as it concerns files.

    Attributes:
        configs: in the README's order.
        default: the config meant when none is named.
        rows: rows per config and split, where the README states them.
        problem: why the front matter couldn't be read; empty when it could.
    """

    configs: Mapping[str, ConfigCard] = field(default_factory=dict)
    default: str | None = None
    rows: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    problem: str = ""


def parse_card(text: str) -> Card:
    """The card of a README; an unreadable one is an empty card that says why."""
    found = _FRONT_MATTER.match(text)
    if not found:
        return Card()
    if len(found[1]) > MAX_FRONT_MATTER or _bracket_depth(found[1]) > MAX_BRACKET_DEPTH:
        return Card(problem=f"the front matter of README.md is too large or too deep ({len(found[1]):,} characters)")
    import yaml

    try:
        matter = yaml.safe_load(found[1])
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        return Card(problem=f"the front matter of README.md can't be read: {str(error).splitlines()[0]}")
    if not isinstance(matter, dict):
        return Card()
    configs: dict[str, ConfigCard] = {}
    defaults: list[str] = []
    for item in _objects(matter.get("configs")):
        name = str(item.get("config_name", DEFAULT_CONFIG))
        configs[name] = ConfigCard(
            patterns=_patterns(item.get("data_files")), folder=_clean(str(item.get("data_dir") or ""))
        )
        defaults += [name] if item.get("default") is True else []
    default = defaults[0] if defaults else _only_or_default(configs)
    return Card(configs=configs, default=default, rows=_rows(matter.get("dataset_info")))


def _bracket_depth(text: str) -> int:
    depth = deepest = 0
    for bracket in re.findall(r"[\[\]{}]", text):
        depth += 1 if bracket in "[{" else -1
        deepest = max(deepest, depth)
    return deepest


def _only_or_default(names: Iterable[str]) -> str | None:
    known = list(names)
    return known[0] if len(known) == 1 else DEFAULT_CONFIG if DEFAULT_CONFIG in known else None


def _objects(value: Any) -> list[dict[Any, Any]]:
    return [item for item in (value if isinstance(value, list) else [value]) if isinstance(item, dict)]


def _patterns(data_files: Any) -> dict[str, tuple[str, ...]]:
    """`data_files` in each of its forms: a pattern, a list of them, or split and path(s)."""
    patterns: dict[str, list[str]] = {}
    for item in data_files if isinstance(data_files, list) else [data_files]:
        if isinstance(item, str):
            patterns.setdefault("train", []).append(_clean(item))
        elif isinstance(item, dict) and isinstance(item.get("split"), str):
            paths = item.get("path")
            texts = [path for path in (paths if isinstance(paths, list) else [paths]) if isinstance(path, str)]
            patterns.setdefault(item["split"], []).extend(map(_clean, texts))
    return {split: tuple(texts) for split, texts in patterns.items() if SPLIT_NAME.fullmatch(split)}


def _rows(dataset_info: Any) -> dict[str, dict[str, int]]:
    rows: dict[str, dict[str, int]] = {}
    for item in _objects(dataset_info):
        name = str(item.get("config_name", DEFAULT_CONFIG))
        rows[name] = {
            str(split["name"]): split["num_examples"]
            for split in _objects(item.get("splits"))
            if "name" in split and isinstance(split.get("num_examples"), int) and split["num_examples"] >= 0
        }
    return rows


def _clean(path: str) -> str:
    return path.removeprefix("./").strip("/")


def tables_among(paths: Iterable[str]) -> list[str]:
    """The tables among a repository's files, sorted; hidden ones are none."""
    return sorted(path for path in paths if _format(path) and not _is_hidden(path))


def splits_of(tables: Sequence[str], card: Card, config: str | None) -> dict[str, tuple[str, ...]]:
    """The table files of each split of a config, in the order of their paths; empty when there are none.

    Args:
        tables: of the repository, as `tables_among` gives them.
        card: what its README says.
        config: None: the README's default, or the whole repository when it names no configs at all.
    """
    if config is None:
        config = card.default if card.configs else DEFAULT_CONFIG
    stated = card.configs.get(config) if config is not None else None
    if stated and stated.patterns:
        found = {
            split: {path for pattern in patterns for path in _matches(tables, _joined(stated.folder, pattern))}
            for split, patterns in stated.patterns.items()
        }
        return _one_format({split: tuple(sorted(files)) for split, files in found.items() if files})
    if stated:
        return _one_format(_in_folder(tables, stated.folder))
    if config == DEFAULT_CONFIG and not card.configs:
        return _one_format(_by_names(tables))
    for folder in _folders_of(config) if config else ():
        if found_here := _in_folder(tables, folder):
            return _one_format(found_here)
    return {}


def split_names(splits: Iterable[str]) -> list[str]:
    """Names in the order people expect: train, validation, test, then the others."""
    order = {name: place for place, name in enumerate(SPLIT_KEYWORDS)}
    return sorted(splits, key=lambda name: (order.get(name, len(order)), name))


def missing_shards(paths: Iterable[str]) -> list[str]:
    """The files that must be there beside these, by their own numbering `-00002-of-00014`, as `STEM-00003-of-00014`."""
    groups: dict[tuple[str, str], set[int]] = {}
    for path in paths:
        if shard := _SHARD.fullmatch(path):
            groups.setdefault((shard["stem"], shard["total"]), set()).add(int(shard["number"]))
    return [
        f"{stem}{number:0{len(total)}d}-of-{total}"
        for (stem, total), numbers in sorted(groups.items())
        for number in range(int(total))
        if number not in numbers
    ]


def is_numbered(path: str) -> bool:
    """Whether the file's name says how many there are."""
    return _SHARD.fullmatch(path) is not None


def _format(path: str) -> str | None:
    """The kind of table by the file's endings, or None for what is no table."""
    kind = table_format(os.fsencode(path))
    return kind[0] if kind else None


def _is_hidden(path: str) -> bool:
    *folders, name = path.split("/")
    return name.startswith(".") or any(folder.startswith((".", "__")) for folder in folders)


def _joined(folder: str, pattern: str) -> str:
    return f"{folder}/{pattern}" if folder else pattern


def _folders_of(config: str) -> list[str]:
    """Where a config's files lie when no README says so: fineweb's `sample-10BT` is the folder `sample/10BT`."""
    return [config, f"data/{config}", *([config.replace("-", "/", 1)] if "-" in config else [])]


def _in_folder(tables: Sequence[str], folder: str) -> dict[str, tuple[str, ...]]:
    prefix = f"{folder}/" if folder else ""
    inside = [path.removeprefix(prefix) for path in _with_prefix(tables, prefix)]
    return {split: tuple(prefix + path for path in files) for split, files in _by_names(inside).items()}


def _by_names(tables: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Splits by the names of files and folders alone."""
    rules = (_sharded_split, _split_by_folder, _split_by_file)
    for rule in rules:
        splits: dict[str, list[str]] = {}
        for path in tables:
            if split := rule(path):
                splits.setdefault(split, []).append(path)
        if splits:
            return {split: tuple(splits[split]) for split in split_names(splits)}
    return {"train": tuple(tables)} if tables else {}


def _sharded_split(path: str) -> str | None:
    found = _SHARDED_SPLIT.fullmatch(path)
    return found["split"] if found else None


_FOLDER_RULES = {
    split: re.compile(rf"(?:.*[-._ 0-9])?(?:{words})(?:[-._ 0-9].*)?") for split, words in SPLIT_KEYWORDS.items()
}
_FILE_RULES = {split: re.compile(rf"(?:.*[-._ 0-9])?(?:{words})[-._ 0-9].*") for split, words in SPLIT_KEYWORDS.items()}


def _split_by_folder(path: str) -> str | None:
    folders = path.split("/")[:-1]
    return next((split for split, rule in _FOLDER_RULES.items() if any(map(rule.fullmatch, folders))), None)


def _split_by_file(path: str) -> str | None:
    name = path.rpartition("/")[2]
    return next((split for split, rule in _FILE_RULES.items() if rule.fullmatch(name)), None)


def _one_format(splits: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
    counts = Counter(_format(path) for files in splits.values() for path in files)
    if len(counts) < 2:
        return splits
    chosen = max(FORMAT_ORDER, key=lambda kind: counts[kind])  # of equals, max takes the first
    kept = {split: tuple(path for path in files if _format(path) == chosen) for split, files in splits.items()}
    return {split: files for split, files in kept.items() if files}


def _with_prefix(tables: Sequence[str], prefix: str) -> Sequence[str]:
    """The sorted paths that begin so; found by bisection, because a repository may have 100 configs of 25,000 files."""
    start = bisect.bisect_left(tables, prefix)
    end = start
    while end < len(tables) and tables[end].startswith(prefix):
        end += 1
    return tables[start:end]


def _matches(tables: Sequence[str], pattern: str) -> list[str]:
    parts = tuple(pattern.split("/"))
    if len(parts) > MAX_PATTERN_PARTS:
        return []
    literal = re.split(r"[*?\[]", pattern, maxsplit=1)[0]
    return [path for path in _with_prefix(tables, literal) if _is_match(parts, tuple(path.split("/")))]


def _is_match(pattern: tuple[str, ...], path: tuple[str, ...]) -> bool:
    """Part by part, `**` for any number of folders, as fsspec does.

    Not one regular expression for the whole path: a hostile README could write one that never ends.
    """

    @cache
    def rest(i: int, j: int) -> bool:
        if i == len(pattern):
            return j == len(path)
        if pattern[i] == "**":
            return rest(i + 1, j) or (j < len(path) and rest(i, j + 1))
        return j < len(path) and fnmatch.fnmatchcase(path[j], pattern[i]) and rest(i + 1, j + 1)

    return rest(0, 0)
