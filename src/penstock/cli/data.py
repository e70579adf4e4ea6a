"""`prepare`, `inspect`, `verify`, `plan`: everything about stores."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import (
    human_bytes,
    human_count,
    note,
    one_line,
    print_facts,
    print_json,
    progress_bar,
)
from penstock.cli.store_summary import print_sample, print_skipped, print_splits, print_summary
from penstock.errors import ConfigError, PlanError

# As in penstock.sources, which `--help` doesn't load.
DEFAULT_UNIT_BYTES = 16 * 2**20

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def prepare(
    inputs: Annotated[
        list[str], typer.Argument(metavar="INPUT...", help="Folder, file, git:PATH, hf:NAME, NAME=PATH, stdlib:")
    ],
    out: Annotated[Path, typer.Option("--out", help="The store; made if it isn't there, updated if it is.")],
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="File (tokenizer.json, .tiktoken, .model), folder or hub id. Default: the store's, else trained."
        ),
    ] = None,
    end_token: Annotated[str | None, typer.Option(help="Name of the token after each document.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Size of a trained vocabulary.")] = 8192,
    split: Annotated[str, typer.Option(help="Names and shares, the most protected last.")] = "train=85,val=10,test=5",
    include: Annotated[
        list[str] | None, typer.Option(help="Only paths that match (as in .gitignore); repeatable.")
    ] = None,
    exclude: Annotated[list[str] | None, typer.Option(help="No paths that match; repeatable.")] = None,
    hidden: Annotated[bool, typer.Option("--hidden", help="Take hidden files and folders too.")] = False,
    vendored: Annotated[
        bool, typer.Option("--vendored", help="Take node_modules, vendor, site-packages… too.")
    ] = False,
    max_file_bytes: Annotated[int, typer.Option(help="Larger files are left out.")] = 16 * 2**20,
    text_field: Annotated[str | None, typer.Option(help="Column of text in a table. Default: found by name.")] = None,
    id_field: Annotated[str | None, typer.Option(help="Column that names a row. Default: the row's number.")] = None,
    group_field: Annotated[
        str | None, typer.Option(help="Column by which rows stay in one split. Default: each row on its own.")
    ] = None,
    template: Annotated[
        str | None,
        typer.Option(help="Records through alpaca, chatml, llama, mistral, phi, deepseek, gemma, plain… or tokenizer."),
    ] = None,
    field_map: Annotated[
        list[str] | None, typer.Option(help="Field of a record = column, as in response=answer; repeatable.")
    ] = None,
    loss: Annotated[str, typer.Option(help="What is learnt of a record: assistant or all.")] = "assistant",
    git_parts: Annotated[str, typer.Option(help="Of a repository: commits, files or both.")] = "commits,files",
    git_content: Annotated[str, typer.Option(help="Of a commit: message, stats, diff.")] = "message,stats,diff",
    git_authors: Annotated[str, typer.Option(help="Names and addresses in commits: drop, hash or keep.")] = "drop",
    git_author_key: Annotated[str, typer.Option(help="Key of --git-authors hash.")] = "",
    git_max_diff_bytes: Annotated[int, typer.Option(help="Of a commit's diff, files beyond this are left out.")] = 2
    ** 20,
    git_since: Annotated[str | None, typer.Option(help="Only commits from this day on, as 2024-01-31.")] = None,
    git_max_commits: Annotated[int | None, typer.Option(help="Only the newest commits.")] = None,
    git_group: Annotated[
        str, typer.Option(help="What stays in one split: path, root, commit. auto: path for one repository, else root.")
    ] = "auto",
    strict: Annotated[
        bool, typer.Option("--strict", help="A broken row ends the run instead of being counted.")
    ] = False,
    network: Annotated[
        bool, typer.Option("--network", help="Allow downloads. Without it, no socket is opened.")
    ] = False,
    dedup: Annotated[str, typer.Option(help="exact or off. Copies across splits always go.")] = "exact",
    seed: Annotated[int, typer.Option(help="Seed of the splits.")] = 0,
    workers: Annotated[
        int | None, typer.Option(help="Worker processes (threads off Linux). Default: the cores.", min=1)
    ] = None,
    unit_bytes: Annotated[
        int, typer.Option(help="Input per unit of work; never changes the result.", min=1)
    ] = DEFAULT_UNIT_BYTES,
    break_lock: Annotated[bool, typer.Option("--break-lock", help="Take over a lock left by another host.")] = False,
    json_output: Json = False,
) -> None:
    """Turn raw text and code into tokens in a store.

    \b
    Examples:
      penstock prepare stdlib: --out store
      penstock prepare ~/src/linux --out kernel --tokenizer gpt2/tokenizer.json --include '*.c' --include '*.h'
      penstock prepare docs=./docs code=./src --out mine --split train=90,val=10
      penstock prepare git:~/src/project#main --out history --git-parts commits
      penstock prepare chat.jsonl --out chat --tokenizer ./qwen --template tokenizer

    Kill it at any time: the same command goes on where it was. Run it again after changes: only what changed is
    tokenised, and a new version is committed.
    """
    from penstock.cli.templates import renderer_of
    from penstock.hardware import default_workers, probe
    from penstock.sources import FileOptions, GitOptions, InputOptions, TableOptions, closing_all, sources_from_inputs
    from penstock.store import PrepareOptions
    from penstock.store import prepare as prepare_store
    from penstock.tokenize import load_tokenizer

    file_options = FileOptions(
        include=tuple(include or ()),
        exclude=tuple(exclude or ()),
        max_file_bytes=max_file_bytes,
        hidden=hidden,
        vendored=vendored,
    )
    loaded = load_tokenizer(tokenizer, end_token=end_token, network=network) if tokenizer else None
    renderer = renderer_of(
        template, field_map=field_map or (), loss=loss, tokenizer=loaded, tokenizer_value=tokenizer, out=out
    )
    git_options = GitOptions(
        parts=tuple(git_parts.split(",")),
        content=tuple(git_content.split(",")),
        authors=git_authors,
        author_key=git_author_key,
        max_diff_bytes=git_max_diff_bytes,
        since=git_since,
        max_commits=git_max_commits,
        group=git_group,
    )
    input_options = InputOptions(
        files=file_options,
        git=git_options,
        tables=TableOptions(text_field=text_field, id_field=id_field, group_field=group_field, strict=strict),
        renderer=renderer,
        network=network,
    )
    sources = sources_from_inputs(inputs, options=input_options)
    options = PrepareOptions(
        split=split,
        dedup=dedup,
        seed=seed,
        workers=workers or default_workers(probe()),
        processes=True,
        unit_bytes=unit_bytes,
        vocab_size=vocab_size,
        break_lock=break_lock,
        control_tokens=renderer.control_tokens if renderer else (),
    )
    with closing_all(sources), progress_bar("preparing") as bar:
        result = prepare_store(sources, out, tokenizer=loaded, options=options, on_progress=bar)
    facts = prepare_facts(result)
    if json_output:
        print_json(facts)
    else:
        print_prepared(facts)


def prepare_facts(result: Any) -> dict[str, Any]:
    """A `PrepareResult` as the JSON object that others rely on."""
    counts = result.manifest.counts
    return {
        "store": str(result.store),
        "version": result.manifest.version,
        "committed": result.committed,
        "documents": counts["documents"],
        "tokens": counts["tokens"],
        "bytes": counts["bytes"],
        "found": counts["found"],
        "seconds": round(result.seconds, 3),
        "units": result.units,
        "units_taken_over": result.units_taken_over,
        "workers": result.workers,
        "documents_reused": result.documents_reused,
        "digest": result.manifest.digest,
        "splits": counts["splits"],
        "skipped": counts["skipped"],
        "tokenizer": {**result.manifest.tokenizer, **result.tokenizer_engine},
    }


def print_prepared(facts: dict[str, Any]) -> None:
    """The same for people."""
    rate = human_bytes(facts["bytes"] / max(facts["seconds"], 1e-9))
    state = f"version {facts['version']}" if facts["committed"] else f"version {facts['version']}, unchanged"
    tokenizer = facts["tokenizer"]
    print_facts(
        {
            "store": f"{one_line(facts['store'])}  ({state})",
            "documents": f"{facts['documents']:,} of {facts['found']:,} found",
            "tokens": f"{facts['tokens']:,} from {human_bytes(facts['bytes'])}",
            "time": f"{facts['seconds']:.1f} s, {rate}/s, {facts['units']} units, {facts['workers']}",
            "tokenizer": one_line(f"{tokenizer['origin']}, {tokenizer['vocab_size']:,} ids"),
            "engine": one_line(f"{tokenizer['engine']}: {tokenizer['reason']}"),
            "digest": facts["digest"],
        }
    )
    print_splits(facts)
    print_skipped(facts["skipped"])
    note(f"see it: penstock inspect {shlex.quote(one_line(facts['store']))}")


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


def verify(
    store: Annotated[Path, typer.Argument(metavar="STORE")],
    json_output: Json = False,
) -> None:
    """Check every byte of every version of a store, and its promises. Exit 0 whole, 1 damaged or leaking."""
    from penstock.store import verify as verify_store

    problems = verify_store(store)
    if json_output:
        print_json({"ok": not problems, "problems": [asdict(problem) for problem in problems]})
    elif not problems:
        print(f"{one_line(str(store))} is whole")
    for problem in problems if not json_output else ():
        print(one_line(f"{problem.file}: {problem.kind}: {problem.detail}"))
    if problems:
        if not json_output:
            note(f"error: {len(problems)} problems in {one_line(str(store))}")
            note("hint: restore the files named, or prepare into a new store from the same input")
        raise typer.Exit(1)


def plan(
    store: Annotated[str, typer.Argument(metavar="STORE[@VERSION]")],
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    pack: Annotated[str, typer.Option(help="concat")] = "concat",
    cross_boundaries: Annotated[bool, typer.Option("--cross-boundaries", help="Let labels cross documents.")] = False,
    json_output: Json = False,
) -> None:
    """Show the rows that a store gives at some length: how many, and what is wasted. Nothing is written.

    \b
    Example:
      penstock plan store --seq-len 2048 --split val
    """
    from penstock.pack import plan_concat
    from penstock.store import open_store

    if pack != "concat":
        raise PlanError(f"packing {pack!r} isn't known", hint="known: concat")
    with open_store(store) as opened:
        facts = plan_concat(opened, split=split, seq_len=seq_len, boundaries=not cross_boundaries).describe()
    if json_output:
        print_json(facts)
        return
    print_facts(
        {
            "split": facts["split"],
            "rows": f"{facts['rows']:,} of {facts['seq_len']:,} tokens",
            "tokens": f"{facts['tokens']:,} ({human_count(facts['tokens'])}) in {facts['documents']:,} documents",
            "waste": f"{facts['waste_tokens']:,} places ({facts['waste_percent']} %)",
        }
    )
