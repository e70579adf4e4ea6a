"""What several stages' tests share: a small real corpus, a small real tokenizer, a small real store."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from penstock.sources import sources_from_inputs
from penstock.store import PrepareOptions, open_store, prepare
from penstock.tokenize import Tokenizer, train_tokenizer

# Cores are shared, with other tests and on CI with whatever else: how long an example took says nothing about the code.
settings.register_profile("shared cores", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared cores")

# The user's own cache is none of the tests' business; the tests of the cache name a folder of their own.
os.environ["PENSTOCK_CACHE"] = "off"

SHARED_TOKENIZERS = Path(__file__).resolve().parents[2] / "shared" / "data" / "tokenizers"


def write_corpus(folder: Path, *, num_files: int = 60) -> Path:
    """Python modules of the standard library, a duplicate, an empty file and a binary one; the same on every call."""
    package = Path(json.__file__).parent.parent
    names = sorted(path for path in package.glob("*.py") if 500 < path.stat().st_size < 8000)[:num_files]
    for number, path in enumerate(names):
        target = folder / f"part{number % 3}" / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(path.read_bytes())
    (folder / "copy.py").write_bytes(names[0].read_bytes())
    (folder / "empty.txt").write_bytes(b"")
    (folder / "picture.bin").write_bytes(bytes(range(256)))
    (folder / "unicode.txt").write_text("naïve café 汉字 🙂 <|endoftext|> </s> [INST]\n" * 20)
    # Old time stamps: files that changed a moment ago are never taken over from a killed run.
    for path in folder.rglob("*"):
        os.utime(path, (1_600_000_000, 1_600_000_000))
    return folder


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "corpus")


@pytest.fixture(scope="session")
def tokenizer(corpus: Path) -> Tokenizer:
    """512 ids, trained once per worker; deterministic."""
    texts = [path.read_bytes() for path in sorted(corpus.rglob("*.py"))]
    return train_tokenizer(texts, vocab_size=512)


@pytest.fixture(scope="session")
def tokenizer_file(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    path.write_bytes(tokenizer.spec.source_json)
    return path


@pytest.fixture(scope="session")
def store_path(corpus: Path, tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the corpus with several segments; tests that change it copy it first."""
    out = tmp_path_factory.mktemp("store") / "store"
    sources = sources_from_inputs([str(corpus)])
    prepare(sources, out, tokenizer=tokenizer, options=PrepareOptions(unit_bytes=40_000))
    return out


@pytest.fixture
def store(store_path: Path):
    with open_store(store_path) as opened:
        yield opened


@pytest.fixture(scope="session")
def shared_tokenizers() -> Path:
    if not SHARED_TOKENIZERS.is_dir():
        pytest.skip("the real vocabularies of ../shared/data/tokenizers are not here")
    return SHARED_TOKENIZERS


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: tests of hundreds of writes would wait for the disk otherwise."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path_factory.mktemp("scratch")
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="penstock-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)
