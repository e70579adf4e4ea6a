"""The C extension gives what its twins in Python give, on text, on noise and on what borders on a rule.

Skipped where the extension wasn't built; everything else of the suite runs with it where it was.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.native import native
from penstock.sources.files import FilesSource, listed_in_python
from penstock.sources.hygiene.content import (
    HEAD_BYTES,
    HEAD_WORDS,
    MIN_MINIFIED_BYTES,
    MINIFIED_LONG_LINE_BYTES,
    NEWLINE,
    PROBE_BYTES,
    PROBLEMS,
    _has_minified_lines,
    content_problem_in_python,
    has_minified_lines_in_python,
)
from penstock.sources.hygiene.marks import MAY_BE_MINIFIED, MAY_HOLD_SECRETS, MAY_SAY_SOMETHING, marks_of
from penstock.sources.hygiene.secret_rules import FORMATS, MAX_USER_BYTES, NAMES, url_password
from penstock.sources.hygiene.secrets import (
    literal_search,
    literals_of,
    secret_spans,
    secret_spans_in_python,
)
from penstock.store.encoding import place_in_python

pytestmark = pytest.mark.skipif(native is None, reason="the C extension isn't built here")

RULES = [*FORMATS, *NAMES]
LITERALS = [literal for literal, _ in RULES]
URLS = [literal for literal, finder in RULES if finder is url_password]

# Around literals: what may complete them to a secret, parts of literals, and whatever else.
piece = st.one_of(
    st.sampled_from(LITERALS),
    st.sampled_from(LITERALS).flatmap(lambda literal: st.integers(1, len(literal)).map(lambda size: literal[:size])),
    st.sampled_from([b"@host", b"user:aB3dE6gH9jK2@h.org", b' = "aB3dE6gH9jK2mN5pQ8sT1vW4yZ7b"', b"\n", b" " * 40]),
    st.text("aB3dE6gH9jK2mN5pQ8_-+/=", min_size=10, max_size=60).map(str.encode),
    st.binary(max_size=80),
)
document = st.lists(piece, max_size=30).map(b"".join)
utf8_border = st.sampled_from(
    [b"\x80", b"\xc0\x80", b"\xc1\xbf", b"\xc2\x80", b"\xdf\xbf", b"\xe0\x9f\xbf", b"\xe0\xa0\x80", b"\xed\x9f\xbf",
     b"\xed\xa0\x80", b"\xee\x80\x80", b"\xef\xbf\xbf", b"\xf0\x8f\xbf\xbf", b"\xf0\x90\x80\x80", b"\xf4\x8f\xbf\xbf",
     b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xff", b"\xe2\x82", b"\xf0\x9f\x98", b"\xc3"]
)  # fmt: skip
text_or_not = st.lists(
    st.one_of(st.text(max_size=40).map(str.encode), st.binary(max_size=8), utf8_border, st.just(b"a" * 70)), max_size=12
).map(b"".join)


@given(text_or_not)
@settings(max_examples=600)
def test_what_is_text(data: bytes) -> None:
    assert PROBLEMS[native.text_problem(data)] == content_problem_in_python(data)


@given(utf8_border, st.integers(0, 200), st.integers(0, 200))
def test_characters_at_every_place_of_a_block(character: bytes, before: int, after: int) -> None:
    data = b"x" * before + character + b"y" * after
    assert PROBLEMS[native.text_problem(data)] == content_problem_in_python(data)


@given(document)
@settings(max_examples=600)
def test_secrets_are_where_the_rules_find_them(data: bytes) -> None:
    expected = secret_spans_in_python(data)
    assert secret_spans(data) == expected
    if expected:
        assert marks_of(data) & MAY_HOLD_SECRETS


@pytest.mark.parametrize("most", [64, 32, 1])
@given(data=document)
def test_every_literal_is_met(most: int, data: bytes) -> None:
    expected = {
        (start, literal, start + len(literal))
        for literal in LITERALS
        for start in range(len(data))
        if data.startswith(literal, start)
        and (literal not in URLS or b"@" in data[start + len(literal) :][:MAX_USER_BYTES])
    }
    search = literals_of(LITERALS, dict.fromkeys(URLS, (MAX_USER_BYTES, b"@")), most=most)
    if search is None:
        pytest.skip("no vector instructions for it here")
    assert {(start, LITERALS[number], end) for start, number, end in native.hits(search, data)} == expected
    assert bool(native.look(search, search, data) & MAY_HOLD_SECRETS) == bool(expected)


def test_no_literal_begins_within_an_address() -> None:
    """Or it would be told of where an address that doesn't count is passed over, and not by the other search."""
    ends = [url[start:] for url in URLS for start in range(1, len(url))]
    names = [literal for literal, _ in NAMES]
    assert [name for name in names for end in ends if name.startswith(end) or end.startswith(name)] == []


@pytest.mark.parametrize("most", [64, 32, 1])
@pytest.mark.parametrize("size", [4, 34, 35, 36, 63, 64, 66, 67, 68, 131, 1000])
def test_a_literal_at_every_place(size: int, most: int) -> None:
    search = literals_of(LITERALS, {}, most=most)
    if search is None:
        pytest.skip("no vector instructions for it here")
    for place in range(size - 3):
        data = b"." * place + b"AKIA" + b"." * (size - 4 - place)
        assert native.hits(search, data) == [(place, LITERALS.index(b"AKIA"), place + 4)]
        assert native.hits(search, data.replace(b"K", b"k")) == []


@given(st.integers(0, 2 * HEAD_BYTES), st.sampled_from(HEAD_WORDS))
def test_words_of_the_head(place: int, word: bytes) -> None:
    if literal_search() is None:
        pytest.skip("no vector instructions for it here")
    data = b"." * place + word + b"." * 100
    assert bool(marks_of(data) & MAY_SAY_SOMETHING) == (word in data[:HEAD_BYTES])


@given(st.lists(st.integers(0, 1500), max_size=12), st.booleans())
def test_lines(lengths: list[int], is_prose: bool) -> None:
    data = b"\n".join((b"word " if is_prose else b"words") * (length // 5) + b"x" * (length % 5) for length in lengths)
    assert _has_minified_lines(data) == has_minified_lines_in_python(data)
    longer = [len(line) for line in data.split(b"\n") if len(line) > MINIFIED_LONG_LINE_BYTES]
    assert native.line_facts(data, MINIFIED_LONG_LINE_BYTES) == (data.count(b"\n"), sum(longer))
    if literal_search() is None:
        return
    size = len(data)
    probes = [data[start : start + PROBE_BYTES] for start in (size >> 2, size >> 1, size - PROBE_BYTES)]
    looked_at = size >= MIN_MINIFIED_BYTES and not all(NEWLINE in probe for probe in probes)
    assert bool(marks_of(data) & MAY_BE_MINIFIED) == looked_at


def test_documents_without_a_mark_need_no_rule() -> None:
    if literal_search() is None:
        pytest.skip("no vector instructions for it here")
    assert marks_of(b"def f(x):\n    return x\n" * 100) == 0
    assert marks_of(b"https://example.org/a\n" * 100) == 0
    assert marks_of(b"https://u:p@example.org/a\n" * 100) == MAY_HOLD_SECRETS


@given(
    st.lists(st.lists(st.integers(0, 2**16 - 1), max_size=40), max_size=8),
    st.lists(st.integers(0, 2**16 - 1), max_size=3),
    st.sampled_from(["<u2", "<u4"]),
)
def test_ids_in_place(texts: list[list[int]], begin: list[int], width: str) -> None:
    ids = np.array([number for text in texts for number in text], np.uint32)
    borders = np.cumsum([0, *map(len, texts)])
    targets = [np.full(sum(map(len, texts)) + len(texts) * (len(begin) + 1), 7, width) for _ in range(2)]
    begins, end = np.array(begin, width).tobytes(), np.array([11], width).tobytes()
    assert native.place(ids, borders, targets[0], begins, end) == max(ids.tolist(), default=0)
    place_in_python(ids, borders, targets[1], begin, 11)
    expected = [number for text in texts for number in [*begin, *text, 11]]
    assert targets[0].tolist() == targets[1].tolist() == expected


def test_ids_that_do_not_fit_are_refused() -> None:
    end = np.array([1], "<u2").tobytes()
    target = np.zeros(4, "<u2")
    for borders, count in (
        ([0, 4], 4),
        ([0, 2], 2),
        ([0, 2], 3),
        ([1, 3], 3),
        ([0, 4, 2], 2),
        ([], 4),
        ([0, 1, 1, 1, 1], 1),
    ):
        with pytest.raises(ValueError, match="fit"):
            native.place(np.zeros(count, np.uint32), np.array(borders, np.int64), target, b"", end)
    with pytest.raises(ValueError, match="fit"):
        native.place(np.zeros(3, np.uint16), np.array([0, 3]), target, b"", end)
    assert not target.any()


def test_a_folder_is_listed_alike(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"text")
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to("file")
    (tmp_path / "broken").symlink_to("nowhere")
    os.mkfifo(tmp_path / "fifo")
    (Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n"))).write_bytes(b"")
    descriptor = os.open(tmp_path, os.O_RDONLY)
    try:
        for with_facts in (True, False):
            listed = sorted(native.list_folder(descriptor, with_facts))
            assert listed == sorted(listed_in_python(descriptor, with_facts))
            assert len(listed) == 6
    finally:
        os.close(descriptor)


def test_only_plain_files_as_the_walk_saw_them(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "text").write_bytes(b"text")
    (tmp_path / "binary").write_bytes(b"a\0b")
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "link").symlink_to("folder/text")
    (tmp_path / "linked").symlink_to("folder")
    os.mkfifo(tmp_path / "fifo")
    root = os.open(tmp_path, os.O_RDONLY)
    try:
        if native.read_text(root, b"folder/text", 4) is None:
            pytest.skip("this kernel has no openat2")
        assert native.read_text(root, b"folder/text", 4) == b"text"
        assert native.read_text(root, b"binary", 3) == 2
        assert native.read_text(root, b"latin", 4) == 3
        for path, size in (
            (b"folder/text", 3), (b"folder/text", 5), (b"empty", 0), (b"link", 4), (b"linked/text", 4), (b"fifo", 4),
            (b"folder", 4096), (b"nothing", 4), (b"", 4), (b"folder/text\0", 4), (b"folder/../folder/text", -1),
            (b"../" + os.fsencode(tmp_path.name) + b"/folder/text", 4), (os.fsencode(tmp_path / "folder" / "text"), 4),
        ):  # fmt: skip
            assert native.read_text(root, path, size) is None, path
    finally:
        os.close(root)


def test_a_folder_that_becomes_a_link_leads_nowhere(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    for folder in (root / "folder", elsewhere):
        folder.mkdir(parents=True)
        (folder / "file.txt").write_text("the same size")
    source = FilesSource(name="source", root=str(root))
    (unit,) = source.units(2**20)
    (root / "folder" / "file.txt").unlink()
    (root / "folder").rmdir()
    (root / "folder").symlink_to(elsewhere)
    text = source.read(unit)
    assert (text.documents, text.skips.counts) == ([], {"unreadable": 1})


def test_the_same_store_with_and_without_it(tmp_path: Path) -> None:
    corpus = tmp_path / "corpus"
    (corpus / "folder").mkdir(parents=True)
    for number in range(40):
        (corpus / "folder" / f"{number}.py").write_text(f"def f{number}(x):\n    return x + {number}\n" * (number + 1))
    (corpus / "secret.py").write_text('password = "aB3dE6gH9jK2mN5p"\nx = 1\n' * 3)
    (corpus / "generated.py").write_text("# This file is automatically generated. Do not edit.\n")
    (corpus / "minified.js").write_text("var a=1;" * 500)
    (corpus / "licence.c").write_text("/* SPDX-License-Identifier: MIT */\nint x;\n")
    (corpus / "binary.txt").write_bytes(b"a\0b")
    (corpus / "latin.txt").write_bytes(b"caf\xe9")
    (corpus / "greek.txt").write_text("αβγ " * 1000)
    answers = {}
    for workers in (1, 2):
        for setting in ("", "off"):
            command = [
                sys.executable,
                "-m",
                "penstock",
                "prepare",
                str(corpus),
                "--out",
                str(tmp_path / f"{workers}{setting}"),
            ]
            command += ["--workers", str(workers), "--unit-bytes", "10000", "--vocab-size", "400", "--json"]
            environment = {**os.environ, "PENSTOCK_NATIVE": setting}
            done = subprocess.run(command, capture_output=True, check=True, env=environment)
            answers[workers, setting] = json.loads(done.stdout)["digest"]
    assert len(set(answers.values())) == 1, answers
