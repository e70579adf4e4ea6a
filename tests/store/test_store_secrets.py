"""Planted secrets, all the way: what was found is in no file of the store, no answer of a command, no page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from penstock.bench.planted import planted_secrets
from penstock.report.store_page import write_store_page
from penstock.sources import FilesSource
from penstock.sources.hygiene import CleaningOptions
from penstock.store import document_text, open_store, prepare, summary, verify
from penstock.store.statistics import statistics

from .samples import BYTES, OPTIONS, contents

COUNT = 300


@pytest.fixture(scope="module")
def planted(tmp_path_factory) -> tuple[Path, list[bytes]]:
    """A folder of files with one secret each."""
    folder = tmp_path_factory.mktemp("planted")
    secrets = []
    for number, one in enumerate(planted_secrets(COUNT, seed=7)):
        path = folder / str(number) / Path(one.path.decode()).name.lstrip(".")  # hidden files are another rule's
        path.parent.mkdir()
        path.write_bytes(one.data)
        secrets.append(one.secret)
    (folder / "clean.txt").write_text("Nothing to hide.")
    return folder, secrets


def prepared(out: Path, folder: Path, secrets: str) -> dict[str, object]:
    cleaning = CleaningOptions(secrets=secrets, generated=True, minified=True)
    options = OPTIONS.__class__(**{**vars(OPTIONS), "cleaning": cleaning, "unit_bytes": 20_000})
    source = FilesSource(name="planted", root=str(folder))
    return prepare([source], out, tokenizer=BYTES, options=options).manifest.counts


def texts_of(out: Path) -> bytes:
    with open_store(out) as store:
        texts = [document_text(store, number, BYTES) for number in range(store.num_documents)]
    return "\n".join(texts).encode()


def test_what_was_found_is_nowhere(tmp_path, planted):
    folder, secrets = planted
    counts = prepared(tmp_path / "store", folder, "redact")
    stored = texts_of(tmp_path / "store")
    missed = [secret for secret in secrets if secret in stored]
    assert len(missed) <= 0.05 * COUNT
    found = set(secrets) - set(missed)
    assert sum(counts["secrets"]["redacted"].values()) >= 0.95 * COUNT  # of kept documents: two became copies
    with open_store(tmp_path / "store") as store:
        facts = {**summary(store), "statistics": vars(statistics(store)), "sample": []}
        rows = store.provenance().to_pylist()
    plain = {**facts, "statistics": {}}
    pieces = {name: data for name, data in contents(tmp_path / "store").items() if not name.endswith(".tokens")}
    pieces["answers"] = json.dumps(plain, default=str).encode() + repr(rows).encode()
    assert [(name, secret) for name, data in pieces.items() for secret in found if secret in data] == []
    assert verify(tmp_path / "store") == []


def test_the_page_tells_counts_and_no_secret(tmp_path, planted):
    from dataclasses import asdict

    folder, secrets = planted
    prepared(tmp_path / "store", folder, "redact")
    stored = texts_of(tmp_path / "store")
    with open_store(tmp_path / "store") as store:
        facts = {**summary(store), "statistics": asdict(statistics(store))}
    write_store_page(tmp_path / "page.html", facts)
    page = (tmp_path / "page.html").read_bytes()
    assert [secret for secret in secrets if secret not in stored and secret in page] == []


def test_dropped_documents_are_counted_and_kept_ones_untouched(tmp_path, planted):
    folder, secrets = planted
    dropped = prepared(tmp_path / "dropped", folder, "drop")
    assert dropped["skipped"]["secret"] >= 0.95 * COUNT
    assert dropped["documents"] + sum(dropped["skipped"].values()) == COUNT + 1
    prepared(tmp_path / "kept", folder, "keep")
    stored = texts_of(tmp_path / "kept")
    assert all(secret in stored for secret in secrets)
