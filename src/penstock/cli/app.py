"""The command tree. Each command lives in a module of its own and imports its stage when it runs, so that `--help` is
instant and needs no torch."""

from __future__ import annotations

from typing import Annotated

import typer

from penstock import __version__
from penstock.cli import (
    bench,
    compare,
    data,
    datasets,
    doctor,
    export,
    inspect,
    plan,
    remote,
    tokenizer,
    training,
    verify,
    versions,
)

__all__ = ["app"]

app = typer.Typer(
    name="penstock",
    help="Turn text and code into tokens once, feed the accelerator at full speed, train, and show it.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start with `penstock run`: it needs no data and no network. `--debug` anywhere shows tracebacks.",
)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.", is_eager=True)] = False,
) -> None:
    if version:
        print(f"penstock {__version__}")
        raise typer.Exit


app.command("run")(training.run)
app.command("prepare")(data.prepare)
app.command("inspect")(inspect.inspect)
app.command("verify")(verify.verify)
app.command("log")(versions.log)
app.command("diff")(versions.diff)
app.command("prune")(versions.prune)
app.command("remove")(versions.remove)
app.command("plan")(plan.plan)
app.command("push")(remote.push)
app.command("export")(export.export)
app.command("datasets")(datasets.datasets)
app.add_typer(tokenizer.app, name="tokenizer")
app.command("train")(training.train)
app.command("report")(training.report)
app.command("compare")(compare.compare)
app.command("bench")(bench.bench)
app.command("doctor")(doctor.doctor)
