"""`export`: a store's tokens, or a run's model, as files that other programs read."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import human_bytes, one_line, print_facts, print_json, print_table, progress_bar
from penstock.errors import ConfigError

# As in penstock.train.export, which is imported only where a model is exported: it brings torch.
MODEL_FORMATS = ("transformers", "peft")
CHECKPOINTS = "checkpoints"


def export(
    store: Annotated[str, typer.Argument(metavar="STORE[@VERSION]|RUN")],
    output_format: Annotated[
        str, typer.Option("--format", help="jsonl, arrow, chunks, megatron or bin; of a run: transformers or peft.")
    ],
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
    step: Annotated[
        int | None, typer.Option(help="Of a run: the checkpoint of this step. Default: the newest.")
    ] = None,
    network: Annotated[
        bool, typer.Option("--network", help="Of a run: allow the download of the model that it began with.")
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace an earlier export.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Write a store's tokens, or a run's model, as files that other programs read.

    \b
    jsonl     a JSON object per document: tokens and metadata        train.jsonl
    arrow     for `datasets.load_from_disk`                           train/data-00000-of-00001.arrow
    chunks    rows of fixed length, safetensors, npy or pt            train/chunk_000000.safetensors
    megatron  Megatron-Core's indexed data set                        train.bin train.idx
    bin       flat tokens, as nanoGPT reads them                      train.bin

    \b
    transformers  a run's model, for `AutoModelForCausalLM.from_pretrained`   model.safetensors config.json …
    peft          a run's adapter, for `PeftModel.from_pretrained`            adapter_model.safetensors …

    \b
    Examples:
      penstock export store --format arrow --seq-len 1024 --out rows
      penstock export store@1 --format jsonl --split val --compress zst --out val
      penstock export store --format bin --out ~/nanoGPT/data/mine
      penstock export runs/one --format transformers --out model

    Only kept documents are written, in canonical order. The folder appears whole or not at all; export.json in it has
    counts and checksums.
    """
    from penstock.export import ExportOptions, export_store
    from penstock.store import open_store

    if output_format in MODEL_FORMATS or (Path(store) / CHECKPOINTS).is_dir():
        given = {
            "--split": split,
            "--seq-len": seq_len,
            "--pack": pack != "concat",
            "--overlap": overlap,
            "--cross-boundaries": cross_boundaries,
            "--chunk-format": chunk_format != "safetensors",
            "--compress": compress,
            "--text": text,
            "--shard-bytes": shard_bytes,
        }
        _refuse_idle(given, why="which a run's model knows nothing of")
        _export_model(Path(store), output_format, out, step, force=force, network=network, json_output=json_output)
        return
    _refuse_idle({"--step": step, "--network": network}, why="which is for a run's model")
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


def _refuse_idle(given: dict[str, Any], *, why: str) -> None:
    for name, value in given.items():
        if value:
            raise ConfigError(f"{name} was given, {why}", hint=f"leave {name} out")


def _export_model(
    run: Path, output_format: str, out: Path, step: int | None, *, force: bool, network: bool, json_output: bool
) -> None:
    from penstock.train.export import export_model, facts_of

    result = export_model(run, out, output_format=output_format, step=step, force=force, network=network)
    facts = {**facts_of(result), "run": str(run)}
    if json_output:
        print_json(facts)
        return
    print_facts(
        {
            "export": one_line(f"{facts['out']}  ({facts['format']} of {facts['run']} after step {facts['step']})"),
            "parameters": f"{facts['parameters']:,}",
            "files": f"{facts['num_files']:,}, {human_bytes(facts['num_bytes'])}",
            "time": f"{facts['seconds']:.1f} s",
        }
    )


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
