"""Measurements kept per machine and model, in the user's cache folder.

In: a key of JSON values (versions, device, sizes, settings) and what was measured. Out: one small JSON file,
$XDG_CACHE_HOME/penstock/tuning/<digest of the key>.json, with a digest of itself. What can't be read, or isn't what it
says, is passed over with an event in the run's log, and written anew. A folder that can't be written only costs the
next run its time.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.errors import DiskError
from penstock.hashing import digest_of
from penstock.runlog import RunLog
from penstock.train.tuning.measuring import Measured

__all__ = ["cache_path", "cached", "keep"]

FORMAT = 1
LIMIT_BYTES = 1 << 20


def cache_path(key: dict[str, Any]) -> Path:
    """Where the measurements of a key are kept."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    # The specification: a relative path is to be ignored.
    root = Path(base) if base and Path(base).is_absolute() else Path.home() / ".cache"
    return root / "penstock" / "tuning" / f"{digest_of(key)}.json"


def cached(key: dict[str, Any], log: RunLog) -> Measured | None:
    """What was measured for a key, or None."""
    path = cache_path(key)
    try:
        if path.stat().st_size > LIMIT_BYTES:
            raise ValueError(f"larger than {LIMIT_BYTES} bytes")
        return _read(path.read_bytes(), key)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        log.append("event", message=f"tuning cache {path.name} passed over, measuring anew: {reason}")
        return None


def _read(data: bytes, key: dict[str, Any]) -> Measured:
    try:
        document = json.loads(data)
    except ValueError as error:
        raise ValueError("not a JSON document") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise ValueError(f"not a document of format {FORMAT}")
    if digest_of({name: value for name, value in document.items() if name != "digest"}) != document.get("digest"):
        raise ValueError("content and digest differ")
    if document["key"] != json.loads(json.dumps(key)):
        raise ValueError("it is of another key")
    return Measured(**document["measured"])


def keep(key: dict[str, Any], found: Measured, log: RunLog) -> None:
    """Writes the measurements of a key; a disk that refuses is recorded."""
    document: dict[str, Any] = {"format": FORMAT, "key": key, "measured": found.as_dict()}
    document["digest"] = digest_of(document)
    path = cache_path(key)
    try:
        fs.make_folder(path.parent)
        fs.write_atomic(path, json.dumps(document, indent=1).encode() + b"\n")
    except (OSError, DiskError) as error:
        log.append("event", message=f"tuning measurements not kept in {path.parent}: {error}")
