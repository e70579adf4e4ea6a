"""`inspect`: what a store or a run holds, and where it came from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.found import print_found, print_step
from penstock.cli.output import note, one_line, print_facts, print_json, progress_bar
from penstock.cli.store_summary import print_sample, print_summary
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.pack import Plan
    from penstock.store import Store
    from penstock.store.searching import Found

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

CHOICES = ("--doc", "--token", "--row", "--find", "--step", "--sample")


def inspect(
    target: Annotated[str, typer.Argument(metavar="STORE[@VERSION]|RUN")],
    doc: Annotated[int | None, typer.Option(help="Show a document, by number in canonical order.")] = None,
    token: Annotated[
        int | None, typer.Option(help="Show where a token came from, by number over the kept documents.")
    ] = None,
    row: Annotated[
        int | None, typer.Option(help="Show a row of the plan: its documents and text (needs --seq-len).")
    ] = None,
    find: Annotated[
        str | None, typer.Option(metavar="TEXT", help="Find the documents that contain a passage; rows with --seq-len.")
    ] = None,
    step: Annotated[
        int | None, typer.Option(help="Of a RUN: the rows and documents of this step; the first is 1.")
    ] = None,
    most: Annotated[int, typer.Option(help="Documents that --find shows; all are counted.", min=0)] = 20,
    ignore_case: Annotated[bool, typer.Option("--ignore-case", help="--find takes a-z and A-Z for the same.")] = False,
    seq_len: Annotated[int | None, typer.Option(help="Row length, for --row and --find.")] = None,
    pack: Annotated[str, typer.Option(help="Packing of those rows; see `penstock plan`.")] = "concat",
    overlap: Annotated[int, typer.Option(help="Of windows: tokens that a row repeats.", min=0)] = 0,
    sample: Annotated[int | None, typer.Option(help="Show the first lines of this many documents.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Which documents --sample draws.")] = 0,
    split: Annotated[str | None, typer.Option(help="Count documents, tokens or rows in this split.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option("--data", metavar="STORE", help="Of a RUN: which of its stores, or where one is now; repeatable."),
    ] = None,
    html: Annotated[
        Path | None, typer.Option(help="Write everything as a page into this file; with --sample, documents too.")
    ] = None,
    json_output: Json = False,
) -> None:
    """Show what is in a store: statistics, some documents, one document, the origin of a token or of a row, the
    documents that contain a passage. Of a run: its main facts, the documents of a step, or anything of its store.

    \b
    Examples:
      penstock inspect store
      penstock inspect store --html store.html --sample 10
      penstock inspect store --sample 3 --split val
      penstock inspect store --doc 12
      penstock inspect store --token 123456 --json
      penstock inspect store --row 7 --seq-len 1024 --split val
      penstock inspect store --find 'the exact passage' --seq-len 1024
      penstock inspect runs/one --step 120
    """
    chosen = [
        name for name, value in zip(CHOICES, (doc, token, row, find, step, sample), strict=True) if value is not None
    ]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} exclude each other", hint="ask for one of them")
    if html is not None and chosen not in ([], ["--sample"]):
        raise ConfigError("--html is a page of the whole store", hint=f"leave out {chosen[0]}")
    if step is not None:
        _show_step(Path(target), step, data or [], json_output=json_output)
        return
    is_run = _is_run(target)
    if data is not None and not is_run:
        raise ConfigError("--data names the store of a RUN", hint="leave it out, or give a run folder")
    if is_run and not chosen and html is None:
        _show_run(Path(target), json_output=json_output)
        return
    with _opened(target, data or [], is_run=is_run) as opened:
        if doc is not None:
            facts = _document_facts(opened, doc)
        elif token is not None:
            facts = _token_facts(opened, token, split)
        elif row is not None:
            facts = _row_facts(_plan(opened, split or "train", seq_len, pack, overlap), row)
        elif find is not None:
            facts = _find_facts(opened, find, split, most, ignore_case, seq_len, pack, overlap)
        else:
            facts = _store_facts(
                opened, split, sample, seed, with_summary=not sample or html is not None or json_output
            )
            if html is not None:
                _write_page(html, facts, store=opened.path)
    if json_output:
        print_json(facts)
    elif sample is not None:
        print_sample(facts["sample"])
    elif find is not None:
        print_found(facts)
    elif chosen:
        _print_piece(facts)
    else:
        print_summary(facts)


def _is_run(target: str) -> bool:
    from penstock.runlog import RECORDS_NAME

    return (Path(target) / RECORDS_NAME).is_file()


def _opened(target: str, data: Sequence[str], *, is_run: bool) -> Store:
    """The store named, or the version of it that a run was trained on; of a mixture's, the one that --data names."""
    from penstock.store import open_store

    if not is_run:
        return open_store(target)
    from penstock.report.steps import open_store_of_run

    if len(data) > 1:
        raise ConfigError(f"--data names {len(data)} stores, this shows one", hint="name one of them, or use --step")
    return open_store_of_run(Path(target), data=next(iter(data), None))


def _document_facts(store: Store, document: int) -> dict[str, Any]:
    from penstock.store import document_origin, document_text

    return {**asdict(document_origin(store, document)), "text": document_text(store, document, store.tokenizer())}


def _token_facts(store: Store, token: int, split: str | None) -> dict[str, Any]:
    from penstock.store import token_origin

    return token_origin(store, token, split=split)


def _plan(store: Store, split: str, seq_len: int | None, pack: str, overlap: int) -> Plan:
    from penstock.pack import make_plan

    if seq_len is None:
        raise ConfigError("--row needs a row length", hint="add --seq-len, for instance --seq-len 1024")
    return make_plan(store, policy=pack, split=split, seq_len=seq_len, overlap=overlap)


def _row_facts(plan: Plan, row: int) -> dict[str, Any]:
    from penstock.load.rows import describe_row

    return describe_row(plan, row, plan.store.tokenizer())


def _find_facts(
    store: Store,
    passage: str,
    split: str | None,
    most: int,
    ignore_case: bool,
    seq_len: int | None,
    pack: str,
    overlap: int,
) -> dict[str, Any]:
    from penstock.store.searching import find_passage

    with progress_bar("searching", unit="tokens") as bar:
        found = find_passage(store, passage, split=split, most=most, ignore_case=ignore_case, on_progress=bar)
    facts = asdict(found)
    if seq_len is not None:
        for name in dict.fromkeys(one.split for one in found.shown if one.status == "kept"):
            _add_rows(facts, found, _plan(store, name, seq_len, pack, overlap))
    return facts


def _add_rows(facts: dict[str, Any], found: Found, plan: Plan) -> None:
    """Adds to each place of a split's documents the rows that hold it."""
    from penstock.load.rows import rows_holding

    places = [
        (told, (one.document, place.first_token, place.last_token))
        for one, document in zip(found.shown, facts["shown"], strict=True)
        if one.status == "kept" and one.split == plan.split
        for place, told in zip(one.places, document["places"], strict=True)
    ]
    for (told, _), rows in zip(places, rows_holding(plan, [stretch for _, stretch in places]), strict=True):
        told["rows"] = rows


def _store_facts(
    store: Store, split: str | None, sample: int | None, seed: int, *, with_summary: bool
) -> dict[str, Any]:
    from penstock.load.samples import sample_documents
    from penstock.store import summary
    from penstock.store.statistics import statistics

    facts = {} if sample is None else {"sample": sample_documents(store, sample, split=split, seed=seed)}
    return {**summary(store), "statistics": asdict(statistics(store, split=split)), **facts} if with_summary else facts


def _show_run(run_folder: Path, *, json_output: bool) -> None:
    from penstock.report import build_manifest, summary_lines
    from penstock.report.run import read_run_records
    from penstock.report.steps import trained_on

    records = read_run_records(run_folder)
    if json_output:
        print_json(build_manifest(records))
        return
    for line in summary_lines(records, run_folder=run_folder):
        print(line)
    facts = trained_on(records)
    if facts is not None:
        rows = f"{facts.batch_rows} rows of {facts.seq_len} tokens a step, seed {facts.seed}"
        of = "" if facts.steps is None else f" of {facts.steps:,}"
        stores = [f"{one.store} version {one.version}, digest {one.digest}" for one in facts.stores]
        print()
        print_facts(
            {
                "trained on": one_line("; ".join(stores)),
                "steps": f"{max(facts.positions, default=0):,}{of} recorded, {rows}",
            }
        )


def _show_step(run_folder: Path, step: int, data: Sequence[str], *, json_output: bool) -> None:
    from penstock.report.steps import describe_step

    facts = describe_step(run_folder, step, data=data)
    if json_output:
        print_json(facts)
    else:
        print_step(facts)


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
