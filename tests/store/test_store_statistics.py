"""Statistics of a store against a slow twin that reads every document and counts in plain Python."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import penstock.store.statistics as module
from penstock.errors import DamagedStoreError, StoreError
from penstock.sources import Document, Part, printable
from penstock.store import Store, document_origin, document_text, open_store, reader
from penstock.store.statistics import Groups, Statistics, statistics

from . import samples

NAMES = st.sampled_from([b"a", b"b", b"\xff\xfe", b"new\nline", b"<script>", b"..", b"\x1b[31m", "été".encode()])
PATHS = st.lists(NAMES, min_size=1, max_size=3).map(b"/".join) | st.just(b"")
LANGUAGES = st.sampled_from(["", "python", "c", "\x1b[2J汉"])
TEXTS = st.text(min_size=1, max_size=70).map(lambda text: text.encode("utf-8", "replace")).filter(bool)


@st.composite
def corpora(draw: st.DrawFn) -> list[list[Document]]:
    """Documents of one or two sources, with odd paths, some copies, and some that don't carry loss throughout."""
    sources = []
    for number in range(draw(st.integers(1, 2))):
        documents = []
        for place in range(draw(st.integers(1, 12))):
            text = draw(TEXTS)
            parts: list[Part | bytes] = [text] if draw(st.booleans()) else [Part(data=text, loss=False), text]
            made = samples.document(f"source{number}/{place}", *parts)
            documents.append(dataclasses.replace(made, path=draw(PATHS), language=draw(LANGUAGES)))
        sources.append(documents)
    return sources


@pytest.fixture(scope="module")
def memory() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="penstock-test-", dir="/dev/shm" if Path("/dev/shm").is_dir() else None))
    yield folder
    shutil.rmtree(folder)


def store_of(folder: Path, sources: Sequence[Sequence[Document]], **changes: Any) -> Store:
    shutil.rmtree(folder, ignore_errors=True)
    made = [samples.MemorySource(documents, name=f"source{number}") for number, documents in enumerate(sources)]
    samples.build(folder, *made, **changes)
    return open_store(folder)


# The slow twin


@dataclasses.dataclass(kw_only=True)
class Slow:
    """One document, read the long way."""

    number: int
    key: str
    path: bytes
    source: str
    split: str
    language: str
    tokens: int
    bytes: int
    tokens_with_loss: int


def slow_documents(store: Store, split: str | None) -> list[Slow]:
    tokenizer = store.tokenizer()
    paths = store.provenance()["path"].to_pylist()
    runs = slow_runs(store)
    documents = []
    for number in range(store.num_documents):
        origin = document_origin(store, number)
        if origin.status == "kept" and split in (None, origin.split):
            tokens = len(store.document_tokens(number))
            documents.append(
                Slow(
                    number=number,
                    key=origin.key,
                    path=paths[number],
                    source=origin.source,
                    split=origin.split,
                    language=origin.language,
                    tokens=tokens,
                    bytes=len(document_text(store, number, tokenizer).encode()),
                    tokens_with_loss=runs.get(number, tokens),
                )
            )
    return documents


def slow_runs(store: Store) -> dict[int, int]:
    """Tokens that carry loss, of the documents in which not all do."""
    starts, runs = store.arrays["loss_starts"].tolist(), store.arrays["loss_runs"].tolist()
    return {
        document: sum(runs[2 * run + 1] for run in range(starts[place], starts[place + 1]))
        for place, document in enumerate(store.arrays["loss_documents"].tolist())
    }


def slow_groups(documents: list[Slow], name: Callable[[Slow], str]) -> dict[str, tuple[int, int, int]]:
    groups: dict[str, list[Slow]] = defaultdict(list)
    for document in documents:
        groups[name(document)].append(document)
    return {
        key: (len(members), sum(one.tokens for one in members), sum(one.bytes for one in members))
        for key, members in groups.items()
    }


def folder_of(document: Slow) -> str:
    folder, slash, _ = document.path.partition(b"/")
    return f"{document.source}/{printable(folder) if slash else ''}"


def fast_groups(groups: Groups) -> dict[str, tuple[int, int, int]]:
    assert groups.count == len(groups.largest)
    assert groups.other is None
    assert [one.tokens for one in groups.largest] == sorted((one.tokens for one in groups.largest), reverse=True)
    for one in groups.largest:
        assert one.bytes_per_token == one.bytes / one.tokens
    return {one.name: (one.documents, one.tokens, one.bytes) for one in groups.largest}


def assert_equals_slow(found: Statistics, store: Store, split: str | None) -> None:
    documents = slow_documents(store, split)
    lengths = sorted(one.tokens for one in documents)
    assert found.split == split
    assert found.documents == found.lengths.count == len(documents)
    assert found.tokens == sum(lengths)
    assert found.bytes == sum(one.bytes for one in documents)
    assert found.loss_tokens == sum(one.tokens_with_loss for one in documents)
    assert fast_groups(found.sources) == slow_groups(documents, lambda one: one.source)
    assert fast_groups(found.languages) == slow_groups(documents, lambda one: one.language)
    assert fast_groups(found.splits) == slow_groups(documents, lambda one: one.split)
    assert fast_groups(found.folders) == slow_groups(documents, folder_of)
    best = sorted(documents, key=lambda one: (-one.tokens, one.number))[:10]
    shown = [(one.document, one.key, one.tokens, one.split) for one in found.longest]
    assert shown == [(one.number, one.key, one.tokens, one.split) for one in best]
    assert_lengths(found, lengths)


def assert_lengths(found: Statistics, lengths: list[int]) -> None:
    if not lengths:
        empty = {"count": 0, "min": None, "max": None, "mean": None, "percentiles": {}, "histogram": ()}
        assert dataclasses.asdict(found.lengths) == empty
        return
    assert (found.lengths.min, found.lengths.max) == (lengths[0], lengths[-1])
    assert found.lengths.mean == sum(lengths) / len(lengths)
    for percent in (5, 25, 50, 75, 95, 99):
        share = next(one for one in lengths if 100 * sum(other <= one for other in lengths) >= percent * len(lengths))
        assert found.lengths.percentiles[str(percent)] == share
    for one in found.lengths.histogram:
        inside = [length for length in lengths if one.shortest <= length <= one.longest]
        assert (one.documents, one.tokens) == (len(inside), sum(inside))
        assert one.longest == 2 * one.shortest - 1
    assert sum(one.documents for one in found.lengths.histogram) == len(lengths)
    assert found.lengths.histogram[0].documents
    assert found.lengths.histogram[-1].documents


@settings(max_examples=25)
@given(corpora(), st.sampled_from([None, "train", "val", "test"]), st.integers(1, 9))
def test_every_number_is_that_of_the_documents(
    memory: Path, sources: list[list[Document]], split: str | None, batch_rows: int
) -> None:
    with store_of(memory / "made", sources) as store, pytest.MonkeyPatch.context() as patch:
        patch.setattr(reader, "TABLE_BATCH_ROWS", batch_rows)
        assert_equals_slow(statistics(store, split=split), store, split)


def test_a_real_folder_with_reasons_and_examples(built: Path) -> None:
    with open_store(built) as store:
        found = statistics(store)
        assert_equals_slow(found, store, None)
        left_out = {one.reason: one for one in found.left_out}
        assert {reason: one.documents for reason, one in left_out.items()} == store.manifest.counts["skipped"]
        assert left_out["empty"].examples == ("corpus/empty.txt",)
        assert left_out["copy-across-splits"].examples == ("corpus/part0/3.txt",)
        assert {one.name for one in found.folders.largest} == {
            "corpus/part0",
            "corpus/part1",
            "corpus/part2",
            "corpus/",
        }


def test_no_token_is_read(built: Path) -> None:
    """Statistics of a store whose segments are damaged are the same."""
    with open_store(built) as store:
        expected = statistics(store)
    for path in (built / "segments").glob("*.tokens"):
        path.write_bytes(bytes(path.stat().st_size))
    with open_store(built) as store:
        assert statistics(store) == expected


def test_one_document_and_empty_splits(memory: Path) -> None:
    with store_of(memory / "one", [[samples.document("source0/one", b"alone")]]) as store:
        per_split = {name: statistics(store, split=name) for name in store.manifest.splits}
        assert sorted(one.documents for one in per_split.values()) == [0, 0, 1]
        for name, one in per_split.items():
            assert_equals_slow(one, store, name)
            json.dumps(dataclasses.asdict(one), allow_nan=False)
        empty = next(one for one in per_split.values() if not one.documents)
        assert empty.bytes_per_token is None
        assert empty.longest == ()


def test_an_unknown_split_is_refused(built: Path) -> None:
    with open_store(built) as store, pytest.raises(StoreError, match="no split 'dev'"):
        statistics(store, split="dev")


def test_folders_beyond_fifty_are_summed(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = [
        dataclasses.replace(samples.document(f"source0/{place:03d}", b"x" * (1 + place)), path=b"f%d/x" % (place // 2))
        for place in range(150)
    ]
    with store_of(memory / "many", [documents]) as store:
        found = statistics(store)
        monkeypatch.setattr(module, "MOST_PARTIAL_ROWS", 3)
        monkeypatch.setattr(reader, "TABLE_BATCH_ROWS", 2)
        assert statistics(store) == found, "however often the partial sums are added up"
        expected = slow_groups(slow_documents(store, None), folder_of)
    assert found.folders.count == len(expected) == 75
    assert len(found.folders.largest) == 50
    other = found.folders.other
    assert other is not None
    for place, name in enumerate(("documents", "tokens", "bytes")):
        shown = sum(getattr(one, name) for one in found.folders.largest)
        assert shown + getattr(other, name) == sum(sums[place] for sums in expected.values())
    assert min(one.tokens for one in found.folders.largest) >= max(
        sums[1] for name, sums in expected.items() if name not in {one.name for one in found.folders.largest}
    )


def test_ties_are_in_the_order_of_the_documents(memory: Path) -> None:
    documents = [samples.document(f"source0/{place:02d}", b"%02d same length" % place) for place in range(40)]
    with store_of(memory / "ties", [documents]) as store:
        assert [one.document for one in statistics(store).longest] == list(range(10))


def test_a_table_that_was_changed_is_damage(built: Path) -> None:
    path = next((built / "index").rglob("documents.parquet"))
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    with open_store(built) as store, pytest.raises(DamagedStoreError, match=r"documents\.parquet"):
        statistics(store)


@pytest.mark.parametrize("kind", ["column gone", "a null", "a row less", "no table"])
def test_a_forged_table_is_damage(built: Path, kind: str) -> None:
    def change(table: pa.Table) -> pa.Table:
        if kind == "column gone":
            return table.drop_columns(["language"])
        if kind == "a null":
            paths = pa.array([None, *table["path"].to_pylist()[1:]], pa.binary())
            return table.set_column(table.schema.get_field_index("path"), "path", paths)
        return table.slice(1)

    if kind == "no table":
        samples.forged_file(built, "documents.parquet", b"")
    else:
        samples.forged_table(built, change)
    with open_store(built) as store, pytest.raises(DamagedStoreError, match=r"documents\.parquet"):
        statistics(store)
