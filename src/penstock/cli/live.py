"""A run as it goes on: a table that is drawn anew on a terminal, a line now and then elsewhere.

In: the records of the trainer, one after the other. Out: on stderr, the figures of the last steps (rates are means over
the last twenty), evaluations and events as lines above the table. Redrawn at most ten times a second, by the thread
that trains: drawing takes about a millisecond.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.cli.output import human_bytes, human_count, note, one_line
from penstock.runlog import Record

__all__ = ["Figures", "shown_records"]

RECENT_STEPS = 20
SECONDS_BETWEEN_DRAWINGS = 0.1
# Left out from the last, where the terminal is too narrow for all.
BY_IMPORTANCE = ("step", "loss", "tokens/s", "ETA", "val bpb", "lr", "MFU", "data stall", "grad norm", "memory")
IN_ORDER = ("step", "loss", "tokens/s", "MFU", "lr", "grad norm", "data stall", "memory", "val bpb", "ETA")
GAP = 2


@dataclass
class Figures:
    """What the table shows."""

    num_steps: int = 0
    step: Record = field(default_factory=dict)
    bits_per_byte: float | None = None
    recent: deque[Record] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    printed_step: int = 0

    def take(self, record: Record) -> None:
        """Takes what a record has to say."""
        if record["kind"] == "length":
            self.num_steps = record["steps"]
        elif record["kind"] == "step":
            self.step = record
            self.recent.append(record)
        elif record["kind"] == "evaluation" and "store" not in record:
            self.bits_per_byte = record["bits_per_byte"]

    def _sum(self, name: str) -> float:
        return float(sum(step[name] for step in self.recent))

    def columns(self, *, memory_bytes: int | None = None) -> dict[str, str]:
        """Name and text of each column that has something to show."""
        if not self.step:
            return {"step": f"0/{self.num_steps}"}
        seconds = max(self._sum("seconds"), 1e-9)
        left_seconds = (self.num_steps - self.step["step"]) * seconds / len(self.recent)
        shares = [step["mfu_percent"] for step in self.recent if "mfu_percent" in step]
        texts = {
            "step": f"{self.step['step']:>{len(str(self.num_steps))}}/{self.num_steps}",
            "loss": f"{self.step['loss']:.4f}",
            "tokens/s": human_count(round(self._sum("tokens") / seconds)),
            "MFU": f"{sum(shares) / len(shares):.1f} %" if shares else "",
            "lr": f"{self.step['learning_rate']:.2e}",
            "grad norm": f"{self.step['grad_norm']:.3f}",
            "data stall": f"{100 * self._sum('data_seconds') / seconds:.1f} %",
            "memory": human_bytes(memory_bytes) if memory_bytes else "",
            "val bpb": "" if self.bits_per_byte is None else f"{self.bits_per_byte:.4f}",
            "ETA": _clock(left_seconds),
        }
        return {name: texts[name] for name in IN_ORDER if texts[name]}

    def fitting_columns(self, width: int, *, memory_bytes: int | None = None) -> dict[str, str]:
        """The most important columns that fit a terminal of so many characters."""
        columns = self.columns(memory_bytes=memory_bytes)
        for name in reversed(BY_IMPORTANCE):
            if sum(max(len(one), len(text)) + GAP for one, text in columns.items()) <= width:
                break
            columns.pop(name, None)
        return columns

    def line(self) -> str:
        """The figures as one line, for logs."""
        shown = self.columns()
        return (
            f"step {self.step['step']:>5}/{self.num_steps}  loss {shown['loss']}  {shown['tokens/s']} tokens/s  "
            f"lr {shown['lr']}  ETA {shown['ETA']}"
        )


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}"


@contextmanager
def shown_records(choices: Callable[[], list[tuple[str, ...]]] | None) -> Iterator[Callable[[Record], None]]:
    """What to hand each record to. `choices` gives the rows of the table that comes before the first step, if any."""
    if sys.stderr.isatty():
        with _live_table() as (draw, say):
            yield _taking(draw, say, choices)
    else:
        yield _taking(_print_tenths, note, choices)


def _taking(
    draw: Callable[[Figures], None],
    say: Callable[[str], None],
    choices: Callable[[], list[tuple[str, ...]]] | None,
) -> Callable[[Record], None]:
    figures = Figures()
    is_to_come = choices is not None

    def take(record: Record) -> None:
        nonlocal is_to_come
        if is_to_come and choices is not None and record["kind"] == "step":
            is_to_come = False
            for line in _in_columns(choices()):
                say(line)
        figures.take(record)
        text = _said(record)
        if text is not None:
            say(text)
        if record["kind"] in ("step", "evaluation"):
            draw(figures)

    return take


def _in_columns(rows: list[tuple[str, ...]]) -> list[str]:
    """Rows as lines, the columns aligned; the last one, of any length, comes last."""
    safe = [[one_line(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*safe, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in safe]


def _said(record: Record) -> str | None:
    """What is told of a record beside the table."""
    kind = record["kind"]
    if kind == "evaluation":
        where = f"{record['split']} of {one_line(record['store'])}" if "store" in record else record["split"]
        return (
            f"step {record['step']:>5}  {where} loss {record['loss']:.3f}, {record['bits_per_byte']:.3f} bits per byte"
        )
    if kind == "epoch" and record["complete"]:
        loss = record["mean_train_loss"]
        return f"step {record['step']:>5}  pass {record['epoch']} done" + (
            f", mean loss {loss:.3f}" if loss is not None else ""
        )
    if kind == "event":
        return one_line(record["message"])
    return None


def _print_tenths(figures: Figures) -> None:
    """A line after the first step and after every tenth of the run."""
    step = figures.step.get("step", 0)
    if step > figures.printed_step and (step == 1 or step % max(figures.num_steps // 10, 1) == 0):
        figures.printed_step = step
        note(figures.line())


@contextmanager
def _live_table() -> Iterator[tuple[Callable[[Figures], None], Callable[[str], None]]]:
    from rich.console import Console
    from rich.live import Live
    from rich.table import Table

    console = Console(stderr=True)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        drawn = 0.0

        def draw(figures: Figures) -> None:
            nonlocal drawn
            now = time.monotonic()
            is_last = figures.step.get("step") == figures.num_steps
            if now - drawn < SECONDS_BETWEEN_DRAWINGS and not is_last:
                return
            drawn = now
            columns = figures.fitting_columns(console.width, memory_bytes=_memory_bytes())
            table = Table(box=None, padding=(0, GAP, 0, 0), pad_edge=False)
            for name in columns:
                table.add_column(name, justify="right", no_wrap=True)
            table.add_row(*columns.values())
            live.update(table, refresh=True)

        def say(text: str) -> None:
            console.print(text, markup=False, highlight=False, soft_wrap=True)

        yield draw, say


def _memory_bytes() -> int:
    """The most that the GPU held for this process; on a CPU what the process holds now."""
    import psutil

    torch: Any = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    return int(psutil.Process().memory_info().rss)
