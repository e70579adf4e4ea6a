"""Hub ids: a path wins, caches come first, and nothing is downloaded unless it is allowed."""

from __future__ import annotations

import shutil
import socket
import sys
import types
from pathlib import Path

import pytest

from penstock.errors import MissingExtraError, TokenizerError
from penstock.tokenize import load_tokenizer
from penstock.tokenize.folders import TOKENIZER_FILES
from penstock.tokenize.hub import is_hub_id


@pytest.fixture(autouse=True)
def no_network(monkeypatch: pytest.MonkeyPatch):
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home with empty caches, which is also the working folder."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "own"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def put_snapshot(cache: Path, value: str, tokenizer_file: Path, *, commit: str = "c0ffee", main: bool = True) -> Path:
    """What huggingface_hub leaves: a snapshot of links into blobs, and a reference to it."""
    repository = cache / f"models--{value.replace('/', '--')}"
    blob = repository / "blobs" / f"{commit}-blob"
    snapshot = repository / "snapshots" / commit
    for folder in (blob.parent, snapshot, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(tokenizer_file, blob)
    (snapshot / "tokenizer.json").symlink_to(blob)
    if main:
        (repository / "refs" / "main").write_text(commit)
    return snapshot


@pytest.mark.parametrize("value", ["gpt2", "meta-llama/Llama-3.1-8B", "bert-base-uncased", "a/b", "Qwen/Qwen2.5-0.5B"])
def test_ids(value: str):
    assert is_hub_id(value)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "/a",
        "a/",
        "a/b/c",
        "../a",
        "a/..",
        "a--b",
        "./gpt2",
        "~/x",
        "a b",
        "tokenizer.json",
        "x/y.model",
        "-a",
        "a\n",
    ],
)
def test_what_can_not_be_an_id(value: str):
    assert not is_hub_id(value)


@pytest.mark.parametrize("value", ["gpt2", "org/name"])
@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", None])
def test_the_hub_s_cache_is_found_where_its_variables_say(
    caches: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch, value: str, variable: str | None
):
    below = {"HF_HUB_CACHE": "", "HF_HOME": "hub", "XDG_CACHE_HOME": "huggingface/hub"}
    if variable is None:
        cache = caches / ".cache" / "huggingface" / "hub"
    else:
        monkeypatch.setenv(variable, str(caches / "elsewhere"))
        cache = caches / "elsewhere" / below[variable]
    put_snapshot(cache, value, tokenizer_file)
    tokenizer = load_tokenizer(value)
    assert tokenizer.origin == value
    assert tokenizer.spec.source_json == tokenizer_file.read_bytes()


def test_the_snapshot_of_main_wins_and_an_empty_one_is_passed_over(caches: Path, tokenizer_file: Path, tmp_path: Path):
    cache = caches / ".cache" / "huggingface" / "hub"
    other = tmp_path / "other.json"
    other.write_bytes(tokenizer_file.read_bytes() + b" ")
    put_snapshot(cache, "org/name", tokenizer_file, commit="aaa", main=True)
    put_snapshot(cache, "org/name", other, commit="bbb", main=False)
    assert load_tokenizer("org/name").spec.source_json == tokenizer_file.read_bytes()
    (cache / "models--org--name" / "refs" / "main").write_text("not-here")
    (cache / "models--org--name" / "snapshots" / "not-here").mkdir()
    assert load_tokenizer("org/name").spec.source_json.strip() == tokenizer_file.read_bytes().strip()


def test_an_existing_path_wins_over_an_id(caches: Path, tokenizer_file: Path):
    put_snapshot(caches / ".cache" / "huggingface" / "hub", "org/name", tokenizer_file)
    local = caches / "org" / "name"
    local.mkdir(parents=True)
    with pytest.raises(TokenizerError, match="holds no tokenizer"):
        load_tokenizer("org/name")
    shutil.copy(tokenizer_file, local / "tokenizer.json")
    assert load_tokenizer("org/name").origin == "org/name"


@pytest.mark.parametrize("value", ["gpt2", "org/name"])
def test_without_the_network_the_hint_names_the_option(caches: Path, value: str):
    with pytest.raises(TokenizerError) as raised:
        load_tokenizer(value)
    assert value in raised.value.message
    assert "--network" in raised.value.hint


class FakeHub(types.ModuleType):
    """huggingface_hub as far as it is used: a folder of files instead of the hub."""

    def __init__(self, files: dict[str, Path], failure: Exception | None = None) -> None:
        super().__init__("huggingface_hub")
        self.files, self.failure, self.asked = files, failure, []
        self.errors = types.ModuleType("huggingface_hub.errors")
        self.errors.EntryNotFoundError = type("EntryNotFoundError", (Exception,), {})
        bases = (OSError, self.errors.EntryNotFoundError)
        self.errors.LocalEntryNotFoundError = type("LocalEntryNotFoundError", bases, {})

    def hf_hub_download(self, repository: str, name: str) -> str:
        self.asked.append((repository, name))
        if self.failure is not None:
            raise self.failure
        if name not in self.files:
            raise self.errors.EntryNotFoundError(name)
        return str(self.files[name])


def use(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub.errors", hub.errors)


def test_a_download_asks_for_tokenizer_files_only_and_happens_once(
    caches: Path, tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = FakeHub({"tokenizer.json": tokenizer_file})
    use(hub, monkeypatch)
    first = load_tokenizer("org/name", network=True)
    assert {name for _, name in hub.asked} == set(TOKENIZER_FILES)
    assert not any(name.endswith((".py", ".pkl", ".bin", ".pt", ".safetensors")) for _, name in hub.asked)
    hub.asked.clear()
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    second = load_tokenizer("org/name")
    assert (hub.asked, second.digest) == ([], first.digest)
    assert sorted(path.name for path in (caches / "own" / "tokenizers").iterdir()) == ["org--name"]


def test_what_the_hub_refuses_is_one_error(caches: Path, monkeypatch: pytest.MonkeyPatch):
    gated = RuntimeError("401 Client Error.\nmore lines")
    gated.response = types.SimpleNamespace(status_code=401)
    for failure, hint in ((OSError("no route to host"), "connection"), (gated, "login")):
        use(FakeHub({}, failure), monkeypatch)
        with pytest.raises(TokenizerError) as raised:
            load_tokenizer("org/name", network=True)
        assert "\n" not in raised.value.message
        assert hint in raised.value.hint


def test_a_hub_that_can_not_be_reached_is_asked_once_and_not_taken_for_an_empty_repository(
    caches: Path, monkeypatch: pytest.MonkeyPatch
):
    hub = FakeHub({})
    hub.failure = hub.errors.LocalEntryNotFoundError("cannot find the requested files in the disk cache")
    use(hub, monkeypatch)
    with pytest.raises(TokenizerError, match="can't be downloaded"):
        load_tokenizer("org/name", network=True)
    assert len(hub.asked) == 1


def test_the_names_of_the_client_s_errors_are_real():
    errors = pytest.importorskip("huggingface_hub.errors")
    assert issubclass(errors.LocalEntryNotFoundError, errors.EntryNotFoundError)


def test_a_repository_without_a_tokenizer_is_refused(caches: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "tokenizer_config.json").write_text("{}")
    use(FakeHub({"tokenizer_config.json": tmp_path / "tokenizer_config.json"}), monkeypatch)
    with pytest.raises(TokenizerError, match="no tokenizer files"):
        load_tokenizer("org/name", network=True)


def test_without_the_package_the_extra_is_named(caches: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(MissingExtraError, match="huggingface_hub"):
        load_tokenizer("org/name", network=True)
