"""Tables that are broken, hostile or huge: counted with their place, or one clear error; never a hang."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from backports import zstd

from penstock.errors import InputError
from penstock.sources import SkipTally, TableOptions, TablesSource, TemplateVocabulary, sources_from_inputs
from penstock.sources.records.templates import row_renderer
from penstock.sources.tables import streams

pytestmark = pytest.mark.torture(lane="F", sample=True)


def source_of(path: Path, *, max_document_bytes: int = 1 << 24, **options: Any) -> TablesSource:
    files = [(b"", str(path))]
    rendered = {"renderer": options.pop("renderer")} if "renderer" in options else {}
    return TablesSource(
        name="t",
        location=str(path),
        files=files,
        options=TableOptions(**options),
        max_document_bytes=max_document_bytes,
        **rendered,
    )


def read_all(source: Any, unit_bytes: int = 1 << 20) -> tuple[list[bytes], SkipTally]:
    tally = SkipTally()
    texts = []
    try:
        for unit in source.units(unit_bytes):
            text = source.read(unit)
            tally.merge([unit.skips, text.skips])
            texts += [document.parts[0].data for document in text.documents]
    finally:
        source.close()
    return texts, tally


def read_everywhere(path: Path, *, unit_bytes: int = 70, **options: Any) -> tuple[list[bytes], SkipTally]:
    """The same for small units and large ones, or the test fails."""
    large = read_all(source_of(path, **options), 1 << 30)
    assert read_all(source_of(path, **options), unit_bytes) == large
    return large


def strict_error(path: Path, **options: Any) -> InputError:
    with pytest.raises(InputError) as raised:
        read_all(source_of(path, strict=True, **options))
    assert raised.value.hint
    assert "\n" not in raised.value.message
    return raised.value


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


GOOD = b'{"text": "good"}\n'


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "x"', "broken-json"),
        (b"nonsense", "broken-json"),
        (b'{"text": "x"} {}', "broken-json"),
        (b"[" * 100_000, "broken-json"),
        (b'{"text": "a\x00b"}', "broken-json"),
        (b'{"text": "x", "n": ' + b"9" * 5000 + b"}", "broken-json"),
        (b"[1, 2]", "not-an-object"),
        (b"null", "not-an-object"),
        (b'"text"', "not-an-object"),
        (b'{"text": "\\ud800"}', "not-utf8"),
        (b'{"text": "\\udc00\\ud800 tail"}', "not-utf8"),
        (b'{"text": "\xff"}', "not-utf8"),
        (b'{"text": "\xc0\xaf"}', "not-utf8"),
        (b'{"text": "\xed\xa0\x80"}', "not-utf8"),
        ('{"text": "x"}'.encode("utf-16"), "not-utf8"),
        (b'{"text": null}', "no-text"),
        (b'{"text": 5}', "no-text"),
        (b'{"body": "x"}', "no-text"),
        (b"{}", "no-text"),
        (b'{"text": ""}', "empty"),
        (b'{"text": "a\\u0000b"}', "binary"),
    ],
)
def test_a_broken_line_is_counted_with_its_place(tmp_path: Path, line: bytes, reason: str):
    path = written(tmp_path / "a.jsonl", GOOD + line + b"\n" + GOOD)
    texts, tally = read_everywhere(path, text_field="text")
    assert texts == [b"good"] * 2
    assert tally.counts == {reason: 1}
    assert tally.examples == {reason: ["t#000000000000017"]}
    assert read_everywhere(path, text_field=None)[1].counts == {reason: 1}
    if reason != "empty":
        assert f"t: byte 17: {reason}" in strict_error(path).message


def test_marks_blank_lines_and_line_ends_are_no_faults(tmp_path: Path):
    data = b"\xef\xbb\xbf" + GOOD + b"\n  \r\n\t\n" + GOOD.replace(b"\n", b"\r\n") + b"\r\n" + GOOD.rstrip()
    texts, tally = read_everywhere(written(tmp_path / "a.jsonl", data))
    assert (texts, tally.counts) == ([b"good"] * 3, {})
    (unit,) = source_of(tmp_path / "a.jsonl").units(1 << 20)
    first, second, _ = source_of(tmp_path / "a.jsonl").read(unit).documents
    assert first.byte_start == 3
    assert data[second.byte_start : second.byte_end] == b'{"text": "good"}'
    texts, tally = read_everywhere(written(tmp_path / "a.csv", b"\xef\xbb\xbftext\r\n\r\na\r\n\n"))
    assert (texts, tally.counts) == ([b"a"], {})


def test_long_rows_are_passed_over_without_being_held(tmp_path: Path):
    limit = 4 * 1000 + 2**16
    long = b'{"text": "' + b"y" * 3_000_000 + b'"}\n'
    middle = b'{"text": "' + b"z" * 2000 + b'"}\n'
    path = written(tmp_path / "a.jsonl", GOOD + long + middle + GOOD)
    texts, tally = read_everywhere(path, max_document_bytes=1000, unit_bytes=50_000)
    assert (texts, tally.counts) == ([b"good"] * 2, {"too-large": 2})
    blocks = streams.plain_blocks(os.open(path, os.O_RDONLY), 0)
    kept = [record.data for record in streams.cut(blocks, limit=limit)]
    assert [data is None for data in kept] == [False, True, False, False]


@pytest.mark.parametrize(("loose", "end"), [(b'"open,3', b""), (b'5" disk,3', b""), (b'5" disk,3', b'6" disk,5')])
def test_a_loose_quote_before_more_than_a_row_may_hold_is_counted_by_lines(tmp_path: Path, loose: bytes, end: bytes):
    rest = b"x,4\n" * 100_000 + end
    data = b'text,n\n"a",1\nb,2\n' + loose + b"\n" + rest
    path = written(tmp_path / "a.csv", data)
    texts, tally = read_everywhere(path, max_document_bytes=1000, unit_bytes=10_000)
    assert (texts, tally.counts) == ([b"a", b"b"], {"broken-row": 1 + len(rest.splitlines())})
    assert tally.examples == {"broken-row": ["t#" + str(data.index(loose)).zfill(15)]}
    assert "quote" in strict_error(path, max_document_bytes=1000).message


@pytest.mark.parametrize("ending", ["csv", "csv.gz", "tsv"])
@pytest.mark.parametrize(
    ("loose", "row"),
    [(b'"open,3', None), (b'5" disk,3', b'5" disk'), (b'5",3', b'5"'), (b'"x"y",3', None), (b'a,b,"', None)],
)
@pytest.mark.parametrize("last", [b"", b'"last",9\n', b'9" disk,9\n', b'"two\nlines",9\n'])
def test_a_loose_quote_takes_no_other_row_along(
    tmp_path: Path, ending: str, loose: bytes, row: bytes | None, last: bytes
):
    data = b'text,n\n"a ""good"" one",1\n' + loose + b"\n" + b'x,4\n"y, z",5\n\nonly\n\xff,6\n' * 3 + last
    if ending == "tsv":
        data, loose = data.replace(b"y, z", b"y").replace(b",", b"\t"), loose.replace(b",", b"\t")
    path = written(tmp_path / f"a.{ending}", gzip.compress(data) if ending.endswith("gz") else data)
    texts, tally = read_everywhere(path)
    between = [b"x", b"y" if ending == "tsv" else b"y, z"] * 3
    assert [text for text in texts if text in (b'a "good" one', *between)] == [b'a "good" one', *between]
    assert (row in texts) == (row is not None)
    assert (f"t#{data.index(loose):015}" in tally.examples["broken-row"]) == (row is None)
    assert tally.counts["not-utf8"] == 3


def test_rows_behind_a_loose_quote_are_found_by_their_keys(tmp_path: Path):
    path = written(tmp_path / "a.csv", b'text,n\n"open,3\nx,4\ny,5\n')
    source = source_of(path)
    (unit,) = source.units(1 << 20)
    key = source.read(unit).documents[1].key
    found = source.read(unit, wanted=lambda other: other == key)
    assert ([document.parts[0].data for document in found.documents], found.skips.counts) == ([b"y"], {})


def test_a_quoted_row_of_several_lines_is_one_whatever_else_is_wrong_with_it(tmp_path: Path):
    for row, reason in (
        (b'"x,1\ny,2\nz",3,4', "broken-row"),
        (b'"x,1\ny,2\n\xff",3', "not-utf8"),
        (b'"x,1\ny,2\n\0",3', "binary"),
        (b'"x,1\ny,2\r\n",3\r4', "broken-row"),
    ):
        texts, tally = read_everywhere(written(tmp_path / "a.csv", b"text,n\ngood,1\n" + row + b"\r\ngood,2\n"))
        assert (texts, tally.counts) == ([b"good"] * 2, {reason: 1})
    path = written(tmp_path / "a.csv", b'text,n\n"' + b"x,1\n" * 100_000 + b'",2\ngood,3\n')
    texts, tally = read_everywhere(path, max_document_bytes=1000, unit_bytes=10_000)
    assert (texts, tally.counts) == ([b"good"], {"too-large": 1})


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (b"a,b,c", "broken-row"),
        (b"alone", "broken-row"),
        (b'"x"y,1', "broken-row"),
        (b"x\ry,1", "broken-row"),
        (b"a\0b,1", "binary"),
        (b"\xff,1", "not-utf8"),
        (b",1", "empty"),
        (b'"",1', "empty"),
    ],
)
def test_a_broken_row_is_counted_with_its_place(tmp_path: Path, row: bytes, reason: str):
    path = written(tmp_path / "a.csv", b"text,n\ngood,1\n" + row + b"\ngood,2\n")
    texts, tally = read_everywhere(path)
    assert (texts, tally.counts) == ([b"good"] * 2, {reason: 1})
    assert tally.examples == {reason: ["t#000000000000014"]}
    if reason != "empty":
        assert f"byte 14: {reason}" in strict_error(path).message


@pytest.mark.parametrize("data", ["text,n\n1,2\n".encode("utf-16"), b"te\xffxt,n\n", b'"text,n\na,b\n', b"\0\0\0\n"])
def test_a_header_that_can_not_be_read_is_named(tmp_path: Path, data: bytes):
    with pytest.raises(InputError, match=r"a\.csv.*header") as met:
        list(source_of(written(tmp_path / "a.csv", data)).units(1))
    assert met.value.message.count("a.csv") == 1


def test_a_header_without_columns_to_take_is_named_for_what_it_is(tmp_path: Path):
    for name, data, told in (
        ("a.csv.xz", b"no xz", "damaged"),
        ("a.csv", b"text,n\rhello,1\r", "carriage return"),
        ("a.csv", b"\n \n", "blank"),
        ("a.csv", b"text;n\nhello;1\n", "looks like several"),
        ("a.tsv", b"text,n\nhello,1\n", "looks like several"),
    ):
        with pytest.raises(InputError, match=told):
            list(source_of(written(tmp_path / name, data)).units(1))
    named = source_of(written(tmp_path / "a.csv", b"text;n\nhello;1\n"), text_field="text;n")
    assert [document.parts[0].data for unit in named.units(1) for document in named.read(unit).documents] == [
        b"hello;1"
    ]


def test_long_fields_leave_other_users_of_csv_alone_until_they_are_met(tmp_path: Path):
    path = written(tmp_path / "a.csv", b'text\n"' + b"long " * 100_000 + b'"\n')
    assert read_everywhere(path, unit_bytes=50_000)[0] == [b"long " * 100_000]


# --- Compressed -------------------------------------------------------------------------------------------------------


def noise_lines(seed: int = 0, count: int = 60) -> bytes:
    noise = random.Random(seed)
    return b"".join(b'{"text": "%s"}\n' % noise.randbytes(8000).hex().encode() for _ in range(count))


def checked_zstd(data: bytes) -> bytes:
    """With a checksum, as the command line tool writes; without one damage may pass for other text."""
    return zstd.compress(data, options={zstd.CompressionParameter.checksum_flag: 1})


PACKED = {".gz": gzip.compress, ".zst": checked_zstd}


@pytest.mark.parametrize("ending", PACKED)
@pytest.mark.parametrize("share", [0.001, 0.3, 0.77, 0.99999])
def test_a_stream_cut_short_gives_its_whole_rows_and_is_counted_once(tmp_path: Path, ending: str, share: float):
    whole = noise_lines()
    packed = PACKED[ending](whole)
    path = written(tmp_path / f"a.jsonl{ending}", packed[: int(len(packed) * share)])
    texts, tally = read_everywhere(path, text_field="text")
    lines = [json.loads(line)["text"].encode() for line in whole.splitlines()]
    assert texts == lines[: len(texts)]
    assert len(texts) >= int(share * 60) - 20
    assert tally.counts == {"truncated": 1}
    if share > 0.1:
        assert "truncated" in strict_error(path).message


@pytest.mark.parametrize("ending", PACKED)
def test_a_damaged_stream_gives_what_was_whole_and_is_counted_once(tmp_path: Path, ending: str):
    whole = noise_lines()
    lines = [json.loads(line)["text"].encode() for line in whole.splitlines()]
    for seed in range(6):
        packed = bytearray(PACKED[ending](whole))
        place = random.Random(seed).randrange(len(packed) // 4, len(packed))
        packed[place : place + 300] = random.Random(seed).randbytes(300)
        texts, tally = read_everywhere(written(tmp_path / f"a.jsonl{ending}", bytes(packed)), text_field="text")
        faults = {reason: count for reason, count in tally.counts.items() if reason in ("damaged-stream", "truncated")}
        assert sum(faults.values()) == 1, (seed, tally.counts)
        assert len(set(texts) & set(lines)) > 5


@pytest.mark.parametrize("count", [1, 10, 20_000])
def test_a_wrong_sum_at_the_end_of_a_gzip_stream_costs_no_row_before_it(tmp_path: Path, count: int):
    packed = bytearray(gzip.compress(GOOD * count))
    packed[-6] ^= 1
    texts, tally = read_everywhere(written(tmp_path / "a.jsonl.gz", bytes(packed)))
    assert (texts, tally.counts) == ([b"good"] * count, {"damaged-stream": 1})
    assert tally.examples == {"damaged-stream": [f"t#{count * len(GOOD):015}"]}


@pytest.mark.parametrize("ending", PACKED)
def test_what_follows_a_stream_is_padding_or_damage(tmp_path: Path, ending: str):
    packed = PACKED[ending](GOOD)
    path = written(tmp_path / f"a.jsonl{ending}", packed + bytes(5000))
    assert read_everywhere(path)[0] == [b"good"]
    assert not read_everywhere(path)[1].counts
    written(path, packed + b"and then some")
    assert read_everywhere(path) == (
        [b"good"],
        SkipTally({"damaged-stream": 1}, {"damaged-stream": ["t#" + str(len(GOOD)).zfill(15)]}),
    )
    written(path, packed + packed * 3)
    assert read_everywhere(path)[0] == [b"good"] * 4
    written(path, b"not compressed at all\n")
    assert read_everywhere(path)[1].counts == {"damaged-stream": 1}


def test_skippable_and_large_window_frames(tmp_path: Path):
    skippable = struct.pack("<II", 0x184D2A50, 4) + b"abcd"
    path = written(tmp_path / "a.jsonl.zst", skippable + zstd.compress(GOOD) + skippable + zstd.compress(GOOD))
    assert read_everywhere(path)[0] == [b"good"] * 2
    options = {zstd.CompressionParameter.window_log: 29}
    compressor = zstd.ZstdCompressor(options=options)
    written(path, compressor.compress(GOOD) + compressor.flush())
    with pytest.raises(InputError, match="window") as raised:
        read_all(source_of(path))
    assert "zstd -d" in raised.value.hint


@pytest.mark.parametrize("ending", PACKED)
def test_a_stream_that_expands_beyond_reason_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ending: str):
    monkeypatch.setattr(streams, "MAX_EXPANDED_BYTES", 20 << 20)
    path = written(tmp_path / f"a.jsonl{ending}", PACKED[ending](GOOD + bytes(40 << 20)))
    assert path.stat().st_size < 65536
    with pytest.raises(InputError, match=r"a\.jsonl.*expand"):
        read_all(source_of(path))


# --- Columns ----------------------------------------------------------------------------------------------------------


def table(count: int = 100) -> pa.Table:
    noise = random.Random(5)
    return pa.table({"text": [noise.randbytes(600).hex() for _ in range(count)], "n": range(count)})


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize("data", [b"x", b"PAR1", b"PAR1" * 10, b"ARROW1\0\0" * 9, bytes(500), b"\xff" * 100])
def test_what_is_no_such_file_is_named(tmp_path: Path, name: str, data: bytes):
    with pytest.raises(InputError, match=name) as raised:
        list(source_of(written(tmp_path / name, data)).units(1))
    assert raised.value.hint
    assert "\n" not in raised.value.message


def test_a_parquet_file_cut_short_is_named(tmp_path: Path):
    pq.write_table(table(), tmp_path / "a.parquet")
    whole = (tmp_path / "a.parquet").read_bytes()
    for share in (0.1, 0.5, 0.99):
        written(tmp_path / "a.parquet", whole[: int(len(whole) * share)])
        with pytest.raises(InputError, match=r"a\.parquet"):
            list(source_of(tmp_path / "a.parquet").units(1))


def test_a_damaged_row_group_costs_its_own_rows_and_is_counted_once(tmp_path: Path):
    path = tmp_path / "a.parquet"
    rows = table()
    pq.write_table(rows, path, row_group_size=20, compression="zstd", use_dictionary=False, write_page_checksum=True)
    column = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    middle = column.data_page_offset + column.total_compressed_size // 2
    data[middle : middle + 50] = bytes(50)
    path.write_bytes(data)
    texts, tally = read_everywhere(path)
    expected = [text.encode() for text in rows["text"].to_pylist()]
    assert texts == expected[:40] + expected[60:]
    assert tally.counts == {"damaged": 1}
    assert tally.examples == {"damaged": ["t#000000000000040"]}
    assert "row 40: damaged" in strict_error(path).message


FOOTER_DAMAGE = """
import struct, sys
from pathlib import Path
from penstock.errors import InputError
from penstock.sources import TablesSource
path, whole = Path(sys.argv[1]), Path(sys.argv[1]).read_bytes()
footer_bytes = struct.unpack("<i", whole[-8:-4])[0]
outcomes = []
for place in range(len(whole) - 8 - footer_bytes, len(whole) - 8):
    for flipped in (1, 4):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ flipped]) + whole[place + 1 :])
        source = TablesSource(name="t", location="", files=[(b"", sys.argv[1])])
        try:
            texts = [source.read(unit) for unit in source.units(1 << 20)]
        except InputError:
            outcomes.append("refused")
        else:
            outcomes += [(len(text.documents), text.skips.counts.get("damaged", 0)) for text in texts]
        source.close()
assert outcomes.count("refused") > 100, outcomes
assert {(2, 1), (1, 1), (3, 0)} <= set(outcomes), outcomes  # a row group is lost, or only a column that nobody reads
"""


def test_no_damaged_byte_of_a_parquet_footer_ends_the_process(tmp_path: Path):
    """Arrow's exceptions about column metadata aren't caught on the way to Python: they abort."""
    messages = [[{"role": "user", "content": "q"}], None, []]
    rows = pa.table({"text": ["a", "b", "c"], "messages": messages})
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    subprocess.run([sys.executable, "-c", FOOTER_DAMAGE, str(tmp_path / "a.parquet")], check=True, timeout=300)


def test_an_arrow_stream_cut_short_keeps_its_whole_batches(tmp_path: Path):
    path = tmp_path / "a.arrow"
    rows = table()
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows, 10)
    whole = path.read_bytes()
    written(path, whole[: len(whole) // 2])
    texts, tally = read_everywhere(path)
    assert texts == [text.encode() for text in rows["text"].to_pylist()][: len(texts)]
    assert (len(texts) % 10, tally.counts) == (0, {"damaged": 1})
    assert 30 <= len(texts) <= 50


def test_arrow_offsets_that_lead_out_of_the_file_are_damage(tmp_path: Path):
    path = tmp_path / "a.arrow"
    rows = pa.table({"text": ["a" * 50] * 100})
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows)
    data = bytearray(path.read_bytes())
    place = data.index(struct.pack("<iii", 50, 100, 150))
    for values in ([-5], [2**30], [1], [2**31 - 1, -(2**31), -1]):
        struct.pack_into(f"<{len(values)}i", data, place + 4, *values)
        texts, tally = read_everywhere(written(path, bytes(data)))
        assert (texts, tally.counts) == ([], {"damaged": 1})


@pytest.mark.parametrize(
    ("kind", "borders", "value"),
    [
        ("dictionary", (50, 100), 1),
        ("messages", (50, 100), 1),
        ("messages", (1, 2, 3), 90),
        ("extension", (50, 100), 1),
    ],
)
def test_offsets_inside_of_a_column_that_lead_out_of_it_are_damage(
    tmp_path: Path, kind: str, borders: tuple[int, ...], value: int
):
    """Of a dictionary's values, of the strings in lists of structs, of the lists, of what extension types hold."""
    texts, options = [f"{number:050d}" for number in range(100)], {}
    rows = pa.table({"text": pa.array(texts).dictionary_encode()})
    if kind == "messages":
        rows = pa.table({"messages": [[{"role": "assistant", "content": text}] for text in texts]})
        options = {"renderer": row_renderer("chatml", vocabulary=TemplateVocabulary.to_be_trained("chatml"))}
    if kind == "extension":
        rows = pa.table({"prompt": pa.ExtensionArray.from_storage(pa.json_(), pa.array(texts)), "completion": texts})
        options = {"renderer": row_renderer("plain", vocabulary=TemplateVocabulary.to_be_trained("plain"))}
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(path, rows.schema) as writer:
        writer.write_table(rows)
    assert len(read_everywhere(path, **options)[0]) == 100
    data = bytearray(path.read_bytes())
    struct.pack_into("<i", data, data.index(struct.pack(f"<{len(borders)}i", *borders)) + 4, value)
    read, tally = read_everywhere(written(path, bytes(data)), **options)
    assert (read, tally.counts) == ([], {"damaged": 1})


def test_bytes_that_are_no_utf8_in_messages_are_counted_by_row(tmp_path: Path):
    of_bytes, of_text = (
        pa.list_(pa.struct([("role", kind), ("content", kind)])) for kind in (pa.binary(), pa.string())
    )
    contents = (b"good", b"\xff\xfe", b"too")
    messages = pa.array([[{"role": b"assistant", "content": content}] for content in contents], of_bytes).view(of_text)
    rows = pa.table({"messages": messages})
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema) as writer:
        writer.write_table(rows)
    renderer = row_renderer("chatml", vocabulary=TemplateVocabulary.to_be_trained("chatml"))
    texts, tally = read_everywhere(tmp_path / "a.arrow", renderer=renderer)
    assert (len(texts), tally.counts) == (2, {"not-utf8": 1})


def test_rows_before_damaged_offsets_stay_however_often_they_are_read(tmp_path: Path):
    path = tmp_path / "a.arrow"
    rows = pa.table({"text": [f"{number:050d}" for number in range(100)]})
    with pa.ipc.new_stream(path, rows.schema) as writer:
        writer.write_table(rows, 10)
    data = bytearray(path.read_bytes())
    sixth_batch = [found.start() for found in re.finditer(re.escape(struct.pack("<iii", 50, 100, 150)), data)][5]
    data[sixth_batch : sixth_batch + 4] = struct.pack("<i", 2**20)
    texts, tally = read_everywhere(written(path, bytes(data)), unit_bytes=1300)
    assert texts == [text.encode() for text in rows["text"].to_pylist()][:50]
    assert tally.examples == {"damaged": ["t#000000000000050"]}
    # A vocabulary is trained on the same units before they are encoded.
    source = source_of(path)
    (unit,) = source.units(1 << 20)
    first, second = source.read(unit), source.read(unit)
    assert (second.documents, second.skips) == (first.documents, first.skips)
    source.close()


def test_random_damage_to_columns_is_an_error_or_counted_and_never_more_rows(tmp_path: Path):
    rows = table(40)
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=10, write_page_checksum=True)
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema) as writer:
        writer.write_table(rows, 10)
    for name in ("a.parquet", "a.arrow"):
        whole = (tmp_path / name).read_bytes()
        refused: list[str] = []
        for seed in range(40):
            noise = random.Random(seed)
            data = bytearray(whole)
            data[noise.randrange(len(data))] ^= 1 << noise.randrange(8)
            try:
                texts, _ = read_all(source_of(written(tmp_path / name, bytes(data)), text_field="text"), 3000)
            except InputError as error:
                refused.append(error.message)
            else:
                assert len(texts) <= 40
        assert all(name in message for message in refused)


def test_bytes_that_are_no_utf8_in_a_column_of_strings_are_counted(tmp_path: Path):
    column = pa.array([b"good", b"\xff\xfe", b"a\0b", b""]).view(pa.string())
    other = pa.array([b"\xff", b"y", b"z", b"w"]).view(pa.string())
    rows = pa.table({"text": column, "other": other})
    pq.write_table(rows, tmp_path / "a.parquet")
    with pa.ipc.new_file(tmp_path / "a.arrow", rows.schema) as writer:
        writer.write_table(rows)
    for name in ("a.parquet", "a.arrow"):
        texts, tally = read_everywhere(tmp_path / name)
        assert (texts, tally.counts) == ([b"good"], {"not-utf8": 1, "binary": 1, "empty": 1})
        assert "row 1: not-utf8" in strict_error(tmp_path / name).message


# --- Files ------------------------------------------------------------------------------------------------------------


def test_nothing_hangs_on_a_fifo_and_no_link_is_followed(tmp_path: Path):
    os.mkfifo(tmp_path / "x.jsonl")
    (tmp_path / "y.parquet").symlink_to(written(tmp_path / "z.parquet.txt", b"secret"))
    (tmp_path / "d.csv").mkdir()
    files = [(name, str(tmp_path / name.decode())) for name in (b"x.jsonl", b"y.parquet", b"d.csv", b"gone.arrow")]
    _, tally = read_all(TablesSource(name="t", location="", files=files))
    assert tally.counts == {"special": 2, "symlink": 1, "unreadable": 1}
    (source,) = sources_from_inputs([str(tmp_path / "x.jsonl")])
    assert read_all(source)[1].counts == {"special": 1}


@pytest.mark.parametrize("name", ["a.jsonl", "a.csv", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_an_empty_file_is_counted(tmp_path: Path, name: str):
    assert read_everywhere(written(tmp_path / name, b"")) == ([], SkipTally({"empty": 1}, {"empty": ["t"]}))


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_that_changes_or_goes_while_it_is_read_is_named(tmp_path: Path, ending: str):
    path = tmp_path / f"a.{ending}"
    if ending == "parquet":
        pq.write_table(table(), path, row_group_size=10)
    else:
        written(path, gzip.compress(GOOD * 100) if ending.endswith("gz") else GOOD * 100)
    source = source_of(path)
    units = list(source.units(100))
    path.write_bytes(path.read_bytes() + GOOD)
    with pytest.raises(InputError, match="changed"):
        source.read(units[0])
    path.unlink()
    with pytest.raises(InputError, match="can't be read any more"):
        source.read(units[0])


def test_a_units_fingerprint_follows_its_file_and_strictness(tmp_path: Path):
    path = written(tmp_path / "a.jsonl", GOOD * 50)

    def prints(**options: Any) -> list[str]:
        return [unit.fingerprint for unit in source_of(path, **options).units(100)]

    first = prints()
    assert len(set(first)) == len(first) > 3
    assert prints() == first
    assert not set(prints(strict=True)) & set(first)
    os.utime(path, (1, 1))
    assert not set(prints()) & set(first)


@pytest.mark.torture(lane="F")
def test_a_line_of_a_gigabyte_costs_bounded_memory(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    with open(path, "wb") as file:
        file.write(GOOD + b'{"text": "')
        for _ in range(1024):
            file.write(b"y" * 2**20)
        file.write(b'"}\n' + GOOD)
    code = (
        "import sys\n"
        "from penstock.hardware import peak_memory_bytes\n"
        "from penstock.sources import TablesSource\n"
        "source = TablesSource(name='t', location='', files=[(b'', sys.argv[1])])\n"
        "texts = [source.read(unit) for unit in source.units(16 << 20)]\n"
        "assert sum(len(text.documents) for text in texts) == 2\n"
        "assert [text.skips.counts for text in texts if text.skips.counts] == [{'too-large': 1}]\n"
        "print(peak_memory_bytes() >> 20)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) < 400


def test_a_missing_column_of_text_is_told_for_what_is_there(tmp_path: Path):
    """Strings with other names aren't no strings, and chats want a template."""
    for name, data, told, hint in (
        ("a.csv", b"a,b\nc,d\n", "no column has a name", "--text-field"),
        ("a.jsonl", b'{"messages": []}\n', "no column has a name", "--template"),
        ("a.csv", b"text,n,text\nc,d,e\n", "'text' is there twice", "rename"),
    ):
        with pytest.raises(InputError, match=told) as met:
            list(source_of(written(tmp_path / name, data)).units(1))
        assert hint in (met.value.hint or "")
