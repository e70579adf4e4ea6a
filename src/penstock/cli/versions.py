"""`log`, `diff`, `prune`, `remove`: the versions of a store."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import human_bytes, note, one_line, print_facts, print_json, print_table

if TYPE_CHECKING:
    from penstock.store.versions import Change, ChangedDocument, VersionDiff, VersionEntry

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

SHORT_DIGEST = 12


def log(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    json_output: Json = False,
) -> None:
    """List the versions of a store, newest first: size, what changed since the one before, which options.

    \b
    Example:
      penstock log store
    """
    from penstock.store.versions import log_versions

    entries = log_versions(store)
    if json_output:
        print_json({"store": str(store), "versions": [asdict(entry) for entry in entries]})
        return
    print_table(
        [_line(entry) for entry in entries],
        header=("version", "created", "documents", "added", "removed", "changed", "tokens", "digest"),
    )
    for entry in entries:
        if entry.tokenizer is not None and entry is entries[-1]:
            print(one_line(f"version {entry.version}: tokenizer is {entry.tokenizer}"))
        for difference in entry.differences:
            print(one_line(f"version {entry.version}: {difference}"))
        if entry.problem is not None:
            print(one_line(f"version {entry.version}: damaged: {entry.problem}"))


def _line(entry: VersionEntry) -> tuple[str, ...]:
    def number(value: int | None, sign: str = "") -> str:
        return "-" if value is None else f"{sign if value else ''}{value:,}"

    return (
        str(entry.version),
        one_line(entry.created or "damaged"),
        number(entry.documents),
        number(entry.added, "+"),
        number(entry.removed, "-"),
        number(entry.changed),
        number(entry.tokens),
        one_line((entry.digest or "-")[:SHORT_DIGEST]),
    )


def diff(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    before: Annotated[int, typer.Argument(metavar="A", help="A version.")],
    after: Annotated[int, typer.Argument(metavar="B", help="Another version.")],
    most: Annotated[int, typer.Option(help="Documents of each kind to name.", min=0)] = 20,
    json_output: Json = False,
) -> None:
    """Show what became of the documents of version A in version B: added, removed, changed, moved.

    \b
    Example:
      penstock diff store 3 4
    """
    from penstock.store.versions import diff_versions

    found = diff_versions(store, before, after, most=most)
    if json_output:
        print_json(asdict(found))
    else:
        _print_diff(found)


def _print_diff(found: VersionDiff) -> None:
    print_facts(
        {
            f"version {found.before}": f"{found.documents_before:,} documents, {found.tokens_before:,} tokens, "
            f"digest {found.digest_before[:SHORT_DIGEST]}",
            f"version {found.after}": f"{found.documents_after:,} documents, {found.tokens_after:,} tokens, "
            f"digest {found.digest_after[:SHORT_DIGEST]}",
        }
    )
    for difference in found.differences:
        print(one_line(difference))
    changes = {name: getattr(found, name) for name in ("added", "removed", "changed", "moved", "split_changed")}
    rows = [
        (name.replace("_", " "), f"{change.documents:,}", f"{change.tokens_before:,}", f"{change.tokens_after:,}")
        for name, change in changes.items()
    ]
    print_table(
        [*rows, ("unchanged", f"{found.unchanged:,}", "", "")],
        header=("", "documents", f"tokens in {found.before}", f"tokens in {found.after}"),
    )
    for name, change in changes.items():
        _print_change(name.replace("_", " "), change)
    if found.split_changed.documents and not found.differences:
        note("warning: documents changed split though no option did; `penstock verify` checks the store's promises")


def _print_change(name: str, change: Change) -> None:
    if not change.documents:
        return
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in change.kinds.items())
    print()
    print(one_line(f"-- {name}: {kinds}"))
    for document in change.shown:
        print(one_line(f"  {document.key}  ({_what(document)})"))
    if len(change.shown) < change.documents:
        print(f"  and {change.documents - len(change.shown):,} more")


def _what(document: ChangedDocument) -> str:
    """Split, status and tokens, each once where both versions agree."""

    def both(before: object, after: object) -> str:
        known = [str(value) for value in (before, after) if value is not None]
        return known[0] if len(set(known)) == 1 else " to ".join(known)

    tokens = both(document.tokens_before, document.tokens_after)
    return ", ".join(
        [
            both(document.split_before, document.split_after),
            both(document.status_before, document.status_after),
            f"{tokens} tokens",
        ]
    )


def prune(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    keep: Annotated[int, typer.Option(help="How many of the newest versions stay.")] = 1,
    compact: Annotated[
        bool, typer.Option("--compact", help="Write segments anew that hold tokens of no version, removed ones too.")
    ] = False,
    runs: Annotated[Path, typer.Option(metavar="FOLDER", help="Runs to ask which versions they need.")] = Path("runs"),
    force: Annotated[bool, typer.Option("--force", help="Remove versions that runs need, too.")] = False,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Take over a lock left by another host.")] = False,
    json_output: Json = False,
) -> None:
    """Remove old versions of a store and what only they referred to. The latest always stays.

    \b
    Examples:
      penstock prune store
      penstock prune store --keep 3
      penstock prune store --compact

    A version that a run with checkpoints in --runs was trained on is refused: without it the run can't be resumed.
    """
    from penstock.store import prune as prune_store

    if not force:
        _refuse_needed(store, keep=keep, compact=compact, runs=runs)
    done = prune_store(store, keep=keep, compact=compact, break_lock=break_lock)
    if json_output:
        print_json({"store": str(store), **asdict(done)})
        return
    print_facts(
        {
            "removed": _versions(done.versions_removed),
            "left": _versions(done.versions_left),
            "freed": human_bytes(max(done.bytes_before - done.bytes_after, 0)),
            "size": human_bytes(done.bytes_after),
        }
    )
    if done.dead_bytes:
        size = human_bytes(done.dead_bytes)
        note(f"{size} inside segments belong to no version: penstock prune {shlex.quote(str(store))} --compact")


def _refuse_needed(store: Path, *, keep: int, compact: bool, runs: Path) -> None:
    """Raises where a run that can be found needs a version that would go."""
    from penstock.errors import StoreError
    from penstock.report.pins import runs_that_need
    from penstock.store.reader import list_versions

    if keep < 1 or not store.is_dir():
        return  # `prune` itself says what is wrong
    versions = list_versions(store)
    # Compacting may commit a version of the latest one's digest; then one more goes.
    doomed = versions[: max(len(versions) + compact - keep, 0)][: max(len(versions) - 1, 0)]
    pins = runs_that_need(doomed, store, runs=runs)
    for folder in pins.unreadable:
        note(f"the records of {one_line(str(folder))} are damaged: which version it needs isn't known")
    if pins.runs:
        folder, version = pins.runs[0]
        others = f", and {len(pins.runs) - 1} more" if len(pins.runs) > 1 else ""
        needed = len(versions) + compact - versions.index(min(version for _, version in pins.runs))
        raise StoreError(
            f"version {version} of {one_line(str(store))} is what run {one_line(str(folder))} was trained on{others}",
            hint=f"--keep {needed} keeps it; with --force it goes, and the run can't be resumed",
        )


def remove(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    match: Annotated[
        list[str],
        typer.Option(help="Documents whose key matches (as in .gitignore), or content:HEX; repeatable."),
    ],
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Take over a lock left by another host.")] = False,
    json_output: Json = False,
) -> None:
    """Take documents out of a store, and keep them out: a new version without them, and a rule that later runs honour.

    \b
    Examples:
      penstock remove store --match 'code/keys/*.pem'
      penstock inspect store --find 'text of a person who asked' --json
      penstock remove store --match docs/letters/
    """
    from penstock.store import remove as remove_from_store

    done = remove_from_store(store, match, break_lock=break_lock)
    if json_output:
        facts = {"version": done.manifest.version, "digest": done.manifest.digest}
        print_json({"store": str(store), "removed": done.documents, "committed": done.committed, **facts})
        return
    state = f"version {done.manifest.version}" + ("" if done.committed else ", unchanged")
    print(
        one_line(
            f"{done.documents:,} {'document' if done.documents == 1 else 'documents'} removed from {store} ({state})"
        )
    )
    for key in done.examples:
        print(f"  {one_line(key)}")
    if done.documents > len(done.examples):
        print(f"  and {done.documents - len(done.examples):,} more")
    if done.documents:
        name = shlex.quote(str(store))
        note(f"older versions still hold them: penstock prune {name} --compact takes their tokens off the disk")


def _versions(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers)) if numbers else "none"
