"""`export`: a store's tokens as files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, one_line, print_facts, print_json, print_table, progress_bar


def export(
    store: Annotated[str, typer.Argument(metavar="STORE[@VERSION]")],
    output_format: Annotated[str, typer.Option("--format", help="jsonl, arrow, chunks, megatron or bin.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder; with --force, one that holds an earlier export.")],
    split: Annotated[str | None, typer.Option(help="Only this split. Default: all, one output for each.")] = None,
    seq_len: Annotated[
        int | None, typer.Option(help="Rows of so many tokens. Default: whole documents; 32768 for chunks.")
    ] = None,
    pack: Annotated[str, typer.Option(help="How rows are made: concat, best-fit, windows or pad.")] = "concat",
    overlap: Annotated[int, typer.Option(help="Tokens a row repeats from the one before, without loss.")] = 0,
    cross_boundaries: Annotated[
        bool, typer.Option("--cross-boundaries", help="Let labels of arrow rows cross documents.")
    ] = False,
    chunk_format: Annotated[str, typer.Option(help="Files of chunks: safetensors, npy or pt.")] = "safetensors",
    compress: Annotated[str | None, typer.Option(help="Compress jsonl: gz or zst.")] = None,
    text: Annotated[bool, typer.Option("--text", help="Add the decoded text to jsonl.")] = False,
    shard_bytes: Annotated[int | None, typer.Option(help="About the largest file of chunks and arrow.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a store's tokens as files that other programs read.

    \b
    jsonl     a JSON object per document: tokens and metadata        train.jsonl
    arrow     for `datasets.load_from_disk`                           train/data-00000-of-00001.arrow
    chunks    rows of fixed length, safetensors, npy or pt            train/chunk_000000.safetensors
    megatron  Megatron-Core's indexed data set                        train.bin train.idx
    bin       flat tokens, as nanoGPT reads them                      train.bin

    \b
    Examples:
      penstock export store --format arrow --seq-len 1024 --out rows
      penstock export store@1 --format jsonl --split val --compress zst --out val
      penstock export store --format bin --out ~/nanoGPT/data/mine

    Only kept documents are written, in canonical order. The folder appears whole or not at all; export.json in it has
    counts and checksums.
    """
    from penstock.export import ExportOptions, export_store
    from penstock.store import open_store

    options = ExportOptions(
        format=output_format,
        split=split,
        seq_len=seq_len,
        pack=pack,
        overlap=overlap,
        boundaries=not cross_boundaries,
        chunk_format=chunk_format,
        compress=compress,
        text=text,
        shard_bytes=shard_bytes,
    )
    with open_store(store) as opened, progress_bar("exporting") as bar:
        result = export_store(opened, out, options=options, force=force, on_progress=bar)
        facts = _facts(opened, result)
    if json_output:
        print_json(facts)
    else:
        _print_exported(facts)


def _facts(store: Any, result: Any) -> dict[str, Any]:
    parts = result.splits.values()
    rows = {"rows": sum(part["rows"] for part in parts)} if all("rows" in part for part in parts) else {}
    return {
        "format": result.format,
        "out": str(result.out),
        "store": store.location,
        "version": store.version,
        "digest": store.digest,
        "files": result.num_files,
        "documents": sum(part["documents"] for part in parts),
        **rows,
        "tokens": sum(part["tokens"] for part in parts),
        "bytes": result.num_bytes,
        "seconds": round(result.seconds, 3),
        "splits": result.splits,
    }


def _print_exported(facts: dict[str, Any]) -> None:
    rate = human_bytes(facts["bytes"] / max(facts["seconds"], 1e-9))
    rows = f", {facts['rows']:,} rows" if "rows" in facts else ""
    print_facts(
        {
            "export": one_line(f"{facts['out']}  ({facts['format']} of {facts['store']} version {facts['version']})"),
            "documents": f"{facts['documents']:,}, {facts['tokens']:,} tokens{rows}",
            "files": f"{facts['files']:,}, {human_bytes(facts['bytes'])}",
            "time": f"{facts['seconds']:.1f} s, {rate}/s",
        }
    )
    has_rows = "rows" in facts
    print_table(
        [
            (name, f"{part['documents']:,}", f"{part['tokens']:,}", *([f"{part['rows']:,}"] if has_rows else []))
            for name, part in facts["splits"].items()
        ],
        header=("split", "documents", "tokens", *(["rows"] if has_rows else [])),
    )
