"""Rows of every packing in every format that has rows, against documents cut by hand."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from penstock.errors import ConfigError
from penstock.export import ExportOptions, export_store

from .reference import IGNORED, Expected, expected_documents

PACKINGS = ("best-fit", "windows", "pad")


def parts_by_hand(documents: list[Expected], seq_len: int, overlap: int) -> list[tuple[int, int, int]]:
    """Document, first token and one after the last of every part."""
    parts = []
    for document in documents:
        first = 0
        while True:
            end = min(first + seq_len, len(document.tokens))
            parts.append((document.origin.document, first, end))
            if end == len(document.tokens):
                break
            first += seq_len - overlap
    return parts


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def exported(store: Any, out: Path, **options: Any) -> dict[str, Any]:
    return export_store(store, out, options=ExportOptions(split="train", **options)).splits["train"]


@pytest.mark.parametrize("name", ["plain", "parts", "wide"])
@pytest.mark.parametrize(("pack", "overlap"), [("best-fit", 0), ("pad", 0), ("windows", 0), ("windows", 7)])
def test_jsonl_rows_are_parts_of_documents(opened, tmp_path: Path, name: str, pack: str, overlap: int) -> None:
    store = opened(name)
    documents = {document.origin.document: document for document in expected_documents(store, "train")}
    counts = exported(store, tmp_path / "out", format="jsonl", seq_len=24, pack=pack, overlap=overlap)
    rows = lines_of(tmp_path / "out" / "train.jsonl")
    assert counts["rows"] == len(rows)
    parts = []
    for number, row in enumerate(rows):
        metadata = row["metadata"]
        assert metadata["row"] == number
        assert 0 < len(row["tokens"]) == metadata["num_tokens"] <= 24
        wanted, carries = [], []
        for entry in metadata["documents"]:
            document = documents[entry["document"]]
            first = entry["document_start"]
            end = first + entry["end"] - entry["start"]
            parts.append((entry["document"], first, end))
            wanted += document.tokens[first:end]
            carries += [
                flag and not (first and place < overlap) for place, flag in enumerate(document.carries[first:end])
            ]
            assert entry["key"] == document.origin.key
        assert row["tokens"] == wanted
        runs = row.get("loss_runs", [[0, len(wanted)]])
        assert [any(a <= place < a + n for a, n in runs) for place in range(len(wanted))] == carries
        assert pack == "best-fit" or len(metadata["documents"]) == 1
    assert sorted(parts) == sorted(parts_by_hand(list(documents.values()), 24, overlap))


@pytest.mark.parametrize("name", ["plain", "parts"])
@pytest.mark.parametrize("pack", PACKINGS)
def test_arrow_rows_teach_inside_documents(opened, tmp_path: Path, name: str, pack: str) -> None:
    datasets = pytest.importorskip("datasets")
    store = opened(name)
    documents = expected_documents(store, "train")
    exported(store, tmp_path / "out", format="arrow", seq_len=200, pack=pack)
    data = datasets.load_from_disk(str(tmp_path / "out")).with_format("numpy")
    ids, labels, mask = (np.stack(list(data[column])) for column in ("input_ids", "labels", "attention_mask"))
    # Each token but the first of a part is a label if it carries loss; nothing else is.
    tokens = {document.origin.document: document for document in documents}
    wanted = Counter(
        tokens[number].tokens[place]
        for number, first, end in parts_by_hand(documents, 200, 0)
        for place in range(first + 1, end)
        if tokens[number].carries[place]
    )
    counted = labels != IGNORED
    assert Counter(labels[counted].tolist()) == wanted
    assert (ids[counted] == labels[counted]).all()
    assert int(mask.sum()) == sum(len(document.tokens) for document in documents)
    end_id = store.manifest.tokenizer["end_id"]
    assert (ids[mask == 0] == end_id).all()
    assert not counted[mask == 0].any()


@pytest.mark.parametrize("pack", PACKINGS)
def test_chunks_say_where_documents_begin_and_how_they_were_packed(opened, tmp_path: Path, pack: str) -> None:
    store = opened("plain")
    documents = expected_documents(store, "train")
    exported(store, tmp_path / "out", format="chunks", seq_len=50, pack=pack, chunk_format="npy", shard_bytes=1000)
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_bytes())
    assert metadata["pack"] == pack
    assert sum(file["tokens"] for file in metadata["files"]) == metadata["total_tokens"]
    assert metadata["total_tokens"] == sum(len(document.tokens) for document in documents)
    begun: list[list[int]] = []
    places = 0
    for file in metadata["files"]:
        rows = np.load(tmp_path / "out" / file["name"])
        starts = np.load(tmp_path / "out" / file["document_starts"])
        places += rows.size
        begun += [rows.reshape(-1)[start : start + 3].tolist() for start in starts]
    assert places - metadata["total_tokens"] == metadata["padding_tokens"]
    for document in documents:
        assert document.tokens[:3] in [tokens[: len(document.tokens[:3])] for tokens in begun]


def test_a_split_without_documents_has_no_rows(opened, tmp_path: Path) -> None:
    store = opened("single")
    result = export_store(store, tmp_path / "out", options=ExportOptions(format="jsonl", seq_len=16, pack="best-fit"))
    assert {split: part["rows"] for split, part in result.splits.items() if not part["documents"]}
    assert all(part["rows"] == 0 for part in result.splits.values() if not part["documents"])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"format": "bin", "pack": "best-fit"}, "--pack"),
        ({"format": "jsonl", "pack": "best-fit"}, "--pack"),
        ({"format": "jsonl", "pack": "pad", "seq_len": 8, "overlap": 2}, "--overlap 2"),
        ({"format": "jsonl", "pack": "windows", "seq_len": 8, "overlap": 8}, "overlap by 8"),
        ({"format": "jsonl", "pack": "window", "seq_len": 8}, "'window'"),
    ],
)
def test_packings_that_cannot_be_are_refused(opened, tmp_path: Path, options: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        export_store(opened("single"), tmp_path / "out", options=ExportOptions(**options))
    assert not (tmp_path / "out").exists()
