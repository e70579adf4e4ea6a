"""The user's cache folder: what may be thrown away at any time and saves a download or a check when it is there.

`PENSTOCK_CACHE` names the folder, or is `off`; otherwise it is `XDG_CACHE_HOME/penstock` or `~/.cache/penstock`.
A damaged or unwritable cache reads as an empty one, and never stops a run.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

from penstock import fs

__all__ = ["cache_folder", "cached_object", "keep_object"]

OFF = "off"


def cache_folder() -> Path | None:
    """Where cached things lie, whether or not the folder exists yet; None when there is to be no cache."""
    named = os.environ.get("PENSTOCK_CACHE")
    if named:
        return None if named == OFF else Path(named)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if base and Path(base).is_absolute():  # the XDG specification says to ignore relative ones
        return Path(base, "penstock")
    home = Path(os.path.expanduser("~"))  # noqa: PTH111  Path.home() raises where there is no home
    return home / ".cache" / "penstock" if home.is_absolute() else None


def cached_object(folder: str, name: str) -> dict[str, Any] | None:
    """A JSON object kept under `folder/name.json`, or None for whatever reason it can't be had."""
    root = cache_folder()
    if root is None:
        return None
    try:
        value = json.loads((root / folder / f"{name}.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def keep_object(folder: str, name: str, value: dict[str, Any]) -> None:
    """Keeps a JSON object; where the disk refuses, nothing is kept and nobody has to know."""
    root = cache_folder()
    if root is None:
        return
    with contextlib.suppress(OSError):
        fs.make_folder(root / folder)
        fs.write_atomic(root / folder / f"{name}.json", json.dumps(value, indent=1).encode())
