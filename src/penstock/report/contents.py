"""What went in and what came out: the data, rows as the model saw them, text it wrote.

In: a `Run`. Out: markup of the sources of a mixture, of each store's splits and left-out documents, of sample rows with
the borders and origins of their documents, and of generated text. All of it is text that strangers wrote. Cost: linear
in what is shown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from penstock.report import quantities
from penstock.report.charts import bar
from penstock.report.corpus import length_content, longest_content, origin_content
from penstock.report.fields import finite, line_of, mapping, sequence
from penstock.report.markup import Markup, clipped, joined, tag
from penstock.report.run import Run, Sample, Source, StoreFacts
from penstock.report.summary import plural
from penstock.report.tables import ABSENT, MOST_TABLE_ROWS, NOTHING, NUMBER, count_text, fact_list, line, table

__all__ = ["data_content", "row_content", "sample_content"]

MOST_STORES = 12
MOST_SAMPLE_ROWS = 6
MOST_SAMPLES = 6
MOST_TEXT_CHARACTERS = 2400
ORIGIN_NAMES = ("origin", "path", "key", "source")


def data_content(run: Run) -> Markup:
    """What each source of a mixture gives; then the stores, their splits, and what was left out."""
    shown = run.stores[:MOST_STORES]
    parts = [_store(store, number) for number, store in enumerate(shown, start=1)]
    if len(shown) > 1:
        titles = [tag("summary", _store_title(store)) for store in shown]
        parts = [tag("details", title, part) for title, part in zip(titles, parts, strict=True)]
    if len(run.stores) > len(shown):
        left_out = plural(len(run.stores) - len(shown), "more store")
        parts.append(tag("p", f"{left_out} in records.jsonl.", class_="quiet"))
    return joined([_mixture(run.mixture), tag("div", *parts, class_="below")] if run.mixture else parts)


def _mixture(sources: Sequence[Source]) -> Markup:
    rows = []
    for one in sources:
        share = one.share or 0
        meter = tag("div", bar(share), tag("span", quantities.percent(100 * share)))
        name = joined([tag("span", line(one.name)), tag("small", f" {line(one.place)}")])
        weight = ABSENT if one.weight is None else f"{one.weight:g}"
        rows.append((name, count_text(one.documents), count_text(one.tokens), weight, meter))
    counts = [(name, NUMBER) for name in ("Documents", "Tokens", "Weight")]
    header = [("Source", ""), *counts, ("Share of an epoch", "meter")]
    return table("Sources of the training split", header, rows) if rows else NOTHING


def _store_title(store: StoreFacts) -> str:
    counts = [
        plural(store.documents, "document") if store.documents is not None else "",
        f"{quantities.compact(store.tokens)} tokens" if store.tokens is not None else "",
    ]
    return ", ".join([line(store.name), *filter(None, counts)])


def _store(store: StoreFacts, number: int) -> Markup:
    facts = [
        ("Store", store.place),
        ("Size", quantities.bytes_text(store.num_bytes) if store.num_bytes is not None else ""),
        ("Digest", store.digest),
    ]
    tables = [_splits(store.splits), _skipped(store.skipped)] if store.splits else []
    parts = [fact_list(facts), tag("div", *tables, class_="pair")]
    if store.statistics:
        lengths = length_content(store.statistics, number=number)
        origins = tag("div", origin_content(store.statistics), longest_content(store.statistics), class_="stack")
        more = tag("details", tag("summary", "Sources, languages, folders, longest documents"), origins)
        parts += [tag("div", lengths, class_="below"), more]
    return joined(parts)


def _splits(splits: dict[str, Any]) -> Markup:
    counts = []
    for name, value in splits.items():
        facts = mapping(value) or {"documents": value}
        counts.append((name, finite(facts.get("documents")), finite(facts.get("tokens"))))
    total = sum(tokens or 0 for _, _, tokens in counts)
    rows = []
    for name, documents, tokens in counts:
        share = (tokens or 0) / total if total else 0
        meter = tag("div", bar(share), tag("span", quantities.percent(100 * share))) if total else NOTHING
        rows.append((line(name), count_text(documents), count_text(tokens), meter))
    header = [("Split", ""), ("Documents", NUMBER), ("Tokens", NUMBER), ("Share", "meter")]
    return tag("div", table("Splits", header, rows)) if rows else NOTHING


def _skipped(skipped: dict[str, Any]) -> Markup:
    counts = []
    for reason, value in skipped.items():
        facts = mapping(value)
        number = finite(facts.get("count")) if facts else finite(value)
        counts.append((number or 0, reason, sequence(facts.get("examples"))))
    counts.sort(key=lambda entry: (-entry[0], entry[1]))
    most = max((number for number, _, _ in counts), default=0)
    rows = []
    for number, reason, examples in counts:
        example = tag("small", f" {line(examples[0])}") if examples else NOTHING
        meter = bar(number / most if most else 0, tone="validation")
        rows.append((joined([tag("span", line(reason)), example]), quantities.count(number), meter))
    header = [("Reason", ""), ("Documents", NUMBER), ("", "meter")]
    if rows:
        return tag("div", table("Left out, by reason", header, rows))
    return tag("div", tag("p", "No document was left out.", class_="quiet"))


def row_content(run: Run) -> Markup:
    """The first sample rows."""
    parts = []
    for record in run.rows:
        for row in sequence(record.get("rows")):
            parts.append(_row(mapping(row), record=record))
            if len(parts) == MOST_SAMPLE_ROWS:
                return joined(parts)
    return joined(parts)


def _row(row: dict[str, Any], *, record: dict[str, Any]) -> Markup:
    """One row; each document in it is a block of its own, named by its origin."""
    documents = sequence(row.get("documents"))
    names = [("source", record.get("source")), ("row", row.get("row"))]
    names += [("split", record.get("split")), ("length", record.get("seq_len"))]
    title = " · ".join(f"{name} {line(value)}" for name, value in names if value is not None)
    noun = "document" if len(documents) == 1 else "documents"
    head = tag("h3", title, " ", tag("small", f"{len(documents):,} {noun}"))
    pieces = [_piece(document) for document in documents[:MOST_TABLE_ROWS]]
    if row.get("text") is not None and not any("text" in mapping(document) for document in documents):
        pieces.append(tag("pre", clipped(line_of(row["text"]), most_characters=MOST_TEXT_CHARACTERS), dir="auto"))
    return tag("article", head, *pieces, class_="row")


def _piece(document: Any) -> Markup:
    facts = mapping(document)
    origin = next((facts[name] for name in ORIGIN_NAMES if facts.get(name)), None)
    label = line(origin if facts else document)
    tokens = finite(facts.get("tokens"))
    note = f" {quantities.count(tokens)} tokens" if tokens is not None else ""
    head = tag("p", tag("code", label or "unknown origin"), tag("small", note), class_="origin")
    if facts.get("text") is None:
        return tag("div", head, class_="piece")
    text = clipped(line_of(facts["text"]), most_characters=MOST_TEXT_CHARACTERS)
    return tag("div", head, tag("pre", text, dir="auto"), class_="piece")


def sample_content(run: Run) -> Markup:
    """The newest sample and, evenly spread, earlier ones: what the model learned between them."""
    stride = max(1, -(-len(run.samples) // MOST_SAMPLES))
    shown = list(run.samples[::-1][::stride])[::-1]
    return joined([_sample(sample) for sample in shown])


def _sample(sample: Sample) -> Markup:
    prompt = clipped(sample.prompt, most_characters=MOST_TEXT_CHARACTERS)
    text = clipped(sample.text, most_characters=MOST_TEXT_CHARACTERS)
    head = tag("h3", f"step {sample.step:,}")
    return tag("article", head, tag("pre", tag("kbd", prompt), tag("samp", text), dir="auto"), class_="row")
