"""`push`: a store to where other machines read it."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer

from penstock.cli.output import human_bytes, one_line, print_json, progress_bar


def push(
    store: Annotated[str, typer.Argument(metavar="STORE[@VERSION]")],
    url: Annotated[str, typer.Argument(metavar="URL", help="s3://, gs://, az:// or file://, and the store's name.")],
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Copy a version of a store behind a URL, from where every command reads it. After a failure, run it again: what is
    there is kept. Readers see the version once all of it is there.

    \b
    Examples:
      penstock push store s3://bucket/store
      penstock inspect s3://bucket/store
      penstock train --data s3://bucket/store --out runs/one
    """
    from penstock.store.pushing import push as push_store

    with progress_bar("pushing") as bar:
        result = push_store(store, url, on_progress=bar)
    if json_output:
        print_json({**asdict(result), "seconds": round(result.seconds, 3)})
        return
    there = f"; {result.files_there} files, {human_bytes(result.bytes_there)}, were there" if result.files_there else ""
    state = "is there already" if result.was_committed and not result.files else "is there now"
    sent = f"{result.files} files, {human_bytes(result.bytes)}, sent in {result.seconds:.1f} s"
    print(one_line(f"{result.url}@{result.version} {state}: {sent}{there}"))
