"""Every format, read back by the library it is for, token for token against the store."""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.export import FORMATS, stream
from penstock.export.rows import RowCut
from penstock.export.stream import TokenStream
from penstock.hashing import checksum_hex
from penstock.load.gather import Gatherer
from penstock.pack import plan_concat
from penstock.store import document_text, open_store

from .reference import contents, expected_documents, expected_rows

datasets = pytest.importorskip("datasets", reason="datasets isn't installed: pip install -c constraints.txt datasets")


def json_lines(path: Path) -> list[dict]:
    with path.open() as file:
        return [json.loads(line) for line in file]


# jsonl


def test_jsonl_documents(any_store, export, tmp_path):
    result = export(any_store, format="jsonl")
    for split in any_store.manifest.splits:
        expected = expected_documents(any_store, split)
        records = json_lines(tmp_path / "out" / f"{split}.jsonl")
        assert [record["tokens"] for record in records] == [document.tokens for document in expected]
        assert result.splits[split]["documents"] == len(expected)
        for record, document in zip(records, expected, strict=True):
            metadata, origin = record["metadata"], document.origin
            assert metadata["num_tokens"] == len(record["tokens"])
            names = ("document", "key", "source", "split", "language", "byte_start", "byte_end", "exact", "facts")
            assert {name: metadata[name] for name in names} == {name: getattr(origin, name) for name in names}
            assert origin.file.endswith(metadata["path"])
            carries = [False] * len(record["tokens"])
            for first, count in record.get("loss_runs", [[0, len(carries)]]):
                carries[first : first + count] = [True] * count
            assert carries == document.carries
            assert ("loss_runs" in record) == (not all(document.carries))


def test_excluded_documents_are_in_no_export(any_store, export, tmp_path):
    export(any_store, format="jsonl")
    lines = [line for split in any_store.manifest.splits for line in json_lines(tmp_path / "out" / f"{split}.jsonl")]
    numbers = sorted(line["metadata"]["document"] for line in lines)
    assert numbers == any_store.kept_documents().tolist()
    if "parts" not in str(any_store.path) and any_store.manifest.counts["skipped"].get("duplicate"):
        assert len(numbers) < any_store.num_documents


def test_jsonl_is_compact_json(opened, export, tmp_path):
    export(opened("parts"), format="jsonl", text=True)
    for line in (tmp_path / "out" / "train.jsonl").read_text().splitlines():
        assert line == json.dumps(json.loads(line), separators=(",", ":"), ensure_ascii=False)


@pytest.mark.parametrize("name", ["plain", "single", "wide"])
def test_jsonl_text_is_the_documents_own(opened, export, tmp_path, name):
    store = opened(name)
    export(store, format="jsonl", text=True)
    tokenizer = store.tokenizer()
    for split in store.manifest.splits:
        for record in json_lines(tmp_path / "out" / f"{split}.jsonl"):
            assert record["text"] == document_text(store, record["metadata"]["document"], tokenizer)


def test_jsonl_compressed_is_the_same_lines(opened, export, tmp_path):
    store = opened("plain")
    for compress in (None, "gz", "zst"):
        export(store, format="jsonl", split="val", compress=compress, out=str(compress))
    plain = (tmp_path / "None" / "val.jsonl").read_bytes()
    assert gzip.decompress((tmp_path / "gz" / "val.jsonl.gz").read_bytes()) == plain
    pa = pytest.importorskip("pyarrow")
    with pa.CompressedInputStream(str(tmp_path / "zst" / "val.jsonl.zst"), "zstd") as file:
        assert file.read() == plain


def test_jsonl_opens_with_datasets(opened, export, tmp_path):
    store = opened("plain")
    export(store, format="jsonl")
    loaded = datasets.load_dataset(
        "json", data_files={"val": str(tmp_path / "out" / "val.jsonl")}, cache_dir=str(tmp_path / "cache")
    )["val"]
    assert loaded["tokens"][:] == [document.tokens for document in expected_documents(store, "val")]


@pytest.mark.parametrize("overlap", [0, 3])
def test_jsonl_rows(any_store, export, tmp_path, overlap):
    export(any_store, format="jsonl", seq_len=13, overlap=overlap)
    for split in any_store.manifest.splits:
        documents = expected_documents(any_store, split)
        rows = expected_rows(documents, 13, overlap)
        records = json_lines(tmp_path / "out" / f"{split}.jsonl")
        assert [record["tokens"] for record in records] == [row.tokens for row in rows]
        lengths = {document.origin.key: document.tokens for document in documents}
        for record, row in zip(records, rows, strict=True):
            carries = [False] * len(row.tokens)
            for first, count in record.get("loss_runs", [[0, len(carries)]]):
                carries[first : first + count] = [True] * count
            assert carries == row.carries
            assert record["metadata"]["num_tokens"] == len(row.tokens)
            rebuilt = []
            for part in record["metadata"]["documents"]:
                size = part["end"] - part["start"]
                assert part["start"] == len(rebuilt)
                rebuilt += lengths[part["key"]][part["document_start"] : part["document_start"] + size]
            assert rebuilt == row.tokens


def test_a_document_longer_than_a_stretch_is_written_in_pieces(opened, export, tmp_path, monkeypatch):
    store = opened("plain")
    export(store, format="jsonl", out="whole")
    export(store, format="arrow", out="whole-arrow")
    monkeypatch.setattr(stream, "STRETCH_TOKENS", 50)
    monkeypatch.setattr("penstock.export.jsonl.STRETCH_TOKENS", 50)
    export(store, format="jsonl", out="pieces")
    export(store, format="arrow", out="pieces-arrow")
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    datasets_read = [datasets.load_from_disk(str(tmp_path / name)) for name in ("whole-arrow", "pieces-arrow")]
    assert datasets_read[0]["train"]["input_ids"][:] == datasets_read[1]["train"]["input_ids"][:]


# arrow


def test_arrow_documents(any_store, export, tmp_path):
    export(any_store, format="arrow")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert list(loaded) == any_store.manifest.splits
    learnt = [document.carries for split in loaded for document in expected_documents(any_store, split)]
    for split, data in loaded.items():
        expected = expected_documents(any_store, split)
        assert data["input_ids"][:] == [document.tokens for document in expected]
        assert data["key"][:] == [document.origin.key for document in expected]
        assert data["num_tokens"][:] == [len(document.tokens) for document in expected]
        assert [json.loads(facts or "{}") for facts in data["facts"][:]] == [d.origin.facts for d in expected]
        if not all(map(all, learnt)):  # of any split: what reads one column of all of them mustn't fail on some
            assert data["labels"][:] == [document.labels for document in expected]
        else:
            assert "labels" not in data.column_names


@pytest.mark.parametrize(("overlap", "boundaries"), [(0, True), (0, False), (4, True)])
def test_arrow_rows(any_store, export, tmp_path, overlap, boundaries):
    export(any_store, format="arrow", seq_len=16, overlap=overlap, boundaries=boundaries)
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    end_id = any_store.manifest.tokenizer["end_id"]
    for split, data in loaded.items():
        rows = expected_rows(expected_documents(any_store, split), 16, overlap)
        padding = [16 - len(row.tokens) for row in rows]
        assert data["input_ids"][:] == [row.tokens + [end_id] * n for row, n in zip(rows, padding, strict=True)]
        assert data["attention_mask"][:] == [[1] * (16 - n) + [0] * n for n in padding]
        assert data["labels"][:] == [
            row.labels(boundaries=boundaries) + [-100] * n for row, n in zip(rows, padding, strict=True)
        ]


def test_one_split_is_a_dataset_in_the_folder_itself(opened, export, tmp_path):
    store = opened("plain")
    export(store, format="arrow", split="val")
    loaded = datasets.load_from_disk(str(tmp_path / "out"))
    assert isinstance(loaded, datasets.Dataset)
    assert loaded.split == "val"
    assert loaded["input_ids"][:] == [document.tokens for document in expected_documents(store, "val")]


@pytest.mark.parametrize("seq_len", [None, 32])
def test_arrow_in_several_files_reads_the_same(opened, export, tmp_path, seq_len):
    store = opened("plain")
    export(store, format="arrow", split="train", seq_len=seq_len, out="one")
    export(store, format="arrow", split="train", seq_len=seq_len, shard_bytes=9000, out="many")
    files = sorted(path.name for path in (tmp_path / "many").glob("*.arrow"))
    assert len(files) > 3
    assert files == [f"data-{number:05d}-of-{len(files):05d}.arrow" for number in range(len(files))]
    one, many = (datasets.load_from_disk(str(tmp_path / name)) for name in ("one", "many"))
    assert one.to_dict() == many.to_dict()


def test_arrow_rows_are_what_a_trainer_collates(opened, export, tmp_path):
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    transformers = pytest.importorskip("transformers", reason="transformers isn't installed")
    store = opened("plain")
    export(store, format="arrow", split="val", seq_len=32)
    data = datasets.load_from_disk(str(tmp_path / "out"))
    rows = expected_rows(expected_documents(store, "val"), 32)
    batch = transformers.default_data_collator([data[number] for number in range(2)])
    assert batch["input_ids"].tolist() == [rows[0].tokens, rows[1].tokens]
    assert batch["labels"].tolist() == [rows[0].labels(), rows[1].labels()]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}
    assert data.with_format("torch")[0]["input_ids"].dtype == torch.int64


# chunks


def chunk_arrays(folder: Path, chunk_format: str) -> list[dict[str, np.ndarray]]:
    """The files that metadata.json names, each by its own library."""
    arrays = []
    for entry in json.loads((folder / "metadata.json").read_text())["files"]:
        if chunk_format == "safetensors":
            from safetensors.numpy import load_file

            arrays.append(load_file(folder / entry["name"]))
        elif chunk_format == "npy":
            names = {"input_ids": entry["name"], "document_starts": entry["document_starts"]}
            names |= {"loss_mask": entry["loss_mask"]} if "loss_mask" in entry else {}
            arrays.append({key: np.load(folder / name, mmap_mode="r") for key, name in names.items()})
        else:
            torch = pytest.importorskip("torch", reason="torch isn't installed")
            loaded = torch.load(folder / entry["name"], weights_only=True)
            arrays.append({key: tensor.numpy() for key, tensor in loaded.items()})
    return arrays


@pytest.mark.parametrize("chunk_format", ["safetensors", "npy", "pt"])
@pytest.mark.parametrize("overlap", [0, 5])
def test_chunks(any_store, export, tmp_path, chunk_format, overlap):
    per_file = 7 if any_store.manifest.counts["tokens"] < 5000 else 2000
    shard_bytes = 16 * (2 if any_store.dtype.itemsize == 2 else 4) * per_file
    export(
        any_store,
        format="chunks",
        seq_len=16,
        overlap=overlap,
        chunk_format=chunk_format,
        shard_bytes=shard_bytes,
    )
    end_id = any_store.manifest.tokenizer["end_id"]
    for split in any_store.manifest.splits:
        folder = tmp_path / "out" / split
        documents = expected_documents(any_store, split)
        rows = expected_rows(documents, 16, overlap)
        metadata = json.loads((folder / "metadata.json").read_text())
        assert metadata["num_chunks"] == len(rows)
        assert metadata["total_tokens"] == sum(len(document.tokens) for document in documents)
        assert sum(entry["tokens"] for entry in metadata["files"]) == metadata["total_tokens"]
        assert metadata["chunk_size"] == 16
        files = chunk_arrays(folder, chunk_format)
        assert [len(file["input_ids"]) for file in files] == [entry["rows"] for entry in metadata["files"]]
        assert all(file["input_ids"].dtype == np.dtype(metadata["dtype"]) for file in files)
        for number, file in enumerate(files):
            chosen = rows[per_file * number : per_file * (number + 1)]
            padded = [row.tokens + [end_id] * (16 - len(row.tokens)) for row in chosen]
            carries = [row.carries + [False] * (16 - len(row.tokens)) for row in chosen]
            assert file["input_ids"].tolist() == padded
            assert ("loss_mask" in file) == (not all(map(all, carries)))
            assert file.get("loss_mask", np.ones((len(chosen), 16), bool)).tolist() == carries
            starts = [16 * place + start for place, row in enumerate(chosen) for start in row.starts]
            assert file["document_starts"].tolist() == starts


def test_chunk_metadata_counts_padding_apart(opened, export, tmp_path):
    store = opened("single")  # 12 letters and an end token
    export(store, format="chunks", seq_len=8, split="train" if len(store.kept_documents("train")) else "val")
    if not (tmp_path / "out" / "chunk_000000.safetensors").exists():
        pytest.fail("the only document is in neither split")
    metadata = json.loads((tmp_path / "out" / "metadata.json").read_text())
    assert (metadata["num_chunks"], metadata["total_tokens"], metadata["padding_tokens"]) == (2, 13, 3)


# megatron


class PublishedReader:
    """Reads an indexed data set as `_IndexReader` and `_MMapBinReader` of NVIDIA/Megatron-LM,
    megatron/core/datasets/indexed_dataset.py, do."""

    TYPES = (None, np.uint8, np.int8, np.int16, np.int32, np.int64, np.float64, np.float32, np.uint16)

    def __init__(self, prefix: Path) -> None:
        index = prefix.with_name(prefix.name + ".idx")
        with index.open("rb") as file:
            assert file.read(9) == b"MMIDIDX\x00\x00"
            assert struct.unpack("<Q", file.read(8)) == (1,)
            self.dtype = self.TYPES[struct.unpack("<B", file.read(1))[0]]
            (sequences,) = struct.unpack("<Q", file.read(8))
            (documents,) = struct.unpack("<Q", file.read(8))
            offset = file.tell()
        buffer = memoryview(np.memmap(index, mode="r", order="C"))
        self.lengths = np.frombuffer(buffer, np.int32, count=sequences, offset=offset)
        self.pointers = np.frombuffer(buffer, np.int64, count=sequences, offset=offset + self.lengths.nbytes)
        end = offset + self.lengths.nbytes + self.pointers.nbytes
        self.document_indices = np.frombuffer(buffer, np.int64, count=documents, offset=end)
        assert end + self.document_indices.nbytes == len(buffer)
        assert self.lengths.shape[0] == self.document_indices[-1] == sequences
        self.data = memoryview(np.memmap(prefix.with_name(prefix.name + ".bin"), mode="r", order="C"))

    def __getitem__(self, number: int) -> list[int]:
        count, offset = self.lengths[number], self.pointers[number]
        return np.frombuffer(self.data, self.dtype, count=count, offset=offset).tolist()

    def __len__(self) -> int:
        return len(self.lengths)


def test_megatron_follows_the_published_layout(any_store, export, tmp_path):
    export(any_store, format="megatron")
    for split in any_store.manifest.splits:
        expected = expected_documents(any_store, split)
        prefix = tmp_path / "out" / split
        if not expected:
            assert not prefix.with_name(f"{split}.bin").exists()
            assert not prefix.with_name(f"{split}.idx").exists()
            continue
        read = PublishedReader(prefix)
        assert [read[number] for number in range(len(read))] == [document.tokens for document in expected]
        assert read.dtype == (np.uint16 if any_store.dtype.itemsize == 2 else np.int32)
        assert read.document_indices.tolist() == list(range(len(expected) + 1))
        if not all(all(document.carries) for document in expected):
            mask = PublishedReader(tmp_path / "out" / f"{split}_loss_mask")
            assert [mask[number] for number in range(len(mask))] == [document.carries for document in expected]


@pytest.mark.skipif(
    not importlib.util.find_spec("megatron"), reason="megatron-core isn't installed; the published layout is checked"
)
def test_megatron_core_reads_it(any_store, export, tmp_path):
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    export(any_store, format="megatron")
    for split in any_store.manifest.splits:
        expected = [document.tokens for document in expected_documents(any_store, split)]
        if expected:
            read = IndexedDataset(str(tmp_path / "out" / split))
            assert [read[number].tolist() for number in range(len(read))] == expected


# bin


def test_bin_as_nanogpt_reads_it(any_store, export, tmp_path):
    """The lines of nanoGPT's get_batch (karpathy/nanoGPT, train.py), its random places included."""
    torch = pytest.importorskip("torch", reason="torch isn't installed")
    export(any_store, format="bin")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text())
    assert meta["vocab_size"] == any_store.manifest.tokenizer["vocab_size"]
    for split in any_store.manifest.splits:
        stream_of_split = [token for d in expected_documents(any_store, split) for token in d.tokens]
        if not stream_of_split:
            assert meta["splits"][split]["file"] is None
            assert not (tmp_path / "out" / f"{split}.bin").exists()
            continue
        dtype = {"uint16": np.uint16, "uint32": np.uint32}[meta["splits"][split]["dtype"]]
        assert dtype == (np.uint16 if any_store.dtype.itemsize == 2 else np.uint32)
        data = np.memmap(tmp_path / "out" / f"{split}.bin", dtype=dtype, mode="r")
        assert data.tolist() == stream_of_split
        block_size = 8
        ix = torch.randint(len(data) - block_size, (4,))
        x = torch.stack([torch.from_numpy((data[i : i + block_size]).astype(np.int64)) for i in ix])
        y = torch.stack([torch.from_numpy((data[i + 1 : i + 1 + block_size]).astype(np.int64)) for i in ix])
        assert torch.equal(x[:, 1:], y[:, :-1])
        carries = [flag for d in expected_documents(any_store, split) for flag in d.carries]
        if not all(carries):
            assert np.fromfile(tmp_path / "out" / f"{split}_loss_mask.bin", np.uint8).tolist() == carries


# all of them


@pytest.mark.parametrize("output_format", FORMATS)
def test_the_manifest_lists_every_file_and_says_what_it_is(opened, export, tmp_path, output_format):
    store = opened("parts")
    result = export(store, format=output_format)
    found = contents(tmp_path / "out")
    manifest = json.loads(found.pop("export.json"))
    assert {entry["name"]: (entry["bytes"], entry["checksum"]) for entry in manifest["files"]} == {
        name: (len(data), checksum_hex(data)) for name, data in found.items()
    }
    assert manifest["store"] == {"digest": store.digest, "version": store.version}
    assert manifest["options"]["format"] == output_format
    assert result.num_files == len(found) + 1
    assert sum(part["tokens"] for part in manifest["splits"].values()) == store.manifest.counts["tokens"]


@pytest.mark.parametrize(
    "options",
    [{"format": name} for name in FORMATS]
    + [
        {"format": "chunks", "chunk_format": "pt"},
        {"format": "jsonl", "compress": "gz"},
        {"format": "jsonl", "compress": "zst"},
        {"format": "arrow", "seq_len": 16},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
def test_two_exports_are_the_same_bytes(opened, export, tmp_path, options):
    export(opened("parts"), out="one", **options)
    export(opened("parts"), out="two", **options)
    assert contents(tmp_path / "one") == contents(tmp_path / "two")


def test_an_older_version_is_exported_as_it_was(tokenizer, export, tmp_path):
    from penstock.sources import sources_from_inputs
    from penstock.store import PrepareOptions, prepare

    folder = tmp_path / "files"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"Document {number}. " * 5)
    options = PrepareOptions(split="train=100")
    prepare(sources_from_inputs([str(folder)]), tmp_path / "store", tokenizer=tokenizer, options=options)
    with open_store(tmp_path / "store") as first:
        export(first, format="bin", out="before")
    (folder / "2.txt").write_text("Changed. ")
    (folder / "4.txt").unlink()
    prepare(sources_from_inputs([str(folder)]), tmp_path / "store", tokenizer=tokenizer, options=options)
    with open_store(f"{tmp_path / 'store'}@1") as first, open_store(tmp_path / "store") as second:
        export(first, format="bin", out="after")
        export(second, format="bin", out="new")
    assert contents(tmp_path / "before") == contents(tmp_path / "after")
    assert contents(tmp_path / "new")["train.bin"] != contents(tmp_path / "before")["train.bin"]


# the parts they share


@pytest.mark.parametrize("seq_len", [7, 64])
@pytest.mark.parametrize("name", ["plain", "parts", "wide"])
def test_rows_without_overlap_are_the_plans(opened, name, seq_len):
    """What `penstock train` reads and what Hugging Face's trainer reads from an export: the same rows and labels."""
    store = opened(name)
    plan = plan_concat(store, split="train", seq_len=seq_len)
    gatherer = Gatherer(plan)
    buffer = gatherer.new_buffer(num_batches=1, batch_rows=plan.num_rows)
    gatherer.fill(np.arange(plan.num_rows)[None], buffer)
    block = RowCut(TokenStream(store, "train"), seq_len=seq_len, overlap=0).block(0, plan.num_rows)
    inputs, targets = buffer.tokens[0, :, :-1], buffer.tokens[0, :, 1:].astype(np.int32)
    assert np.array_equal(block.tokens[block.is_token], inputs[block.is_token])
    labels = np.where(buffer.loss_mask[0], targets, -100)
    assert np.array_equal(block.labels(boundaries=True)[:, 1:], labels[:, :-1])


@given(data=st.data())
def test_any_range_of_the_stream_is_the_documents_joined(store_paths, data):
    with open_store(store_paths[data.draw(st.sampled_from(["plain", "parts", "wide"]))]) as store:
        documents = expected_documents(store, "val")
        tokens = [token for document in documents for token in document.tokens]
        carries = [flag for document in documents for flag in document.carries]
        read = TokenStream(store, "val")
        begin = data.draw(st.integers(0, len(tokens)))
        end = data.draw(st.integers(begin, len(tokens)))
        assert read.num_tokens == len(tokens)
        assert read.tokens(begin, end).tolist() == tokens[begin:end]
        assert read.carries_loss(begin, end).tolist() == carries[begin:end]


@given(tokens=st.integers(0, 300), seq_len=st.integers(2, 40), data=st.data())
def test_the_number_of_rows_is_the_documented_one(tokens, seq_len, data):
    overlap = data.draw(st.integers(0, seq_len - 1))

    class Stream:
        num_tokens = tokens

    cut = RowCut(Stream(), seq_len=seq_len, overlap=overlap)  # type: ignore[arg-type]
    stride = seq_len - overlap
    expected = 0 if not tokens else 1 if tokens <= seq_len else 1 + -(-(tokens - seq_len) // stride)
    assert cut.num_rows == expected
    if expected:
        ranges = [cut.row_range(row) for row in range(expected)]
        assert ranges[0][0] == 0
        assert ranges[-1][1] == tokens
        assert all(later[0] == earlier[1] - overlap for earlier, later in itertools.pairwise(ranges))
        assert cut.padding == seq_len - (ranges[-1][1] - ranges[-1][0])


@pytest.mark.parametrize(("overlap", "rows"), [(0, 196), (128, 261), (256, 390)])
def test_the_rows_of_a_hundred_thousand_tokens(overlap, rows):
    class Stream:
        num_tokens = 100_000

    assert RowCut(Stream(), seq_len=512, overlap=overlap).num_rows == rows  # type: ignore[arg-type]
