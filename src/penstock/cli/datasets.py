"""`datasets`: what the local Hugging Face caches hold, how much of it, and which training manifests use it."""

from __future__ import annotations

import os
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, note, one_line, print_json, print_table
from penstock.errors import InputError

MANIFESTS_SHOWN = 3
# The default folder is wherever the user stands, which may be a home folder.
MANIFEST_ENTRIES = 200_000


def datasets(
    cache: Annotated[
        Path | None, typer.Option(help="Folder with hub/ and datasets/, or one of the two. Default: as HF_HOME says.")
    ] = None,
    manifests: Annotated[Path, typer.Option(help="Look for training manifests here and below.")] = Path(),
    presets: Annotated[bool, typer.Option("--presets", help="List the short names instead.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """List the Hugging Face data sets that are cached here, and which training manifests use them.

    \b
    Examples:
      penstock datasets
      penstock datasets --manifests experts --json
      penstock prepare hf:tinystories --out store

    Nothing is downloaded and nothing is run. Names in this list can be given to `prepare` as hf:NAME/CONFIG:SPLIT.
    """
    facts = _presets() if presets else _listing(cache, manifests)
    if json_output:
        print_json(facts)
    elif presets:
        rows = [
            (f"hf:{name}", one_line(f"{preset['name']}{'/' + preset['config'] if preset['config'] else ''}"))
            for name, preset in facts["presets"].items()
        ]
        print_table(rows, header=("preset", "data set"))
    else:
        _print_listing(facts)


def _presets() -> dict[str, Any]:
    from penstock.sources.huggingface.words import PRESETS

    return {
        "presets": {
            name: {
                "name": preset.names[0],
                "config": preset.config,
                "text_field": preset.text_field,
                "about": preset.about,
            }
            for name, preset in PRESETS.items()
        }
    }


def _listing(cache: Path | None, manifests: Path) -> dict[str, Any]:
    from penstock.sources.huggingface.cache import Scan, cache_folders, cached_names
    from penstock.sources.huggingface.processed import find_processed, snake_case_name
    from penstock.sources.huggingface.repository import find_hub
    from penstock.sources.huggingface.uses import manifests_below

    if cache and not cache.is_dir():
        raise InputError(f"--cache {str(cache)!r} is no folder", hint="name a folder with hub/ and datasets/")
    if not manifests.is_dir():
        raise InputError(f"--manifests {str(manifests)!r} is no folder", hint="name a folder with training manifests")
    folders = _folders_in(cache) if cache else cache_folders()
    scan, manifest_scan = Scan(), Scan(max_entries=MANIFEST_ENTRIES)
    found = manifests_below(str(manifests.absolute()), manifest_scan)
    entries: list[dict[str, Any]] = []
    inodes: dict[tuple[int, int], int] = {}
    names = cached_names(folders, scan)
    full_names = {snake_case_name(name): name for name in _known_full_names(names)}
    for kind, name in names:
        find, root = (find_processed, folders.processed) if kind == "processed" else (find_hub, folders.hub)
        if data_set := find(root, name, scan):
            entries.append(_entry(data_set, full_names.get(name, name), found))
            inodes.update(data_set.inodes)
    return {
        "caches": {"processed": folders.processed, "hub": folders.hub},
        "datasets": entries,
        "bytes": sum(inodes.values()),
        "manifests": len(found),
        "skipped": {"caches": scan.skips.counts, "manifests": manifest_scan.skips.counts},
        "skipped_examples": {"caches": scan.skips.examples, "manifests": manifest_scan.skips.examples},
        "cut_short": scan.is_cut_short or manifest_scan.is_cut_short,
    }


def _folders_in(cache: Path) -> Any:
    """DIR/hub and DIR/datasets where there is one of them; else DIR itself may be either cache."""
    from penstock.sources.huggingface.cache import CacheFolders

    folder = cache.absolute()
    processed, hub = folder / "datasets", folder / "hub"
    if not processed.is_dir() and not hub.is_dir():
        processed = hub = folder
    return CacheFolders(processed=str(processed), hub=str(hub))


def _known_full_names(names: list[tuple[str, str]]) -> list[str]:
    """The processed cache keeps names in snake case; the hub cache and the presets know some of them in full."""
    from penstock.sources.huggingface.words import PRESETS

    presets = [name for preset in PRESETS.values() for name in preset.names]
    return presets + [name for kind, name in names if kind == "hub"]


def _entry(data_set: Any, name: str, manifests: Any) -> dict[str, Any]:
    from penstock.sources.huggingface.uses import uses

    configs = [_config(config) for config in data_set.configs.values()]
    # Of the tables only: to list them, READMEs and info files were read just now.
    splits = [split for config in data_set.configs.values() for split in config.splits.values()]
    used_ns = max((file.last_used_ns for split in splits for file in split.files), default=0)
    used = datetime.fromtimestamp(used_ns / 1e9, UTC) if used_ns else None
    return {
        "name": name,
        "cache": data_set.cache,
        "location": data_set.folder,
        "bytes": sum(data_set.inodes.values()),
        "last_used": used.isoformat(timespec="seconds") if used else None,
        "problem": data_set.problem,
        "configs": configs,
        "manifests": [manifest.path for manifest in manifests if uses(manifest, data_set)],
    }


def _config(config: Any) -> dict[str, Any]:
    splits = {
        name: {
            "rows": split.rows,
            "files": len(split.files),
            "bytes": sum(file.num_bytes for file in split.files),
            "complete": False if split.problem else True if split.is_certain else None,
            "problem": split.problem,
        }
        for name, split in config.splits.items()
    }
    states = [split["complete"] for split in splits.values()]
    known_rows = [split["rows"] for split in splits.values()]
    return {
        "config": config.name,
        "location": config.folder,
        "splits": splits,
        "rows": sum(known_rows) if known_rows and None not in known_rows else None,
        "bytes": sum(split["bytes"] for split in splits.values()),
        "complete": False if config.problem or False in states or not states else None if None in states else True,
        "problem": config.problem,
    }


def _print_listing(facts: dict[str, Any]) -> None:
    rows = [row for entry in facts["datasets"] for row in _rows(entry)]
    header = ("data set", "config", "splits", "rows", "size", "complete", "last used", "cache", "used by")
    if rows:
        print_table(rows, header=header)
        print(f"data sets: {len(facts['datasets'])}, {human_bytes(facts['bytes'])} on disk")
    else:
        print("no data set is cached")
    for kind, folder in facts["caches"].items():
        print(one_line(f"{kind} cache: {folder}"))
    for entry in facts["datasets"]:
        for problem in _problems(entry):
            note(one_line(f"  {entry['name']}: {problem}"))
    for kind, counts in facts["skipped"].items():
        for reason, count in counts.items():
            example = facts["skipped_examples"][kind][reason][0]
            note(one_line(f"  {kind}: {count:,} {reason}, for instance {example}"))


def _rows(entry: dict[str, Any]) -> list[tuple[str, ...]]:
    used = (entry["last_used"] or "-")[:10]
    by = [os.path.relpath(path) for path in entry["manifests"]]
    more = f" and {len(by) - MANIFESTS_SHOWN} more" if len(by) > MANIFESTS_SHOWN else ""
    tail = (used, entry["cache"], one_line(", ".join(by[:MANIFESTS_SHOWN]) + more) or "-")
    rows: list[tuple[str, ...]] = [
        (
            one_line(entry["name"]),
            one_line(config["config"]),
            one_line("+".join(config["splits"]) or "-"),
            "?" if config["rows"] is None else f"{config['rows']:,}",
            human_bytes(config["bytes"]),
            {True: "yes", False: "no", None: "?"}[config["complete"]],
            *tail,
        )
        for config in entry["configs"]
    ]
    other = entry["bytes"] - sum(config["bytes"] for config in entry["configs"])
    if not rows or other > max(entry["bytes"] // 10, 10**6):
        rows.append((one_line(entry["name"]), "(other files)", "-", "-", human_bytes(other), "-", *tail))
    return rows


def _problems(entry: dict[str, Any]) -> list[str]:
    found = [entry["problem"]] if entry["problem"] else []
    for config in entry["configs"]:
        found += [f"{config['config']}: {config['problem']}"] if config["problem"] else []
        for name, split in config["splits"].items():
            found += [f"{config['config']}:{name}: {split['problem']}"] if split["problem"] else []
    return found
