"""Passed self-checks are remembered, failed ones are not, and no state of the cache is ever fatal."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from tokenizers import pre_tokenizers

from penstock.tokenize import engines, verdicts
from penstock.tokenize.cache import cache_folder
from penstock.tokenize.engines import choose_engine

from .conftest import byte_level, ids_of, loaded

HELLO = [("h", "e"), ("l", "l"), ("he", "ll")]
CHECKED_ON = re.compile(r"checked on \d{4}-\d{2}-\d{2}(;|$)")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
    return folder


def reason(merges=HELLO, **options) -> str:
    choice, _ = choose_engine(loaded(byte_level(merges, **options)).spec)
    assert choice.name == "gigatoken", choice.reason
    return choice.reason


def verdict_files(cache: Path) -> list[Path]:
    return sorted((cache / verdicts.FOLDER).glob("*.json"))


def test_a_passed_check_is_not_repeated(cache: Path, monkeypatch: pytest.MonkeyPatch):
    assert "checked on" not in reason()
    assert len(verdict_files(cache)) == 1

    def never(*arguments):
        raise AssertionError("the reference was asked again")

    monkeypatch.setattr(engines, "ReferenceEngine", never)
    assert CHECKED_ON.search(reason())


def test_the_engine_of_a_remembered_check_gives_the_same_ids(cache: Path):
    first, second = loaded(byte_level(HELLO)), loaded(byte_level(HELLO))
    texts = [b"hello hell he", "naïve 汉字".encode()]
    assert ids_of(first, texts) == ids_of(second, texts)
    assert CHECKED_ON.search(second.engine.reason)
    assert not CHECKED_ON.search(first.engine.reason)


def test_another_tokenizer_version_text_or_processor_is_checked_anew(cache: Path, monkeypatch: pytest.MonkeyPatch):
    reason()
    assert "checked on" not in reason([*HELLO, ("hell", "o")])
    with monkeypatch.context() as patch:
        patch.setattr(engines, "engine_versions", lambda: {"gigatoken": "0.11", "tokenizers": "0.23"})
        assert "checked on" not in reason()
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "_processor", lambda: {"model name": "another"})
        assert "checked on" not in reason()
    with monkeypatch.context() as patch:
        patch.setattr(verdicts, "CHECK_VERSION", verdicts.CHECK_VERSION + 1)
        assert "checked on" not in reason()
    with monkeypatch.context() as patch:
        texts = engines.torture_texts
        patch.setattr(engines, "torture_texts", lambda spec: [*texts(spec), b"one more"])
        assert "checked on" not in reason()
    assert len(verdict_files(cache)) == 6
    assert CHECKED_ON.search(reason())


def test_a_failed_check_is_run_again(cache: Path):
    unsplit = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    for _ in range(2):
        choice, _engine = choose_engine(loaded(byte_level(HELLO, pre_tokenizer=unsplit)).spec)
        assert choice.name == "tokenizers"
        assert "checked on" not in choice.reason
    assert verdict_files(cache) == []


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[1]",
        b"null",
        b"\xff\xfe",
        b'{"passed": true}',
        b'{"passed": 1, "date": "2026-01-01"}',
        b"[" * 10**5,
    ],
)
def test_a_damaged_verdict_is_ignored_and_replaced(cache: Path, content: bytes):
    reason()
    (path,) = verdict_files(cache)
    path.write_bytes(content)
    assert "checked on" not in reason()
    assert json.loads(path.read_bytes())["passed"] is True
    assert CHECKED_ON.search(reason())


@pytest.mark.parametrize("date", ["soon", 3, None, "2026-13-01", "\x1b[31m"])
def test_a_verdict_with_no_date_is_ignored(cache: Path, date: object):
    reason()
    (path,) = verdict_files(cache)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"date": date}))
    assert "checked on" not in reason()


def test_a_verdict_under_another_name_is_ignored(cache: Path):
    reason()
    (path,) = verdict_files(cache)
    path.write_text(json.dumps(json.loads(path.read_bytes()) | {"name": "0" * 32}))
    assert "checked on" not in reason()


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_bytes(b"")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "below"))
    assert "checked on" not in reason()
    assert "checked on" not in reason()


def test_off_means_none_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert cache_folder() is None
    reason()
    assert "checked on" not in reason()
    assert os.listdir(tmp_path) == []


def test_where_the_cache_lies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("PENSTOCK_CACHE")
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert cache_folder() == tmp_path / ".cache" / "penstock"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "penstock"
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "own"))
    assert cache_folder() == tmp_path / "own"
