"""INPUT words to sources: names, kinds, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from penstock.errors import InputError
from penstock.sources import (
    STANDARD_LIBRARY,
    FileOptions,
    GitOptions,
    InputOptions,
    TableOptions,
    TablesSource,
    sources_from_inputs,
)
from penstock.sources.rows import TextColumn


def names(*words: str) -> list[str]:
    return [source.name for source in sources_from_inputs(words)]


def keys(word: str, options: FileOptions | None = None) -> list[bytes]:
    (source,) = sources_from_inputs([word], options=InputOptions(files=options or FileOptions()))
    return [document.key for unit in source.units(1 << 20) for document in source.read(unit).documents]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "a.txt").write_text("a")
    (tmp_path / "b.txt").write_text("b")
    return tmp_path


def test_inputs_are_named_after_their_last_part_and_keep_their_order(tree: Path, monkeypatch: pytest.MonkeyPatch):
    assert names(f"{tree}/b.txt", f"{tree}/docs/") == ["b.txt", "docs"]
    monkeypatch.chdir(tree / "docs")
    assert names(".") == ["docs"]
    assert names("..", "/") == [tree.name, "root"]


def test_a_name_can_be_given_and_begins_the_keys(tree: Path):
    assert keys(f"mine={tree}/docs") == [b"mine/a.txt"]
    assert keys(f"{tree}/docs") == [b"docs/a.txt"]
    assert keys(f"one={tree}/b.txt") == [b"one"]


def test_a_path_with_an_equals_sign_is_a_path_when_it_exists(tree: Path):
    (tree / "k=v").mkdir()
    assert names(f"{tree}/k=v") == ["k=v"]
    assert names(f"x={tree}/k=v") == ["x"]


def test_a_link_given_by_name_is_followed_once(tree: Path):
    (tree / "link").symlink_to(tree / "docs")
    assert keys(f"{tree}/link") == [b"docs/a.txt"]


def test_two_inputs_with_one_name_are_refused_until_one_is_renamed(tree: Path):
    (tree / "other" / "docs").mkdir(parents=True)
    words = [f"{tree}/docs", f"{tree}/other/docs"]
    with pytest.raises(InputError) as raised:
        names(*words)
    assert "'docs'" in raised.value.message
    suggested = raised.value.hint.rpartition(" ")[2]
    assert names(words[0], suggested) == ["docs", "other"]
    with pytest.raises(InputError):
        names(STANDARD_LIBRARY, f"stdlib={tree}")


@pytest.mark.parametrize(
    ("word", "met"),
    [
        ("git:somewhere", "git:somewhere"),
        ("hf:owner/name", "hf:owner/name"),
        ("https://example.org/x", "https://example.org/x"),
        ("gopher:x", "gopher:x"),
        ("/no/such/path", "/no/such/path"),
        ("name=/no/such/path", "/no/such/path"),
        ("name=", "''"),
        ("", "''"),
        ("nul\0byte", "nul"),
        ("a/b=/", "a/b"),
    ],
)
def test_what_is_no_input_is_refused_with_the_value_met(word: str, met: str):
    with pytest.raises(InputError) as raised:
        names(word)
    assert met in raised.value.message
    assert raised.value.hint


def test_no_input_at_all_is_refused():
    with pytest.raises(InputError):
        names()


def test_links_that_lead_nowhere_are_missing(tree: Path):
    (tree / "dangling").symlink_to(tree / "nowhere")
    (tree / "loop").symlink_to(tree / "loop")
    for name in ("dangling", "loop"):
        with pytest.raises(InputError, match=name):
            names(str(tree / name))


def test_a_folder_whose_name_can_not_be_shown_needs_another(tree: Path):
    (tree / "new\nline").mkdir()
    with pytest.raises(InputError) as raised:
        names(str(tree / "new\nline"))
    assert "NAME=PATH" in raised.value.hint
    assert "\n" not in raised.value.message
    assert names(f"fine={tree}/new\nline") == ["fine"]


def test_a_folder_whose_name_is_no_utf8_can_be_read(tree: Path):
    folder = os.fsencode(tree) + b"/bad\xff"
    os.mkdir(folder)
    Path(os.fsdecode(folder), "a.txt").write_text("a")
    assert keys(os.fsdecode(folder)) == [b"bad\\udcff/a.txt"]


def test_a_fifo_given_as_input_is_counted_and_nothing_hangs(tree: Path):
    os.mkfifo(tree / "fifo")
    (source,) = sources_from_inputs([str(tree / "fifo")])
    (unit,) = source.units(1)
    assert (unit.items, unit.skips.counts) == ((), {"special": 1})


def test_devices_are_never_read():
    (source,) = sources_from_inputs(["/dev/zero"])
    (unit,) = source.units(1)
    assert (unit.items, unit.skips.counts) == ((), {"special": 1})


def test_the_standard_library_is_python_source_without_installed_packages():
    (source,) = sources_from_inputs([STANDARD_LIBRARY])
    units = list(source.units(64 << 20))
    paths = [path for unit in units for path, _ in unit.items]
    assert b"json/decoder.py" in paths
    assert all(path.endswith(b".py") for path in paths)
    assert not any(name in path.split(b"/") for path in paths for name in (b"site-packages", b"dist-packages"))
    assert paths == sorted(paths)
    root = Path(sysconfig.get_path("stdlib"))
    top_level = {path.name.encode() for path in root.glob("*.py") if not path.is_symlink()}
    assert {path for path in paths if b"/" not in path} == top_level


def test_the_standard_library_takes_the_filters_it_is_given():
    paths = keys(STANDARD_LIBRARY, FileOptions(include=("json/*.py",), exclude=("tool.py",)))
    assert b"stdlib/json/decoder.py" in paths
    assert not any(path.endswith(b"/tool.py") for path in paths)
    assert all(b"json/" in path for path in paths)


@pytest.mark.parametrize("field", ["text_field", "id_field", "group_field"])
def test_columns_of_tables_are_refused_where_no_input_is_one(tree: Path, field: str):
    (tree / "chats").mkdir()
    (tree / "chats" / "a.jsonl").write_text('{"body": "hello", "n": "1"}\n')
    options = InputOptions(tables=TableOptions(**{field: "body"}))
    assert isinstance(sources_from_inputs([str(tree / "chats")], options=options)[0], TablesSource)
    # One other file makes it a folder of files, whose rows no option about columns reaches.
    (tree / "chats" / "notes.py").write_text("pass\n")
    with pytest.raises(InputError, match=field.replace("_", "-")):
        sources_from_inputs([str(tree / "chats")], options=options)
    assert len(sources_from_inputs([str(tree / "chats"), str(tree / "chats" / "a.jsonl")], options=options)) == 2


def test_a_folder_of_tables_with_another_file_in_it_is_told_of(tree: Path):
    """Its rows are read as text then, which nothing in the store would show."""
    notes: list[str] = []
    shards = tree / "shards"
    shards.mkdir()
    for name in ("a.jsonl", "b.jsonl", "README.md"):
        (shards / name).write_text('{"text": "hello"}\n')
    sources_from_inputs([str(shards)], on_note=notes.append)
    assert notes == []
    (shards / "make\nthem.py").write_text("pass\n")
    (source,) = sources_from_inputs([str(shards)], on_note=notes.append)
    assert not isinstance(source, TablesSource)
    assert len(notes) == 1
    assert "a.jsonl" in notes[0]
    assert "make\\nthem.py" in notes[0]
    # What it advises helps; and code with a table or two in it is what it seems.
    excluded = InputOptions(files=FileOptions(exclude=("*.py",)))
    assert isinstance(sources_from_inputs([str(shards)], options=excluded, on_note=notes.append)[0], TablesSource)
    for number in range(2):
        (shards / f"{number}.py").write_text("pass\n")
    sources_from_inputs([str(shards), STANDARD_LIBRARY], on_note=notes.append)
    assert len(notes) == 1


def test_a_template_is_refused_where_no_input_is_a_table(tree: Path):
    options = InputOptions(renderer=TextColumn(text_field="text"))
    with pytest.raises(InputError, match="--template"):
        sources_from_inputs([STANDARD_LIBRARY], options=options)


def test_a_column_of_text_beside_a_template_is_refused(tree: Path):
    (tree / "rows.jsonl").write_text('{"text": "some text"}\n')
    renderer = TextColumn(text_field="text")
    options = InputOptions(tables=TableOptions(text_field="body"), renderer=renderer)
    with pytest.raises(InputError, match="--text-field") as met:
        sources_from_inputs([str(tree / "rows.jsonl")], options=options)
    assert "--field-map text=body" in (met.value.hint or "")


def test_the_home_folder_is_meant_within_a_word(tree: Path, monkeypatch: pytest.MonkeyPatch):
    """A shell writes `~` out at the beginning of a word, but not behind `git:`, and some not behind `NAME=`."""
    subprocess.run(["git", "init", "-q", "-b", "main", str(tree / "repo")], check=True)
    monkeypatch.setenv("HOME", str(tree))
    words = ["git:~/repo", "ref=git:~/repo#main", "docs=~/docs"]
    home, ref, docs = sources_from_inputs(words)
    assert [source.location for source in (home, docs)] == [str(tree / "repo"), str(tree / "docs")]
    assert ref.location.startswith(str(tree / "repo"))
    (tree / "~" / "docs").mkdir(parents=True)
    monkeypatch.chdir(tree)
    assert sources_from_inputs(["docs=~/docs"])[0].location == str(tree / "~" / "docs")


def test_options_about_repositories_are_refused_where_no_input_is_one(tree: Path):
    """A repository's folder without `git:` would be read as files, whatever was asked of its history."""
    for options in (GitOptions(parts=("commits",)), GitOptions(max_diff_bytes=10), GitOptions(since="2024-01-31")):
        with pytest.raises(InputError, match="--git-") as met:
            sources_from_inputs([str(tree)], options=InputOptions(git=options))
        assert "git:PATH" in (met.value.hint or "")
    assert sources_from_inputs([str(tree)], options=InputOptions(git=GitOptions(group="root")))
