"""The page of a store: its figures, its policy, and names that want to be markup; in a parser and in a real browser."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.report import write_page
from penstock.report.markup import visible
from penstock.report.store_page import render_store_page, write_store_page

from .pages import CONTRAST_BELOW_AA, Page, Visit, assert_harmless

Facts = dict[str, Any]


def group(name: str, documents: int, tokens: int) -> Facts:
    return {
        "name": name,
        "documents": documents,
        "tokens": tokens,
        "bytes": 4 * tokens,
        "bytes_per_token": 4.0 if tokens else None,
    }


def groups(*members: Facts, other: Facts | None = None, count: int = 0) -> Facts:
    return {"count": count or len(members), "largest": list(members), "other": other}


@pytest.fixture
def facts() -> Facts:
    """What `penstock inspect --json` prints of a store of 130 documents."""
    histogram = [
        {"shortest": 2**bits, "longest": 2 ** (bits + 1) - 1, "documents": 10, "tokens": 15 * 2**bits}
        for bits in range(13)
    ]
    tokens = sum(one["tokens"] for one in histogram)
    folders = [group(f"linux/folder{number}", 1, 60 - number) for number in range(50)]
    statistics = {
        **group("", 130, tokens),
        "split": None,
        "loss_tokens": tokens // 4,
        "lengths": {
            "count": 130,
            "min": 1,
            "max": 8191,
            "mean": tokens / 130,
            "percentiles": {"5": 2, "25": 12, "50": 96, "75": 700, "95": 4_096, "99": 8_000},
            "histogram": histogram,
        },
        "sources": groups(group("linux", 130, tokens)),
        "folders": groups(*folders, other=group("other", 80, 7), count=63),
        "languages": groups(group("c", 100, tokens - 99), group("", 30, 99)),
        "splits": groups(group("train", 130, tokens)),
        "longest": [{"document": 17, "key": "linux/very/long.c", "tokens": 8191, "split": "train"}],
        "left_out": [
            {"reason": "duplicate", "documents": 1_234, "examples": ["linux/a.c", "linux/b.c"]},
            {"reason": "binary", "documents": 2, "examples": []},
        ],
    }
    return {
        "store": "some/where/kernel",
        "version": 3,
        "created": "2026-01-02T03:04:05+00:00",
        "digest": "5f2c9a7e" * 8,
        "found": 1_366,
        "segments": 2,
        "tokenizer": {"origin": "gpt2/tokenizer.json", "vocab_size": 50_257},
        "sources": [{"name": "linux", "location": "/data/linux"}],
        "sample": [
            {
                "document": 4,
                "key": "linux/été.c",
                "split": "val",
                "tokens": 70,
                "text": "int main\n\t{",
                "is_whole": False,
            }
        ],
        "statistics": statistics,
    }


def hostile(value: Any, payloads: Any) -> Any:
    """The same shape with every text in it a payload."""
    if isinstance(value, dict):
        return {key: hostile(item, payloads) for key, item in value.items()}
    if isinstance(value, list):
        return [hostile(item, payloads) for item in value]
    return next(payloads) if isinstance(value, str) else value


def page_of(facts: Facts, tmp_path: Path) -> Page:
    write_store_page(tmp_path / "store.html", facts)
    return Page(tmp_path / "store.html")


def test_the_figures_are_on_the_page(facts: Facts, tmp_path: Path) -> None:
    page = page_of(facts, tmp_path)
    assert_harmless(page)
    for expected in (
        "kernel",
        "version 3",
        "130 documents of 123 k tokens. Half of them have at most 96.",
        "25 %",
        "1,236 left out",
        "95 % have at most",
        "4,096 tokens",
        "linux/folder49",
        "13 others",
        "none known",
        "linux/very/long.c",
        "duplicate",
        "linux/b.c",
        "linux/été.c",
        "\t{\n…",
        "/data/linux",
        facts["digest"],
    ):
        assert expected in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_charts_have_names_and_columns_of_the_right_height(facts: Facts, tmp_path: Path) -> None:
    page = page_of(facts, tmp_path)
    columns = [attributes for name, attributes in page.elements if name == "rect" and "column" in attributes["class"]]
    of_documents = [float(one["height"]) for one in columns if "train" in one["class"]]
    of_tokens = [float(one["height"]) for one in columns if "validation" in one["class"]]
    assert len(of_documents) == len(of_tokens) == 13
    assert len(set(of_documents)) == 1
    assert of_tokens[-1] == pytest.approx(2 * of_tokens[-2], abs=0.2)
    identifiers = page.attributes("id")
    assert len(identifiers) == len(set(identifiers))
    for names in page.attributes("aria-labelledby"):
        assert set(names.split()) <= set(identifiers)


def test_the_same_facts_give_the_same_page(facts: Facts) -> None:
    assert render_store_page(facts) == render_store_page(copy.deepcopy(facts))


def test_payloads_stay_text(facts: Facts, payloads: list[str], tmp_path: Path) -> None:
    """Every text is a payload, and every payload is in the page."""
    facts["statistics"]["left_out"][1]["examples"] = payloads
    page = page_of(hostile(facts, iter(payloads * 3)), tmp_path)
    assert_harmless(page)
    facts["statistics"]["left_out"][1]["examples"] = []
    examples = {"reason": "junk", "documents": 1, "examples": payloads}
    facts["statistics"]["left_out"].append(examples)
    page = page_of(facts, tmp_path)
    assert_harmless(page)
    for payload in payloads:
        assert visible(payload) in page.text


@pytest.mark.parametrize("broken", [{}, {"statistics": 3}, {"statistics": {"lengths": [], "sources": 7}}, "empty"])
def test_facts_that_are_missing_or_bent_give_a_page(broken: Any, facts: Facts, tmp_path: Path) -> None:
    if broken == "empty":
        none = {"count": 0, "min": None, "max": None, "mean": None, "percentiles": {}, "histogram": []}
        facts["statistics"].update(documents=0, tokens=0, bytes=0, bytes_per_token=None, loss_tokens=0, lengths=none)
        facts["statistics"].update({name: groups() for name in ("sources", "folders", "languages", "splits")})
        facts["statistics"].update(longest=[], left_out=[])
        broken = facts
    page = page_of(broken, tmp_path)
    assert_harmless(page)
    assert "0 documents" in page.text.replace("\N{NO-BREAK SPACE}", " ")


def test_the_page_of_a_run_shows_its_store(
    records: list[dict[str, Any]], facts: Facts, payloads: list[str], run_of: Callable[..., Path]
) -> None:
    data = next(record for record in records if record["kind"] == "data")
    data["statistics"] = facts["statistics"]
    page = Page(write_page(run_of(records)))
    for expected in ("Documents by length", "linux/folder0", "linux/very/long.c"):
        assert expected in page.text
    data["statistics"] = hostile(facts["statistics"], iter(payloads * 3))
    assert_harmless(Page(write_page(run_of([*records, data], "hostile"))))


def test_in_a_browser_no_payload_runs_and_nothing_is_fetched(
    facts: Facts, payloads: list[str], tmp_path: Path, browser: Any
) -> None:
    facts["statistics"]["left_out"][1]["examples"] = payloads
    write_store_page(tmp_path / "store.html", hostile(facts, iter(payloads * 3)))
    visit = Visit(browser, tmp_path / "store.html")
    visit.stir()
    assert visit.page.evaluate("window.__pwned") is None
    assert (visit.dialogs, visit.fetched(), visit.complaints) == ([], [], [])
    assert visit.page.evaluate("document.scripts.length") == 0
    assert visit.page.url == visit.address
    visit.context.close()


@pytest.mark.parametrize("width", [320, 390, 1200])
def test_the_page_never_scrolls_sideways(
    facts: Facts, payloads: list[str], width: int, tmp_path: Path, browser: Any
) -> None:
    for place, shown in enumerate((facts, hostile(facts, iter(payloads * 3)))):
        write_store_page(tmp_path / f"{place}.html", shown)
        visit = Visit(browser, tmp_path / f"{place}.html", width=width)
        visit.page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
        assert visit.page.evaluate("document.documentElement.scrollWidth") <= width
        visit.context.close()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_enough_to_read(facts: Facts, scheme: str, tmp_path: Path, browser: Any) -> None:
    write_store_page(tmp_path / "store.html", facts)
    visit = Visit(browser, tmp_path / "store.html", scheme=scheme)
    assert visit.page.evaluate(CONTRAST_BELOW_AA) == []
    visit.context.close()
