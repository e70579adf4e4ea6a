"""Tables as sources: the same rows in every format, unit size and order, through `prepare` and the command line."""

from __future__ import annotations

import bz2
import csv
import gzip
import io
import json
import lzma
import os
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InputError
from penstock.hashing import strong_hash
from penstock.sources import (
    Document,
    InputOptions,
    Part,
    SkipTally,
    TableOptions,
    TablesSource,
    TextColumn,
    sources_from_inputs,
)
from penstock.store import PrepareOptions, open_store, prepare, verify

Rows = list[dict[str, Any]]


def jsonl(rows: Rows) -> bytes:
    return b"".join(json.dumps(row, ensure_ascii=number % 2 == 0).encode() + b"\n" for number, row in enumerate(rows))


def csv_bytes(rows: Rows, delimiter: str = ",") -> bytes:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, list(rows[0]), delimiter=delimiter)
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue().encode()


def parquet(rows: Rows, **options: Any) -> bytes:
    sink = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), sink, **options)
    return sink.getvalue()


def arrow(rows: Rows, *, stream: bool = True, batch_rows: int = 7, compression: str | None = None) -> bytes:
    sink = io.BytesIO()
    table = pa.Table.from_pylist(rows)
    options = pa.ipc.IpcWriteOptions(compression=compression)
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(sink, table.schema, options=options) as writer:
        writer.write_table(table, batch_rows)
    return sink.getvalue()


FORMATS: dict[str, Callable[[Rows], bytes]] = {
    "rows.jsonl": jsonl,
    "rows.ndjson": jsonl,
    "rows.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)),
    "two.jsonl.gz": lambda rows: gzip.compress(jsonl(rows)[:1000]) + gzip.compress(jsonl(rows)[1000:]),
    "rows.jsonl.zst": lambda rows: zstd.compress(jsonl(rows)),
    "two.jsonl.zst": lambda rows: zstd.compress(jsonl(rows)[:1000]) + zstd.compress(jsonl(rows)[1000:]),
    "rows.jsonl.bz2": lambda rows: bz2.compress(jsonl(rows)),
    "rows.jsonl.xz": lambda rows: lzma.compress(jsonl(rows)),
    "rows.csv": csv_bytes,
    "rows.tsv": lambda rows: csv_bytes(rows, "\t"),
    "rows.csv.gz": lambda rows: gzip.compress(csv_bytes(rows)),
    "rows.csv.zst": lambda rows: zstd.compress(csv_bytes(rows)),
    "one.parquet": parquet,
    "groups.parquet": lambda rows: parquet(rows, row_group_size=5, compression="zstd"),
    "stream.arrow": arrow,
    "file.arrow": lambda rows: arrow(rows, stream=False),
    "packed.feather": lambda rows: arrow(rows, stream=False, compression="lz4"),
}


def source_of(path: Path, **options: Any) -> TablesSource:
    extra = {name: options.pop(name) for name in ("renderer", "max_document_bytes", "facts") if name in options}
    return TablesSource(
        name="t", location=str(path), files=[(b"", str(path))], options=TableOptions(**options), **extra
    )


def read_all(source: Any, unit_bytes: int = 1 << 20, order: random.Random | None = None):
    """All documents in the order of units, and the tally; units are read in a shuffled order if one is given."""
    units = list(source.units(unit_bytes))
    numbers = list(range(len(units)))
    if order is not None:
        order.shuffle(numbers)
    texts = {number: source.read(units[number]) for number in numbers}
    source.close()
    tally = SkipTally()
    for number, unit in enumerate(units):
        tally.merge([unit.skips, texts[number].skips])
    return [document for number in range(len(units)) for document in texts[number].documents], tally


def contents(documents: list[Document]) -> list[bytes]:
    return [b"".join(part.data for part in document.parts) for document in documents]


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.fixture(scope="session")
def rows(corpus: Path) -> Rows:
    """The corpus as rows: text with quotes, commas, newlines, every script; a number, a flag and a path beside it."""
    found: Rows = []
    for number, path in enumerate(sorted(corpus.rglob("*"))):
        if path.is_file() and path.suffix in (".py", ".txt") and path.stat().st_size:
            found.append({"id": f"r{number}", "path": path.name, "text": path.read_text(), "n": number, "ok": True})
    return found


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit_bytes", [900, 1 << 24])
def test_every_format_gives_the_same_texts_at_any_unit_size(tmp_path: Path, rows: Rows, name: str, unit_bytes: int):
    path = written(tmp_path / name, FORMATS[name](rows))
    documents, tally = read_all(source_of(path), unit_bytes, random.Random(unit_bytes))
    assert contents(documents) == [row["text"].encode() for row in rows]
    assert not tally.counts
    assert [document.key for document in documents] == sorted({document.key for document in documents})
    assert {document.language for document in documents} == {"python", "text"}
    assert all(document.group == strong_hash(document.parts[0].data) for document in documents)
    facts = [json.loads(document.facts) for document in documents]
    assert [int(fact["n"]) for fact in facts] == [row["n"] for row in rows]
    assert not any("text" in fact for fact in facts)
    assert not any(document.exact for document in documents)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
@pytest.mark.parametrize("batch_rows", [7, 1000])
def test_arrow_units_are_of_one_size_however_unlike_the_rows(tmp_path: Path, kind: pa.DataType, batch_rows: int):
    """Most bytes in a few rows that stand together, as generated headers do in a tree of code."""
    lengths = [200] * 300 + [20_000] * 30 + [0] * 40 + [200] * 300
    texts = [f"{number} " + "x" * length for number, length in enumerate(lengths)]
    table = pa.table({"id": list(range(len(texts))), "text": pa.array(texts, pa.string()).cast(kind)})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, batch_rows)
    source = source_of(tmp_path / "a.arrow")
    units = list(source.units(50_000))
    read = [contents(source.read(unit).documents) for unit in units]
    source.close()
    assert [text.decode() for unit in read for text in unit] == texts
    total = sum(map(len, texts))
    assert total <= sum(unit.input_bytes for unit in units) <= total + 30 * len(texts)
    assert max(sum(map(len, unit)) for unit in read) <= 50_000 + 20_100
    assert len(units) <= 2 + total // 50_000


@pytest.mark.parametrize("text", ["a", "", None])
def test_arrow_units_of_rows_that_hold_next_to_nothing_are_of_few(tmp_path: Path, text: str | None):
    table = pa.table({"text": pa.array([text] * 5000, pa.string())})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, 700)
    source = source_of(tmp_path / "a.arrow")
    units = [source.read(unit) for unit in source.units(2000)]
    source.close()
    found = [len(unit.documents) + sum(unit.skips.counts.values()) for unit in units]
    assert sum(found) == 5000
    assert max(found) <= 2000 // 8


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "rows.jsonl.zst", "groups.parquet", "stream.arrow"])
def test_places_lead_back_to_the_rows(tmp_path: Path, rows: Rows, name: str):
    data = FORMATS[name](rows)
    documents, _ = read_all(source_of(written(tmp_path / name, data)), 3000)
    plain = zstd.decompress(data) if name.endswith("zst") else data
    for number, (document, row) in enumerate(zip(documents, rows, strict=True)):
        assert document.key == b"t#%015d" % document.byte_start
        place = plain[document.byte_start : document.byte_end]
        if "jsonl" in name:
            assert json.loads(place) == row
            assert not place.endswith((b"\n", b"\r"))
        elif "csv" in name:
            assert next(csv.reader(io.StringIO(place.decode(), newline=""))) == [str(value) for value in row.values()]
        else:
            assert (document.byte_start, document.byte_end) == (number, number + 1)
            assert json.loads(document.facts)["row"] == number


def test_compressed_units_are_cut_by_chunks_and_read_in_any_order(tmp_path: Path):
    """Noise doesn't compress, so that the file has several chunks of 64 KiB and most lines straddle none."""
    noise = random.Random(1)
    rows = [{"text": noise.randbytes(noise.choice([3, 300, 30_000, 90_000])).hex()} for _ in range(60)]
    for name, pack in {"n.jsonl.gz": gzip.compress, "n.jsonl.zst": zstd.compress}.items():
        path = written(tmp_path / name, pack(jsonl(rows)))
        source = source_of(path)
        units = list(source.units(1))
        assert len(units) == -(-path.stat().st_size // 65536) > 3
        for unit_bytes in (1, 1 << 19, 1 << 24):
            for order in (None, random.Random(3), random.Random(4)):
                documents, tally = read_all(source, unit_bytes, order)
                assert contents(documents) == [row["text"].encode() for row in rows]
                assert not tally.counts


@settings(max_examples=60)
@given(
    lengths=st.lists(st.sampled_from([0, 1, 2, 30, 61, 62, 63, 64, 65, 127, 500]), min_size=1, max_size=40),
    unit_bytes=st.integers(1, 700),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    last=st.booleans(),
    quotes=st.booleans(),
)
def test_any_cut_gives_the_same_rows(
    tmp_path_factory: pytest.TempPathFactory,
    lengths: list[int],
    unit_bytes: int,
    ending: bytes,
    last: bool,
    quotes: bool,
):
    folder = tmp_path_factory.mktemp("cut")
    texts = [('"\n,' * length)[:length] if quotes else "x" * length for length in lengths]
    lines = [json.dumps({"text": text}).encode() for text in texts]
    whole = ending.join(lines) + (ending if last else b"")
    written(folder / "a.jsonl", whole)
    rows = ['"' + text.replace('"', '""') + '"' for text in texts]
    written(folder / "a.csv", ending.join([b"text", *(row.encode() for row in rows)]) + (ending if last else b""))
    expected = [text.encode() for text in texts if text]
    for name in ("a.jsonl", "a.csv"):
        documents, tally = read_all(source_of(folder / name), unit_bytes)
        assert contents(documents) == expected
        assert tally.counts == ({"empty": len(texts) - len(expected)} if len(expected) < len(texts) else {})
        assert documents == read_all(source_of(folder / name), 1 << 30)[0]


def test_sources_and_units_can_be_pickled_in_the_middle_of_a_stream(tmp_path: Path, rows: Rows):
    path = written(tmp_path / "a.parquet", parquet(rows, row_group_size=20))
    source = source_of(path)
    units = list(source.units(100))
    first = source.read(units[0]).documents
    copy = pickle.loads(pickle.dumps(source))
    again = [document for unit in pickle.loads(pickle.dumps(units)) for document in copy.read(unit).documents]
    assert first == again[: len(first)]
    assert contents(again) == [row["text"].encode() for row in rows]
    source.close()
    copy.close()


def test_a_forked_process_does_not_disturb_its_parents_streams(tmp_path: Path, rows: Rows):
    path = written(tmp_path / "a.parquet", parquet(rows * 20, compression="none", use_dictionary=False))
    source = source_of(path)
    units = list(source.units(30_000))
    texts = contents(source.read(units[0]).documents)
    child = os.fork()
    if child == 0:
        ok = all(source.read(unit).documents for unit in units[1:])
        os._exit(0 if ok else 1)
    for unit in units[1:]:
        texts += contents(source.read(unit).documents)
    source.close()
    assert os.waitpid(child, 0)[1] == 0
    assert texts == [row["text"].encode() for row in rows] * 20


def test_options_name_what_decides_the_documents_and_nothing_else(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", b'{"text": "x"}\n')
    plain = source_of(path).options()
    assert source_of(path, strict=True).options() == plain
    for change in ({"text_field": "body"}, {"id_field": "id"}, {"group_field": "g"}, {"max_document_bytes": 5}):
        assert source_of(path, **change).options() != plain
    assert json.loads(json.dumps(plain)) == plain


def test_ids_make_keys_and_groups(tmp_path: Path):
    data = b'{"id": 7, "text": "a", "user": "u"}\n{"id": "x/y", "text": "b", "user": "u"}\n{"text": "c", "user": 3}\n'
    path = written(tmp_path / "a.jsonl", data)
    documents, tally = read_all(source_of(path, id_field="id"), 1)
    assert [(document.key, document.group) for document in documents] == [(b"t#7", b"7"), (b"t#x/y", b"x/y")]
    assert tally.counts == {"no-id": 1}
    documents, tally = read_all(source_of(path, group_field="user"))
    assert [document.group for document in documents] == [b"u", b"u", b"3"]
    documents, tally = read_all(source_of(path, group_field="usr"))
    assert (documents, tally.counts) == ([], {"no-group": 3})


def test_equal_ids_are_refused_when_the_store_is_built(tmp_path: Path, tokenizer):
    path = written(tmp_path / "a.jsonl", b'{"id": 1, "text": "a"}\n{"id": 1, "text": "b"}\n')
    with pytest.raises(InputError, match="t#1") as raised:
        prepare([source_of(path, id_field="id")], tmp_path / "store", tokenizer=tokenizer)
    assert "--id-field" in raised.value.hint


def test_rows_put_in_front_move_no_other_row_to_another_split(tmp_path: Path, rows: Rows):
    before, _ = read_all(source_of(written(tmp_path / "a.jsonl", jsonl(rows))))
    after, _ = read_all(source_of(written(tmp_path / "b.jsonl", jsonl([{"text": "new"}, *rows]))))
    assert [document.group for document in after[1:]] == [document.group for document in before]


def test_a_renderer_makes_the_parts_of_rows(tmp_path: Path):
    class Pairs(TextColumn):
        def columns(self, available):
            return ("q", "a")

        def parts(self, row):
            return (Part(data=row["q"]["s"].encode(), loss=False), Part(data=row["a"].encode()))

    class Renderer:
        framed = True
        columns, parts = Pairs.columns, Pairs.parts

        def options(self):
            return {"kind": "pairs"}

    rows = [{"q": {"s": f"q{n}"}, "a": f"a{n}", "n": n} for n in range(20)]
    for name in ("rows.jsonl", "groups.parquet", "stream.arrow"):
        path = written(tmp_path / name, FORMATS[name](rows))
        documents, _ = read_all(source_of(path, renderer=Renderer()), 50)
        assert [document.parts for document in documents] == [Pairs.parts(None, row) for row in rows]
        assert all(document.framed and not document.is_plain for document in documents)
        assert [json.loads(document.facts)["n"] for document in documents] == list(range(20))
        assert documents[3].group == strong_hash(b"q3a3")


def test_facts_hold_short_scalars_in_json_whatever_they_are(tmp_path: Path):
    line = (
        b'{"text": "x", "nan": NaN, "big": 123456789012345678901234567890, "deep": {"a": 1}, "long": "%s", "f": 1.5,'
        b' "none": null, "name": "na\xc3\xafve", "b": true, "inf": -Infinity, "%s": 1}\n' % (b"y" * 2000, b"k" * 300)
    )
    many = json.dumps({"text": "m", **{f"c{n}": n for n in range(500)}}).encode()
    documents, tally = read_all(source_of(written(tmp_path / "a.jsonl", line + many)))
    assert not tally.counts
    facts = json.loads(documents[0].facts)
    assert set(facts) == {"nan", "big", "f", "name", "b", "inf"}
    assert (facts["nan"], facts["f"], facts["name"], facts["b"]) == (None, 1.5, "naïve", True)
    assert len(json.loads(documents[1].facts)) == 64


def test_columns_of_every_kind_become_facts(tmp_path: Path):
    table = pa.table(
        {
            "text": ["x", "y"],
            "when": pa.array([0, 1_500_000_000_123_456], pa.timestamp("us", "Europe/Berlin")),
            "naive": pa.array([0, None], pa.timestamp("ns")),
            "day": pa.array([0, 1], pa.date32()),
            "money": pa.array([None, 1], pa.decimal128(10, 2)),
            "kind": pa.array(["a", "b"]).dictionary_encode(),
            "list": [[1], [2]],
            "raw": [b"\xff", b"\xfe"],
            "nan": [float("nan"), 1.0],
        }
    )
    pq.write_table(table, tmp_path / "a.parquet")
    documents, _ = read_all(source_of(tmp_path / "a.parquet"))
    first, second = (json.loads(document.facts) for document in documents)
    assert first["when"] == "1970-01-01T00:00:00.000000Z"
    assert second["when"] == "2017-07-14T02:40:00.123456Z"
    assert first["naive"] == "1970-01-01T00:00:00.000000000"
    assert "naive" not in second
    assert (second["day"], second["money"], second["kind"], first["nan"]) == ("1970-01-02", "1.00", "b", None)
    assert not {"list", "raw", "text"} & set(first)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
)
def test_every_layout_of_strings_is_read(tmp_path: Path, kind: pa.DataType):
    texts = ["naïve", None, "", "b" * 40, "naïve", "\u6c49"]
    column = pa.array(texts, pa.string()).cast(kind) if kind != pa.string_view() else pa.array(texts, kind)
    table = pa.table({"text": column})
    with pa.ipc.new_stream(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table.slice(1), 2)
    documents, tally = read_all(source_of(tmp_path / "a.arrow"), 1)
    assert contents(documents) == [text.encode() for text in texts[1:] if text]
    assert tally.counts == {"no-text": 1, "empty": 1}


@pytest.mark.parametrize("storage", [pa.string(), pa.large_string()])
@pytest.mark.parametrize("ending", ["parquet", "arrow"])
def test_json_columns_are_columns_of_strings(tmp_path: Path, storage: pa.DataType, ending: str):
    texts, path = ['{"a": 1}', None, "[]"], tmp_path / f"a.{ending}"
    column = pa.ExtensionArray.from_storage(pa.json_(storage), pa.array(texts, storage))
    table = pa.table({"text": column, "more": column})
    if ending == "parquet":
        pq.write_table(table, path)
    else:
        with pa.ipc.new_file(path, table.schema) as writer:
            writer.write_table(table)
    for options in ({}, {"text_field": "text"}):
        documents, tally = read_all(source_of(path, **options), 1)
        assert (contents(documents), tally.counts) == ([b'{"a": 1}', b"[]"], {"no-text": 1})
        assert [json.loads(document.facts)["more"] for document in documents] == ['{"a": 1}', "[]"]


def test_only_a_column_of_bytes_is_said_to_be_text_if_it_is_named(tmp_path: Path):
    for column, is_named in ((pa.array([b"a"]), True), (pa.array([["a"]]), False), (pa.array([1]), False)):
        pq.write_table(pa.table({"text": column, "n": [1]}), tmp_path / "a.parquet")
        with pytest.raises(InputError) as met:
            read_all(source_of(tmp_path / "a.parquet"))
        assert ("--text-field text" in (met.value.hint or "")) == is_named


def test_a_time_beyond_all_years_is_no_fact(tmp_path: Path):
    times = pa.array([2**63 - 1, -(2**63) + 1, 0], pa.timestamp("s"))
    days = pa.array([2**31 - 1, -(2**31), 0], pa.date32())
    table = pa.table({"text": ["a", "b", "c"], "when": times, "day": days})
    with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table)
    documents, _ = read_all(source_of(tmp_path / "a.arrow"))
    facts = [{name: json.loads(document.facts).get(name) for name in ("when", "day")} for document in documents]
    nothing = {"when": None, "day": None}
    assert facts == [nothing, nothing, {"when": "1970-01-01T00:00:00", "day": "1970-01-01"}]


@pytest.mark.parametrize(
    ("names", "found"),
    [
        (["id", "content", "text"], "text"),
        (["Body", "id"], "Body"),
        (["TEXT", "text"], "text"),
        (["raw_content", "code"], "code"),
        (["whatever"], "whatever"),
    ],
)
def test_the_column_of_text_is_found_by_name(tmp_path: Path, names: list[str], found: str):
    rows = [{name: f"{name} {number}" for name in names} for number in range(3)]
    for name in ("rows.csv", "one.parquet", "stream.arrow", *(["rows.jsonl"] if names != ["whatever"] else [])):
        documents, _ = read_all(source_of(written(tmp_path / name, FORMATS[name](rows))))
        assert contents(documents) == [f"{found} {number}".encode() for number in range(3)]


def test_the_only_column_of_strings_will_do_in_typed_tables(tmp_path: Path):
    rows = [{"prose": "x", "n": 1, "l": ["a"]}]
    for name in ("one.parquet", "stream.arrow"):
        assert contents(read_all(source_of(written(tmp_path / name, FORMATS[name](rows))))[0]) == [b"x"]


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv", "one.parquet", "stream.arrow", "rows.jsonl.gz"])
def test_without_a_column_of_text_the_columns_are_listed(tmp_path: Path, name: str):
    path = written(tmp_path / name, FORMATS[name]([{"alpha": "x", "beta": "y"}]))
    with pytest.raises(InputError, match=r"alpha, beta") as raised:
        list(source_of(path).units(1))
    assert name in raised.value.message
    assert "--text-field" in raised.value.hint
    if "jsonl" not in name:
        with pytest.raises(InputError, match="gamma"):
            list(source_of(path, text_field="gamma").units(1))
        with pytest.raises(InputError, match="gamma"):
            list(source_of(path, text_field="beta", id_field="gamma").units(1))
    assert contents(read_all(source_of(path, text_field="beta"))[0]) == [b"y"]


# --- Through the store ------------------------------------------------------------------------------------------------


def tokens_by_content(store_path: Path) -> dict[bytes, list[int]]:
    with open_store(store_path) as store:
        hashes = store.provenance()["content_hash"].to_pylist()
        return {content: store.document_tokens(number).tolist() for number, content in enumerate(hashes)}


def save_to_disk(folder: Path, rows: Rows, *, split: str | None = "train", files: int = 2) -> None:
    """As `datasets` writes it."""
    folder.mkdir(parents=True)
    names = [f"data-{number:05d}-of-{files:05d}.arrow" for number in range(files)]
    for number, name in enumerate(names):
        share = rows[len(rows) * number // files : len(rows) * (number + 1) // files]
        (folder / name).write_bytes(arrow(share, batch_rows=10))
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "x", "_split": split}
    (folder / "state.json").write_text(json.dumps(state))
    (folder / "dataset_info.json").write_text("{}")


def test_the_same_documents_have_the_same_tokens_whatever_they_come_in(
    tmp_path: Path, rows: Rows, corpus: Path, store_path: Path, tokenizer
):
    files = {strong_hash(row["text"].encode()) for row in rows}
    expected = {content: ids for content, ids in tokens_by_content(store_path).items() if content in files}
    assert len(expected) > 40
    save_to_disk(tmp_path / "saved", rows)
    names = ("rows.jsonl", "two.jsonl.gz", "two.jsonl.zst", "rows.csv", "groups.parquet", "file.arrow")
    inputs = [written(tmp_path / name, FORMATS[name](rows)) for name in names] + [tmp_path / "saved"]
    for number, path in enumerate(inputs):
        out = tmp_path / f"store{number}"
        sources = sources_from_inputs([str(path)])
        prepare(sources, out, tokenizer=tokenizer, options=PrepareOptions(unit_bytes=80_000))
        sources[0].close()
        # A few files are generated code or hold what looks like a secret; rows of a table are taken as they are.
        found = tokens_by_content(out)
        assert {content: found.get(content) for content in expected} == expected, path.name
        assert verify(out) == []


def test_the_digest_does_not_depend_on_units_or_workers(tmp_path: Path, rows: Rows, tokenizer):
    for name in ("rows.jsonl", "rows.csv", "groups.parquet"):
        path = written(tmp_path / name, FORMATS[name](rows))
        digests = set()
        for number, unit_bytes in enumerate((1 << 24, 30_000)):
            options = PrepareOptions(unit_bytes=unit_bytes, workers=1 + number % 2)
            (source,) = sources_from_inputs([str(path)])
            digests.add(
                prepare([source], tmp_path / f"{name}{number}", tokenizer=tokenizer, options=options).manifest.digest
            )
            source.close()
        assert len(digests) == 1, name


def test_a_real_command_line(tmp_path: Path, rows: Rows, tokenizer_file: Path):
    written(tmp_path / "rows.jsonl.zst", zstd.compress(jsonl(rows) + b'{"text": 5}\nbroken\n[1]\n'))

    def penstock(*arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "penstock", *map(str, arguments)]
        return subprocess.run(
            command, capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "OMP_NUM_THREADS": "1"}
        )

    done = penstock("prepare", "rows.jsonl.zst", "--out", "store", "--tokenizer", tokenizer_file, "--json")
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert {"no-text": 1, "broken-json": 1, "not-an-object": 1}.items() <= facts["skipped"].items()
    shown = json.loads(penstock("inspect", "store", "--doc", 3, "--json").stdout)
    assert shown["text"] == rows[3]["text"]
    assert (shown["facts"]["n"], shown["exact"]) == (rows[3]["n"], False)
    assert penstock("verify", "store").returncode == 0
    strict = penstock("prepare", "rows.jsonl.zst", "--out", "other", "--tokenizer", tokenizer_file, "--strict")
    assert strict.returncode == 1
    assert strict.stderr.startswith("error: rows.jsonl.zst: byte "), strict.stderr
    assert len(strict.stderr.splitlines()) == 2
    assert not (tmp_path / "other").exists()


# --- Folders ----------------------------------------------------------------------------------------------------------


def only(path: Path, **options: Any) -> Any:
    (source,) = sources_from_inputs([str(path)], options=InputOptions(tables=TableOptions(**options)))
    return source


def test_a_folder_of_tables_is_one_source(tmp_path: Path):
    root = tmp_path / "data"
    (root / "part").mkdir(parents=True)
    written(root / "b.jsonl", b'{"text": "b"}\n')
    written(root / "part" / "a.csv", b"text\na\n")
    written(root / "part" / "c.parquet", parquet([{"text": "c"}]))
    for name in ("README.md", "LICENSE", "_SUCCESS", "part/x.crc", "info.json"):
        written(root / name, b"words")
    written(root / ".hidden", b"words")
    os.mkfifo(root / "pipe.jsonl")
    (root / "link.jsonl").symlink_to(root / "b.jsonl")
    (root / "loop").symlink_to(root)
    source = only(root)
    assert isinstance(source, TablesSource)
    documents, tally = read_all(source)
    assert [document.key for document in documents] == [
        b"data/b.jsonl#000000000000000",
        b"data/part/a.csv#000000000000005",
        b"data/part/c.parquet#000000000000000",
    ]
    assert [document.path for document in documents] == [b"b.jsonl", b"part/a.csv", b"part/c.parquet"]
    assert tally.counts == {"not-a-table": 5, "hidden": 1, "special": 1, "symlink": 2}
    written(root / "code.py", b"pass")
    assert not isinstance(only(root), TablesSource)
    (source,) = sources_from_inputs(
        [str(root)], options=InputOptions(files=InputOptions().files.__class__(exclude=("*.py", "part/")))
    )
    assert [document.path for document in read_all(source)[0]] == [b"b.jsonl"]


def test_folders_without_tables_stay_folders_of_files(tmp_path: Path):
    written(tmp_path / "README.md", b"words")
    written(tmp_path / "x.json", b"{}")
    assert not isinstance(only(tmp_path), TablesSource)


def test_a_saved_data_set_is_its_tables(tmp_path: Path, rows: Rows):
    save_to_disk(tmp_path / "ds", rows, files=3)
    written(tmp_path / "ds" / "cache-123.arrow", b"not listed, not read")
    documents, tally = read_all(only(tmp_path / "ds"), 999)
    assert contents(documents) == [row["text"].encode() for row in rows]
    assert {document.path for document in documents} == {b"data-0000%d-of-00003.arrow" % number for number in range(3)}
    assert json.loads(documents[0].facts)["split"] == "train"
    assert not tally.counts


def test_a_dictionary_of_splits_has_them_in_path_and_facts(tmp_path: Path, rows: Rows):
    for split in ("train", "test"):
        save_to_disk(tmp_path / "dd" / split, [{**row, "text": f"{split} {row['text']}"} for row in rows], split=None)
    written(tmp_path / "dd" / "dataset_dict.json", b'{"splits": ["train", "test"]}')
    documents, _ = read_all(only(tmp_path / "dd"))
    assert len(documents) == 2 * len(rows)
    for document in documents:
        split = document.path.split(b"/")[0].decode()
        assert document.parts[0].data.startswith(split.encode())
        assert json.loads(document.facts)["split"] == split


@pytest.mark.parametrize("name", ["../other", "/etc/passwd", "..", "", "a/b", 5, "no\nname"])
def test_a_saved_data_set_can_not_lead_out_of_its_folder(tmp_path: Path, name: Any):
    save_to_disk(tmp_path / "ds", [{"text": "x"}])
    state = {"_data_files": [{"filename": name}], "_split": None}
    (tmp_path / "ds" / "state.json").write_text(json.dumps(state))
    with pytest.raises(InputError, match=r"state\.json"):
        only(tmp_path / "ds")


def test_what_the_real_library_saves_is_read(tmp_path: Path, rows: Rows, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.setenv("HF_DATASETS_OFFLINE", "1")
    datasets = pytest.importorskip("datasets", reason="datasets isn't installed")
    dataset = datasets.Dataset.from_list(rows)
    dataset.save_to_disk(str(tmp_path / "one"), num_shards=3)
    assert contents(read_all(only(tmp_path / "one"), 5000)[0]) == [row["text"].encode() for row in rows]
    datasets.DatasetDict({"train": dataset, "val": dataset.select(range(4))}).save_to_disk(str(tmp_path / "two"))
    documents, _ = read_all(only(tmp_path / "two"), 5000)
    assert [json.loads(document.facts)["split"] for document in documents].count("val") == 4
    assert len(documents) == len(rows) + 4
