"""From tokens back to bytes, for every kind of source: exact where they are those bytes, and called so nowhere else."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import subprocess
from pathlib import Path

import pytest

from penstock.errors import DamagedStoreError
from penstock.sources import InputOptions, TableOptions, closing_all, sources_from_inputs
from penstock.store import document_origin, document_text, open_store, prepare, token_origin
from penstock.store.provenance import byte_range

from .samples import OPTIONS, MemorySource, build, document, forged_table

TRAINED = dataclasses.replace(OPTIONS, vocab_size=300)


def store_of(out: Path, *words: str, options: InputOptions | None = None) -> Path:
    sources = sources_from_inputs(words, options=options) if options else sources_from_inputs(words)
    with closing_all(sources):
        prepare(sources, out, options=TRAINED)
    return out


def git(folder: Path, *words: str) -> bytes:
    environment = {"PATH": os.environ["PATH"], "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null"}
    who = ["-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    return subprocess.run(["git", *who, *words], cwd=folder, env=environment, check=True, capture_output=True).stdout


@pytest.fixture
def repository(tmp_path) -> Path:
    folder = tmp_path / "repository"
    folder.mkdir()
    git(folder, "init", "-q", "-b", "main")
    for number in range(4):
        (folder / "grows.txt").write_text("naïve 汉字 🙂 line\n" * (number + 1))
        (folder / f"new{number}.txt").write_text(f"file {number}\n" * 5)
        git(folder, "add", "-A")
        git(folder, "commit", "-q", "-m", f"change {number}")
    return folder


def test_tokens_of_a_repository_lead_to_commits_and_blobs(scratch, repository):
    path = store_of(scratch / "store", f"git:{repository}")
    commits = git(repository, "rev-list", "main").decode().split()
    with open_store(path) as store:
        tokenizer = store.tokenizer()
        kinds = set()
        for token in random.Random(1).sample(range(store.manifest.counts["tokens"]), 120):
            found = token_origin(store, token)
            if "/commits/" in found["key"]:
                kinds.add("commit")
                assert found["facts"]["commit"] in commits
                assert found["facts"]["time"].startswith("20")
                assert not found["exact"]
                assert (found["byte_start"], found["byte_end"]) == (0, found["text_bytes"])
            else:
                kinds.add("file")
                assert found["exact"]
                name = found["key"].rpartition("/")[2]
                data = git(repository, "show", f"main:{name}")
                piece = data[found["byte_start"] : found["byte_end"]]
                is_end = found["id"] == tokenizer.end_id
                assert piece == (b"" if is_end else tokenizer.spec.token_bytes[found["id"]])
        assert kinds == {"commit", "file"}


def test_stretches_of_tokens_are_stretches_of_bytes(scratch, corpus):
    path = store_of(scratch / "store", str(corpus))
    chance = random.Random(2)
    with open_store(path) as store:
        tokenizer = store.tokenizer()
        for number in store.kept_documents().tolist():
            origin, tokens = document_origin(store, number), store.document_tokens(number)
            first, end = sorted(chance.choices(range(len(tokens)), k=2))
            start, stop, exact = byte_range(tokenizer, tokens, origin, first=first, end=end)
            assert exact
            text = b"".join(tokenizer.spec.token_bytes[token] for token in tokens[first:end].tolist())
            assert Path(origin.file).read_bytes()[start:stop] == text


@pytest.mark.parametrize("ending", ["jsonl", "csv"])
def test_tokens_of_a_row_lead_to_the_row(scratch, ending):
    texts = [f"row {number} says naïve 汉字 {number * 7}" for number in range(30)]
    file = scratch / f"rows.{ending}"
    if ending == "jsonl":
        file.write_text("".join(json.dumps({"text": text, "who": f"w{n}"}) + "\n" for n, text in enumerate(texts)))
    else:
        file.write_text("text,who\n" + "".join(f'"{text}",w{n}\n' for n, text in enumerate(texts)))
    path = store_of(scratch / "store", str(file), options=InputOptions(tables=TableOptions(text_field="text")))
    data = file.read_bytes()
    with open_store(path) as store:
        tokenizer = store.tokenizer()
        assert store.num_documents == len(texts)
        for token in random.Random(3).sample(range(store.manifest.counts["tokens"]), 60):
            found = token_origin(store, token)
            assert not found["exact"]
            assert found["file"] == str(file)
            number = int(found["facts"]["who"][1:])
            row = data[found["byte_start"] : found["byte_end"]]
            assert f"w{number}".encode() in row
            assert document_text(store, found["document"], tokenizer) == texts[number]


def test_redacted_documents_are_not_called_exact(scratch):
    redacted = dataclasses.replace(document("secret", b"key = [redacted token]"), exact=False, byte_end=99)
    build(scratch / "store", MemorySource([redacted, document("plain", b"as it is")]))
    with open_store(scratch / "store") as store:
        exact = {document_origin(store, number).key: document_origin(store, number).exact for number in (0, 1)}
        assert exact == {"secret": False, "plain": True}
        for token in range(store.manifest.counts["tokens"]):
            found = token_origin(store, token)
            assert found["exact"] == (found["key"] == "plain")
            if found["key"] == "secret":
                assert (found["byte_start"], found["byte_end"]) == (0, 99)


@pytest.mark.parametrize("facts", ["{", "[1]", "3", "[" * 100_000])
def test_facts_that_are_no_object_are_damage(built, facts):
    def change(table):
        import pyarrow as pa

        column = pa.array([facts] * table.num_rows, pa.string())
        return table.set_column(table.schema.get_field_index("facts"), "facts", column)

    forged_table(built, change)
    with open_store(built) as store, pytest.raises(DamagedStoreError, match="facts of document 0"):
        document_origin(store, 0)
