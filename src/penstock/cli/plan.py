"""`plan`: the rows that a store gives."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Annotated, Any

import typer

from penstock.cli.output import human_count, one_line, print_facts, print_json, print_table
from penstock.errors import ConfigError

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]

SHOWN_ROWS = 8


def plan(
    stores: Annotated[list[str], typer.Argument(metavar="STORE[@VERSION]...")],
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
    mix: Annotated[
        list[str] | None,
        typer.Option("--mix", metavar="NAME=WEIGHT", help="Weight of a store or of paths, e.g. src/**=3; repeatable."),
    ] = None,
    epochs: Annotated[
        list[str] | None,
        typer.Option("--epochs", metavar="NAME=PASSES", help="Of a mixture: after so many passes a source leaves."),
    ] = None,
    temperature: Annotated[
        float, typer.Option(help="Of a mixture: above 1 makes sources more alike (rows count as rows^(1/T)).")
    ] = 1.0,
    seed: Annotated[
        int | None, typer.Option(help="Also show which rows the order of this seed begins with.", min=0)
    ] = None,
    order: Annotated[
        str, typer.Option(help="Of --seed: shuffled, sequential, group-by-length, curriculum or segments.")
    ] = "shuffled",
    curriculum_by: Annotated[
        str | None, typer.Option(metavar="FACT", help="What a curriculum goes by; default document-length.")
    ] = None,
    window_segments: Annotated[
        int | None, typer.Option(help="Of the order segments: how many it draws rows from at a time; default 8.", min=1)
    ] = None,
    json_output: Json = False,
) -> None:
    """Show the rows that a store gives at some length: how many, and what is wasted. The store is not changed.

    Of several stores, or with --mix, the share of each source; see docs/mixture.md.

    \b
    Examples:
      penstock plan store --seq-len 2048 --split val
      penstock plan store --seq-len 2048 --pack best-fit
      penstock plan store --seq-len 512 --pack windows --overlap 128
      penstock plan store --seq-len 512 --pack pad --seed 42 --order curriculum
      penstock plan code books --mix books=0.3 --mix 'code:docs/**=2' --seq-len 2048
    """
    options: dict[str, Any] = {
        "policy": pack,
        "split": split,
        "seq_len": seq_len,
        "overlap": overlap,
        "boundaries": not cross_boundaries,
        "overlap_loss": overlap_loss,
    }
    if seed is None and (order != "shuffled" or curriculum_by or window_segments):
        raise ConfigError("--order shows where the order of a seed begins", hint="add --seed, as the run has it")
    if len(stores) > 1 or mix or epochs or temperature != 1:
        if seed is not None:
            raise ConfigError("--seed shows the order of one plan, this is a mixture", hint="leave --seed out")
        facts = _mixture_facts(stores, mix or [], epochs=epochs or [], temperature=temperature, options=options)
        show = _print_mixture
    else:
        stream = {"order": order, "curriculum_by": curriculum_by, "window_segments": window_segments}
        facts, show = _plan_facts(stores[0], options, seed=seed, stream=stream), _print_plan
    if json_output:
        print_json(facts)
    else:
        show(facts)


def _plan_facts(store: str, options: dict[str, Any], *, seed: int | None, stream: dict[str, Any]) -> dict[str, Any]:
    from penstock.load.filling import Filler
    from penstock.load.stream import StreamSettings
    from penstock.pack import make_plan
    from penstock.store import open_store

    with open_store(store) as opened:
        made = make_plan(opened, **options)
        facts = made.describe()
        if seed is not None:
            count = min(SHOWN_ROWS, made.num_rows)
            settings = StreamSettings.of(stream)
            filler = Filler(made, seed=seed, **settings.options(made, seed=seed, batch_rows=1))
            facts |= {"seed": seed, "order": settings.order, "first_rows": filler.at(0, count)[0].tolist()}
        return facts


def _mixture_facts(
    words: Sequence[str], mix: Sequence[str], *, epochs: Sequence[str], temperature: float, options: dict[str, Any]
) -> dict[str, Any]:
    from penstock.pack.mixture import make_mixture, names_of_stores, with_names
    from penstock.store import open_store

    names = names_of_stores(words)
    with ExitStack() as stack:
        stores = {name: stack.enter_context(open_store(word)) for name, word in names.items()}
        return make_mixture(
            stores, with_names(mix, names), epochs=epochs, temperature=temperature, **options
        ).describe()


def _print_mixture(facts: dict[str, Any]) -> None:
    print_table(
        [
            [
                one_line(one["name"]),
                f"{one['rows']:,}",
                f"{one['tokens']:,}",
                f"{one['waste_tokens']:,} ({one['waste_tokens'] / (one['rows'] * facts['seq_len']):.2%})",
                f"{one['weight']:g}",
                f"{one['share']:.2%}",
                f"{one['passes_per_epoch']:g}",
                "-" if one["epochs"] is None else f"{one['epochs']:g}",
            ]
            for one in facts["mix"]
        ],
        header=["source", "rows", "tokens", "waste", "weight", "share", "passes per epoch", "leaves after"],
    )
    print()
    print_facts(
        {
            "split": facts["split"],
            "packing": facts["policy"],
            "rows": f"{facts['rows']:,} of {facts['seq_len']:,} tokens, each counted once",
            "epoch": f"{facts['epoch_rows']:,.0f} rows",
            "mixture": facts["mixture"],
        }
    )


def _print_plan(facts: dict[str, Any]) -> None:
    shown = {
        "split": facts["split"],
        "packing": facts["policy"] + (f", overlap {facts['overlap']}" if facts.get("overlap") else ""),
        "rows": f"{facts['rows']:,} of {facts['seq_len']:,} tokens",
        "tokens": f"{facts['tokens']:,} ({human_count(facts['tokens'])}) in {facts['documents']:,} documents",
        "waste": f"{facts['waste_tokens']:,} places ({facts['waste_percent']} %)",
        "split up": f"{facts['documents_split']:,} documents are in more than one row",
        "repeated": f"{facts['repeated_tokens']:,} places hold a token that another row has too",
        "in a row": f"{facts['most_documents_in_a_row']:,} documents at most, padding counted as one",
    }
    if "first_rows" in facts:
        begin = ", ".join(map(str, facts["first_rows"]))
        shown["order"] = f"{facts['order']}, seed {facts['seed']} begins with {begin}"
    print_facts(shown)
