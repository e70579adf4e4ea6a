"""What several stages' tests share: a small real corpus, a small real tokenizer, a small real store."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

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


# Torture (torture.md): `@pytest.mark.torture(lane="A")` counts a test to a lane. Such a test is part of `make torture`
# alone, unless it takes `scale` (its numbers then depend on where it runs) or says `sample=True` (it is small anyway):
# those are in `make test` too, except cases that say `sample=False`. `benchmarks/torture.py` runs the lanes and
# collects what `torture_figures` was told.


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--torture", metavar="LANES", help="only the torture tests of these lanes, as in ABC, or `all`")
    parser.addoption("--torture-scale", type=float, default=1.0, help="a share of their full numbers (default: all)")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Chooses the tests of the lanes asked for; without such a question, those that are samples."""
    lanes = config.getoption("--torture")
    asked_by_mark = "torture" in config.option.markexpr and not lanes
    chosen = [item for item in items if asked_by_mark or _is_wanted(item, lanes)]
    if len(chosen) < len(items):
        kept = set(chosen)
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen


def _is_wanted(item: pytest.Item, lanes: str | None) -> bool:
    marks = list(item.iter_markers("torture"))
    if lanes is None:
        if any(mark.kwargs.get("sample") is False for mark in marks):
            return False
        # The closest mark decides: a case of its own may be too large for a module that is sampled as a whole.
        return not marks or "scale" in getattr(item, "fixturenames", ()) or bool(marks[0].kwargs.get("sample"))
    named = [mark.kwargs["lane"] for mark in marks if "lane" in mark.kwargs]
    return bool(named) and (lanes == "all" or named[0] in lanes)


@pytest.fixture(scope="session")
def scale(request: pytest.FixtureRequest) -> Callable[..., int]:
    """`scale(test=50, torture=1000)`: how many, here. Never fewer than one."""
    in_torture = request.config.getoption("--torture") is not None
    share: float = request.config.getoption("--torture-scale")

    def chosen(*, test: int, torture: int) -> int:
        return max(1, round(torture * share)) if in_torture else test

    return chosen


@pytest.fixture
def torture_figures(record_property: Callable[[str, object], None]) -> Callable[..., None]:
    """`torture_figures(lane="A", case="SIGKILL at random times", trials=1000, failures=0, workers=2)`.

    Goes into benchmarks/results/torture-LANE.json, also from xdist's workers; in `make test` nowhere. Call it before
    the assertion, so that failures are counted too. Tests that name the same case are added up: integers are summed, of
    floats the largest counts, of anything else the first. `random=True` gives the bound 3/N, `exhaustive=True` none.
    """

    def tell(*, lane: str, case: str, trials: int, failures: int, **more: Any) -> None:
        figures = {"lane": lane, "case": case, "trials": trials, "failures": failures, **more}
        record_property("torture", json.dumps(figures))

    return tell


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


@contextlib.contextmanager
def _memory_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in memory where there is one: tests of hundreds of writes would wait for the disk otherwise."""
    if not Path("/dev/shm").is_dir():
        yield tmp_path_factory.mktemp("scratch")
        return
    folder = Path(tempfile.mkdtemp(dir="/dev/shm", prefix="penstock-test-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with _memory_folder(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="module")
def module_scratch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with _memory_folder(tmp_path_factory) as folder:
        yield folder


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    """Address of an S3-compatible server on this machine."""
    pytest.importorskip("flask_cors", reason="moto's server needs flask and flask-cors")
    pytest.importorskip("obstore")
    moto = pytest.importorskip("moto.server")
    started = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    with contextlib.redirect_stdout(None):
        started.start()
    host, port = started.get_host_and_port()
    yield f"http://{host}:{port}"
    started.stop()


@pytest.fixture
def bucket(server: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    import boto3

    settings = {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
        # Nobody is asked for credentials outside this machine.
        "AWS_METADATA_ENDPOINT": "http://127.0.0.1:9",
    }
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    resource = boto3.resource("s3", endpoint_url=server, region_name="us-east-1")
    made = resource.create_bucket(Bucket="bucket")
    yield made
    made.objects.all().delete()
    made.delete()
