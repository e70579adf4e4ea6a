"""Tables and lists of facts, and the text of single values.

In: untrusted values of any type. Out: markup, and short lines of text. Tables are cut at a length that a reader still
looks at, and say how much was cut; wide ones scroll inside their own box. Cost: linear in what is shown.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from penstock.report import quantities
from penstock.report.fields import finite, line_of
from penstock.report.markup import Markup, clipped, joined, tag

__all__ = [
    "ABSENT",
    "MOST_TABLE_ROWS",
    "NOTHING",
    "NUMBER",
    "count_text",
    "fact_list",
    "line",
    "number_text",
    "table",
    "value_text",
    "words",
]

MOST_TABLE_ROWS = 60
MOST_LINE_CHARACTERS = 400
WIDE_FACT_CHARACTERS = 50
NOTHING = Markup("")
ABSENT = "-"
NUMBER = "number"  # class of a column of figures: set flush right
UNIT_ENDINGS = ("_bytes_per_second", "_bytes", "_seconds", "_percent", "_watts", "_flops")


def line(value: Any) -> str:
    """The value as one line of bounded length."""
    return clipped(line_of(value), most_characters=MOST_LINE_CHARACTERS)


def table(caption: str, header: Sequence[tuple[str, str]], rows: Sequence[Sequence[str]]) -> Markup:
    """A table; the header gives (name, class) of each column, the first column names the row."""
    classes = [class_ or None for _, class_ in header]
    head = tag("tr", *(tag("th", name, scope="col", class_=class_ or None) for name, class_ in header))
    body = []
    for row in rows[:MOST_TABLE_ROWS]:
        first = tag("th", row[0], scope="row", class_=classes[0])
        rest = (tag("td", cell, class_=class_) for cell, class_ in zip(row[1:], classes[1:], strict=True))
        body.append(tag("tr", first, *rest))
    table = tag("table", tag("caption", caption), tag("thead", head), tag("tbody", *body))
    # Focusable, so that a keyboard can scroll it.
    box = tag("div", table, class_="scroll", tabindex="0", role="region", aria_label=caption)
    left_out = len(rows) - MOST_TABLE_ROWS
    return joined([box, tag("p", f"{left_out:,} more in records.jsonl.", class_="quiet")]) if left_out > 0 else box


def fact_list(facts: Sequence[tuple[str, str]]) -> Markup:
    """Names with values; those without a value are left out."""
    entries = [
        tag(
            "div", tag("dt", name), tag("dd", line(value)), class_="wide" if len(value) > WIDE_FACT_CHARACTERS else None
        )
        for name, value in facts
        if value
    ]
    return tag("dl", *entries, class_="facts") if entries else NOTHING


def number_text(value: float | None) -> str:
    """A loss, or a dash."""
    return ABSENT if value is None else quantities.decimal(value)


def count_text(value: float | None) -> str:
    """A count, or a dash."""
    return ABSENT if value is None else quantities.count(value)


def words(name: str) -> str:
    """A field name as words, without its unit."""
    for unit in UNIT_ENDINGS:
        name = name.removesuffix(unit)
    numbered = re.sub(r"s?\.(\d+)", r" \1", name.removeprefix("num_"))  # gpus.0.name: gpu 0, name
    return numbered.replace("_", " ").replace(".", ", ")


def value_text(name: str, value: Any) -> str:
    """A leaf of a nested record as text; the unit is read from the end of its name."""
    number = finite(value)
    if number is None:
        return line({True: "yes", False: "no"}[value] if isinstance(value, bool) else value)
    if name.endswith("bytes_per_second"):
        return quantities.compact(number, unit="B/s")
    if name.endswith("flops"):
        return quantities.compact(number, unit="FLOP/s")
    if name.endswith("bytes"):
        return quantities.bytes_text(number)
    if name.endswith("seconds"):
        return quantities.duration(number)
    if name.endswith("percent"):
        return quantities.percent(number)
    if name.endswith("watts"):
        return f"{number:,.0f} W"
    return quantities.count(number) if isinstance(value, int) else quantities.decimal(number)
