"""`inspect`: what a store or a run holds, and where it came from."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import note, one_line, print_facts, print_json
from penstock.cli.store_summary import print_sample, print_summary
from penstock.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def inspect(
    store: Annotated[str, typer.Argument(metavar="STORE[@VERSION]")],
    doc: Annotated[int | None, typer.Option(help="Show a document, by number in canonical order.")] = None,
    token: Annotated[
        int | None, typer.Option(help="Show where a token came from, by number over the kept documents.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Show a row of the plan: its documents and text (needs --seq-len).")
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="Row length, for --row.")] = None,
    sample: Annotated[int | None, typer.Option(help="Show the first lines of this many documents.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Which documents --sample draws.")] = 0,
    split: Annotated[str | None, typer.Option(help="Count documents, tokens or rows in this split.")] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write everything as a page into this file; with --sample, documents too.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Show what is in a store: statistics, some documents, one document, the origin of a token or of a row.

    \b
    Examples:
      penstock inspect store
      penstock inspect store --html store.html --sample 10
      penstock inspect store --sample 3 --split val
      penstock inspect store --doc 12
      penstock inspect store --token 123456 --json
      penstock inspect store --row 7 --seq-len 1024 --split val
    """
    from penstock.load.samples import sample_documents
    from penstock.store import document_origin, document_text, open_store, summary, token_origin
    from penstock.store.statistics import statistics

    if sum(choice is not None for choice in (doc, token, row, sample)) > 1:
        raise ConfigError("--doc, --token, --row and --sample exclude each other", hint="ask for one of them")
    if html is not None and (doc, token, row) != (None, None, None):
        raise ConfigError("--html is a page of the whole store", hint="leave out --doc, --token and --row")
    with open_store(store) as opened:
        if doc is not None:
            facts = {**asdict(document_origin(opened, doc)), "text": document_text(opened, doc, opened.tokenizer())}
        elif token is not None:
            facts = token_origin(opened, token, split=split)
        elif row is not None:
            facts = _row_facts(opened, row, seq_len, split or "train")
        else:
            facts = {} if sample is None else {"sample": sample_documents(opened, sample, split=split, seed=seed)}
            if sample is None or html is not None or json_output:
                facts = {**summary(opened), "statistics": asdict(statistics(opened, split=split)), **facts}
            if html is not None:
                _write_page(html, facts, store=opened.path)
    if json_output:
        print_json(facts)
    elif sample is not None:
        print_sample(facts["sample"])
    elif doc is None and token is None and row is None:
        print_summary(facts)
    else:
        _print_piece(facts)


def _write_page(path: Path, facts: dict[str, Any], *, store: Path) -> None:
    from penstock.report.store_page import write_store_page

    if path.resolve().is_relative_to(store.resolve()):
        raise ConfigError(
            f"{str(path)!r} lies inside the store, which holds its own files only", hint="write it beside the store"
        )
    write_store_page(path, facts)
    note(f"wrote {one_line(str(path))}")


def _print_piece(facts: dict[str, Any]) -> None:
    """A document, token or row: its facts, then its text; of a row, document by document."""
    pieces = facts.pop("documents", [facts] if "text" in facts else [])
    print_facts({name: one_line(str(value)) for name, value in facts.items() if name != "text"})
    for piece in pieces:
        if piece is not facts:
            place = f"{piece['row_start']}-{piece['row_end']}, from its token {piece['document_start']}"
            print()
            print(one_line(f"-- document {piece['document']} {piece['key']}, places {place}"))
        print("\n".join(one_line(line) for line in piece["text"].expandtabs(4).split("\n")))


def _row_facts(store: Any, row: int, seq_len: int | None, split: str) -> dict[str, Any]:
    from penstock.load.rows import describe_row
    from penstock.pack import plan_concat

    if seq_len is None:
        raise ConfigError("--row needs a row length", hint="add --seq-len, for instance --seq-len 1024")
    return describe_row(plan_concat(store, split=split, seq_len=seq_len), row, store.tokenizer())
