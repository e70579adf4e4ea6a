"""`penstock datasets` and `prepare hf:…`, typed as commands over caches made by hand."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from types import ModuleType

import pytest

from penstock.cli import _run
from penstock.store import document_origin, document_text, open_store, verify


def load_caches() -> ModuleType:
    path = Path(__file__).parents[1] / "sources" / "huggingface_caches.py"
    spec = importlib.util.spec_from_file_location("huggingface_caches", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


caches = load_caches()


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_HUB_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    made = caches.HandMadeCaches(tmp_path / "home")
    made.processed("roneneldan___tiny_stories", {"train": [["a", "b"], ["c"]], "validation": [["v"]]})
    made.raw("org/name", {"data/train-00000-of-00002.parquet": caches.parquet(["one"])})
    return made


@pytest.fixture
def listing(capsys: pytest.CaptureFixture[str]):
    """The command in this process: what it says must not depend on a fresh one."""

    def run(*arguments: object) -> dict:
        assert _run(["datasets", *map(str, arguments), "--json"], debug=True) == 0
        return json.loads(capsys.readouterr().out)

    return run


def by_name(facts: dict) -> dict[str, dict]:
    return {entry["name"]: entry for entry in facts["datasets"]}


def test_the_list_says_what_is_there_how_much_and_whether_all_of_it(home, listing):
    found = by_name(listing())
    stories = found["roneneldan/TinyStories"]  # the cache knows tiny_stories; a preset knows the rest
    assert (stories["cache"], stories["location"]) == ("processed", str(home.datasets / "roneneldan___tiny_stories"))
    (config,) = stories["configs"]
    assert {name: split["rows"] for name, split in config["splits"].items()} == {"train": 3, "validation": 1}
    assert (config["config"], config["rows"], config["complete"]) == ("default", 4, True)
    on_disk = sum(path.stat().st_size for path in Path(stories["location"]).rglob("*") if path.is_file())
    assert stories["bytes"] == on_disk
    assert stories["last_used"].endswith("+00:00")
    (config,) = found["org/name"]["configs"]
    assert config["complete"] is False
    assert "1 of 2" in config["splits"]["train"]["problem"]


def test_to_list_is_not_to_use(home, listing):
    old = 1_500_000_000
    for path in home.home.rglob("*"):
        if path.is_file():
            os.utime(path, (old, old))
    listing()
    assert {entry["last_used"] for entry in listing()["datasets"]} == {"2017-07-14T02:40:00+00:00"}


def test_blobs_are_counted_once(home, listing):
    data = caches.parquet(["the same"] * 100)
    home.raw("org/twice", {"a/train.parquet": data, "b/train.parquet": data})
    home.raw("org/twice", {"a/train.parquet": data}, revision="f" * 40, main=None)
    facts = listing()
    assert by_name(facts)["org/twice"]["bytes"] == len(data)
    assert facts["bytes"] == sum(entry["bytes"] for entry in facts["datasets"])


def manifest(path: Path, dataset: object, **rest: object) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"name": "expert", "training": {"dataset": dataset, "config": {}}, **rest}))
    return str(path)


def test_manifests_are_found_by_name_by_word_by_task_and_by_path(home, listing, tmp_path: Path):
    experts = tmp_path / "experts"
    by_hub = manifest(experts / "a" / "manifest.json", {"path": "roneneldan/TinyStories", "format": "huggingface"})
    by_word = manifest(experts / "b.json", {"path": "hf:tinystories:train"}, schema_version="1.0", adapters=[])
    task = {"train": "org/name", "valid": "x.jsonl", "weight": 0.3}
    by_task = manifest(experts / "c.json", {"type": "multi_task", "tasks": {"json": task}}, schema_version="2.0")
    inside = home.datasets / "roneneldan___tiny_stories" / "default"
    by_path = manifest(experts / "d.json", {"path": os.path.relpath(inside, experts)})
    manifest(experts / "e.json", {"path": "data/train.jsonl", "_note": "roneneldan/TinyStories"})
    (experts / "local" / "org" / "name").mkdir(parents=True)  # a folder of that name is that folder
    manifest(experts / "local" / "h.json", {"path": "org/name"})
    manifest(experts / ".hidden" / "f.json", {"path": "org/name"})
    nested = {"schema_version": "2.0", "base_models": [{"adapters": [{"training": {"dataset": {"path": "org/name"}}}]}]}
    (experts / "g.json").write_text(json.dumps(nested))
    found = by_name(listing("--manifests", experts))
    assert found["roneneldan/TinyStories"]["manifests"] == [by_hub, by_word, by_path]
    assert found["org/name"]["manifests"] == [by_task, str(experts / "g.json")]
    assert by_name(listing())["org/name"]["manifests"] == [by_task, str(experts / "g.json")]  # from the folder above


def test_junk_is_counted_and_never_tears_anything_down(home, listing, tmp_path: Path):
    (home.datasets / "downloads").mkdir()
    (home.datasets / "empty" / "default").mkdir(parents=True)
    (home.datasets / "no data set" / "a" / "b" / "c").mkdir(parents=True)
    (home.datasets / "loop").mkdir()
    (home.datasets / "loop" / "loop").symlink_to(home.datasets / "loop")
    (home.datasets / "file").write_text("x")
    (home.hub / "datasets--org--bare").mkdir(parents=True)
    (home.hub / "datasets--org--file").write_text("x")
    (home.hub / "datasets--org--link").symlink_to(tmp_path)
    (home.hub / "models--org--model").mkdir()
    name = os.fsencode(home.hub) + b"/datasets--bad\xff\n--name/snapshots/abc"
    os.makedirs(name)
    Path(os.fsdecode(name), "train-\udcff\n.csv").write_text("text\na\n")
    broken = home.processed("broken", {"train": [["a"]]})
    (broken / "dataset_info.json").write_text("[" * 100_000)
    os.mkfifo(broken / "broken-test.arrow")
    odd = home.raw("org/odd", {"README.md": b"---\nconfigs: [[[\n---\n", "a.csv": b"text\na\n"})
    (odd / "trees").mkdir()
    os.mkfifo(tmp_path / "fifo.json")
    (tmp_path / "broken.json").write_text('{"training": ')
    (tmp_path / "deep.json").write_text('{"a":' * 5000 + "1" + "}" * 5000)
    (tmp_path / "around").symlink_to(tmp_path)
    for value in (None, 3, [], {"path": 3, "tasks": [1]}, {"tasks": {"a": 3}}, {"path": "\0"}, {"path": "~" * 999}):
        manifest(tmp_path / f"odd-{abs(hash(str(value)))}.json", value)
    facts = listing()
    found = by_name(facts)
    assert "1 of 2" in found["org/name"]["configs"][0]["splits"]["train"]["problem"]
    assert found["broken"]["configs"][0]["complete"] is False
    assert found["org/bare"]["problem"]
    assert not {"org/link", "empty", "no data set", "downloads"} & found.keys()
    assert facts["skipped"]["caches"]["broken-json"] == 1
    assert facts["skipped"]["manifests"]["broken-json"] >= 1
    assert facts["cut_short"] is False


def test_the_table_stays_on_its_lines(penstock, home):
    name = os.fsencode(home.hub) + b"/datasets--org--new\nline\x1b[31m\xff/snapshots/abc"
    os.makedirs(name)
    Path(os.fsdecode(name), "train.csv").write_text("text\na\n")
    done = penstock("datasets")
    assert "\x1b" not in done.out + done.err
    assert any("roneneldan/TinyStories" in line and "train+validation" in line for line in done.out.splitlines())
    assert "1 of 2" in done.err


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
def test_folders_that_can_not_be_read_are_counted(home, listing):
    locked = home.hub / "datasets--org--locked"
    locked.mkdir(mode=0)
    try:
        assert listing()["skipped"]["caches"]["unreadable"] >= 1
    finally:
        locked.chmod(0o700)


def test_one_of_the_caches_can_be_named(home, listing, tmp_path: Path):
    assert set(by_name(listing("--cache", home.home))) == {"roneneldan/TinyStories", "org/name"}
    assert set(by_name(listing("--cache", home.hub))) == {"org/name"}
    assert set(by_name(listing("--cache", home.datasets))) == {"roneneldan/TinyStories"}
    assert listing("--cache", tmp_path / "home" / "hub" / "datasets--org--name")["datasets"] == []


def test_presets_are_listed(listing):
    presets = listing("--presets")["presets"]
    assert presets["fineweb-edu"]["config"] == presets["finewebedu"]["config"] == "sample-10BT"
    assert {"wikitext-103", "tinystories", "openwebtext"} <= presets.keys()


@pytest.mark.parametrize("option", ["--cache", "--manifests"])
def test_folders_that_are_not_there_are_refused(home, capsys: pytest.CaptureFixture[str], option: str):
    assert _run(["datasets", option, "nowhere"], debug=False) == 1
    assert [line.split(":")[0] for line in capsys.readouterr().err.splitlines()] == ["error", "hint"]


def test_a_cached_data_set_is_prepared_and_the_store_verifies(home, penstock, tokenizer_file, tmp_path: Path):
    texts = [f"story number {number}, long enough to be split" for number in range(50)]
    home.raw("org/stories", {"train.parquet": caches.parquet(texts), "test.parquet": caches.parquet(["t"])})
    facts = penstock("prepare", "hf:org/stories", "--tokenizer", tokenizer_file, "--out", "s", "--json").json
    assert (facts["documents"], facts["skipped"]) == (50, {"other-split": 1})
    assert verify(tmp_path / "s") == []
    with open_store(tmp_path / "s") as store:
        assert document_text(store, 7, store.tokenizer()) == texts[7]
        assert document_origin(store, 7).key == "org--stories/train/train.parquet#000000000000007"
    error = penstock("prepare", "hf:org/name", "--out", "t", expect=1)
    error.assert_one_error()
    assert "1 of 2" in error.err
