"""`plan`: the rows that a store gives."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock.cli.output import human_count, print_facts, print_json
from penstock.errors import PlanError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


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
