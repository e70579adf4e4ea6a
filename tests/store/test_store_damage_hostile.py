"""Stores made to harm (torture C): every checksum in them is right. Each is refused with one line, without a traceback,
a crash, much memory or much time; `make torture` gives the figures, under `python -O` too."""

from __future__ import annotations

import functools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from penstock.errors import TokenizerError
from penstock.store import open_store
from penstock.store.layout import INDEX_ARRAYS

from .damage import write_tiny_store
from .samples import forged_array, forged_file, forged_manifest, forged_table, with_right_checksum
from .test_store_damage import HUGE, LIES, OUTSIDE, RAW

Scale = Callable[..., int]
Figures = Callable[..., None]
Harm = Callable[[Path], object]

MEGABYTES = 10**6
LARGEST_MEMORY_BYTES = 200 * MEGABYTES
LARGEST_SECONDS = 1.0


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_store(tmp_path_factory.mktemp("hostile") / "tiny")


def manifest(change: Callable[[dict[str, Any]], object]) -> Harm:
    return lambda store: forged_manifest(store, change)


def raw(change: Callable[[str], str | bytes]) -> Harm:
    def harm(store: Path) -> None:
        path = store / "manifests" / "000001.json"
        text = change(path.read_text())
        path.write_bytes(with_right_checksum(text.encode() if isinstance(text, str) else text))

    return harm


def array(name: str, values: Any) -> Harm:
    return lambda store: forged_array(store, name, lambda old: values)


def table(change: Callable[[pa.Table], pa.Table]) -> Harm:
    return lambda store: forged_table(store, change)


def column(name: str, values: list[Any], kind: Any = None) -> Harm:
    def change(old: pa.Table) -> pa.Table:
        wanted = kind or old.schema.field(name).type
        return old.set_column(old.column_names.index(name), pa.field(name, wanted), pa.array(values, wanted))

    return table(change)


def bomb(name: str, num_bytes: int) -> Harm:
    """A value that is nearly nothing on disk and all of the memory when read."""

    def harm(store: Path) -> None:
        with open_store(store) as opened:
            old = opened.provenance()
        kind = old.schema.field(name).type
        large = pa.array([b"" if kind == pa.binary() else "", bytes(num_bytes), b""], kind)
        sink = pa.BufferOutputStream()
        new = old.set_column(old.column_names.index(name), pa.field(name, kind), large)
        pa.parquet.write_table(new, sink, compression="zstd", use_dictionary=False, write_statistics=False)
        forged_file(store, "documents.parquet", sink.getvalue().to_pybytes())

    return harm


def sparse_manifest(store: Path) -> None:
    os.truncate(store / "manifests" / "000001.json", 2**40)


def linked_folder(name: str) -> Harm:
    def harm(store: Path) -> None:
        folder = next(path for path in sorted(store.rglob("*")) if path.is_dir() and str(path).endswith(name))
        aside = store.with_name(store.name + ".aside")
        folder.rename(aside)
        folder.symlink_to(aside)

    return harm


LONG = "x" * 10 * MEGABYTES
MANY = 2**20

CASES: dict[str, Harm] = {
    **{f"manifest, {name}": raw(change) for name, change in RAW.items()},
    **{
        f"manifest, {field} = {value!r:.40}": manifest(
            lambda content, field=field, value=value: content.update({field: value})
        )
        for field, values in LIES.items()
        for value in values
    },
    **{
        f"segment named {name!r:.20}": manifest(lambda content, name=name: content["segments"][0].update(name=name))
        for name in OUTSIDE
        if name != "index"
    },
    **{
        f"{field} of a segment is {value}": manifest(
            lambda content, field=field, value=value: content["segments"][0].update({field: value})
        )
        for field in ("bytes", "tokens")
        for value in (HUGE, 2**63, 2**63 - 1, 2**64, -1, 1.5, True, 10**400)
    },
    **{
        f"{field} of an array is {value}": manifest(
            lambda content, field=field, value=value: content["index"][0].update({field: value})
        )
        for field in ("bytes", "checksum")
        for value in (HUGE, 2**63, -1, 1.5, True)
    },
    **{
        f"a long string as {field}": manifest(lambda content, field=field: content.update({field: LONG}))
        for field in ("digest", "dtype", "format", "splits")
    },
    "a long name": manifest(lambda content: content["segments"][0].update(name=LONG)),
    "a long key": manifest(lambda content: content.update({LONG: 1})),
    "a long split": manifest(lambda content: content.update(splits=[LONG, "b", "c"])),
    "splits of other names": manifest(lambda content: content.update(splits=["a", "b", "c"])),
    "300 splits": manifest(lambda content: content.update(splits=[str(number) for number in range(300)])),
    "many options": manifest(lambda content: content["options"].update({str(n): n for n in range(20_000)})),
    "many segments": manifest(lambda content: content.update(segments=content["segments"] * 1_000)),
    "a manifest of a terabyte": sparse_manifest,
    **{f"linked folder {name}": linked_folder(name) for name in ("manifests", "segments", "index", "tokenizers")},
    **{
        f"{name} is {value}": array(name, [value] * 3)
        for name, value in {
            "segment": 2**32 - 1,
            "offset": 2**64 - 1,
            "length": 2**32 - 1,
            "split": 255,
            "source": 2**16 - 1,
            "reason": 255,
            "loss_documents": 2**64 - 1,
            "loss_starts": 2**63,
            "loss_runs": 2**32 - 1,
        }.items()
    },
    **{f"{name} of a million rows": array(name, [0] * MANY) for name in INDEX_ARRAYS},
    **{f"{name} of no rows": array(name, []) for name in INDEX_ARRAYS if name not in ("loss_documents", "loss_runs")},
    "offsets that wrap around": array("offset", [2**64 - 2, 2**64 - 4, 2**63]),
    "loss runs that wrap around": array("loss_runs", [2**32 - 1, 2**32 - 1]),
    "a table without rows": table(lambda old: old.slice(0, 0)),
    "a table of many rows": table(lambda old: pa.concat_tables([old] * 10_000)),
    "a table without a column": table(lambda old: old.drop_columns(["facts"])),
    "a table of one column more": table(lambda old: old.append_column("more", pa.array([1, 2, 3]))),
    "a column twice": table(lambda old: old.append_column("key", old["key"])),
    "nulls": column("path", [None, b"", None]),
    "signed numbers": column("byte_start", [-1, -2, -3], pa.int64()),
    "floats": column("text_bytes", [0.5, float("nan"), 1.0], pa.float64()),
    "lists": column("facts", [[["a"]], [], []], pa.list_(pa.list_(pa.string()))),
    "deep lists": column("facts", [None] * 3, functools.reduce(lambda kind, _: pa.list_(kind), range(60), pa.int8())),
    "short hashes": column("content_hash", [bytes(16)] * 3, pa.binary(16)),
    "strings that aren't UTF-8": table(
        lambda old: old.set_column(
            old.column_names.index("language"),
            "language",
            pa.StringArray.from_buffers(3, pa.py_buffer(np.array([0, 1, 2, 3], "<i4")), pa.py_buffer(b"\xff\xfe\xfd")),
        )
    ),
    "300 megabytes in a key": bomb("key", 3 * 10**8),
    "300 megabytes in a column that nobody asked for": bomb("path", 3 * 10**8),
    "a tokenizer of deep nesting": lambda store: forged_file(store, "tokenizer.json", b"[" * 10**6),
    "a tokenizer that is a long string": lambda store: forged_file(store, "tokenizer.json", LONG.encode()),
    "a tokenizer that is no object": lambda store: forged_file(store, "tokenizer.json", b"[]"),
    "a tokenizer of huge ids": lambda store: forged_file(
        store,
        "tokenizer.json",
        next(store.rglob("tokenizer.json")).read_bytes().replace(b'"id":256', b'"id":99999999999').replace(
            b'"id": 256', b'"id": 99999999999'
        ),
    ),
}  # fmt: skip

# Answers a JSON line per store: who refused it and how, what it cost. Time is the processor's, of reading and of
# verifying together: the clock on the wall tells of the neighbours. Each in a process of its own, forked after the
# imports, whose own memory is in the figure.
ASKING = """
import json, os, resource, sys
from pathlib import Path
import numpy, numpy.ma, pyarrow.parquet, pyarrow.compute, tokenizers
from penstock.errors import PenstockError
from penstock.store import open_store, verify
import penstock.tokenize.specification, penstock.store.verification

def read(store):
    with open_store(store) as opened:
        for number in range(opened.num_documents): opened.document_tokens(number)
        opened.provenance(), opened.tokenizer()
    return False

def judged(ask, store):
    try:
        return "refused" if ask(store) else "accepted"
    except PenstockError as error:
        return "refused" if "\\n" not in error.message and error.hint else "refused in many lines"
    except BaseException as error:
        return f"{type(error).__name__}: {error}"[:300]

for line in sys.stdin:
    store = Path(line.rstrip("\\n"))
    ours, theirs = os.pipe()
    child = os.fork()
    if child == 0:
        resource.setrlimit(resource.RLIMIT_AS, (4 * 2**30, 4 * 2**30))
        answer = {"reader": judged(read, store), "verify": judged(verify, store)}
        os.write(theirs, json.dumps(answer).encode())
        os._exit(0)
    os.close(theirs)
    answer = os.read(ours, 65536)
    os.close(ours)
    _, status, usage = os.wait4(child, 0)
    print(json.dumps({**json.loads(answer or b"{}"), "status": status, "seconds": usage.ru_utime + usage.ru_stime,
                      "memory": usage.ru_maxrss * 1024, "asserts": __debug__}), flush=True)
"""


class Asker:
    """The process above."""

    def __init__(self, *flags: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, *flags, "-c", ASKING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def ask(self, store: Path) -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{store}\n")
        self._process.stdin.flush()
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer

    def close(self) -> None:
        self._process.communicate(timeout=60)


@pytest.mark.torture(lane="C", sample=True)
@pytest.mark.parametrize("flags", [(), ("-O",)], ids=["as usual", "python -O"])
def test_hostile_stores_are_refused_at_little_cost(
    whole: Path,
    scratch: Path,
    flags: tuple[str, ...],
    torture_figures: Figures,
    request: pytest.FixtureRequest,
):
    """In `make test` every ninth, and their memory; in torture all of them, and their time too."""
    timed = request.config.getoption("--torture") is not None
    names = [name for name in CASES if timed or "megabytes" not in name]  # those take long to make
    if not timed:
        names = names[bool(flags) :: 9]
    asker = Asker(*flags)
    failures, worst_seconds, worst_memory = [], 0.0, 0
    try:
        for number, name in enumerate(names):
            store = scratch / f"store{number}"
            shutil.copytree(whole, store)
            CASES[name](store)
            answer = asker.ask(store)
            worst_seconds = max(worst_seconds, answer["seconds"])
            worst_memory = max(worst_memory, answer["memory"])
            fine = (answer.get("reader"), answer.get("verify"), answer["status"]) in (
                ("refused", "refused", 0),
                ("accepted", "refused", 0),  # what only breaks a promise is for verify to find
            )
            cheap = answer["memory"] < LARGEST_MEMORY_BYTES and (not timed or answer["seconds"] < LARGEST_SECONDS)
            failures += [] if fine and cheap else [(name, answer)]
            assert answer["asserts"] is not bool(flags)
            shutil.rmtree(store)
            if (scratch / f"store{number}.aside").exists():
                shutil.rmtree(scratch / f"store{number}.aside")
    finally:
        asker.close()
    torture_figures(
        lane="C",
        case=f"hostile headers, index files, tables and tokenizers{' under python -O' if flags else ''}",
        trials=len(names),
        failures=len(failures),
        most_seconds=round(worst_seconds, 3),
        most_memory_megabytes=round(worst_memory / MEGABYTES),
    )
    assert failures == []


@pytest.mark.torture(lane="C")
def test_tables_with_flipped_bits_and_right_checksums(
    whole: Path, scratch: Path, scale: Scale, torture_figures: Figures
):
    """Parquet is a large format, read by somebody else's code: whatever it makes of them, it ends in an answer."""
    store = scratch / "store"
    shutil.copytree(whole, store)
    [path] = store.rglob("documents.parquet")
    content = path.read_bytes()
    chance = random.Random(8)
    asker = Asker()
    failures, worst_memory, refused = [], 0, 0
    trials = scale(test=10, torture=3_000)
    try:
        for _ in range(trials):
            damaged = bytearray(content)
            for _ in range(chance.choice([1, 1, 4, 16])):
                # The footer is where the sizes are.
                at = chance.choice(
                    [chance.randrange(len(content)), chance.randrange(len(content) * 2 // 3, len(content))]
                )
                damaged[at] ^= 1 << chance.randrange(8)
            forged_file(store, "documents.parquet", bytes(damaged))
            answer = asker.ask(store)
            worst_memory = max(worst_memory, answer["memory"])
            refused += answer.get("verify") == "refused"
            fine = answer["status"] == 0 and answer.get("verify") in ("refused", "accepted")
            fine = fine and answer.get("reader") in ("refused", "accepted")
            failures += [] if fine else [(bytes(damaged).hex()[-400:], answer)]
    finally:
        asker.close()
    torture_figures(
        lane="C",
        case="tables of documents with flipped bits under right checksums: an answer, never a crash",
        trials=trials,
        failures=len(failures),
        refused=refused,
        most_memory_megabytes=round(worst_memory / MEGABYTES),
    )
    assert failures == []


def test_no_id_is_ever_wrapped():
    """The writer's side: an id that the store's width can't hold is an error, not another id."""
    from .samples import bytes_tokenizer

    tokenizer = bytes_tokenizer()
    assert tokenizer.dtype == np.dtype("<u2")
    for bad in (tokenizer.vocab_size, 65_535, 65_536, 2**32 - 1):
        with pytest.raises(TokenizerError):
            tokenizer.check(np.array([1, bad], np.uint32))
