"""`verify`: whether a store is what was committed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, note, one_line, print_json, progress_bar


def verify(
    store: Annotated[str, typer.Argument(metavar="STORE|URL")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Everything but the tokens themselves; seconds on any store.")
    ] = False,
    workers: Annotated[
        int | None, typer.Option(help="Processes that read tokens (Linux). Default: the cores.", min=1)
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Check every byte of every version of a store, and its promises. Exit 0 whole, 1 damaged or leaking.

    \b
    Examples:
      penstock verify store
      penstock verify store --quick --json
      penstock verify s3://bucket/store --quick
    """
    from penstock.hardware import default_workers, probe
    from penstock.store.urls import is_url
    from penstock.store.verification import examine

    with progress_bar("verifying") as bar:
        if is_url(store):
            from penstock.store.remote import examine_remote

            if not quick:
                note(f"fetching all of {one_line(store)} to check it; --quick leaves out the tokens")
            result = examine_remote(store, quick=quick, on_progress=bar)
        else:
            result = examine(Path(store), quick=quick, workers=workers or default_workers(probe()), on_progress=bar)
    if json_output:
        print_json(
            {
                "ok": not result.problems,
                "problems": [asdict(problem) for problem in result.problems],
                "versions": result.versions,
                "bytes": result.bytes,
                "seconds": round(result.seconds, 3),
                "quick": result.quick,
            }
        )
    else:
        _print_verification(store, result)
    if result.problems:
        raise typer.Exit(1)


def _print_verification(store: str, result: Any) -> None:
    name = one_line(store)
    for problem in result.problems:
        print(one_line(f"{problem.file}: {problem.kind}: {problem.detail}"))
    left_out = "; --quick: the tokens themselves weren't read" if result.quick else ""
    if result.problems:
        from penstock.store.layout import CACHE
        from penstock.store.urls import is_url

        count = f"{len(result.problems)} problems" if len(result.problems) > 1 else "1 problem"
        note(f"error: {count} in {name}{left_out}")
        mend = "push them again from the store they came from" if is_url(store) else "restore the files named"
        if all(problem.file.split("/")[0] == CACHE for problem in result.problems):
            note("hint: no version needs what the cache remembers: prepare again, or remove the files named")
            return
        note(f"hint: {mend}, or prepare into a new store from the same input")
        return
    versions = f"{len(result.versions)} versions" if len(result.versions) > 1 else "1 version"
    whole = f"all but the tokens of {name}" if result.quick else name
    print(f"{whole} is whole: {versions}, {human_bytes(result.bytes)} in {result.seconds:.1f} s{left_out}")
