"""The page of a store: one static file that needs nothing else.

In: what `penstock inspect --json` prints, perhaps with a sample of documents. Out: a page under the same rules as the
page of a run (page.py): no script, nothing fetched, every name escaped. Cost: linear in the facts; some 40 kB.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock import fs
from penstock.report import quantities
from penstock.report.corpus import (
    document_content,
    left_out_content,
    length_content,
    longest_content,
    origin_content,
)
from penstock.report.fields import finite, line_of, mapping, sequence, whole
from penstock.report.markup import Markup, clipped, joined, tag
from penstock.report.page import glued, whole_page
from penstock.report.sections import figure
from penstock.report.tables import fact_list, line

__all__ = ["render_store_page", "write_store_page"]

FOOTER = "Written by penstock from the index of the store. This page loads nothing and runs nothing."


def write_store_page(path: Path, facts: dict[str, Any]) -> None:
    """Writes the page, whole or not at all."""
    with fs.fail_as_disk_error("writing the page"):
        fs.write_atomic(path, render_store_page(facts).encode())


def render_store_page(facts: dict[str, Any]) -> str:
    """The whole page."""
    statistics = mapping(facts.get("statistics"))
    title = clipped(Path(line_of(facts.get("store"))).name, most_characters=80) or "store"
    parts = [
        ("Lengths", length_content(statistics)),
        ("Where it comes from", origin_content(statistics)),
        ("Longest documents", longest_content(statistics)),
        ("Left out", left_out_content(statistics)),
        ("Some documents", document_content(sequence(facts.get("sample")))),
        ("Store", _store(facts)),
    ]
    return whole_page(
        title=title,
        header=_header(facts, statistics, title),
        figures=_key_figures(statistics),
        parts=[(name, content) for name, content in parts if content],
        footer=FOOTER,
    )


def _header(facts: dict[str, Any], statistics: dict[str, Any], title: str) -> Markup:
    version = whole(facts.get("version"))
    pill = tag("span", f"version {version}" if version is not None else "version unknown", class_="pill completed")
    return tag(
        "header",
        tag("p", "penstock store", class_="mark"),
        tag("h1", tag("bdi", title), " ", pill),
        tag("p", glued(_headline(statistics)), class_="lead", dir="auto"),
    )


def _headline(statistics: dict[str, Any]) -> str:
    documents, tokens = (whole(statistics.get(name)) or 0 for name in ("documents", "tokens"))
    split = f" in split {line(statistics['split'])}" if statistics.get("split") else ""
    sentence = f"{documents:,} document{'' if documents == 1 else 's'}{split} of {quantities.compact(tokens)} tokens."
    middle = finite(mapping(mapping(statistics.get("lengths")).get("percentiles")).get("50"))
    if middle is not None:
        sentence += f" Half of them have at most {quantities.count(middle)}."
    return sentence


def _key_figures(statistics: dict[str, Any]) -> Markup:
    documents, tokens, size = (finite(statistics.get(name)) or 0 for name in ("documents", "tokens", "bytes"))
    left_out = [finite(mapping(one).get("documents")) or 0 for one in sequence(statistics.get("left_out"))]
    ratio = finite(statistics.get("bytes_per_token"))
    figures = [
        figure("Documents", quantities.compact(documents), f"{quantities.count(sum(left_out))} left out"),
        figure("Tokens", quantities.compact(tokens), "begin and end tokens included"),
        figure("Text", quantities.bytes_text(size), "before tokenising"),
    ]
    if ratio is not None:
        figures.append(figure("Bytes per token", quantities.decimal(ratio), "of text"))
    with_loss = finite(statistics.get("loss_tokens"))
    if with_loss is not None and tokens and with_loss < tokens:
        figures.append(figure("Loss on", quantities.percent(100 * with_loss / tokens), "of the tokens"))
    return tag("dl", *figures, class_="figures")


def _store(facts: dict[str, Any]) -> Markup:
    tokenizer = mapping(facts.get("tokenizer"))
    size = whole(tokenizer.get("vocab_size"))
    places = [mapping(source) for source in sequence(facts.get("sources"))]
    found = whole(facts.get("found"))
    return joined(
        [
            fact_list(
                [
                    ("Tokenizer", line(tokenizer.get("origin"))),
                    ("Vocabulary", f"{size:,} ids" if size is not None else ""),
                    ("Made", line(facts.get("created"))),
                    ("Segments", line(facts.get("segments"))),
                    ("Found", f"{found:,} documents" if found is not None else ""),
                    ("Path", line(facts.get("store"))),
                    ("Digest", line(facts.get("digest"))),
                    *((f"Source {line(one.get('name'))}", line(one.get("location"))) for one in places),
                ]
            )
        ]
    )
