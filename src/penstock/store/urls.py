"""Words that name a store: a path, or an address as `s3://bucket/store`, either with `@VERSION` behind it."""

from __future__ import annotations

import re

__all__ = ["is_url", "split_url"]


def is_url(text: str) -> bool:
    """Whether a word names something behind a URL and not a path."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", text) is not None


def split_url(text: str, version: int | None = None) -> tuple[str, int | None]:
    """The address and the version that it names, or else the one given."""
    named = re.fullmatch(r"(.+)@([0-9]{1,18})", text, re.DOTALL)
    return (named[1].rstrip("/"), int(named[2])) if named else (text.rstrip("/"), version)
