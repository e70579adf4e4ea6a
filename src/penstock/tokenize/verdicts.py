"""Self-checks that were passed before, so that a start doesn't repeat one that can only end the same way.

A verdict is named by the digest of everything the check's outcome depends on: the tokenizer, the versions of both
engines, the texts, the version of the check itself, and the processor, because gigatoken has code of its own for each
set of vector instructions. Only passed checks are kept. Costs a hash of about a hundred texts and one small file.
"""

from __future__ import annotations

import datetime
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from penstock.hashing import digest_of, strong_hash
from penstock.tokenize.cache import cached_object, keep_object

__all__ = ["date_of_passed_check", "keep_passed_check", "verdict_name"]

FOLDER = "self-checks"
# Raise it whenever what is compared, or how, changes: verdicts of the older check then count no more.
CHECK_VERSION = 3


def verdict_name(tokenizer_digest: str, texts: Sequence[bytes], versions: dict[str, Any]) -> str:
    """Identity of one check on this machine."""
    meaning = {
        "tokenizer": tokenizer_digest,
        "versions": versions,
        "texts": [strong_hash(text).hex() for text in texts],
        "check": CHECK_VERSION,
        "processor": _processor(),
    }
    return digest_of(meaning)[:32]


def date_of_passed_check(name: str) -> str | None:
    """When (YYYY-MM-DD) the check of that name was passed here, if it was."""
    verdict = cached_object(FOLDER, name)
    if verdict is None or verdict.get("passed") is not True or verdict.get("name") != name:
        return None
    try:
        return datetime.date.fromisoformat(verdict["date"]).isoformat()
    except (KeyError, TypeError, ValueError):
        return None


def keep_passed_check(name: str) -> None:
    """Remembers that the check was passed today."""
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    keep_object(FOLDER, name, {"name": name, "passed": True, "date": today})


def _processor() -> dict[str, str]:
    """Architecture, model and instruction sets of the first core (the others have the same)."""
    facts = {"machine": platform.machine(), "system": platform.system()}
    try:
        first_core = Path("/proc/cpuinfo").read_text().partition("\n\n")[0]
    except OSError:
        return facts | {"processor": platform.processor()}
    for line in first_core.splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("vendor_id", "model name", "cpu family", "model", "stepping", "flags", "Features"):
            facts[key.strip()] = value.strip()
    return facts
