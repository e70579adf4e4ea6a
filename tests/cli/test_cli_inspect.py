"""inspect: statistics of a store as tables, JSON and page, and a sample of its documents, typed as commands."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path

import pytest

from penstock.store import open_store, summary
from penstock.store.statistics import statistics


@pytest.fixture(scope="module")
def facts(store_path):
    """What the command prints as JSON, made without a process."""
    with open_store(store_path) as store:
        return {**summary(store), "statistics": json.loads(json.dumps(asdict(statistics(store))))}


def test_json_keeps_what_others_rely_on_and_adds_statistics(penstock, store_path, facts):
    shown = penstock("inspect", store_path, "--json").json
    assert {"documents", "tokens", "digest", "splits", "tokenizer", "skipped", "skipped_examples"} <= shown.keys()
    assert shown == facts
    found = shown["statistics"]
    assert [found[name] for name in ("documents", "tokens", "bytes")] == [
        shown[name] for name in ("documents", "tokens", "bytes")
    ]
    tokens = {one["name"]: one["tokens"] for one in found["splits"]["largest"]}
    assert tokens == {name: part["tokens"] for name, part in shown["splits"].items()}
    assert {one["reason"]: one["documents"] for one in found["left_out"]} == shown["skipped"]
    assert all(one["examples"] for one in found["left_out"])


def test_tables_name_lengths_folders_and_reasons(penstock, store_path, facts):
    shown = penstock("inspect", store_path)
    found = facts["statistics"]
    for one in [*found["folders"]["largest"], *found["languages"]["largest"]]:
        assert f"{one['tokens']:,}" in shown.out
    for one in found["longest"]:
        assert one["key"] in shown.out
    for one in found["left_out"]:
        assert one["examples"][0] in shown.out
    bars = [line for line in shown.out.splitlines() if line.endswith("#")]
    assert len(bars) == len([one for one in found["lengths"]["histogram"] if one["documents"]])
    assert shown.err == ""


def test_a_split_alone(penstock, store_path, facts):
    shown = penstock("inspect", store_path, "--split", "val").out
    assert "split val alone" in shown
    longest = [line for line in shown.splitlines() if re.search(r" (train|val|test) +\d+$", line)]
    assert longest
    assert all(" val " in line for line in longest)


def test_a_sample_on_the_terminal_and_on_the_page(penstock, store_path, tmp_path):
    result = penstock("inspect", store_path, "--html", "store.html", "--sample", 2, "--json")
    page = (tmp_path / "store.html").read_text(encoding="utf-8")
    assert page.startswith("<!doctype html>")
    assert "Content-Security-Policy" in page
    assert "<script" not in page
    assert "store.html" in result.err
    shown = penstock("inspect", store_path, "--sample", 2).out
    assert len(result.json["sample"]) == 2
    for one in result.json["sample"]:
        assert one["key"] in page
        assert one["key"] in shown


@pytest.mark.parametrize(
    "words",
    [
        ["--html", "s/page.html"],
        ["--html", "missing/folder/page.html"],
        ["--html", "folder"],
        ["--html", "page.html", "--doc", "1"],
        ["--sample", "3", "--doc", "1"],
        ["--split", "dev"],
    ],
    ids=lambda words: " ".join(words),
)
def test_what_cannot_be_shown_is_one_error(penstock, store_path, tmp_path, words):
    shutil.copytree(store_path, tmp_path / "s")
    (tmp_path / "folder").mkdir()
    before = sorted(tmp_path.rglob("*"))
    penstock("inspect", "s", *words, expect=None).assert_one_error()
    assert sorted(tmp_path.rglob("*")) == before


def test_hostile_names_reach_neither_terminal_nor_markup(penstock, tokenizer_file, tmp_path):
    folder = tmp_path / "hostile"
    names = (
        b"<script>alert(1)<script>/\x1b[31mred.txt",
        b"new\nline/\xff\xfe.txt",
        "\u202erev/x.txt".encode(),
        b"l" * 200 + b"/" + b"m" * 200,
    )
    for number, name in enumerate(names):
        path = Path(os.fsdecode(os.fsencode(folder) + b"/" + name))
        path.parent.mkdir(parents=True)
        path.write_text(f"text {number} \x1b[2J <img src=x onerror=alert(1)>\n")
    (folder / "\x1b[2Jempty.txt").write_text("")
    prepared = penstock("prepare", folder, "--out", "\x1b[1ms", "--tokenizer", tokenizer_file)
    assert "\x1b" not in prepared.out + prepared.err
    for words in ([], ["--html", "page.html", "--sample", 9]):
        shown = penstock("inspect", "\x1b[1ms", *words)
        for character in "\x1b\u202e":
            assert character not in shown.out + shown.err
        assert max(map(len, shown.out.splitlines())) < 260
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for forbidden in ("\x1b", "\u202e", "<script", "<img"):
        assert forbidden not in page
    assert "hostile/new\\nline" in page


def test_prepare_says_how_to_see_it(penstock, corpus, tokenizer_file):
    done = penstock("prepare", corpus, "--out", "with space", "--tokenizer", tokenizer_file)
    assert done.err.strip() == "see it: penstock inspect 'with space'"


def test_a_document_s_content_hash_is_what_remove_takes(penstock, store_path, tmp_path):
    store = shutil.copytree(store_path, tmp_path / "mine")
    shown = penstock("inspect", store, "--doc", 3, "--json").json
    done = penstock("remove", store, "--match", f"content:{shown['content_hash']}", "--json").json
    assert done["removed"] >= 1
    with open_store(store) as after:
        assert shown["key"].encode() not in after.provenance()["key"].to_pylist()


def test_a_store_says_whether_near_copies_were_looked_for(penstock, corpus, tokenizer_file):
    said = {}
    for dedup in ("exact", "near"):
        made = penstock("prepare", corpus, "--out", dedup, "--tokenizer", tokenizer_file, "--dedup", dedup).out
        shown = penstock("inspect", dedup).out
        said[dedup] = [line for text in (made, shown) for line in text.splitlines() if line.startswith("near copies")]
    assert [len(lines) for lines in said.values()] == [2, 2]
    assert all("not looked for" in line for line in said["exact"])
    assert not any("not looked for" in line for line in said["near"])
