"""The page as a parser reads it: what it must hold, and what it must never hold."""

import base64
import hashlib
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.report import write_page
from penstock.report.markup import visible

from .pages import Page, assert_harmless

Records = list[dict[str, Any]]
RunOf = Callable[[Records], Path]


def test_the_figures_of_a_run_are_on_its_page(records: Records, run_of: RunOf) -> None:
    page = Page(write_page(run_of(records)))
    steps = [record for record in records if record["kind"] == "step"]
    for expected in (
        "completed",
        f"{steps[0]['loss']:.3f} → {steps[-1]['loss']:.3f}",
        "bits per byte",
        "34.2 k tokens/s",
        "9,634,512 tokens",
        "12,431 documents",
        "near-copy",
        "throughput knee at 8 rows: 16 rows gave 1.4 % more",
        "NVIDIA H200",
        "stdlib/données/été.py",
        "    return None",
        "checkpoints/step-000200",
        "penstock run --repo '/data/some repo' --out runs/demo --verbose",
        "clock of the card fell",
    ):
        assert expected in page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert_harmless(page)


def test_every_store_of_a_mixture_is_on_the_page(mixed_records: Records, run_of: RunOf) -> None:
    page = Page(write_page(run_of(mixed_records)))
    text = page.text.replace("\N{NO-BREAK SPACE}", " ")
    assert "Stores15 M tokens, 13,641 documents in 2 stores" in text
    for expected in (
        "code runs/demo/store@110,5618,204,9910.530 %",
        "books:new/** stores/books@37782,900310 %",
        "books:rest stores/books@31,0124,746,100160 %",
        "code, 12,431 documents, 9.63 M tokens",
        "books, 1,210 documents, 5.37 M tokens",
        "77aa",
        "near-copy",
        "empty",
    ):
        assert expected in text
    identifiers = page.attributes("id")
    assert len(identifiers) == len(set(identifiers)), "both stores have a chart of their lengths"
    assert_harmless(page)


def test_what_is_not_known_of_a_store_is_not_made_up(mixed_records: Records, run_of: RunOf) -> None:
    """Records of a mixture used to hold the figures of its first store alone."""
    data = next(record for record in mixed_records if record["kind"] == "data")
    names = ("name", "store", "version", "digest")
    data["stores"] = [{name: store[name] for name in names} for store in data["stores"]]
    text = Page(write_page(run_of(mixed_records))).text
    assert "13,641" not in text
    assert "in 2 stores" not in text
    assert "code, 12,431 documents" in text
    assert "books:rest stores/books@31,0124,746,100160 %" in text
    assert "77aa" in text
    assert "No document was left out" not in text


def test_a_mixture_of_many_stores_has_a_page_of_bounded_size(mixed_records: Records, run_of: RunOf) -> None:
    data = next(record for record in mixed_records if record["kind"] == "data")
    data["stores"] = data["stores"] * 500
    data["mixture"]["mix"] = data["mixture"]["mix"] * 500
    path = write_page(run_of(mixed_records))
    assert "more stores in records.jsonl" in Page(path).text
    assert path.stat().st_size < 300_000


def test_every_chart_has_title_and_description(records: Records, run_of: RunOf) -> None:
    page = Page(write_page(run_of(records)))
    plots = [attributes for tag, attributes in page.elements if tag == "svg" and attributes.get("role") == "img"]
    assert len(plots) == 5
    identifiers = page.attributes("id")
    assert len(identifiers) == len(set(identifiers))
    for plot in plots:
        assert set(plot["aria-labelledby"].split()) <= set(identifiers)


def test_the_policy_allows_the_one_style_sheet_and_nothing_else(records: Records, run_of: RunOf) -> None:
    page = Page(write_page(run_of(records)))
    policy = next(attributes["content"] for _, attributes in page.elements if "http-equiv" in attributes)
    style = re.findall(r"<style>(.*?)</style>", page.source, re.DOTALL)
    assert len(style) == 1
    style_hash = base64.b64encode(hashlib.sha256(style[0].encode()).digest()).decode()
    assert policy.split("; ")[:2] == ["default-src 'none'", f"style-src 'sha256-{style_hash}'"]
    assert "unsafe" not in policy
    assert "script-src" not in policy
    assert "url(" not in style[0]
    assert "@import" not in style[0]


def test_two_hundred_payloads_stay_text(hostile: Records, payloads: list[str], run_of: RunOf) -> None:
    assert len(payloads) == len(set(payloads)) == 200
    page = Page(write_page(run_of(hostile)))
    assert_harmless(page)
    for payload in payloads:
        assert visible(payload) in page.text, "shown as it is, with hidden characters spelt out"


def test_hidden_characters_are_spelt_out(run_of: RunOf) -> None:
    name = "a\u202egpj\u2066.exe\x1b[2J\x00\x7f\x85\ufeff\ud800\U000e0041\r\n"
    page = Page(write_page(run_of([{"kind": "event", "time": 1, "message": name}])))
    assert "a\\u202egpj\\u2066.exe\\u001b[2J\\u0000\\u007f\\u0085\\ufeff\\ud800\\U000e0041\\r\\n" in page.text
    assert not set(name) - set("agpj.exe[2J\n") & set(page.source)


def test_text_of_other_scripts_is_left_alone(run_of: RunOf) -> None:
    message = "naïve 日本語 עברית می\u200cخواهم 👩\u200d💻"
    assert message in Page(write_page(run_of([{"kind": "event", "time": 1, "message": message}]))).text


def test_the_same_records_give_the_same_page(records: Records, run_of: RunOf) -> None:
    folder = run_of(records)
    assert write_page(folder).read_bytes() == write_page(folder).read_bytes()


@pytest.mark.parametrize("num_records", [0, 1, 5, 12, 14, 16, 17, 18, 60])
def test_a_run_cut_anywhere_has_a_page(num_records: int, records: Records, run_of: RunOf) -> None:
    folder = run_of(records[:num_records])
    page = Page(write_page(folder))
    assert "interrupted" in page.text
    assert_harmless(page)


def test_one_step_is_told_not_drawn(records: Records, run_of: RunOf) -> None:
    first = next(record for record in records if record["kind"] == "step")
    page = Page(write_page(run_of([first])))
    assert "a line needs two" in page.text
    assert not [1 for tag, _ in page.elements if tag == "path"]


def test_a_loss_that_is_not_finite_is_a_gap(records: Records, run_of: RunOf) -> None:
    for record in records:
        if record["kind"] == "step" and record["step"] in (50, 51):
            record["loss"] = float("nan")
    page = Page(write_page(run_of(records)))
    raw = next(a["d"] for tag, a in page.elements if tag == "path" and a["class"] == "faint train" and len(a["d"]) > 50)
    assert raw.count("M") == 2
    assert "nan" not in raw


def test_a_long_run_has_a_page_of_bounded_size(records: Records, run_of: RunOf) -> None:
    step = next(record for record in records if record["kind"] == "step")
    many = [{**step, "step": number, "loss": 1 + 1 / number} for number in range(1, 10_001)]
    assert write_page(run_of([*records, *many])).stat().st_size < 300_000
