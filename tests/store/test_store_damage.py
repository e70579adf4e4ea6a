"""Damage and forgery: files that are gone, and manifests that lie with a right checksum. `test_store_damage_bits.py`
has the accidents by the thousand, `test_store_damage_hostile.py` what hostile files cost."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.errors import DamagedStoreError, NotAStoreError, PenstockError
from penstock.store import open_store, verify
from penstock.store.layout import BLOCK_BYTES, INDEX_ARRAYS, REASONS

from . import samples
from .damage import forged_counts, read_everything, write_tiny_store
from .samples import (
    MemorySource,
    build,
    contents,
    document,
    forged_array,
    forged_digest,
    forged_file,
    forged_manifest,
    forged_table,
    forged_tokens,
    with_right_checksum,
)

FILES = [
    "000001.json",
    "tokenizer.json",
    "tokens",
    "blocks",
    "documents.parquet",
    *(f"{n}.array" for n in INDEX_ARRAYS),
]


@pytest.fixture
def tiny(scratch: Path) -> Path:
    return write_tiny_store(scratch / "tiny")


def name_of(store: Path, ending: str) -> str:
    """The first file of a kind, relative to the store."""
    return min(name for name in contents(store) if name.endswith(ending))


def problem_files(store: Path) -> set[str]:
    return {problem.file for problem in verify(store)}


# Accidents


def test_the_tiny_store_has_each_of_these_files_and_no_other(tiny):
    others = {name.rpartition("/")[2] for name in contents(tiny) if not name.startswith(("segments/", "cache/"))}
    assert others == {name for name in FILES if name not in ("tokens", "blocks")}
    assert {name.rpartition(".")[2] for name in contents(tiny) if name.startswith("segments/")} == {"tokens", "blocks"}
    assert all(contents(tiny).values())
    assert verify(tiny) == []
    read_everything(tiny)


@pytest.mark.parametrize("ending", FILES)
def test_a_deleted_file_is_found(tiny, ending):
    name = name_of(tiny, ending)
    (tiny / name).unlink()
    if ending == "000001.json":  # without its only commit it is no store
        with pytest.raises(NotAStoreError):
            verify(tiny)
        with pytest.raises(NotAStoreError):
            open_store(tiny)
        return
    assert problem_files(tiny) == {name}
    with pytest.raises(DamagedStoreError, match="missing"):
        open_store(tiny)


@pytest.mark.parametrize("ending", [name for name in FILES if name != "000001.json"])
def test_a_link_a_folder_and_a_fifo_in_place_of_a_file_are_refused(tiny, ending):
    """A link to the very same bytes as well: a name in a store must not lead out of it."""
    name = name_of(tiny, ending)
    elsewhere = tiny.with_name("elsewhere")
    (tiny / name).rename(elsewhere)
    for put in (lambda path: path.symlink_to(elsewhere), Path.mkdir, os.mkfifo):
        put(tiny / name)
        assert problem_files(tiny) == {name}
        with pytest.raises(DamagedStoreError):
            open_store(tiny)
        (tiny / name).rmdir() if (tiny / name).is_dir() and not (tiny / name).is_symlink() else (tiny / name).unlink()


def test_swapped_segments_are_found(scratch):
    """Two segments of one size change places, without and with their checksums."""
    store = scratch / "store"
    build(store, MemorySource([document(key, key.encode() * 9) for key in "abcd"]))
    one, two = (store / "segments" / path.name for path in (store / "segments").glob("*.tokens"))
    assert one.stat().st_size == two.stat().st_size
    swap(one, two)
    assert problem_files(store) == {f"segments/{path.name}" for path in (one, two)}
    with pytest.raises(DamagedStoreError):
        read_everything(store)
    swap(one.with_suffix(".blocks"), two.with_suffix(".blocks"))
    assert problem_files(store) == {f"segments/{path.stem}.blocks" for path in (one, two)}
    with pytest.raises(DamagedStoreError):
        read_everything(store)


def swap(one: Path, two: Path) -> None:
    first, second = one.read_bytes(), two.read_bytes()
    one.write_bytes(second)
    two.write_bytes(first)


def test_a_stale_blocks_file_is_found(built, scratch):
    tokens, blocks = name_of(built, ".tokens"), name_of(built, ".blocks")
    others = [path for path in (built / "segments").glob("*.blocks") if path != built / blocks]
    assert (built / blocks).stat().st_size == others[0].stat().st_size
    shutil.copy(others[0], built / blocks)
    assert problem_files(built) == {blocks}
    with pytest.raises(DamagedStoreError, match="blocks"):
        read_everything(built)
    assert tokens in contents(built)


def test_a_manifest_copied_over_another_version_is_found(built, updated_corpus):
    build(built, samples.files(updated_corpus))
    first, second = (built / "manifests" / f"00000{number}.json" for number in (1, 2))
    second.write_bytes(first.read_bytes())
    assert problem_files(built) == {"manifests/000002.json"}
    with pytest.raises(DamagedStoreError, match="version 1"):
        open_store(built)
    with open_store(built, version=1) as opened:
        assert opened.digest == samples.GOLDEN_FILES


def test_damage_to_what_two_versions_share_is_reported_once(built, updated_corpus):
    build(built, samples.files(updated_corpus))
    with open_store(built, version=1) as old, open_store(built) as new:
        [shared, *_] = {entry.name for entry in old.manifest.segments} & {entry.name for entry in new.manifest.segments}
    path = built / "segments" / f"{shared}.tokens"
    whole = path.read_bytes()
    for damaged in (whole[:-1] + bytes([whole[-1] ^ 1]), whole[:-2]):
        path.write_bytes(damaged)
        assert [problem.file for problem in verify(built)] == [f"segments/{shared}.tokens"]


def test_all_damage_is_listed_at_once(built):
    names = [name_of(built, ending) for ending in ("split.array", "tokenizer.json", ".tokens")]
    for name in names:
        (built / name).write_bytes(bytes((built / name).stat().st_size))
    assert problem_files(built) == set(names)


class TestPayload:
    """Segments of several blocks: damage is found when its block is first touched, and only then."""

    @pytest.fixture
    def large(self, scratch: Path) -> Path:
        text = np.random.default_rng(5).integers(97, 123, 5 * BLOCK_BYTES // 2, np.uint8).tobytes()
        half = len(text) // 2
        build(scratch / "large", MemorySource([document("a", text[:half]), document("b", text[half:])]))
        return scratch / "large"

    @pytest.fixture
    def tokens(self, large: Path) -> Path:
        [path] = (large / "segments").glob("*.tokens")
        assert path.stat().st_size > 4 * BLOCK_BYTES
        return path

    def test_a_flipped_bit_on_first_touch_of_its_block(self, large, tokens):
        whole = tokens.read_bytes()
        chance = random.Random(11)
        for _ in range(30):
            position = chance.randrange(len(whole))
            damaged = bytearray(whole)
            damaged[position] ^= 1 << chance.randrange(8)
            tokens.write_bytes(damaged)
            with open_store(large) as opened:
                blocks = BLOCK_BYTES // opened.dtype.itemsize
                for start in range(0, len(whole) // 2, blocks):
                    length = min(blocks, len(whole) // 2 - start)
                    if start <= position // 2 < start + length:
                        with pytest.raises(DamagedStoreError, match=tokens.name):
                            opened.read(0, start, length)
                    else:
                        read = opened.read(0, start, length).tobytes()
                        assert read == whole[2 * start : 2 * (start + length)]
            assert problem_files(large) == {f"segments/{tokens.name}"}

    def test_a_zeroed_page_and_a_swapped_block(self, large, tokens):
        whole = tokens.read_bytes()
        first, second = whole[:BLOCK_BYTES], whole[BLOCK_BYTES : 2 * BLOCK_BYTES]
        rest = whole[2 * BLOCK_BYTES :]
        zeroed = whole[:8192] + bytes(4096) + whole[12288:]
        for damaged, document_number in ((zeroed, 0), (second + first + rest, 0)):
            tokens.write_bytes(damaged)
            with open_store(large) as opened, pytest.raises(DamagedStoreError, match=tokens.name):
                opened.document_tokens(document_number)
            assert problem_files(large) == {f"segments/{tokens.name}"}

    def test_a_check_is_not_forgotten_and_not_assumed(self, large, tokens):
        with open_store(large) as opened:
            spans = [np.array(values) for values in ([0, 0], [0, BLOCK_BYTES], [100, 100])]
            assert opened.unchecked(*spans).tolist() == [True, True]
            opened.read(0, 0, 100)
            assert opened.unchecked(*spans).tolist() == [False, True]

    def test_tokens_can_not_be_written_through(self, large):
        with open_store(large) as opened:
            tokens = opened.document_tokens(0)
            assert not tokens.flags.writeable
            with pytest.raises(ValueError, match="read-only"):
                tokens[0] = 1


UNDER_O = """
import sys
from pathlib import Path
assert not __debug__
try:
    assert False
except AssertionError:
    raise SystemExit("asserts are on")
from penstock.errors import DamagedStoreError
from penstock.store import open_store, verify
store = Path(sys.argv[1])
missed, count = [], 0
for path in sorted(path for path in store.rglob("*") if path.is_file() and path.parent.name != "cache"):
    whole = path.read_bytes()
    places = range(0, len(whole), 1 + len(whole) // 16)
    changes = [whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :] for at in places]
    changes += [whole[:length] for length in places]
    for damaged in changes:
        count += 1
        path.write_bytes(damaged)
        if str(path.relative_to(store)) not in {problem.file for problem in verify(store)}:
            missed.append(["verify", str(path)])
        try:
            with open_store(store) as opened:
                for number in range(opened.num_documents): opened.document_tokens(number)
                opened.provenance(), opened.tokenizer()
            missed.append(["reader", str(path)])
        except DamagedStoreError:
            pass
    path.write_bytes(whole)
print(count, missed, verify(store))
"""


def test_damage_is_found_without_asserts(tiny):
    done = subprocess.run(
        [sys.executable, "-O", "-c", UNDER_O, tiny], capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr
    count, rest = done.stdout.split(maxsplit=1)
    assert int(count) > 250
    assert rest.strip() == "[] []"


# Forgeries: manifests that somebody wrote by hand, with a right checksum


def manifest_text(store: Path) -> str:
    return (store / "manifests" / "000001.json").read_text()


def put_text(store: Path, text: str | bytes) -> None:
    data = text.encode() if isinstance(text, str) else text
    (store / "manifests" / "000001.json").write_bytes(with_right_checksum(data))


RAW = {
    "twice": lambda text: text.replace("{\n", '{\n  "version": 1,\n', 1),
    "twice inside": lambda text: text.replace('"tokens":', '"tokens": 3, "tokens":', 1),
    "deep lists": lambda text: text.replace("{\n", '{\n  "deep": ' + "[" * 200_000 + "]" * 200_000 + ",\n", 1),
    "deep objects": lambda text: text.replace(
        "{\n", '{\n  "deep": ' + '{"a":' * 50_000 + "1" + "}" * 50_000 + ",\n", 1
    ),
    "unclosed": lambda text: "[" * 1_000_000 + text,
    "long number": lambda text: text.replace('"version": 1', '"version": 1' + "0" * 100_000, 1),
    "not JSON": lambda text: "hello " + text,
    "not text": lambda text: b"\xff\xfe\x00\x01" + text.encode(),
    "nothing": lambda text: text[-68:],
    "only a checksum": lambda text: '{"checksum": "' + text[-68:],
    "another last field": lambda text: text.replace('"checksum"', '"checksums"'),
    "a long list": lambda text: text.replace("{\n", '{\n  "more": [' + "0," * 1_000_000 + "0],\n", 1),
}


@pytest.mark.parametrize("case", RAW)
def test_a_malformed_manifest_with_a_right_checksum_is_refused(tiny, case):
    put_text(tiny, RAW[case](manifest_text(tiny)))
    with pytest.raises(DamagedStoreError):
        open_store(tiny)
    assert [(problem.file, problem.kind) for problem in verify(tiny)] == [("manifests/000001.json", "manifest")]


HUGE = 2**70
LIES: dict[str, Any] = {
    "version": [2, -1, 1.0, True, "1", None, HUGE],
    "digest": [1, None],
    "dtype": ["<f4", "O", ">u2", "<u8", "S9999999999", "<u2,<u4", "", None, 16],
    "num_documents": [HUGE, -1, 0, 4, 3.0, "3", None],
    "block_bytes": [1, 0, HUGE, None],
    "reasons": [[], ["kept"], ["duplicate", "kept", "copy-across-splits"], None],
    "splits": [[], [1], {}, "abc", None],
    "sources": [[], [1], [{}], [{"name": 1, "location": ""}], None],
    "segments": [[], {}, [1], [{}], 5, "abc", None],
    "index": [[], {}, [1], [{}], 5, "abc", None],
    "tokenizer": [{}, [], None, {"digest": "", "origin": "", "end_id": "x", "control_tokens": {}}],
    "tokenizer_file": [{}, [], None, 5],
    "counts": [{}, [], None, {"documents": HUGE}],
    "options": [[], None, 5],
    "created": [5, None],
    "skipped_examples": [[], None],
    "format": ["penstock", 1, None],
    "format_version": [2, "1", None],
    "unknown": [1],
}


@pytest.mark.parametrize("field", LIES)
def test_a_manifest_of_wrong_types_or_values_is_refused(tiny, field):
    whole = manifest_text(tiny)
    for value in LIES[field]:
        forged_manifest(tiny, lambda content, value=value: content.update({field: value}))
        with pytest.raises(DamagedStoreError):
            open_store(tiny)
        assert "manifests/000001.json" in problem_files(tiny), f"{field} = {value!r}"
        (tiny / "manifests" / "000001.json").write_text(whole)


@pytest.mark.parametrize("field", [name for name in LIES if name not in ("unknown", "format", "format_version")])
def test_a_manifest_without_a_field_is_refused(tiny, field):
    optional = {"block_bytes", "reasons", "skipped_examples"}  # the format fixes their values
    forged_manifest(tiny, lambda content: content.pop(field))
    if field in optional:
        read_everything(tiny)
        return
    with pytest.raises(DamagedStoreError):
        open_store(tiny)
    assert problem_files(tiny) == {"manifests/000001.json"}


OUTSIDE = [
    "../x", "/etc/passwd", "segments/../../x", ".", "..", "", "a\0b", "a/b/c/d", "index", "index/../x/y", "a b", "~/x",
    "x" * 4096, "index//x", "C:\\x", "-rf", ".hidden",
]  # fmt: skip


@pytest.mark.parametrize("where", ["segments", "index", "tokenizer_file"])
def test_names_that_lead_out_of_the_store_are_refused(tiny, where):
    whole = manifest_text(tiny)
    fine = {"index"} if where == "segments" else set()  # there it names segments/index.tokens
    for name in [*sorted(set(OUTSIDE) - fine), 5, None, ["x"]]:

        def change(content: dict[str, Any], name: Any = name) -> None:
            entry = content[where] if where == "tokenizer_file" else content[where][0]
            entry["name"] = name

        forged_manifest(tiny, change)
        with pytest.raises(DamagedStoreError):
            open_store(tiny)
        assert [problem.kind for problem in verify(tiny)] == ["manifest"]
        (tiny / "manifests" / "000001.json").write_text(whole)


@pytest.mark.parametrize("field", ["bytes", "tokens", "checksum"])
@pytest.mark.parametrize("value", [HUGE, 2**63, -1, 0, 1, 1.5, None, "0", True])
def test_a_segment_of_a_wrong_size_is_refused(tiny, field, value):
    forged_manifest(tiny, lambda content: content["segments"][0].update({field: value}))
    with pytest.raises(DamagedStoreError):
        read_everything(tiny)
    assert verify(tiny)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_no_forged_manifest_makes_reader_or_verify_stumble(tiny, data):
    """Any value anywhere in the manifest: it is refused, or it made no difference; nothing else is ever raised."""
    whole = manifest_text(tiny)

    def change(content: dict[str, Any]) -> None:
        place: Any = content
        while True:
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys))
            deeper = isinstance(place[key], dict | list) and len(place[key]) > 0
            if not deeper or data.draw(st.booleans()):
                place[key] = data.draw(json_values)
                return
            place = place[key]

    try:
        forged_manifest(tiny, change)
        try:
            open_store(tiny).close()
            opens = True
        except DamagedStoreError:
            opens = False
        try:
            read_everything(tiny)
        except PenstockError:
            assert verify(tiny)
        assert opens or verify(tiny)
    finally:
        (tiny / "manifests" / "000001.json").write_text(whole)


# Forgeries: an index whose checksums fit but that points nowhere, or lies


def put(position: int, value: int) -> Any:
    return lambda array: array.__setitem__(position, value)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("segment", put(1, 2)),
        ("segment", put(1, 2**32 - 1)),
        ("offset", put(0, 10**6)),
        ("offset", put(0, 2**64 - 1)),  # plus the length it is small again
        ("length", put(2, 9)),
        ("length", put(0, 2**32 - 1)),
        ("split", put(0, 3)),
        ("source", put(2, 1)),
        ("reason", put(0, len(REASONS))),
        ("loss_documents", put(0, 3)),
        ("loss_documents", lambda array: [2, 2]),
        ("loss_starts", put(0, 1)),
        ("loss_starts", put(1, 2)),
        ("loss_starts", lambda array: []),
        ("loss_runs", put(1, 9)),
        ("loss_runs", lambda array: [0, 1, 2]),
        ("length", lambda array: [*array, 1]),
        ("split", lambda array: array[:-1]),
    ],
)
def test_an_index_that_points_nowhere_is_refused(tiny, name, change):
    forged_array(tiny, name, change)
    with pytest.raises(DamagedStoreError):
        open_store(tiny)
    assert problem_files(tiny) == {"manifests/000001.json"}


def test_an_array_of_half_a_row_is_refused(tiny):
    forged_file(tiny, "offset.array", bytes(23))
    with pytest.raises(DamagedStoreError):
        open_store(tiny)
    assert problem_files(tiny) == {"manifests/000001.json"}


@pytest.mark.parametrize(
    "change",
    [
        lambda table: table.slice(1),
        lambda table: table.drop_columns(["content_hash"]),
        lambda table: table.rename_columns([*table.column_names[:-1], "other"]),
        lambda table: table.set_column(0, "key", [[1, 2, 3]]),
        lambda table: table.set_column(0, table.schema.field("key"), [[b"a", None, b"c"]]),
    ],
)
def test_a_table_of_documents_that_is_none_is_refused(tiny, change):
    forged_table(tiny, change)
    with open_store(tiny) as opened, pytest.raises(DamagedStoreError):
        opened.provenance()
    assert problem_files(tiny) == {"manifests/000001.json"}


@pytest.mark.parametrize("name", ["documents.parquet", "tokenizer.json"])
def test_another_file_under_a_right_checksum_is_refused(tiny, name):
    forged_file(tiny, name, b"PAR1 something else PAR1")
    with pytest.raises(PenstockError):
        read_everything(tiny)
    assert problem_files(tiny) == {"manifests/000001.json"}


def kinds(store: Path) -> list[str]:
    return [problem.kind for problem in verify(store)]


def test_a_wrong_digest_is_found(tiny):
    forged_manifest(tiny, lambda content: content.update(digest="0" * 64))
    assert kinds(tiny) == ["digest"]
    forged_digest(tiny)
    assert kinds(tiny) == []


def test_split_names_that_were_not_those_of_the_build_are_found(tiny):
    forged_manifest(tiny, lambda content: content.update(splits=["test", "val", "train"]))
    assert set(kinds(tiny)) == {"splits", "counts"}
    for split in (5, None, [5], [[]], "train", {"train": "1"}):
        forged_manifest(tiny, lambda content, split=split: content["options"].update(split=split))
        assert set(kinds(tiny)) == {"digest", "splits", "counts"}


def test_options_that_were_not_those_of_the_build_are_found(tiny):
    forged_manifest(tiny, lambda content: content["options"].update(seed=1))
    assert kinds(tiny) == ["digest"]


def test_tokens_that_are_not_the_documents_are_found(tiny):
    forged_tokens(tiny, put(0, 7))
    assert kinds(tiny) == ["tokens"]


def test_a_document_that_reads_another_ones_tokens_is_found(tiny):
    with open_store(tiny) as opened:
        assert opened.arrays["segment"][0] == opened.arrays["segment"][1]
    forged_array(tiny, "offset", lambda array: array[[1, 0, 2]])
    assert kinds(tiny) == ["tokens", "tokens"]


def test_a_leak_is_found(scratch, corpus):
    """The same content in two splits, in a store that is perfect otherwise."""
    build(scratch / "store", samples.files(corpus))
    with open_store(scratch / "store") as opened:
        reasons = opened.arrays["reason"].tolist()
    forged_array(scratch / "store", "reason", put(reasons.index(2), 0))
    assert set(kinds(scratch / "store")) == {"digest", "counts", "leak"}
    forged_digest(scratch / "store")
    forged_counts(scratch / "store")
    [leak] = verify(scratch / "store")
    assert leak.kind == "leak"
    copied = {"corpus/copy.txt", "corpus/part0/3.txt"}
    with open_store(scratch / "store") as opened:
        keys = opened.provenance()["key"].to_pylist()
    numbers = [number for number, key in enumerate(keys) if key.decode() in copied]
    assert all(str(number) in leak.detail for number in numbers)


def test_forgery_leaves_a_store_whole_when_it_changes_nothing(tiny):
    """The premise of the tests above."""
    before = contents(tiny)
    forged_manifest(tiny, lambda content: None)
    forged_array(tiny, "split", lambda array: None)
    forged_tokens(tiny, lambda tokens: None)
    forged_digest(tiny)
    assert contents(tiny) == before
    forged_table(tiny, lambda table: table)
    assert verify(tiny) == []
    assert json.loads(manifest_text(tiny))["digest"] == json.loads(before["manifests/000001.json"])["digest"]
