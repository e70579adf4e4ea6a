"""What a store holds, drawn: lengths, origins, longest documents, what was left out.

In: `statistics` of `penstock inspect --json`, read back from a file or fresh; names in it are text that strangers
wrote. Out: markup, for the page of a store and for the page of a run that used it. Cost: linear in what is shown, at
most some fifty rows a table.
"""

from __future__ import annotations

from typing import Any

from penstock.report import quantities
from penstock.report.charts import Columns, bar, columns_figure
from penstock.report.fields import finite, line_of, mapping, sequence, whole
from penstock.report.markup import Markup, clipped, joined, tag
from penstock.report.tables import ABSENT, NOTHING, NUMBER, count_text, fact_list, line, number_text, table

__all__ = ["document_content", "left_out_content", "length_content", "longest_content", "origin_content"]

MOST_ROWS_AT_ONCE = 10
MOST_TEXT_CHARACTERS = 2400
NO_NAME = "none known"


def length_content(statistics: dict[str, Any], *, number: int = 1) -> Markup:
    """How long documents are, and in documents of which length the tokens lie; `number` is the store's on its page."""
    lengths = mapping(statistics.get("lengths"))
    bins = [mapping(one) for one in sequence(lengths.get("histogram"))]
    if not bins:
        return NOTHING
    shares = [
        (f"{percent} % have at most", f"{quantities.count(length)} tokens")
        for percent, value in mapping(lengths.get("percentiles")).items()
        if (length := finite(value)) is not None
    ]
    mean = finite(lengths.get("mean"))
    facts = [
        ("Shortest", f"{count_text(finite(lengths.get('min')))} tokens"),
        *shares,
        ("Longest", f"{count_text(finite(lengths.get('max')))} tokens"),
        ("Mean", f"{quantities.decimal(mean)} tokens" if mean is not None else ""),
    ]
    figures = [_lengths_figure(bins, measure=measure, number=number) for measure in ("documents", "tokens")]
    return joined([tag("div", *figures, class_="pair first"), tag("div", fact_list(facts), class_="below")])


def _lengths_figure(bins: list[dict[str, Any]], *, measure: str, number: int) -> Markup:
    values = [finite(one.get(measure)) or 0.0 for one in bins]
    ranges = [(whole(one.get("shortest")) or 0, whole(one.get("longest")) or 0) for one in bins]
    total = sum(values)
    most = max(range(len(values)), key=lambda place: values[place])
    low, high = ranges[most]
    span = f"{low:,}" if low == high else f"{low:,} to {high:,}"
    share = quantities.percent(100 * values[most] / total) if total else "0 %"
    return columns_figure(
        Columns(
            title=f"{measure.capitalize()} by length",
            subtitle="tokens per document",
            description=f"{share} of the {measure} in documents of {span} tokens, more than in any other range.",
            readout=f"{quantities.compact(total)} {measure}",
            values=values,
            edges=[_edge_text(edge) for edge in (*(low for low, _ in ranges), ranges[-1][1] + 1)],
            hints=[
                f"{low:,} to {high:,} tokens: {quantities.count(value)} {measure}"
                for (low, high), value in zip(ranges, values, strict=True)
            ],
            value_text=lambda value: quantities.compact(value).replace(" ", ""),
            tone="train" if measure == "documents" else "validation",
            number=number,
        )
    )


def _edge_text(length: int) -> str:
    """A power of two as people write it: 512, 1k, 64k."""
    for size, unit in ((2**30, "G"), (2**20, "M"), (2**10, "k")):
        if length >= size:
            return f"{length // size}{unit}"
    return str(length)


def origin_content(statistics: dict[str, Any]) -> Markup:
    """Tokens by split, source, language and folder."""
    kinds = [("splits", "Split"), ("sources", "Source"), ("languages", "Language"), ("folders", "Folder")]
    return tag("div", *(_groups(mapping(statistics.get(kind)), noun) for kind, noun in kinds), class_="stack")


def _groups(groups: dict[str, Any], noun: str) -> Markup:
    largest = [mapping(one) for one in sequence(groups.get("largest"))]
    if not largest:
        return NOTHING
    other = mapping(groups.get("other"))
    number = whole(groups.get("count")) or len(largest)
    entries = [(line(one.get("name")) or NO_NAME, one) for one in largest]
    if other:
        entries.append((f"{number - len(largest):,} others", other))
    total = sum(finite(one.get("tokens")) or 0 for _, one in entries)
    rows = [_group_row(name, one, total) for name, one in entries]
    caption = f"By {noun.lower()}" if number == 1 else f"By {noun.lower()}: {number:,}"
    header = [(noun, "name"), ("Documents", NUMBER), ("Tokens", NUMBER), ("Bytes per token", NUMBER), ("", "meter")]
    parts = [table(caption, header, rows[:MOST_ROWS_AT_ONCE])]
    if len(rows) > MOST_ROWS_AT_ONCE:
        parts.append(
            tag(
                "details",
                tag("summary", f"{len(rows) - MOST_ROWS_AT_ONCE} more rows"),
                table(f"{caption}, continued", header, rows[MOST_ROWS_AT_ONCE:]),
            )
        )
    return tag("div", *parts)


def _group_row(name: str, group: dict[str, Any], total: float) -> tuple[str, ...]:
    tokens = finite(group.get("tokens"))
    share = (tokens or 0) / total if total else 0
    meter = tag("div", bar(share), tag("span", quantities.percent(100 * share)))
    ratio = finite(group.get("bytes_per_token"))
    return (name, count_text(finite(group.get("documents"))), count_text(tokens), number_text(ratio), meter)


def longest_content(statistics: dict[str, Any]) -> Markup:
    """The longest documents."""
    rows = []
    for one in map(mapping, sequence(statistics.get("longest"))):
        tokens, number = finite(one.get("tokens")), whole(one.get("document"))
        place = f"{number:,}" if number is not None else ABSENT
        rows.append((line(one.get("key")) or ABSENT, count_text(tokens), line(one.get("split")), place))
    header = [("Key", "name"), ("Tokens", NUMBER), ("Split", ""), ("Document", NUMBER)]
    return table("Most tokens first", header, rows) if rows else NOTHING


def left_out_content(statistics: dict[str, Any]) -> Markup:
    """What isn't in the data: reasons, counts, examples."""
    entries = [mapping(one) for one in sequence(statistics.get("left_out"))]
    if not entries:
        return tag("p", "No document was left out.", class_="quiet")
    most = max(finite(one.get("documents")) or 0 for one in entries)
    rows = []
    for one in entries:
        count, examples = finite(one.get("documents")), sequence(one.get("examples"))
        meter = bar((count or 0) / most if most else 0, tone="validation")
        shown = joined([tag("small", line(example)) for example in examples])
        rows.append((joined([tag("span", line(one.get("reason"))), shown]), count_text(count), meter))
    header = [("Reason", "name"), ("Documents", NUMBER), ("", "meter")]
    return tag("div", table("By reason, with examples", header, rows), class_="examples")


def document_content(documents: list[Any]) -> Markup:
    """Documents with their first lines."""
    pieces = []
    for one in map(mapping, documents):
        tokens = finite(one.get("tokens"))
        notes = [f"{quantities.count(tokens)} tokens" if tokens is not None else "", line(one.get("split"))]
        note = f" {' · '.join(note for note in notes if note)}"
        head = tag("p", tag("code", line(one.get("key")) or ABSENT), tag("small", note), class_="origin")
        text = clipped(line_of(one.get("text")), most_characters=MOST_TEXT_CHARACTERS)
        end = "" if one.get("is_whole") else "\n…"
        pieces.append(tag("div", head, tag("pre", text + end, dir="auto"), class_="piece"))
    return joined(pieces)
