"""`git:` words of the command line to sources.

git:PATH            all branches and tags of a repository, and the files at HEAD
git:PATH#REF        the history and the files of one branch, tag or commit
NAME=git:PATH       under another name
git:https://HOST/PATH[#REF]     with --network
"""

from __future__ import annotations

import dataclasses
import os
import re

from penstock.errors import InputError
from penstock.sources.files import FileOptions
from penstock.sources.git.history import GitOptions, GitSource
from penstock.sources.git.repository import check_url, is_url, local_git_folder

__all__ = ["SCHEME", "git_word", "source_from_word"]

SCHEME = "git:"


def git_word(word: str) -> tuple[str, str]:
    """The given name (or nothing) and the `git:` word; the latter empty where the input is something else."""
    if word.startswith(SCHEME):
        return "", word
    name, _, rest = word.partition("=")
    return (name, rest) if rest.startswith(SCHEME) and not os.path.lexists(word) else ("", "")


def source_from_word(
    word: str, *, name: str, options: GitOptions, files: FileOptions, network: bool, several: bool
) -> GitSource:
    """The repository that a word names.

    Args:
        word: `git:PATH[#REF]`.
        name: given name, or empty: the last part of the path.
        options: what becomes a document.
        files: filters of files.
        network: whether a URL may be opened.
        several: whether other repositories are read beside it; then forks must agree on their splits.

    Raises:
        InputError: there is no repository, or it is out of reach.
    """
    text = word.removeprefix(SCHEME)
    place, ref = _parted(text)
    if place.startswith("~") and not os.path.lexists(place):  # within a word no shell writes it out
        place, ref = _parted(os.path.expanduser(text))
    if not place:
        raise InputError(f"input {word!r} names no repository", hint="write git:PATH, or git:PATH#branch")
    if is_url(place):
        check_url(place, network=network)
    elif not os.path.exists(place):
        raise InputError(f"input {word!r} doesn't exist", hint="check the path after git:")
    else:
        place = os.path.realpath(place)
        local_git_folder(place)
    if options.group == "auto":
        options = dataclasses.replace(options, group="root" if several else "path")
    return GitSource(name=name or _name_of(place), place=place, ref=ref, options=options, files=files, network=network)


def _parted(text: str) -> tuple[str, str | None]:
    """Path and ref: at the first `#` before which there is a path, because either may hold one."""
    if os.path.lexists(text):
        return text, None
    for mark in re.finditer("#", text):
        if os.path.lexists(text[: mark.start()]):
            return text[: mark.start()], text[mark.end() :] or None
    place, _, ref = text.partition("#")
    return place, ref or None


def _name_of(place: str) -> str:
    """The last part that says something: neither `.git` nor the ending of a bare repository."""
    parts = [part for part in re.split(r"[/:]", place) if part not in ("", ".git")]
    return parts[-1].removesuffix(".git") if parts else "repository"
