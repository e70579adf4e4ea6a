"""`plan`: the rows that a store gives."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.output import human_count, print_facts, print_json

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

SHOWN_ROWS = 8


def plan(
    store: Annotated[str, typer.Argument(metavar="STORE[@VERSION]")],
    split: Annotated[str, typer.Option(help="Which split.")] = "train",
    seq_len: Annotated[int, typer.Option(help="Tokens per row.")] = 1024,
    pack: Annotated[
        str,
        typer.Option(
            help="concat (one stream, cut), best-fit (documents kept whole), windows (each document on its own, with "
            "an overlap), pad (windows without one)."
        ),
    ] = "concat",
    overlap: Annotated[int, typer.Option(help="Of windows: tokens that a row repeats from the one before.")] = 0,
    overlap_loss: Annotated[
        bool, typer.Option("--overlap-loss", help="Of windows: repeated tokens count as labels again.")
    ] = False,
    cross_boundaries: Annotated[bool, typer.Option("--cross-boundaries", help="Let labels cross documents.")] = False,
    seed: Annotated[
        int | None, typer.Option(help="Also show which rows the order of this seed begins with.", min=0)
    ] = None,
    json_output: Json = False,
) -> None:
    """Show the rows that a store gives at some length: how many, and what is wasted. The store is not changed.

    \b
    Examples:
      penstock plan store --seq-len 2048 --split val
      penstock plan store --seq-len 2048 --pack best-fit
      penstock plan store --seq-len 512 --pack windows --overlap 128
    """
    from penstock.load.order import rows_at
    from penstock.pack import make_plan
    from penstock.store import open_store

    with open_store(store) as opened:
        made = make_plan(
            opened,
            policy=pack,
            split=split,
            seq_len=seq_len,
            overlap=overlap,
            boundaries=not cross_boundaries,
            overlap_loss=overlap_loss,
        )
        facts = made.describe()
        if seed is not None:
            count = min(SHOWN_ROWS, made.num_rows)
            first = rows_at(0, count, num_rows=made.num_rows, seed=seed, shuffle=True).tolist()
            facts |= {"seed": seed, "first_rows": first}
    if json_output:
        print_json(facts)
    else:
        _print_plan(facts)


def _print_plan(facts: dict[str, Any]) -> None:
    shown = {
        "split": facts["split"],
        "packing": facts["policy"] + (f", overlap {facts['overlap']}" if facts.get("overlap") else ""),
        "rows": f"{facts['rows']:,} of {facts['seq_len']:,} tokens",
        "tokens": f"{facts['tokens']:,} ({human_count(facts['tokens'])}) in {facts['documents']:,} documents",
        "waste": f"{facts['waste_tokens']:,} places ({facts['waste_percent']} %)",
        "split up": f"{facts['documents_split']:,} documents are in more than one row",
        "repeated": f"{facts['repeated_tokens']:,} places hold a token that another row has too",
        "in a row": f"{facts['most_documents_in_a_row']:,} documents at most",
    }
    if "first_rows" in facts:
        shown["order"] = f"seed {facts['seed']} begins with {', '.join(map(str, facts['first_rows']))}"
    print_facts(shown)
