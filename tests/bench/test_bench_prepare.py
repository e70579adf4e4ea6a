"""`bench prepare` measures the same documents on all sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from penstock.bench.corpus import batches_of, corpus_documents, evenly_sampled
from penstock.bench.gathering import gather_files
from penstock.bench.prepare import BARE_PIPELINE, CEILINGS, DATASETS, OURS

from .conftest import JSON_PACKAGE, rows_by_name

ONE_THREAD = f"{OURS}, 1 thread"


def test_all_sides_encode_the_same_documents(prepare_result: dict[str, Any]) -> None:
    rows = rows_by_name(prepare_result)
    documents = corpus_documents([JSON_PACKAGE])
    ours = rows[ONE_THREAD]
    assert ours["engine"] == "gigatoken"
    assert ours["documents"] == len(documents)
    assert ours["document_bytes"] == sum(map(len, documents))
    for ceiling in (f"{name}, 1 thread" for name in CEILINGS):
        # The store has an end token after each document; the encoder alone gives none.
        assert rows[ceiling]["tokens"] == ours["tokens"] - len(documents)
    bare = rows[f"{BARE_PIPELINE}, 1 thread"]
    assert (bare["tokens"], bare["document_bytes"]) == (ours["tokens"], ours["document_bytes"])


def test_phases_add_up_to_the_time(prepare_result: dict[str, Any]) -> None:
    rows = rows_by_name(prepare_result)
    total = rows[f"{OURS}, time"]["value"]
    assert abs(sum(rows[ONE_THREAD]["phases"].values()) - total) < 0.01 + 0.001 * total


def test_the_ceiling_is_the_fastest_way_to_call_the_encoder(prepare_result: dict[str, Any]) -> None:
    rows = rows_by_name(prepare_result)
    fastest = max((f"{name}, 1 thread" for name in CEILINGS), key=lambda name: rows[name]["value"])
    assert prepare_result["ratios"][0]["over"] == fastest
    assert [ratio["over"] for ratio in prepare_result["ratios"]].count(DATASETS) == 1


def test_a_sample_is_taken_from_all_over_the_corpus() -> None:
    documents = [b"%03d" % number for number in range(100)]
    sample = evenly_sampled(documents, 30)
    assert len(sample) == 10
    assert sample[0] < b"010"
    assert sample[-1] >= b"090"
    assert evenly_sampled(documents, 10**9) == documents


def test_batches_keep_every_document_in_order() -> None:
    documents = [b"x" * size for size in (3, 1, 9, 2, 2)]
    batches = list(batches_of(documents, 4))
    assert [document for batch in batches for document in batch] == documents
    assert all(sum(map(len, batch)) >= 4 for batch in batches[:-1])


def test_each_content_is_gathered_once_and_all_of_it_is_prepared(tmp_path: Path) -> None:
    origin = tmp_path / "origin"
    names = {"a.py": "x = 1\n", "b/a.py": "x = 1\n", "vendor/c.py": "y = 2\n", "d/.hidden.py": "z = 3\n"}
    for name, text in {**names, "e_pb2.py": "generated = 1\n", "bytes.bin": "\0"}.items():
        (origin / name).parent.mkdir(parents=True, exist_ok=True)
        (origin / name).write_text(text)
    gathered = gather_files(inputs=[f"own={origin}"], folder=str(tmp_path / "corpus"))
    documents = corpus_documents(gathered["inputs"])
    assert documents == [b"x = 1\n"]  # what is hidden or vendored was no input
    assert gathered["documents"] == 1
    assert gathered["left_out"].keys() == {"copies", "generated or minified"}


def test_inputs_that_arent_files_stay_as_they_are(tmp_path: Path) -> None:
    table = tmp_path / "rows.jsonl"
    table.write_text('{"text": "one"}\n{"text": "one"}\n')
    gathered = gather_files(inputs=[str(table)], folder=str(tmp_path / "corpus"))
    assert gathered["inputs"] == [str(table)]
    assert not (tmp_path / "corpus").exists()
