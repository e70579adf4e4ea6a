"""The smallest real corpus at hand, Python's json package, with a vocabulary trained on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from penstock.bench import run_benchmark
from penstock.bench.corpus import corpus_documents
from penstock.bench.preparing import prepare_store
from penstock.tokenize import train_tokenizer

JSON_PACKAGE = str(Path(json.__file__).parent)


@pytest.fixture(scope="session")
def tokenizer_file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("bench-tokenizer") / "small.tokenizer.json"
    path.write_bytes(train_tokenizer(corpus_documents([JSON_PACKAGE]), vocab_size=512).spec.source_json)
    return str(path)


@pytest.fixture(scope="session")
def store_folder(tokenizer_file: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """That corpus prepared, for benchmarks that take a store."""
    out = str(tmp_path_factory.mktemp("bench-store") / "store")
    prepare_store(inputs=[JSON_PACKAGE], tokenizer=tokenizer_file, workers=1, out=out, keep=True)
    return out


@pytest.fixture(scope="session")
def corpus_options(tokenizer_file: str) -> dict[str, Any]:
    return {"inputs": [JSON_PACKAGE], "tokenizer": tokenizer_file, "repeats": 1}


@pytest.fixture(scope="session")
def prepare_result(corpus_options: dict[str, Any]) -> dict[str, Any]:
    return run_benchmark("prepare", {**corpus_options, "workers": 1})


@pytest.fixture(scope="session")
def load_result(corpus_options: dict[str, Any]) -> dict[str, Any]:
    """Ours and the ceiling; the peers have tests of their own, which need no fresh process for each."""
    peers = ["litdata", "streaming", "datasets", "Grain", "TensorFlow", "JAX", "DataLoader"]
    return run_benchmark("load", {**corpus_options, "batch_size": 4, "seq_len": 64, "skip": peers})


def rows_by_name(result: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in result["results"]}
