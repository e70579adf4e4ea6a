"""The page of a run: one static file that needs nothing else.

In: `RUN/records.jsonl`. Out: `RUN/report.html`, written whole or not at all. The page holds no script, and its policy
forbids them along with every request: the one style sheet (page.css) is allowed by its hash, the icon is inside. So a
payload would have to get past the escaping of markup.py and past the browser's own rule. Cost: linear in the records;
200 steps give about 60 kB.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from penstock import fs
from penstock.report.manifest import PAGE_NAME
from penstock.report.markup import Markup, clipped, joined, tag
from penstock.report.run import Run, read_run_records
from penstock.report.sections import key_figures, sections
from penstock.report.summary import headline

__all__ = ["glued", "render_page", "whole_page", "write_page"]

FOOTER = "Written by penstock from records.jsonl. This page loads nothing and runs nothing."
KNOWN_STATUSES = frozenset({"completed", "failed", "interrupted"})
ICON = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16"><path d="M3 2v7a4 4 0 0 0 4 4h7" fill="none" '
    b'stroke="#0b7285" stroke-width="4"/></svg>'
)


def write_page(run_folder: Path) -> Path:
    """Writes `RUN/report.html` and returns its path."""
    run = Run.from_records(read_run_records(run_folder))
    path = run_folder / PAGE_NAME
    with fs.fail_as_disk_error("writing the report"):
        fs.write_atomic(path, render_page(run, name=run_folder.resolve().name).encode())
    return path


def render_page(run: Run, *, name: str) -> str:
    """The whole page; `name` is what the run is called, its folder."""
    title = clipped(name, most_characters=80) or "run"
    return whole_page(
        title=title, header=_header(run, title), figures=key_figures(run), parts=sections(run), footer=FOOTER
    )


def whole_page(*, title: str, header: Markup, figures: Markup, parts: Sequence[tuple[str, Markup]], footer: str) -> str:
    """A page of these parts, each (title, content), with links to them at its top, under the policy."""
    style = resources.files("penstock.report").joinpath("page.css").read_text(encoding="utf-8")
    body = tag("body", _body(header=header, figures=figures, parts=parts, footer=footer))
    page = tag("html", _head(title, style=style), body, lang="en")
    return f"<!doctype html>\n{page}\n"


def _head(title: str, *, style: str) -> Markup:
    style_hash = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{style_hash}'; img-src data:; base-uri 'none'; form-action 'none'"
    icon = f"data:image/svg+xml;base64,{base64.b64encode(ICON).decode()}"
    return tag(
        "head",
        tag("meta", charset="utf-8"),
        # Before anything it is to govern.
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", f"{title} · penstock"),
        tag("link", rel="icon", href=icon),
        tag("style", Markup(style)),
    )


def _body(*, header: Markup, figures: Markup, parts: Sequence[tuple[str, Markup]], footer: str) -> Markup:
    links = [tag("a", name, href=f"#{_anchor(name)}") for name, _ in parts]
    blocks = [
        tag(
            "section",
            tag("h2", name, id=f"{_anchor(name)}-title"),
            content,
            id=_anchor(name),
            aria_labelledby=f"{_anchor(name)}-title",
        )
        for name, content in parts
    ]
    return joined(
        [
            header,
            tag("nav", *links, aria_label="Sections") if links else Markup(""),
            tag("main", figures, *blocks),
            tag("footer", footer),
        ],
        separator="\n",
    )


def _anchor(name: str) -> str:
    return name.lower().replace(" ", "-")


def glued(text: str) -> str:
    """The text with every number held to the word after it: no line ends between `1.63` and `M`."""
    return re.sub(r"(?<=\d) (?=[^\W\d])", "\N{NO-BREAK SPACE}", text)


def _header(run: Run, title: str) -> Markup:
    status = run.status if run.status in KNOWN_STATUSES else "unknown"
    pill = tag("span", clipped(run.status, most_characters=40), class_=f"pill {status}")
    return tag(
        "header",
        tag("p", "penstock run", class_="mark"),
        tag("h1", tag("bdi", title), " ", pill),
        tag("p", glued(headline(run)), class_="lead", dir="auto"),
    )
