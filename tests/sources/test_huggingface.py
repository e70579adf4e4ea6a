"""`hf:` words to tables: names, configs, splits, what is missing, what is refused. Caches are made by hand; two tests
hold their layout against what the real libraries write."""

from __future__ import annotations

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import InputError, MissingExtraError
from penstock.sources import InputOptions, TableOptions, sources_from_inputs
from penstock.sources.huggingface.cache import Scan, cache_folders
from penstock.sources.huggingface.files import missing_shards, parse_card, splits_of, tables_among
from penstock.sources.huggingface.processed import find_processed
from penstock.sources.huggingface.repository import find_hub
from penstock.sources.huggingface.words import PRESETS, readings_of


def load_caches() -> ModuleType:
    spec = importlib.util.spec_from_file_location("huggingface_caches", Path(__file__).parent / "huggingface_caches.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


caches = load_caches()
REVISION = caches.REVISION
CARD = """---
configs:
- config_name: big
  data_files:
  - split: train
    path: big/train-*
  - split: test
    path: [big/test-*]
- config_name: small
  data_files: small/*
  default: true
dataset_info:
- config_name: big
  features:
  - name: text
    dtype: string
  splits:
  - name: train
    num_bytes: 31
    num_examples: 4
  - name: test
    num_bytes: 8
    num_examples: 1
  download_size: 1
  dataset_size: 39
---
# A data set
"""
REPOSITORY = {
    "README.md": CARD.encode(),
    "big/train-00000-of-00002.parquet": caches.parquet(["one", "two"]),
    "big/train-00001-of-00002.parquet": caches.parquet(["three", "four"]),
    "big/test-00000-of-00001.parquet": caches.parquet(["five"]),
    "small/only.jsonl": caches.jsonl(["six"]),
}


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    return caches.HandMadeCaches(tmp_path / "home")


def read(word: str, **options: object) -> dict[str, str]:
    """Keys and texts of a word's documents."""
    (source,) = sources_from_inputs([word], options=InputOptions(**options))
    documents = [document for unit in source.units(1 << 20) for document in source.read(unit).documents]
    source.close()
    return {document.key.decode(): document.parts[0].data.decode() for document in documents}


def texts(word: str, **options: object) -> list[str]:
    return list(read(word, **options).values())


def refusal(word: str, **options: object) -> InputError:
    with pytest.raises(InputError) as raised:
        read(word, **options)
    assert raised.value.hint
    return raised.value


# --- words ------------------------------------------------------------------------------------------------------------


def test_a_word_of_two_parts_is_an_owner_and_a_name_or_a_name_and_a_config():
    (exact,) = readings_of("hf:Salesforce/wikitext/wikitext-103-raw-v1:train")
    assert (exact.names, exact.config, exact.splits) == (("Salesforce/wikitext",), "wikitext-103-raw-v1", "train")
    assert [(reading.names, reading.config) for reading in readings_of("hf:a/b")] == [(("a/b",), None), (("a",), "b")]
    assert [(reading.names, reading.config) for reading in readings_of("hf:a")] == [(("a",), None)]


@pytest.mark.parametrize("name", PRESETS)
def test_presets_stand_for_full_names_with_a_column_of_text(name: str):
    preset = readings_of(f"hf:{name}:validation")[0]
    assert "/" in preset.names[0]
    assert (preset.splits, preset.text_field) == ("validation", "text")


def test_a_preset_takes_another_config():
    assert readings_of("hf:fineweb-edu")[0].config == "sample-10BT"
    assert readings_of("hf:finewebedu/sample-100BT")[0].config == "sample-100BT"


@pytest.mark.parametrize(
    "word",
    "hf:,hf:/,hf:a//b,hf:a/b/c/d,hf:../x,hf:a/..,hf:.a,hf:a b,hf:a:,hf:a:train[:10%],hf:a:../x,hf:a:b:c,hf:a\n,hf:a\0,"
    f"hf:{'a' * 300},hf:\u202e,hf:é".split(","),
)
def test_what_names_no_data_set_is_refused_on_one_line(home, word: str):
    error = refusal(word)
    assert "\n" not in error.message
    assert "\u202e" not in error.message


@given(st.text(max_size=40))
def test_any_text_is_read_or_refused(text: str):
    try:
        readings = readings_of("hf:" + text)
    except InputError:
        return
    assert all(".." not in name.split("/") and "\0" not in name for reading in readings for name in reading.names)


# --- which files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("paths", "config", "expected"),
    [
        (["a.parquet", "b.parquet", "notes.txt"], None, {"train": ["a.parquet", "b.parquet"]}),
        (["train.csv", "test.csv", "x.csv"], None, {"train": ["train.csv"], "test": ["test.csv"]}),
        (["x/dev/a.csv", "x/train/a.csv"], None, {"train": ["x/train/a.csv"], "validation": ["x/dev/a.csv"]}),
        (
            ["data/odd-00000-of-00001-1f2e.parquet", "data/train-00000-of-00001-1f2e.parquet", "TinyStories-train.csv"],
            None,
            {"train": ["data/train-00000-of-00001-1f2e.parquet"], "odd": ["data/odd-00000-of-00001-1f2e.parquet"]},
        ),
        (["c/odd-00000-of-00001.csv", "d/odd-00000-of-00001.csv"], "c", {"odd": ["c/odd-00000-of-00001.csv"]}),
        (["sample/10BT/0.parquet", "sample/100BT/0.parquet"], "sample-10BT", {"train": ["sample/10BT/0.parquet"]}),
        (["data/CC-1/000.parquet", "data/CC-2/000.parquet"], "CC-2", {"train": ["data/CC-2/000.parquet"]}),
        (["train.parquet", "train.csv"], None, {"train": ["train.parquet"]}),
        ([".hidden.csv", "__x__/a.csv", ".git/b.csv"], None, {}),
        (["training_set.jsonl", "restrain.jsonl"], None, {"train": ["training_set.jsonl"]}),
        (["a.csv"], "nothing", {}),
        ([], None, {}),
    ],
)  # fmt: skip
def test_splits_follow_the_names_of_files_and_folders(paths, config, expected):
    found = splits_of(tables_among(paths), parse_card(""), config)
    assert {split: sorted(files) for split, files in found.items()} == {k: sorted(v) for k, v in expected.items()}


def test_splits_follow_the_readme():
    card = parse_card(CARD)
    assert card.default == "small"
    assert splits_of(tables_among(REPOSITORY), card, None) == {"train": ("small/only.jsonl",)}
    assert splits_of(tables_among(REPOSITORY), card, "big")["test"] == ("big/test-00000-of-00001.parquet",)
    assert card.rows["big"] == {"train": 4, "test": 1}


@pytest.mark.parametrize(
    ("data_files", "expected"),
    [
        ("data_files: '**/*.csv'", ["a.csv", "x/b.csv", "x/y/c.csv"]),
        ("data_files: ['a.csv', 'x/?.csv']", ["a.csv", "x/b.csv"]),
        ("data_files: './x/**'", ["x/b.csv", "x/y/c.csv"]),
        ("data_dir: x", ["x/b.csv", "x/y/c.csv"]),
        ("data_files: '*.csv'\n  data_dir: x/y", ["x/y/c.csv"]),
        ("data_files: ../../etc/*", []),
        ("data_files: https://example.org/a.csv", []),
        ("data_files: 17", ["a.csv", "x/b.csv", "x/y/c.csv"]),
        ("data_files: [{split: 'a-b', path: '*.csv'}]", ["a.csv", "x/b.csv", "x/y/c.csv"]),
    ],
)
def test_patterns_of_a_readme_meet_only_the_repository(data_files: str, expected: list[str]):
    card = parse_card(f"---\nconfigs:\n- config_name: c\n  {data_files}\n---\n")
    found = splits_of(tables_among(["a.csv", "x/b.csv", "x/y/c.csv", "README.md"]), card, None)
    assert [path for files in found.values() for path in files] == expected


def test_a_hostile_readme_costs_little():
    assert parse_card("---\nconfigs: [" + "[" * 5000 + "\n---\n").problem
    assert parse_card("---\na: *b\n---\n").problem
    assert parse_card("---\n- 1\n---\n").configs == {}
    stars = "/".join(["**", "*a*a*a*a*a*a*a*a*a*b"] * 12)
    card = parse_card(f"---\nconfigs:\n- config_name: c\n  data_files: '{stars}'\n---\n")
    assert splits_of(["/".join(["a" * 200] * 30) + ".csv"] * 50, card, None) == {}


def test_missing_shards_are_named():
    here = [f"train-{number:05d}-of-00005-ab12.parquet" for number in (0, 2, 3)]
    assert missing_shards(here) == ["train-00001-of-00005", "train-00004-of-00005"]
    assert missing_shards(["c4-train.00000-of-00002.jsonl.gz"]) == ["c4-train.00001-of-00002"]
    assert missing_shards(["000_00000.parquet", "a-of-b.parquet"]) == []


# --- the processed cache ----------------------------------------------------------------------------------------------


def test_a_processed_data_set_is_read_shard_by_shard(home):
    home.processed("roneneldan___tiny_stories", {"train": [["a", "b"], ["c"]], "validation": [["v"]]})
    assert read("hf:roneneldan/TinyStories") == {
        "roneneldan--TinyStories/train/tiny_stories-train-00000-of-00002.arrow#000000000000000": "a",
        "roneneldan--TinyStories/train/tiny_stories-train-00000-of-00002.arrow#000000000000001": "b",
        "roneneldan--TinyStories/train/tiny_stories-train-00001-of-00002.arrow#000000000000000": "c",
    }
    assert texts("hf:tinystories:validation") == ["v"]
    assert texts("hf:roneneldan/TinyStories/default:all") == ["a", "b", "c", "v"]
    assert texts("hf:roneneldan/TinyStories:validation+train") == ["a", "b", "c", "v"]


def test_a_split_that_nobody_named_is_counted_not_lost(home):
    home.processed("json", {"train": [["a"]], "test": [["t"], ["u"]]})
    (source,) = sources_from_inputs(["hf:json"])
    assert [unit.skips.counts for unit in source.units(1)] == [{"other-split": 2}]
    (source,) = sources_from_inputs(["hf:json:train"])
    assert [unit.skips.counts for unit in source.units(1)] == [{}]


def test_keys_do_not_depend_on_where_the_cache_is_nor_on_the_revision(home, tmp_path: Path, monkeypatch):
    home.raw("org/name", REPOSITORY)
    before = read("hf:org/name/big")
    other = caches.HandMadeCaches(tmp_path / "elsewhere" / "deep")
    other.raw("org/name", REPOSITORY, revision="f" * 40, main="f" * 40)
    monkeypatch.setenv("HF_HUB_CACHE", str(other.hub))
    assert read("hf:org/name/big") == before
    assert next(iter(before)) == "org--name/train/big/train-00000-of-00002.parquet#000000000000000"


def test_the_build_made_last_is_taken_and_what_map_left_is_not(home):
    old = home.processed("name", {"train": [["old"]]}, build="b" * 16)
    new = home.processed("name", {"train": [["new"]]}, build="a" * 16)
    caches.write_arrow(new / "cache-0123456789abcdef.arrow", ["mapped"])
    caches.write_arrow(new / "cache-0123456789abcdef_00000_of_00002.arrow", ["mapped"])
    os.utime(old, (1_500_000_000, 1_500_000_000))
    assert texts("hf:name") == ["new"]


def test_a_build_with_options_of_its_own_is_taken_only_by_its_full_name(home):
    home.processed("name", {"train": [["some"]]}, config_folder="default-0123456789abcdef")
    assert "default-0123456789abcdef" in refusal("hf:name").message
    assert texts("hf:name/default-0123456789abcdef") == ["some"]


def test_several_configs_have_to_be_told_apart(home):
    home.processed("wikitext", {"train": [["two"]]}, config="wikitext-2-raw-v1")
    assert texts("hf:wikitext") == ["two"]
    home.processed("wikitext", {"train": [["many"]]}, config="wikitext-103-raw-v1")
    error = refusal("hf:wikitext")
    assert "wikitext-2-raw-v1" in error.message
    assert "hf:wikitext/wikitext-103-raw-v1" in error.hint
    assert texts("hf:wikitext/wikitext-2-raw-v1") == ["two"]
    assert texts("hf:wikitext-103") == ["many"]  # the preset knows the older name too
    assert "wikitext-9" in refusal("hf:wikitext/wikitext-9").message


def test_unfinished_builds_are_refused_with_the_numbers(home):
    folder = home.processed("name", {"train": [["a"], ["b"], ["c"]]})
    (folder / "name-train-00001-of-00003.arrow").unlink()
    error = refusal("hf:name")
    assert "2 of 3" in error.message
    assert "00001-of-00003" in error.message
    (folder / "name-train-00000-of-00003.arrow").unlink()
    (folder / "name-train-00002-of-00003.arrow").unlink()
    assert "0 of 3" in refusal("hf:name").message
    (folder / "dataset_info.json").unlink()
    assert refusal("hf:name:train").message


def test_a_build_that_was_broken_off_is_refused_unless_another_is_whole(home):
    home.processed("name", {"train": [["half"]]}, build="a" * 16 + ".incomplete")
    error = refusal("hf:name")
    assert "broken off" in error.message
    assert ".incomplete" in error.message
    home.processed("name", {"train": [["whole"]]}, build="b" * 16)
    assert texts("hf:name") == ["whole"]


@pytest.mark.parametrize(
    "junk", ["", "{", "[]", "[" * 100_000, '{"splits": 1}', '{"splits": {"train": 3}}', "9" * 9999]
)
def test_a_broken_info_file_never_tears_anything_down(home, junk: str):
    folder = home.processed("name", {"train": [["a"]]})
    (folder / "dataset_info.json").write_text(junk)
    data_set = find_processed(str(home.datasets), "name", Scan())
    assert data_set is not None
    if junk.startswith("{") and len(junk) > 1:
        assert texts("hf:name") == ["a"]  # all that matters is in the files' own names
    else:
        assert "dataset_info.json" in refusal("hf:name").message


# --- the hub cache ----------------------------------------------------------------------------------------------------


def test_raw_files_are_read_by_the_readme(home):
    home.raw("org/name", REPOSITORY)
    assert texts("hf:org/name") == ["six"]
    assert texts("hf:org/name/big") == ["one", "two", "three", "four"]
    assert texts("hf:org/name/big:test") == ["five"]
    assert "'validation'" in refusal("hf:org/name/big:validation").message


def test_raw_files_are_read_by_their_names_where_there_is_no_readme(home):
    files = {path: data for path, data in REPOSITORY.items() if path != "README.md"}
    home.raw("HuggingFaceFW/fineweb-edu", {"sample/10BT/000_00000.parquet": caches.parquet(["edu"])})
    home.raw("org/name", files)
    assert texts("hf:fineweb-edu") == ["edu"]
    assert texts("hf:org/name/big:test") == ["five"]


def test_a_readme_with_several_configs_and_no_default_needs_one_named(home):
    home.raw("org/name", {**REPOSITORY, "README.md": CARD.replace("  default: true\n", "").encode()})
    error = refusal("hf:org/name")
    assert "big, small" in error.message
    assert "hf:org/name/big" in error.hint
    home.raw("org/bare", {"README.md": CARD.encode()})
    assert "none of its tables is here" in refusal("hf:org/bare").message


def test_what_can_not_be_seen_whole_is_refused(home, monkeypatch: pytest.MonkeyPatch):
    home.raw("org/name", REPOSITORY)
    monkeypatch.setattr(Scan.__init__, "__kwdefaults__", {"max_entries": 9})
    assert "beyond-limit" in refusal("hf:org/name").message
    monkeypatch.undo()
    monkeypatch.setenv("HF_HOME", str(home.home))
    home.raw("org/deep", {"train.jsonl": caches.jsonl(["a"]), "x/" * 40 + "train.jsonl": caches.jsonl(["b"])})
    assert "too-deep" in refusal("hf:org/deep").message


def test_the_processed_cache_comes_first_and_the_raw_one_fills_in(home):
    home.raw("org/name", REPOSITORY)
    folder = home.processed("org___name", {"train": [["processed"]]}, config="big")
    assert texts("hf:org/name/big") == ["processed"]
    assert texts("hf:org/name/big:test") == ["five"]
    (folder / "dataset_info.json").unlink()
    assert texts("hf:org/name/big") == ["one", "two", "three", "four"]


def test_refs_main_chooses_the_revision(home):
    home.raw("name", {"train.jsonl": caches.jsonl(["old"])}, revision="1" * 40, main=None)
    assert texts("hf:name") == ["old"]  # the only one
    snapshot = home.raw("name", {"train.jsonl": caches.jsonl(["new"])}, revision="2" * 40, main=None)
    assert "refs/main" in refusal("hf:name").message
    refs = snapshot.parents[1] / "refs"
    refs.mkdir()
    for content, expected in (("1" * 40, ["old"]), ("2" * 40 + "\n", ["new"])):
        (refs / "main").write_text(content)
        assert texts("hf:name") == expected
    for content in ("3" * 40, "../../..", "\0"):
        (refs / "main").write_text(content)
        assert "refs/main" in refusal("hf:name").message


def test_links_lead_nowhere_but_into_the_data_set(home, tmp_path: Path):
    secret = tmp_path / "secret.jsonl"
    secret.write_bytes(caches.jsonl(["secret"]))
    other = home.raw("org/other", {"train.jsonl": caches.jsonl(["other"])})
    snapshot = home.raw("org/name", {"train.jsonl": caches.jsonl(["own"])})
    link = snapshot / "train.jsonl"
    for target in (secret, other / "train.jsonl", Path("/dev/zero"), snapshot):
        link.unlink()
        link.symlink_to(target)
        assert "no file of the cache's own" in refusal("hf:org/name").message
    link.unlink()
    link.symlink_to("train.jsonl")  # a loop
    assert "missing" in refusal("hf:org/name").message
    link.unlink()
    link.symlink_to(tmp_path)
    (snapshot / "folder").symlink_to(tmp_path)
    assert "no file of the cache's own" in refusal("hf:org/name").message
    link.unlink()
    link.write_bytes(caches.jsonl(["a copy, where links aren't supported"]))
    assert texts("hf:org/name") == ["a copy, where links aren't supported"]


def test_blobs_that_repositories_share_are_followed(home):
    snapshot = home.raw("org/name", {"train.jsonl": caches.jsonl(["shared"])})
    blob = (snapshot / "train.jsonl").resolve()
    shared = home.hub / "blobs" / "ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert texts("hf:org/name") == ["shared"]
    data_set = find_hub(str(home.hub), "org/name", Scan())
    assert sum(data_set.inodes.values()) == shared.stat().st_size


def test_a_fifo_in_the_cache_is_no_table_and_nothing_hangs(home):
    snapshot = home.raw("name", {"train.jsonl": caches.jsonl(["a"])})
    (snapshot / "train.jsonl").unlink()
    os.mkfifo(snapshot / "train.jsonl")
    assert refusal("hf:name")
    os.remove(home.hub / "datasets--name" / "refs" / "main")
    os.mkfifo(home.hub / "datasets--name" / "refs" / "main")
    assert refusal("hf:name")


def test_missing_shards_of_raw_files_are_refused_with_the_numbers(home):
    files = {f"data/train-{n:05d}-of-00004.parquet": caches.parquet([str(n)]) for n in (0, 3)}
    home.raw("name", files)
    error = refusal("hf:name")
    assert "2 of 4" in error.message
    assert "data/train-00001-of-00004" in error.message
    assert "--network" in error.hint


def test_the_list_of_the_repository_tells_exactly_what_is_missing(home):
    sizes = {path: len(data) for path, data in REPOSITORY.items()}
    here = {path: data for path, data in REPOSITORY.items() if path != "small/only.jsonl"}
    home.raw("org/name", here, listed=sizes)
    assert texts("hf:org/name/big") == ["one", "two", "three", "four"]
    error = refusal("hf:org/name/small")
    assert "0 of 1" in error.message
    assert "small/only.jsonl" in error.message
    home.raw("org/cut", REPOSITORY, listed={**sizes, "small/only.jsonl": 10**6})
    assert "1,000,000" in refusal("hf:org/cut").message


def test_downloads_that_were_broken_off_are_refused_where_nothing_says_what_they_were(home):
    snapshot = home.raw("name", {"000.parquet": caches.parquet(["a"])})
    partial = snapshot.parents[1] / "blobs" / ("e" * 64 + ".incomplete")
    partial.write_bytes(b"x" * 12345)
    assert "12,345 bytes" in refusal("hf:name").message
    partial.unlink()
    assert texts("hf:name") == ["a"]
    numbered = home.raw("numbered", {"train-00000-of-00001.parquet": caches.parquet(["b"])})
    (numbered.parents[1] / "blobs" / "f.incomplete").write_bytes(b"x")
    assert texts("hf:numbered") == ["b"]


def test_data_sets_made_by_a_program_are_refused_by_its_name(home):
    program = b"raise SystemExit('ran')"
    home.raw("org/name", {"name.py": program, "train.jsonl": caches.jsonl(["raw material"])})
    error = refusal("hf:org/name")
    assert "name.py" in error.message
    home.raw("org/told", {**REPOSITORY, "told.py": program})  # the README says which files: no program is needed
    assert texts("hf:org/told") == ["six"]


# --- inputs -----------------------------------------------------------------------------------------------------------


def test_names_of_sources_can_be_given_and_must_differ(home):
    home.raw("org/name", REPOSITORY)
    sources = sources_from_inputs(["hf:org/name/big:train", "other=hf:org/name/big:test"])
    assert [source.name for source in sources] == ["org--name", "other"]
    with pytest.raises(InputError, match="org--name") as raised:
        sources_from_inputs(["hf:org/name/big:train", "hf:org/name/big:test"])
    assert "other=hf:org/name/big:test" in raised.value.hint


def test_a_column_can_be_named_and_a_preset_names_its_own(home):
    home.raw("name", {"train.jsonl": b'{"text": "t", "body": "b"}\n'})
    assert texts("hf:name", tables=TableOptions(text_field="body")) == ["b"]
    home.raw("roneneldan/TinyStories", {"train.jsonl": b'{"content": "c", "text": "t"}\n'})
    assert texts("hf:tinystories") == ["t"]


def test_what_is_not_cached_is_refused_with_near_names(home):
    home.raw("roneneldan/TinyStories", {"train.jsonl": caches.jsonl(["a"])})
    home.processed("wikitext", {"train": [["a"]]})
    error = refusal("hf:roneneldan/TinyStory")
    assert error.message.index("roneneldan/TinyStories") < error.message.index("wikitext")
    assert "--network" in error.hint
    assert "none" in refusal_without_cache(home)


def refusal_without_cache(home) -> str:
    empty = home.home / "nowhere"
    os.environ["HF_HOME"] = str(empty)  # the fixture's own variable: restored by it
    return refusal("hf:anything").message


def test_the_caches_are_where_the_libraries_look():
    at = cache_folders({"HF_HOME": "/h"})
    assert (at.processed, at.hub) == ("/h/datasets", "/h/hub")
    at = cache_folders({"HF_HOME": "/h", "HF_HUB_CACHE": "/a", "HF_DATASETS_CACHE": "/b"})
    assert (at.processed, at.hub) == ("/b", "/a")
    assert cache_folders({"XDG_CACHE_HOME": "/x"}).hub == "/x/huggingface/hub"
    assert cache_folders({}).hub == str(Path.home() / ".cache/huggingface/hub")


# --- the network ------------------------------------------------------------------------------------------------------


def test_no_socket_is_opened_without_leave(home, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a socket was opened")

    for name in ("socket", "create_connection", "getaddrinfo"):
        monkeypatch.setattr(socket, name, refuse)
    home.raw("org/name", REPOSITORY)
    assert texts("hf:org/name") == ["six"]
    assert texts("hf:org/name", network=True) == ["six"]  # cached: nothing to ask for
    for word in ("hf:org/absent", "hf:org/name/big:absent"):
        assert "--network" in refusal(word).hint or "name one" in refusal(word).hint
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE" in refusal("hf:org/absent", network=True).hint
    assert "HF_HUB_OFFLINE" in refusal("hf:org/name/big:absent", network=True).hint


def test_a_download_without_the_library_says_what_to_install(home, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="huggingface_hub") as raised:
        read("hf:org/name", network=True)
    assert "penstock[hf]" in raised.value.hint


@pytest.fixture
def hub(home, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("huggingface_hub", reason="huggingface_hub isn't installed")
    repositories = {
        "org/name": REPOSITORY,
        "org/program": {"program.py": b"raise SystemExit('ran')", "a.csv": b"text\na\n"},
        "odd/names": {"data/train [a*]-00000-of-00001.jsonl": caches.jsonl(["odd"]), "data/x.bin": b"-"},
    }
    with caches.hub_server(repositories) as (address, asked):
        monkeypatch.setenv("HF_ENDPOINT", address)
        yield asked


def test_only_the_files_of_the_splits_wanted_are_downloaded(home, hub):
    assert texts("hf:org/name/big:test", network=True) == ["five"]
    fetched = {path.rpartition("/")[2] for path in hub if path.startswith("GET /datasets/")}
    assert fetched == {"README.md", "test-00000-of-00001.parquet"}
    hub.clear()
    assert texts("hf:org/name/big:test", network=True) == ["five"]
    assert hub == []  # the cache has it now
    assert "0 of 2" in refusal("hf:org/name/big:train").message
    assert len(texts("hf:org/name/big:train+test", network=True)) == 5
    assert set(texts("hf:org/name/big:all")) == {"one", "two", "three", "four", "five"}


def test_an_unfinished_download_is_finished(home, hub):
    half = {path: data for path, data in REPOSITORY.items() if "00001-of-00002" not in path}
    home.raw("org/name", half)
    assert "1 of 2" in refusal("hf:org/name/big").message
    assert texts("hf:org/name/big", network=True) == ["one", "two", "three", "four"]


def test_names_with_wildcards_match_only_themselves(home, hub):
    assert texts("hf:odd/names", network=True) == ["odd"]
    assert not any("x.bin" in path for path in hub)


@pytest.mark.parametrize(
    ("word", "met"),
    [
        ("hf:org/absent", "org/absent"),
        ("hf:org/program", "program.py"),
        ("hf:org/name/absent", "'absent'"),
        ("hf:org/name/big:absent", "'absent'"),
    ],
)
def test_what_the_hub_does_not_have_is_refused(home, hub, word: str, met: str):
    assert met in refusal(word, network=True).message
    assert not any(path.endswith((".py", ".csv")) for path in hub if path.startswith("GET /datasets/"))


def test_a_hub_that_can_not_be_reached_is_one_line(home, hub, monkeypatch: pytest.MonkeyPatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()[1]
    monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{address}")
    error = refusal("hf:org/name", network=True)
    assert "can't be downloaded" in error.message
    assert "\n" not in error.message


# --- the layouts, by the libraries themselves -------------------------------------------------------------------------


LOAD = """
import sys, datasets
print(datasets.load_dataset("org/TinyNames", "big", split="train")["text"][:])
builder = datasets.load_dataset_builder("json", data_files=sys.argv[1])
datasets.config.DEFAULT_MAX_BATCH_SIZE = builder._writer_batch_size = 50
builder.config.chunksize = 1000
builder.download_and_prepare(max_shard_size=1500)
print(len(builder.info.splits["train"].shard_lengths))
"""


def test_the_real_libraries_write_what_is_made_by_hand_here(home, tmp_path: Path):
    pytest.importorskip("datasets", reason="the datasets library isn't installed")
    table = tmp_path / "train.jsonl"
    table.write_bytes(caches.jsonl([f"text {number}" for number in range(300)]))
    with caches.hub_server({"org/TinyNames": REPOSITORY}) as (address, _):
        environment = {**os.environ, "HF_ENDPOINT": address, "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", LOAD, str(table)]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    printed, num_shards = done.stdout.splitlines()

    by_hand = caches.HandMadeCaches(tmp_path / "by hand")
    splits = {"train": [["one", "two", "three", "four"]], "test": [["five"]]}
    by_hand.processed("org___tiny_names", splits, config="big", build=REVISION)
    by_hand.raw("org/TinyNames", {path: data for path, data in REPOSITORY.items() if "small" not in path})
    for made in ("datasets/org___tiny_names", "hub/datasets--org--TinyNames"):
        ours = {path.relative_to(by_hand.home) for path in (by_hand.home / made).rglob("*")}
        theirs = {path.relative_to(home.home) for path in (home.home / made).rglob("*") if path.suffix != ".lock"}
        assert ours == {path for path in theirs if "trees" not in path.parts}
    link = Path("hub/datasets--org--TinyNames/snapshots") / REVISION / "big/train-00000-of-00002.parquet"
    assert os.readlink(home.home / link) == os.readlink(by_hand.home / link)

    assert str(texts("hf:org/TinyNames/big")) == printed
    assert set(texts("hf:org/TinyNames/big:all")) == {"one", "two", "three", "four", "five"}
    (config,) = (path.name for path in (home.datasets / "json").iterdir())
    assert len(texts(f"hf:json/{config}")) == 300
    shards = sorted((home.datasets / "json").rglob(f"json-train-*-of-{int(num_shards):05d}.arrow"))
    assert len(shards) == int(num_shards) > 2
    shards[1].unlink()
    assert "00001-of-" in refusal(f"hf:json/{config}").message
