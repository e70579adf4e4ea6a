"""`compare`: whether a second run is as good as the first, and what it gained."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.output import note, one_line, print_json, print_table
from penstock.cli.training import wait_briefly

if TYPE_CHECKING:
    from penstock.report.comparison import Comparison


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="The run to hold on to.")],
    after: Annotated[Path, typer.Argument(metavar="AFTER", help="The run that should be as good.")],
    seeds: Annotated[
        list[Path] | None,
        typer.Option("--seeds", metavar="RUN", help="A rerun of either with another seed; repeatable."),
    ] = None,
    threshold: Annotated[
        float, typer.Option(metavar="PERCENT", help="How many percent more bits per byte still count as held.")
    ] = 5.0,
    html: Annotated[Path | None, typer.Option(metavar="FILE", help="Also write the comparison as a page.")] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say whether quality held between two runs, and what was gained. Exit 0: held, 1: not held.

    Quality is bits per byte of held-out text, over the same rows or, where the runs were scored on different ones, over
    the same documents once more.

    \b
    Examples:
      penstock compare runs/before runs/after
      penstock compare runs/before runs/after --seeds runs/before-43 --seeds runs/after-43 --html compare.html
    """
    from penstock.report.comparison import compare_runs
    from penstock.report.comparison_page import write_comparison_page
    from penstock.report.rescoring import score_again

    wait_briefly()  # what is scored again is scored by PyTorch
    found = compare_runs(before, after, seeds=seeds or (), threshold_percent=threshold, rescore=score_again)
    if html is not None:
        write_comparison_page(html, found)
        note(f"written: {html}")
    if json_output:
        print_json(found.as_dict())
    else:
        _print(found)
    if not found.held:
        raise typer.Exit(1)


def _print(found: Comparison) -> None:
    from penstock.report.comparison_text import evaluated_sentence, setting_rows, speed_rows, spread_sentence
    from penstock.report.comparison_text import verdict_line as verdict

    print(one_line(verdict(found)))
    print(one_line(spread_sentence(found)))
    print(one_line(evaluated_sentence(found)))
    print()
    print_table(speed_rows(found), header=("speed", "before", "after", "ratio"))
    rows = [tuple(map(one_line, row)) for row in setting_rows(found)]
    print()
    if rows:
        print_table(rows, header=("settings that differ", "before", "after"))
    else:
        print("  no setting differs")
