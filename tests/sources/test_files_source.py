"""Folders to documents: canonical order, every entry accounted for, links never followed, hostile names and races."""

from __future__ import annotations

import errno
import itertools
import os
import socket
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.sources import FileOptions, FilesSource, PartKind, SkipTally, Unit, UnitText
from penstock.sources.files import Stretch
from penstock.sources.hygiene import content_problem, language_of

# Bytes that sort around the slash (0x2f), and some that no terminal should see.
NAME_BYTES = b"aB.-/0 \n'\"\x1b\x7f\xc3\xa9\xff\\"


def write(root: Path, relative: bytes, data: bytes = b"text\n") -> None:
    path = os.path.join(os.fsencode(root), relative)
    os.makedirs(os.path.dirname(path), exist_ok=True)
    Path(os.fsdecode(path)).write_bytes(data)


def source(root: Path, **options: object) -> FilesSource:
    return FilesSource(name="src", root=str(root), options=FileOptions(**options))  # type: ignore[arg-type]


def read_all(files: FilesSource, unit_bytes: int = 1 << 20) -> tuple[list[Unit], list[UnitText]]:
    units = list(files.units(unit_bytes))
    return units, [files.read(unit) for unit in units]


def outcome(files: FilesSource, unit_bytes: int = 1 << 20) -> tuple[dict[bytes, bytes], dict[str, int]]:
    """(content by relative path, skip counts); asserts that no document comes twice."""
    units, texts = read_all(files, unit_bytes)
    documents = [document for text in texts for document in text.documents]
    tally = SkipTally()
    tally.merge(skips for unit, text in zip(units, texts, strict=True) for skips in (unit.skips, text.skips))
    contents = {document.path: document.parts[0].data for document in documents}
    assert len(contents) == len(documents)
    return contents, tally.counts


def entries_below(root: Path) -> list[bytes]:
    """The slow reference: every entry that isn't a folder, by os.walk, sorted as whole paths."""
    found = []
    for folder, folders, files in os.walk(os.fsencode(root)):
        links = [name for name in folders if os.path.islink(os.path.join(folder, name))]
        found += [os.path.relpath(os.path.join(folder, name), os.fsencode(root)) for name in files + links]
    return sorted(found)


def test_order_is_the_byte_order_of_whole_paths_around_the_slash(tmp_path: Path):
    names = [b"a/z", b"a.b", b"a-b/c", b"a/b/c", b"a0", b"B", b"a!", b"\xc3\xa9", b"\xff", b"a/b.c", b"a/b-"]
    for name in names:
        write(tmp_path, name)
    _, texts = read_all(source(tmp_path))
    paths = [document.path for text in texts for document in text.documents]
    assert paths == entries_below(tmp_path)
    assert paths == [b"B", b"a!", b"a-b/c", b"a.b", b"a/b-", b"a/b.c", b"a/b/c", b"a/z", b"a0", b"\xc3\xa9", b"\xff"]


@st.composite
def trees(draw: st.DrawFn) -> list[bytes]:
    """Relative paths in some order of creation, none of which is a folder of another."""
    step = st.lists(st.sampled_from([bytes([b]) for b in NAME_BYTES if b != 0x2F]), min_size=1, max_size=3).map(
        b"".join
    )
    step = step.filter(lambda name: name not in (b".", b".."))
    paths = draw(st.lists(st.lists(step, min_size=1, max_size=3).map(b"/".join), min_size=1, max_size=12, unique=True))
    return [path for path in paths if not any(other.startswith(path + b"/") for other in paths)]


@settings(max_examples=60, deadline=None)
@given(paths=trees(), unit_bytes=st.integers(1, 80), data=st.data())
def test_any_tree_any_unit_size_each_file_once_in_order(
    tmp_path_factory: pytest.TempPathFactory, paths: list[bytes], unit_bytes: int, data: st.DataObject
):
    root = tmp_path_factory.mktemp("tree")
    sizes = {path: data.draw(st.integers(1, 40)) for path in paths}
    for path in paths:
        write(root, path, b"x" * sizes[path])
    files = source(root, hidden=True, vendored=True)
    units, texts = read_all(files, unit_bytes)
    assert [path for unit in units for path, _ in unit.items] == entries_below(root) == sorted(paths)
    assert [document.path for text in texts for document in text.documents] == sorted(paths)
    assert [document.key for text in texts for document in text.documents] == [b"src/" + path for path in sorted(paths)]
    # A unit ends with the file that fills it: never earlier, never later.
    for unit in units:
        assert unit.input_bytes == sum(sizes[path] for path, _ in unit.items)
        assert unit.input_bytes - sizes[unit.items[-1][0]] < unit_bytes
    assert all(unit.input_bytes >= unit_bytes for unit in units[:-1])
    assert list(files.units(unit_bytes)) == units


@settings(max_examples=60, deadline=None)
@given(paths=trees(), data=st.data())
def test_stretches_of_a_walk_make_the_whole(
    tmp_path_factory: pytest.TempPathFactory, paths: list[bytes], data: st.DataObject
):
    root = tmp_path_factory.mktemp("tree")
    for path in paths:
        write(root, path)
    files = source(root, hidden=data.draw(st.booleans()))
    whole = files.changes(Stretch())
    assert [path for path, *_ in whole] == sorted(paths)
    places = st.one_of(st.sampled_from(paths), st.binary(min_size=1, max_size=5))
    borders = [None, *sorted(data.draw(st.lists(places, unique=True, max_size=4))), None]
    known = {
        path + facts: number for number, (path, facts, _) in enumerate(whole) if facts and data.draw(st.booleans())
    }
    stretches = [Stretch(first=first, end=end, known=known) for first, end in itertools.pairwise(borders)]
    found = [entry for stretch in stretches for entry in files.changes(stretch)]
    assert found == [entry for entry in whole if entry[1] is None or entry[0] + entry[1] not in known]
    assert sorted(number for stretch in stretches for number in stretch.recognised) == sorted(known.values())


def test_a_folder_that_cannot_be_opened_says_nothing_of_those_beside_it(tmp_path: Path, monkeypatch):
    for name in (b".closed/inside.txt", b"beside/inside.txt", b"beside.txt"):
        write(tmp_path, name)
    system_open = os.open

    def refuse(path, *more, **options):
        if os.fsencode(path).endswith(b".closed"):
            raise PermissionError(errno.EACCES, "Permission denied")
        return system_open(path, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    files = source(tmp_path)
    whole = files.changes(Stretch())
    assert [(path, reason) for path, _, reason in whole] == [
        (b".closed/", "unreadable"),
        (b"beside.txt", None),
        (b"beside/inside.txt", None),
    ]
    inside = b".closed/middle"  # where two stretches share the folder, one of them tells of it
    assert files.changes(Stretch(end=inside)) + files.changes(Stretch(first=inside)) == whole


def test_creation_order_does_not_matter(tmp_path: Path):
    names = [f"{folder}/{number}.txt".encode() for folder in "ab" for number in range(20)]
    for root, order in ((tmp_path / "one", names), (tmp_path / "two", names[::-1])):
        for name in order:
            write(root, name, name)
    assert list(outcome(source(tmp_path / "one"))[0].items()) == list(outcome(source(tmp_path / "two"))[0].items())


def test_every_entry_is_a_document_or_counted_under_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    outside = tmp_path / "outside"
    write(outside, b"secret.txt", b"must never be read")
    root = tmp_path / "root"
    write(root, b"kept.py", b"print('ok')\n")
    write(root, "utf8-é.txt".encode(), "汉字 🙂 \u202e\n".encode())
    write(root, b"bom.txt", b"\xef\xbb\xbfmarked\n")
    (root / "to-file").symlink_to(outside / "secret.txt")
    (root / "to-folder").symlink_to(outside)
    (root / "dangling").symlink_to(tmp_path / "nowhere")
    (root / "loop").symlink_to(root / "loop")
    (root / "up").symlink_to("..")
    os.mkfifo(root / "fifo")
    monkeypatch.chdir(root)  # socket paths are short
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("socket")
    write(root, b".hidden.txt")
    write(root, b".git/objects/aa/bb")
    write(root, b".git/config")
    write(root, b"node_modules/left-pad/index.js")
    write(root, b"lib/__pycache__/x.pyc")
    write(root, b"empty.txt", b"")
    write(root, b"nul.bin", b"text\0more")
    write(root, b"utf16.txt", "hello".encode("utf-16"))
    write(root, b"latin1.txt", "naïve".encode("latin-1"))
    write(root, b"surrogate.txt", b"a\xed\xa0\x80b")
    write(root, b"overlong.txt", b"a\xc0\xafb")
    write(root, b"cut.txt", "é".encode()[:1])
    write(root, b"large.txt", b"x" * 1001)
    write(root, b"just-fits.txt", b"x" * 1000)
    contents, skipped = outcome(source(root, max_file_bytes=1000))
    assert set(contents) == {b"kept.py", "utf8-é.txt".encode(), b"bom.txt", b"just-fits.txt"}
    assert skipped == {
        "symlink": 5,
        "special": 2,
        "hidden": 3,
        "vendored": 2,
        "empty": 1,
        "binary": 2,  # UTF-16 of ASCII text has NUL bytes
        "not-utf8": 4,
        "too-large": 1,
    }
    assert len(contents) + sum(skipped.values()) == len(entries_below(root))


def test_hidden_and_vendored_files_are_read_when_asked_for(tmp_path: Path):
    for name in (b".env", b".git/config", b"vendor/a.c", b"a.c"):
        write(tmp_path, name)
    assert set(outcome(source(tmp_path, hidden=True))[0]) == {b".env", b".git/config", b"a.c"}
    assert set(outcome(source(tmp_path, vendored=True))[0]) == {b"vendor/a.c", b"a.c"}
    assert outcome(source(tmp_path)) == ({b"a.c": b"text\n"}, {"hidden": 2, "vendored": 1})


def test_a_folder_left_alone_is_neither_read_nor_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for path in (b"a", b"made/b", b"made/.c", b"made.d", b"deep/made/e", b"deep/f"):
        write(tmp_path, path)
    files = source(tmp_path)
    files.leave_alone(tmp_path / "made")
    files.leave_alone(tmp_path.parent / "elsewhere")
    monkeypatch.chdir(tmp_path)
    files.leave_alone(Path("deep/made"))
    contents, skipped = outcome(files)
    assert (sorted(contents), skipped) == ([b"a", b"deep/f", b"made.d"], {})


def test_a_file_named_like_a_vendored_folder_is_an_ordinary_file(tmp_path: Path):
    write(tmp_path, b"vendor")
    assert outcome(source(tmp_path)) == ({b"vendor": b"text\n"}, {})


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_what_may_not_be_read_is_counted(tmp_path: Path):
    write(tmp_path, b"file.txt")
    write(tmp_path, b"folder/inside.txt")
    write(tmp_path, b"open.txt")
    (tmp_path / "file.txt").chmod(0)
    (tmp_path / "folder").chmod(0)
    try:
        assert outcome(source(tmp_path)) == ({b"open.txt": b"text\n"}, {"unreadable": 2})
    finally:
        (tmp_path / "folder").chmod(0o700)


def test_a_tree_deeper_than_a_path_may_be_is_counted_not_a_crash(tmp_path: Path):
    """250 folders of 20 letters are longer than PATH_MAX; they are made and removed by descriptor."""
    write(tmp_path, b"z.txt")
    step, depth = b"d" * 20, 250
    descriptors = [os.open(tmp_path, os.O_RDONLY)]
    try:
        for _ in range(depth):
            os.mkdir(step, dir_fd=descriptors[-1])
            descriptors.append(os.open(step, os.O_RDONLY, dir_fd=descriptors[-1]))
        contents, skipped = outcome(source(tmp_path))
        assert contents == {b"z.txt": b"text\n"}
        assert skipped == {"unreadable": 1}
    finally:
        for descriptor in descriptors[-2::-1]:
            os.rmdir(step, dir_fd=descriptor)
        for descriptor in descriptors:
            os.close(descriptor)


@settings(deadline=None)
@given(data=st.one_of(st.binary(max_size=200), st.text(max_size=100).map(lambda text: text.encode("utf-8", "replace"))))
def test_content_is_text_exactly_if_python_decodes_it_and_it_has_no_nul(data: bytes):
    try:
        data.decode()
        is_utf8 = True
    except UnicodeDecodeError:
        is_utf8 = False
    expected = "empty" if not data else "binary" if b"\0" in data else None if is_utf8 else "not-utf8"
    assert content_problem(data) == expected


@pytest.mark.parametrize(
    ("include", "exclude", "kept"),
    [
        (("*.py",), (), {b"a.py", b"docs/c.py", b"docs/deep/d.py"}),
        (("/docs/",), (), {b"docs/b.md", b"docs/c.py", b"docs/deep/d.py"}),
        (("/*.py",), (), {b"a.py"}),
        (("docs/**/*.py",), (), {b"docs/c.py", b"docs/deep/d.py"}),
        ((), ("docs/",), {b"a.py", b"e.txt"}),
        ((), ("*", "!*.md"), {b"docs/b.md"}),
        (("*.py",), ("deep/",), {b"a.py", b"docs/c.py"}),
        (("# only a comment",), (), set()),
    ],
)
def test_include_and_exclude_follow_gitignore(
    tmp_path: Path, include: tuple[str, ...], exclude: tuple[str, ...], kept: set[bytes]
):
    everything = {b"a.py", b"docs/b.md", b"docs/c.py", b"docs/deep/d.py", b"e.txt"}
    for name in everything:
        write(tmp_path, name)
    contents, skipped = outcome(source(tmp_path, include=include, exclude=exclude))
    assert set(contents) == kept
    assert sum(skipped.values()) == len(everything - kept)
    assert set(skipped) <= ({"not-included"} if include else set()) | ({"excluded"} if exclude else set())


def test_a_newline_in_a_folder_name_hides_nothing_from_the_patterns(tmp_path: Path):
    write(tmp_path, b"new\nline/secret.txt")
    write(tmp_path, b"new\nline/a.py")
    assert set(outcome(source(tmp_path, exclude=("secret.txt",)))[0]) == {b"new\nline/a.py"}
    assert set(outcome(source(tmp_path, include=("*.py",)))[0]) == {b"new\nline/a.py"}


def test_a_newline_at_the_end_of_a_name_is_part_of_the_name(tmp_path: Path):
    write(tmp_path, b"a.py\n")
    assert outcome(source(tmp_path, include=("*.py",))) == ({}, {"not-included": 1})


@pytest.mark.parametrize("pattern", ["!", "[z-a]", "a\\"])
def test_a_pattern_that_means_nothing_is_refused(tmp_path: Path, pattern: str):
    for options in (FileOptions(include=(pattern,)), FileOptions(exclude=("*.md", pattern))):
        with pytest.raises(InputError) as raised:
            FilesSource(name="src", root=str(tmp_path), options=options)
        assert pattern in raised.value.message


def prints(files: FilesSource) -> list[str]:
    return [unit.fingerprint for unit in files.units(10)]


def test_a_unit_is_recognised_until_a_file_of_it_changes(tmp_path: Path):
    names = [b"a", b"b", b"c"]
    for name in names:
        write(tmp_path, name, b"x" * 10)
        os.utime(tmp_path / os.fsdecode(name), ns=(10**18, 10**18))
    files = source(tmp_path)
    before = prints(files)
    assert len(set(before)) == 3
    assert prints(source(tmp_path)) == before
    os.utime(tmp_path / "b", ns=(10**18, 10**18 + 1))
    touched = prints(files)
    assert [old == new for old, new in zip(before, touched, strict=True)] == [True, False, True]
    write(tmp_path, b"c", b"x" * 11)
    os.utime(tmp_path / "c", ns=(10**18, 10**18))
    assert [old == new for old, new in zip(touched, prints(files), strict=True)] == [True, True, False]
    os.utime(tmp_path / "a", ns=(10**18, 10**18))
    (tmp_path / "a").rename(tmp_path / "a1")
    assert prints(files)[0] != before[0]


def test_a_replaced_file_with_the_same_size_and_time_changes_the_fingerprint(tmp_path: Path):
    write(tmp_path, b"a", b"old old old")
    os.utime(tmp_path / "a", ns=(10**18, 10**18))
    before = prints(source(tmp_path))
    write(tmp_path, b"new", b"new new new")
    os.utime(tmp_path / "new", ns=(10**18, 10**18))
    (tmp_path / "new").replace(tmp_path / "a")
    assert prints(source(tmp_path)) != before


def test_a_fingerprint_stands_for_the_counts_of_its_unit_as_well(tmp_path: Path):
    """A finished unit is taken over with its counts, so that it must not be when something else was left out."""
    write(tmp_path, b"b", b"x" * 10)
    before = prints(source(tmp_path))
    (tmp_path / "a").symlink_to("b")
    after = prints(source(tmp_path))
    assert len(before) == len(after) == 1
    assert before != after


def test_newest_change_is_the_youngest_time_stamp_of_the_unit(tmp_path: Path):
    future = 4 * 10**18  # the change time of a file can't be set; its modification time can lie ahead
    for name, moment in ((b"a", future - 5), (b"b", future), (b"c", 10**18)):
        write(tmp_path, name, b"x" * 10)
        os.utime(tmp_path / os.fsdecode(name), ns=(moment, moment))
    first, second = source(tmp_path).units(20)
    assert first.newest_change_ns == future
    assert second.newest_change_ns == (tmp_path / "c").stat().st_ctime_ns


def test_what_a_file_became_between_walk_and_read_is_counted_never_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    write(outside, b"secret.txt", b"must never be read")
    root = tmp_path / "root"
    for name in (b"fifo", b"folder", b"gone", b"grown", b"growing", b"link", b"stays", b"sub/secret.txt"):
        write(root, name)
    files = source(root, max_file_bytes=1000)
    (unit,) = files.units(1 << 20)
    for name in ("fifo", "folder", "gone", "link"):
        (root / name).unlink()
    os.mkfifo(root / "fifo")
    (root / "folder").mkdir()
    (root / "link").symlink_to(outside / "secret.txt")
    (root / "sub").rename(tmp_path / "sub")
    (root / "sub").symlink_to(outside)
    write(root, b"grown", b"x" * 1001)
    write(root, b"growing", b"x" * 1000)
    text = files.read(unit)
    assert {document.path: document.byte_end for document in text.documents} == {b"growing": 1000, b"stays": 5}
    assert text.skips.counts == {"unreadable": 5, "too-large": 1}


def test_what_changes_during_the_walk_is_counted_never_followed(tmp_path: Path):
    outside = tmp_path / "outside"
    write(outside, b"secret.txt", b"must never be listed")
    root = tmp_path / "root"
    for name in (b"a", b"b-gone", b"c-gone/x", b"d-link/x", b"e"):
        write(root, name)
    files = source(root)
    units = files.units(1)
    assert [path for path, _ in next(units).items] == [b"a"]
    (root / "b-gone").unlink()  # listed with "a", so it is found to be gone when it is read
    (root / "c-gone" / "x").unlink()
    (root / "c-gone").rmdir()
    (root / "d-link" / "x").unlink()
    (root / "d-link").rmdir()
    (root / "d-link").symlink_to(outside)
    rest = list(units)
    texts = [files.read(unit) for unit in rest]
    assert [document.path for text in texts for document in text.documents] == [b"e"]
    skips = [tally.counts for unit, text in zip(rest, texts, strict=True) for tally in (unit.skips, text.skips)]
    assert sum(map(Counter, skips), Counter()) == {"unreadable": 3}


@pytest.mark.skipif(not Path("/proc/version").is_file(), reason="needs Linux's /proc")
def test_a_file_that_is_longer_than_its_size_says_is_read_to_its_end():
    """Files of /proc claim 0 bytes, as a file does that is being written: what is read must not be cut there."""
    assert Path("/proc/version").stat().st_size == 0
    files = FilesSource(name="version", root="/proc/version")
    contents, skipped = outcome(files)
    assert (contents, skipped) == ({b"": Path("/proc/version").read_bytes()}, {})


def test_folders_of_any_depth_are_read_with_few_descriptors(tmp_path: Path):
    """Far deeper than folders are kept open, siblings at every level, so that the way is gone up and down again."""
    names = [b"/".join([b"d%d" % level for level in range(depth)] + [b"f%d" % depth]) for depth in range(40)]
    names += [b"/".join([b"d%d" % level for level in range(depth)] + [b"z", b"file"]) for depth in range(40)]
    for name in names:
        write(tmp_path, name, name)
    before = set(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").is_dir() else None
    most = 0

    def wanted(key: bytes) -> bool:
        nonlocal most
        most = max(most, len(os.listdir("/proc/self/fd")) if before is not None else 0)
        return True

    (unit,) = source(tmp_path).units(1 << 20)
    text = source(tmp_path).read(unit, wanted=wanted)
    assert {document.path: document.parts[0].data for document in text.documents} == {name: name for name in names}
    assert text.skips.counts == {}
    if before is not None:
        assert set(os.listdir("/proc/self/fd")) == before
        assert most - len(before) <= 10


def test_a_folder_that_cannot_be_entered_does_not_lead_the_next_one_astray(tmp_path: Path):
    for name in (b"a/b/c/1", b"a/b/d/2", b"a/e/3", b"f/4"):
        write(tmp_path, name, name)
    (unit,) = source(tmp_path).units(1 << 20)
    (tmp_path / "a" / "b" / "d").rename(tmp_path / "gone")
    text = source(tmp_path).read(unit)
    assert [document.parts[0].data for document in text.documents] == [b"a/b/c/1", b"a/e/3", b"f/4"]
    assert text.skips.counts == {"unreadable": 1}


def test_only_wanted_documents_are_read(tmp_path: Path):
    for name in (b"a", b"b", b"empty"):
        write(tmp_path, name, b"" if name == b"empty" else name)
    files = source(tmp_path)
    (unit,) = files.units(1 << 20)
    text = files.read(unit, wanted=lambda key: key == b"src/b")
    assert [document.key for document in text.documents] == [b"src/b"]
    assert text.skips.counts == {}


def test_a_file_becomes_one_plain_part_with_its_bytes_unchanged(tmp_path: Path):
    data = "<|endoftext|>\r\n\ttext 汉字\n".encode()
    write(tmp_path, b"deep/er/Main.PY", data)
    _, (text,) = read_all(source(tmp_path))
    (document,) = text.documents
    assert document.key == document.group == b"src/deep/er/Main.PY"
    assert (document.path, document.byte_start, document.byte_end) == (b"deep/er/Main.PY", 0, len(data))
    assert document.language == "python"
    assert document.is_plain
    assert [(part.data, part.kind, part.loss) for part in document.parts] == [(data, PartKind.TEXT, True)]


@pytest.mark.parametrize(
    ("path", "language"),
    [
        (b"a.py", "python"),
        (b"x/y.tar.C", "c"),
        (b"go", ""),  # a program of that name, not a source file
        (b"bin/py", ""),
        (b"folder.py/README", ""),
        (b"a.", ""),
        (b"\xff.rs", "rust"),
    ],
)
def test_language_is_told_by_the_ending_of_the_file_name(path: bytes, language: str):
    assert language_of(path) == language


def test_hostile_names_survive_as_keys(tmp_path: Path):
    names = [
        b"new\nline",
        b"quo'te\"s",
        b"\x1b[31mred",
        b"bad\xff\xfeutf8",
        b"-rf",
        b"$(touch x)",
        b"a\\b",
        b" ",
        b"<script>",
    ]
    for name in names:
        write(tmp_path, name, b"content of " + name.hex().encode())
    contents, skipped = outcome(source(tmp_path))
    assert contents == {name: b"content of " + name.hex().encode() for name in names}
    assert skipped == {}


def test_a_single_file_is_a_source_of_one_document(tmp_path: Path):
    write(tmp_path, b".one.py", b"pass\n")
    files = FilesSource(name="one", root=str(tmp_path / ".one.py"), options=FileOptions(include=("*.py",)))
    _, (text,) = read_all(files)
    assert [(document.key, document.path, document.language) for document in text.documents] == [
        (b"one", b"", "python")
    ]
    excluded = FilesSource(name="one", root=str(tmp_path / ".one.py"), options=FileOptions(exclude=("*.py",)))
    assert outcome(excluded) == ({}, {"excluded": 1})


def test_an_empty_folder_has_no_units(tmp_path: Path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    assert list(source(tmp_path).units(1)) == []


def test_options_tell_apart_whatever_chooses_documents(tmp_path: Path):
    chosen = [
        FileOptions(),
        FileOptions(include=("*.py",)),
        FileOptions(exclude=("*.py",)),
        FileOptions(max_file_bytes=7),
        FileOptions(hidden=True),
        FileOptions(vendored=True),
    ]
    seen = [repr(FilesSource(name="src", root=str(tmp_path), options=options).options()) for options in chosen]
    assert len(set(seen)) == len(chosen)
    elsewhere = FilesSource(name="src", root=str(tmp_path / "elsewhere"))
    assert elsewhere.options() == source(tmp_path).options()
