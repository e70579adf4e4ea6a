"""What the commands print: data on stdout, everything else on stderr, bars only on a terminal, nothing that a file name
could use to move the cursor."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

__all__ = ["ProgressBar", "human_bytes", "human_count", "note", "one_line", "print_json", "print_table", "progress_bar"]


class ProgressBar(Protocol):
    """Shows how far a task is."""

    def __call__(self, done: int, total: int, detail: str = "") -> None:
        """Moves the bar."""


def one_line(text: str) -> str:
    """The text with control characters escaped, so that it stays on one line and can't drive the terminal."""
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def print_json(value: Any) -> None:
    """One JSON object on stdout."""
    print(json.dumps(value, indent=2, ensure_ascii=True, default=str))


def note(text: str) -> None:
    """A remark for people, on stderr."""
    print(text, file=sys.stderr, flush=True)


def human_count(number: float) -> str:
    """1234567 as 1.23 M."""
    for limit, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(number) >= limit:
            return f"{number / limit:.3g} {unit}" if number / limit < 100 else f"{number / limit:.0f} {unit}"
    return f"{number:g}" if number == int(number) else f"{number:.3g}"


def human_bytes(number: float) -> str:
    """Bytes in decimal units."""
    return human_count(number) + "B" if number >= 1e3 else f"{human_count(number)} B"


def print_table(rows: Sequence[Sequence[str]], *, header: Sequence[str] | None = None) -> None:
    """Columns on stdout, the first to the left, the others to the right."""
    lines = [list(header), *map(list, rows)] if header else [list(row) for row in rows]
    if not lines:
        return
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    for line in lines:
        cells = [
            cell.ljust(width) if not column else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        print("  " + "  ".join(cells).rstrip())


def print_facts(facts: Mapping[str, str]) -> None:
    """Name and value a line, values aligned."""
    width = max(map(len, facts), default=0)
    for name, value in facts.items():
        print(f"{name.ljust(width)}  {value}")


@contextmanager
def progress_bar(label: str, *, unit: str = "bytes") -> Iterator[ProgressBar]:
    """A bar on stderr when that is a terminal; silence otherwise."""
    if not sys.stderr.isatty():
        yield lambda done, total, detail="": None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    amounts = [DownloadColumn(), TransferSpeedColumn()] if unit == "bytes" else [MofNCompleteColumn()]
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        *amounts,
        TimeRemainingColumn(),
        TextColumn("{task.fields[detail]}"),
    ]
    with Progress(*columns, console=Console(stderr=True), transient=True, auto_refresh=False) as progress:
        task = progress.add_task(label, total=None, detail="")

        def move(done: int, total: int, detail: str = "") -> None:
            # Drawn when there is news, not by a thread: `prepare` forks workers only where no thread runs.
            progress.update(task, completed=done, total=total, detail=detail, refresh=True)

        yield move
