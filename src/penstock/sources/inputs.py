"""INPUT words of the command line to sources.

PATH            a folder or a file, named after its last part; a table by its ending (.jsonl, .csv, .parquet, .arrow…)
NAME=PATH       the same under another name (two inputs may not share one)
hf:NAME         a Hugging Face data set, hf:NAME[/config][:split], from the local cache or, with --network, the hub
git:PATH[#REF]  a repository's history and files, also NAME=git:PATH; with --network, git:https://…
stdlib:         Python's own standard library, the embedded default: no network, no data needed
"""

from __future__ import annotations

import dataclasses
import os
import re
import sysconfig
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import InputError
from penstock.sources.document import printable
from penstock.sources.files import FileOptions, FilesSource
from penstock.sources.git import GitOptions, GitSource
from penstock.sources.git import words as git
from penstock.sources.huggingface import words as huggingface
from penstock.sources.rows import RowRenderer
from penstock.sources.source import Source
from penstock.sources.tables import TableOptions, TablesSource, found_tables, unread_tables

__all__ = ["STANDARD_LIBRARY", "InputOptions", "sources_from_inputs"]

STANDARD_LIBRARY = "stdlib:"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """How inputs of each kind are read.

    Attributes:
        files: of folders and files.
        tables: of tables.
        git: of repositories.
        renderer: makes documents of rows; None: a column of text, found or named.
        network: whether the network may be used at all.
    """

    files: FileOptions = field(default_factory=FileOptions)
    tables: TableOptions = field(default_factory=TableOptions)
    git: GitOptions = field(default_factory=GitOptions)
    renderer: RowRenderer | None = None
    network: bool = False


def sources_from_inputs(
    inputs: Sequence[str], *, options: InputOptions | None = None, on_note: Callable[[str], None] | None = None
) -> list[Source]:
    """The sources that the inputs name, in the order given; `on_note` is told of one that may be meant otherwise.

    Raises:
        InputError: an input is missing, of an unknown kind, or two share a name; an option concerns none of them.
    """
    if not inputs:
        raise InputError("no input was given", hint=f"name a folder, a file, or {STANDARD_LIBRARY}")
    options = options or InputOptions()
    if options.renderer is not None and options.tables.text_field is not None:
        raise InputError(
            "--text-field does nothing beside --template or --field-map",
            hint=f"name the column of text with --field-map text={options.tables.text_field}, or leave it out",
        )
    several_repositories = sum(bool(git.git_word(word)[1]) for word in inputs) > 1
    sources: list[Source] = []
    for word in inputs:
        source = _source(word, options, several_repositories=several_repositories)
        if any(source.name == other.name for other in sources):
            raise InputError(
                f"two inputs are named {source.name!r}; names are part of document keys and must differ",
                hint=f"name one of them: other={word.rpartition('=')[2]}",
            )
        sources.append(source)
        if on_note is not None and isinstance(source, FilesSource):
            _tell_of_unread_tables(source, options.files, on_note)
    if not any(isinstance(source, TablesSource) for source in sources):
        _refuse_unused(options)
    if not any(isinstance(source, GitSource) for source in sources):
        _refuse_unused_git(options.git)
    return sources


def _tell_of_unread_tables(source: FilesSource, options: FileOptions, on_note: Callable[[str], None]) -> None:
    """Tables that lie beside one other file are read as files of text: rarely what is wanted, and nothing shows it."""
    if found := unread_tables(source.location, options=options):
        table, other = (printable(path) for path in found)
        on_note(
            f"{source.name}: {table} and its like are read as text, not row by row, because {other} lies there too; "
            f"--exclude what is no table, or name the tables themselves"
        )


def _refuse_unused(options: InputOptions) -> None:
    """Refuses what only rows of tables take: a folder of chats with one other file in it would be read as raw text."""
    given = {
        "--text-field": options.tables.text_field,
        "--id-field": options.tables.id_field,
        "--group-field": options.tables.group_field,
        "--template or --field-map": options.renderer,
    }
    unused = [name for name, value in given.items() if value is not None]
    if unused:
        raise InputError(
            f"{unused[0]} is for rows of tables, and no input is a table",
            hint="name the tables themselves; a folder is one of tables only when every file in it is (docs/tables.md)",
        )


def _refuse_unused_git(options: GitOptions) -> None:
    """Refuses what only repositories take: without `git:` a repository's folder is read as files, not as history."""
    default = GitOptions()
    # The grouping is the store's, asked for or not, also when its repositories are no longer named.
    names = [field.name for field in dataclasses.fields(default) if field.name != "group"]
    changed = [name for name in names if getattr(options, name) != getattr(default, name)]
    if changed:
        raise InputError(
            f"--git-{changed[0].replace('_', '-')} is for repositories, and no input is one",
            hint="write git:PATH; a path alone is a folder of files",
        )


def _source(word: str, options: InputOptions, *, several_repositories: bool) -> Source:
    if word == STANDARD_LIBRARY:
        return _standard_library(options.files)
    given_name, repository_word = git.git_word(word)
    if repository_word:
        return git.source_from_word(
            repository_word,
            name=_checked_name(given_name),
            options=options.git,
            files=options.files,
            network=options.network,
            several=several_repositories,
        )
    given_name, hub_word = _hub_word(word)
    if hub_word and not os.path.lexists(word):
        return huggingface.source_from_word(
            hub_word,
            name=_checked_name(given_name),
            tables=options.tables,
            renderer=options.renderer,
            network=options.network,
        )
    scheme = re.match(r"([a-z]{2,}):", word)
    if scheme and not os.path.lexists(word):
        raise InputError(
            f"input {word!r}: no such kind of input",
            hint=f"give a folder, a file, git:PATH, hf:NAME or {STANDARD_LIBRARY}",
        )
    name, separator, path = word.partition("=")
    if not separator or os.path.lexists(word):
        name, path = "", word
    if path.startswith("~") and not os.path.lexists(path):  # behind NAME= few shells write it out
        path = os.path.expanduser(path)
    if not os.path.exists(path):  # a link that leads nowhere is as good as missing
        raise InputError(f"input {path!r} doesn't exist", hint="check the path; folders and files are taken")
    # A link given by name is meant; links found inside are not followed.
    root = os.path.realpath(path)
    name = _checked_name(name or os.path.basename(root) or "root")
    tables = found_tables(root, name=name, options=options.files)
    if tables is None:
        return FilesSource(name=name, root=root, options=options.files)
    return TablesSource(
        name=name,
        location=root,
        files=tables.files,
        options=options.tables,
        renderer=options.renderer,
        max_document_bytes=options.files.max_file_bytes,
        skips=tables.skips,
        facts=tables.facts,
    )


def _hub_word(word: str) -> tuple[str, str]:
    """The given name (or nothing) and the `hf:` word; the latter empty where the input is no data set."""
    if word.startswith(huggingface.SCHEME):
        return "", word
    name, _, rest = word.partition("=")
    return (name, rest) if rest.startswith(huggingface.SCHEME) else ("", "")


def _checked_name(name: str) -> str:
    encodable = name.encode("utf-8", "backslashreplace").decode()
    if "/" in encodable or not encodable.isprintable():
        raise InputError(f"source name {encodable!r} has a slash or an unprintable character", hint="use NAME=PATH")
    return encodable


def _standard_library(options: FileOptions) -> FilesSource:
    root = sysconfig.get_path("stdlib")
    if not Path(root).is_dir():
        raise InputError(f"this Python has no library folder at {root}", hint="give a folder of text or code instead")
    include = options.include or ("*.py",)
    return FilesSource(
        name="stdlib",
        root=root,
        options=dataclasses.replace(options, include=include),
        # Installed packages lie inside the library's folder but are no part of it.
        outside=frozenset([b"site-packages", b"dist-packages", b"__pycache__"]),
    )
