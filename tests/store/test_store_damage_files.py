"""Whole pieces in the wrong place (torture C): blocks, pages, segments, index files, manifests, folders and links. And
stores that are whole but break a promise."""

from __future__ import annotations

import errno
import os
import random
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import DamagedStoreError, DiskError, NotAStoreError
from penstock.hashing import checksum_hex, token_hash
from penstock.store import open_store, verify
from penstock.store.layout import BLOCK_BYTES
from penstock.store.payload import Ranges, examine_segment
from penstock.store.verification import LEAST_BYTES_FOR_PROCESSES, examine

from . import samples
from .damage import (
    MANIFEST,
    Committed,
    forged_counts,
    read_everything,
    replaced,
    write_large_store,
    write_tiny_store,
)
from .samples import (
    MemorySource,
    build,
    contents,
    document,
    forged_array,
    forged_digest,
    forged_file,
    forged_manifest,
    forged_tokens,
)

Scale = Callable[..., int]
Figures = Callable[..., None]


@pytest.fixture
def large(scratch: Path) -> Committed:
    return Committed(write_large_store(scratch / "large"))


@pytest.fixture
def tiny(scratch: Path) -> Path:
    return write_tiny_store(scratch / "tiny")


def kinds(store: Path) -> set[str]:
    return {problem.kind for problem in verify(store)}


# Pieces of tokens that moved


def moved_pieces(store: Committed, count: int) -> Iterator[tuple[str, bytes]]:
    """(name, content) of segments with blocks swapped, pages zeroed, or parts of another segment in them."""
    chance = random.Random(7)
    names = [name for name in store.files if name.endswith(".tokens")]
    for _ in range(count):
        name, other = chance.sample(names, 2)
        whole, foreign = (bytearray((store.path / each).read_bytes()) for each in (name, other))
        size = chance.choice([512, 4096, BLOCK_BYTES])
        places = range(0, len(whole) - size, size)
        one, two = chance.sample(list(places), 2)
        changes = {
            "swapped": {one: whole[two : two + size], two: whole[one : one + size]},
            "zeroed": {one: bytes(size)},
            "of another segment": {one: foreign[one : one + size]},
            "twice": {one: whole[two : two + size]},
            "shifted": {0: whole[size:] + whole[:size]},
            "all zero": {0: bytes(len(whole))},
            "a file of ones": {0: b"\xff" * len(whole)},
        }
        for pieces in changes.values():
            damaged = bytearray(whole)
            for at, piece in pieces.items():
                damaged[at : at + len(piece)] = piece
            if damaged != whole:
                yield name, bytes(damaged)


@pytest.mark.torture(lane="C")
def test_moved_and_zeroed_blocks(large: Committed, scale: Scale, torture_figures: Figures):
    trials, missed = 0, []
    for name, damaged in moved_pieces(large, scale(test=10, torture=2_000)):
        with replaced(large.path / name, damaged):
            trials += 1
            missed += [] if large.found_by_verify(name) and large.found_by_reader(name) else [name]
    torture_figures(
        lane="C",
        case="swapped, zeroed, shifted and foreign pages and blocks of tokens, by verify and by a reader",
        trials=trials,
        failures=len(missed),
        found=trials - len(missed),
    )
    assert trials
    assert missed == []
    assert verify(large.path) == []


# Files of another time, another place or another kind


@contextmanager
def changed(path: Path, change: Callable[[Path], object]) -> Iterator[None]:
    """A file or folder that `change` puts something else in the place of; it is moved aside meanwhile."""
    aside = path.with_name(path.name + ".aside")
    path.rename(aside)
    try:
        change(path)
        yield
    finally:
        if path.is_symlink() or path.is_file() or path.is_fifo():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
        aside.rename(path)


OTHER_KINDS: dict[str, Callable[[Path], object]] = {
    "missing": lambda path: None,
    "a folder": lambda path: path.mkdir(),
    "a link to the same bytes": lambda path: path.symlink_to(path.name + ".aside"),
    "a link to nowhere": lambda path: path.symlink_to("nowhere"),
    "a link to itself": lambda path: path.symlink_to(path.name),
    "a link to a device": lambda path: path.symlink_to("/dev/null"),
    "a pipe": os.mkfifo,
    "an empty file": lambda path: path.touch(),
}


@pytest.mark.torture(lane="C", sample=True)
def test_files_and_folders_of_another_kind(tiny: Path, torture_figures: Figures):
    """Every file and every folder that a version needs, in each of eight ways."""
    store = Committed(tiny)
    store.files = [name for name in store.files if not name.startswith("cache/")]
    folders = sorted({str(Path(name).parent) for name in store.files} | {"index", "tokenizers"})
    trials, missed = 0, []
    for name in [*store.files, *folders]:
        for kind, change in OTHER_KINDS.items():
            trials += 1
            with changed(tiny / name, change):
                found = is_found(tiny, verify) and is_found(tiny, open_store)
            missed += [] if found else [f"{name}: {kind}"]
    torture_figures(
        lane="C",
        case="files and folders missing, or replaced by folders, links and pipes",
        trials=trials,
        failures=len(missed),
        found=trials - len(missed),
    )
    assert missed == []
    assert verify(tiny) == []


def test_a_cache_of_another_kind_is_named_and_not_followed(tiny: Path):
    """No version needs it, so it may be gone."""
    for path in (next((tiny / "cache").iterdir()), tiny / "cache"):
        for kind, change in OTHER_KINDS.items():
            with changed(path, change):
                named = {problem.file for problem in verify(tiny)}
            harmless = kind == "missing" or (path.is_dir() and "link" not in kind)
            assert named == (set() if harmless else {str(path.relative_to(tiny))}), f"{path.name}: {kind}"


def is_found(store: Path, ask: Callable[[Path], Any]) -> bool:
    try:
        answer = ask(store)
    except (DamagedStoreError, NotAStoreError, DiskError):
        return True
    if isinstance(answer, list):
        return bool(answer)
    answer.close()
    return False


@pytest.mark.torture(lane="C", sample=True)
def test_stale_and_foreign_files(built: Path, scratch: Path, updated_corpus: Path, torture_figures: Figures):
    """Each file of version 2 replaced by its twin of version 1, and by that of another store; swapped names."""
    build(built, samples.files(updated_corpus))
    other = scratch / "other"
    build(other, samples.files(updated_corpus), split="train=50,val=50", seed=9)
    with open_store(built, version=1) as old, open_store(built) as new, open_store(other) as foreign:
        manifests = [opened.manifest for opened in (old, new, foreign)]
    replacements = [(MANIFEST, other / MANIFEST), ("manifests/000002.json", other / MANIFEST)]
    for entry in manifests[1].index:
        last = entry.name.rpartition("/")[2]
        for folder, manifest in ((built, manifests[0]), (other, manifests[2])):
            twin = next(each.name for each in manifest.index if each.name.endswith(f"/{last}"))
            replacements.append((entry.name, folder / twin))
    segments = sorted(path.name for path in (built / "segments").glob("*.tokens"))
    for one in segments:
        replacements += [(f"segments/{one}", built / "segments" / two) for two in segments if two != one]
        replacements += [
            (f"segments/{one[:-6]}blocks", built / "segments" / f"{two[:-6]}blocks") for two in segments if two != one
        ]
    trials, missed = 0, []
    for name, twin in replacements:
        content = twin.read_bytes()
        if content == (built / name).read_bytes():
            continue
        trials += 1
        with replaced(built / name, content):
            named = {problem.file for problem in verify(built)}
        # A whole manifest of another store names files that aren't here: those are what is missing.
        missed += [] if name in named or (named and name == MANIFEST) else [name]
    torture_figures(
        lane="C",
        case="stale index files and segments, those of another store, names exchanged",
        trials=trials,
        failures=len(missed),
        found=trials - len(missed),
    )
    assert trials > 20
    assert missed == []
    assert verify(built) == []


# Whole files, broken promises


def test_a_hand_made_leak_is_found(scratch: Path):
    """A store that is perfect but for one content in two splits, three documents wide."""
    copies = [document(key, b"the same text", group=f"group {key}") for key in "abcdefgh"]
    build(scratch / "store", MemorySource([*copies, document("z", b"another text")]), split="train=50,val=50")
    with open_store(scratch / "store") as opened:
        splits, reasons = opened.arrays["split"].tolist(), opened.arrays["reason"].tolist()
    assert {0, 1} <= set(splits[:8])
    assert reasons.count(0) == 2
    forged_array(scratch / "store", "reason", lambda array: array.fill(0))
    forged_digest(scratch / "store")
    forged_counts(scratch / "store")
    problems = verify(scratch / "store")
    assert {problem.kind for problem in problems} == {"leak"}
    assert len(problems) == sum(split != splits[0] for split in splits[:8])
    assert {problem.kind for problem in verify(scratch / "store", quick=True)} == {"leak"}


def test_an_id_beyond_the_vocabulary_is_found(tiny: Path):
    """The hash of the tokens is made to fit as well: only the id itself is wrong."""
    forged_tokens(tiny, lambda tokens: tokens.__setitem__(0, 60_000))
    with open_store(tiny) as opened:
        vocab_size = opened.tokenizer().vocab_size
    problems = [problem for problem in verify(tiny) if problem.file.endswith(".tokens")]
    assert [problem.kind for problem in problems] == ["tokens"]
    assert "60000" in problems[0].detail
    assert str(vocab_size - 1) in problems[0].detail


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda content: content["tokenizer"].update(vocab_size=5), "tokenizer"),
        (lambda content: content["tokenizer"].update(digest="0" * 64), "tokenizer"),
        (lambda content: content["counts"].update(tokens=5), "counts"),
        (lambda content: content["counts"]["splits"].pop("val"), "counts"),
        (lambda content: content["counts"]["splits"].update(val=5), "counts"),
        (lambda content: content.update(splits=["a", "b", "c"]), "splits"),
    ],
)
def test_a_manifest_that_says_something_else_is_found(tiny: Path, change: Callable[[dict[str, Any]], object], kind):
    forged_manifest(tiny, change)
    assert kind in kinds(tiny)


def test_documents_that_overlap_are_found_and_not_hashed_for_ever(large: Committed):
    """Each begins one token after the other and ends with the segment."""
    count = large.manifest.num_documents
    size = large.manifest.segments[0].tokens
    forged_array(large.path, "segment", lambda array: array.fill(0))
    forged_array(large.path, "offset", lambda array: np.arange(count))
    forged_array(large.path, "length", lambda array: size - np.arange(count))
    assert any("overlaps" in problem.detail for problem in verify(large.path))


def test_an_empty_document_is_no_place_to_hide(tiny: Path):
    forged_array(tiny, "length", lambda array: array.__setitem__(0, 0))
    assert "tokens" in kinds(tiny)


def test_many_problems_of_a_kind_are_cut_short(scratch: Path):
    store = scratch / "store"
    build(store, MemorySource([document(f"{number:04d}", b"text %d" % number) for number in range(300)]))
    forged_array(store, "offset", lambda array: np.zeros(300, np.uint64))
    details = [problem.detail for problem in verify(store)]
    assert any("more of this kind" in detail for detail in details)
    assert len(details) < 220


# Versions


def test_versions_that_share_segments_are_read_once(built: Path, updated_corpus: Path):
    first = examine(built)
    build(built, samples.files(updated_corpus))
    both = examine(built)
    assert (first.problems, both.problems) == ([], [])
    assert both.versions == [1, 2]
    shared = sum(path.stat().st_size for path in (built / "segments").glob("*"))
    index = sum(path.stat().st_size for path in (built / "index").rglob("*") if path.is_file())
    tokenizer = sum(path.stat().st_size for path in (built / "tokenizers").rglob("*") if path.is_file())
    assert both.bytes == shared + index + tokenizer


def test_a_document_of_a_later_version_in_an_old_segment_is_hashed(built: Path, updated_corpus: Path):
    """Version 2 lies about one document in a segment that version 1 has had checked."""
    build(built, samples.files(updated_corpus))
    with open_store(built, version=1) as old, open_store(built) as new:
        shared = {entry.name for entry in old.manifest.segments} & {entry.name for entry in new.manifest.segments}
        number = next(
            number
            for number, segment in enumerate(new.arrays["segment"].tolist())
            if new.manifest.segments[segment].name in shared and new.arrays["length"][number] > 2
        )
    forged_array(built, "length", lambda array: array.__setitem__(number, array[number] - 1), version=2)
    found = {(problem.file, problem.kind) for problem in verify(built)}
    assert ("manifests/000002.json", "tokens") in found
    assert not any(file == MANIFEST for file, _ in found)


# The pass over a segment, against the slow way


@pytest.mark.parametrize("num_bytes", [2, BLOCK_BYTES, 4 * BLOCK_BYTES, 9 * BLOCK_BYTES + 1234])
def test_documents_hash_the_same_in_windows_as_at_once(scratch: Path, num_bytes: int):
    chance = np.random.default_rng(num_bytes)
    content = chance.integers(0, 256, num_bytes, np.uint8).tobytes()
    path = scratch / "tokens"
    path.write_bytes(content)
    for count in (0, 1, 2, 7, 300):
        borders = np.unique(chance.integers(0, num_bytes // 2 + 1, 2 * count)) * 2
        borders = borders[: len(borders) // 2 * 2]
        for ranges in (
            Ranges(starts=borders[::2], ends=borders[1::2]),  # with gaps
            Ranges(starts=borders[:-1], ends=borders[1:]),  # end to end
        ):
            checksums = samples.block_checksums(content)
            found = examine_segment(
                path, num_bytes=num_bytes, dtype=np.dtype("<u2"), checksums=checksums, ranges=ranges
            )
            slow = [token_hash(content[a:b]) for a, b in zip(ranges.starts, ranges.ends, strict=True)]
            assert [row.tobytes() for row in found.hashes] == slow
            assert found.bad_blocks == []
            assert found.largest_id == np.frombuffer(content, "<u2").max()


def test_worker_processes_find_the_same(large: Committed, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("penstock.store.verification.LEAST_BYTES_FOR_PROCESSES", 0)
    names = [name for name in large.files if name.endswith(".tokens")]
    assert sum((large.path / name).stat().st_size for name in names) < LEAST_BYTES_FOR_PROCESSES
    (large.path / names[0]).write_bytes(bytes((large.path / names[0]).stat().st_size))
    alone = examine(large.path, workers=1)
    together = examine(large.path, workers=3)
    assert alone.problems
    assert together.problems == alone.problems
    assert together.bytes == alone.bytes


def test_progress_ends_at_its_total(large: Committed):
    seen: list[tuple[int, int]] = []
    result = examine(large.path, on_progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (result.bytes, result.bytes)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# Signatures


def with_signatures(store: Path, data: bytes) -> None:
    """Adds an array of signatures to a store of version 1."""

    def change(content: dict[str, Any]) -> None:
        name = content["index"][0]["name"].rpartition("/")[0] + "/signatures.array"
        (store / name).write_bytes(data)
        content["index"] = [entry for entry in content["index"] if not entry["name"].endswith("/signatures.array")]
        content["index"].append({"name": name, "bytes": len(data), "checksum": checksum_hex(data)})

    forged_manifest(store, change)


def test_signatures_are_read_where_there_are_any(tiny: Path):
    expected = np.random.default_rng(1).integers(0, 2**16, (3, 128), np.uint16)
    with_signatures(tiny, expected.tobytes())
    with open_store(tiny) as opened:
        found = opened.signatures()
        assert found is not None
        assert np.array_equal(found, expected)
        assert not found.flags.writeable
    assert verify(tiny) == []


def test_damaged_signatures_are_refused(tiny: Path):
    data = bytes(3 * 256)
    with_signatures(tiny, data)
    [path] = (tiny / "index").rglob("signatures.array")
    with replaced(path, b"\1" + data[1:]):
        with open_store(tiny) as opened, pytest.raises(DamagedStoreError, match="checksum"):
            opened.signatures()
        assert {problem.file for problem in verify(tiny)} == {str(path.relative_to(tiny))}
    with_signatures(tiny, data[:-2])
    with open_store(tiny) as opened, pytest.raises(DamagedStoreError, match="documents"):
        opened.signatures()
    assert kinds(tiny) == {"meaning"}


# What the system refuses


def test_a_store_of_more_segments_than_open_files(scratch: Path):
    """The limit is raised where the system lets us; where not, one line says so."""
    build(scratch / "store", MemorySource([document(f"{number:03d}", b"%d" % number) for number in range(100)]))
    program = """
import resource, sys
from penstock.errors import PenstockError
from penstock.store import open_store
import penstock.tokenize.specification
soft, hard = map(int, sys.argv[2:])
with open_store(sys.argv[1]) as opened:
    opened.segment(0)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    try:
        print(sum(len(opened.document_tokens(number)) for number in range(100)))
    except PenstockError as error:
        print(type(error).__name__, error.message, error.hint, sep="|")
"""
    for soft, hard in ((30, 200), (30, 30)):
        done = subprocess.run(
            [sys.executable, "-c", program, scratch / "store", str(soft), str(hard)],
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        if hard > soft:
            assert int(done.stdout) == sum(len(str(number)) + 1 for number in range(100))
        else:
            assert done.stdout.startswith("DiskError|reading '")
            assert os.strerror(errno.EMFILE) in done.stdout
            assert "ulimit -n" in done.stdout


@pytest.mark.parametrize("name", [MANIFEST, "manifests", "split.array", ".blocks", ".tokens"])
def test_a_file_that_may_not_be_read_is_one_line(tiny: Path, name: str):
    """As a user without rights, which root isn't."""
    path = next(path for path in sorted(tiny.rglob("*")) if str(path).endswith(name))
    path.chmod(0)
    tiny.parent.chmod(0o755)
    program = """
import os, sys
from pathlib import Path
from penstock.errors import DiskError
from penstock.store import open_store, verify
import pyarrow.parquet, penstock.tokenize.specification, penstock.store.verification
if os.getuid() == 0:
    os.setuid(65534)
for ask in (lambda: [open_store(sys.argv[1]).document_tokens(number) for number in range(3)],
            lambda: print("verify", verify(Path(sys.argv[1])))):
    try:
        ask()
    except DiskError as error:
        print(error.message, error.hint)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tiny], capture_output=True, text=True, check=False, timeout=60
    )
    path.chmod(0o755)
    assert done.returncode == 0, done.stderr
    reader, checker = done.stdout.strip().split("\n")
    assert f"{path}" in reader
    assert os.strerror(errno.EACCES) in reader
    assert "ls -l" in reader
    assert os.strerror(errno.EACCES) in checker
    assert resource.RLIMIT_NOFILE is not None
    assert contents(tiny)


def test_no_store_is_said_so(scratch: Path):
    (scratch / "file").write_text("not a store")
    for path in (scratch / "nothing", scratch / "file", scratch):
        with pytest.raises(NotAStoreError):
            verify(path)
        with pytest.raises(NotAStoreError):
            open_store(path)


def test_reading_everything_is_what_the_tests_think_it_is(tiny: Path):
    read_everything(tiny)
    forged_file(tiny, "tokenizer.json", b"{}")
    with pytest.raises(Exception, match=r"tokenizer|JSON"):
        read_everything(tiny)
