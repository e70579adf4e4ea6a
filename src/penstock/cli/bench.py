"""`bench`: figures against named peers and ceilings, measured here and now."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from penstock.cli.output import note, print_json


def bench(
    name: Annotated[
        str, typer.Argument(metavar="tokenize|refused|prepare|formats|plan|load|verify|hygiene|near|rerun|train|import")
    ],
    inputs: Annotated[
        list[str] | None, typer.Option("--input", help="Corpus; default: installed packages + stdlib:.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="Vocabulary for all sides; default: one is trained.")] = None,
    store: Annotated[str | None, typer.Option(help="load, verify: use this store instead of making one.")] = None,
    workers: Annotated[int | None, typer.Option(help="Threads on both sides; default: the cores.", min=1)] = None,
    repeats: Annotated[int | None, typer.Option(help="Interleaved repeats; medians are reported.", min=1)] = None,
    num_batches: Annotated[int | None, typer.Option(help="load: batches per repeat.", min=1)] = None,
    batch_size: Annotated[
        list[int] | None, typer.Option(help="load, train, plan: rows per batch; load takes several.", min=1)
    ] = None,
    seq_len: Annotated[int | None, typer.Option(help="load, train: tokens per row.", min=1)] = None,
    preset: Annotated[str | None, typer.Option(help="train: size of the built-in model, e.g. small.")] = None,
    steps: Annotated[int | None, typer.Option(help="train: steps per measurement.", min=1)] = None,
    large_tokens: Annotated[
        int | None, typer.Option(help="load: also open a store of so many drawn tokens.", min=1)
    ] = None,
    skip: Annotated[list[str] | None, typer.Option(help="Leave a peer out; repeatable.")] = None,
    results: Annotated[Path | None, typer.Option(help="Also write the result as JSON into this folder.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine: ours, its ceiling and its peers, in one run.

    \b
    Examples:
      penstock bench prepare --tokenizer gpt2/tokenizer.json
      penstock bench load --batch-size 256 --batch-size 512 --skip litdata
    """
    from penstock.bench import format_table, run_benchmark, write_result

    given: dict[str, Any] = {
        "inputs": inputs,
        "tokenizer": tokenizer,
        "store": store,
        "workers": workers,
        "repeats": repeats,
        "num_batches": num_batches,
        "batch_size": batch_size,
        "seq_len": seq_len,
        "preset": preset,
        "steps": steps,
        "large_tokens": large_tokens,
        "skip": skip,
    }
    result = run_benchmark(name, {key: value for key, value in given.items() if value is not None}, on_progress=note)
    if results is not None:
        note(f"written: {write_result(result, results)}")
    if json_output:
        print_json(result)
    else:
        print(format_table(result))
