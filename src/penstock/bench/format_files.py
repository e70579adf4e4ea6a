"""The corpus in other forms: tables, and a repository with a history. Setup tasks of the formats benchmark."""

from __future__ import annotations

import csv
import io
import json
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.bench.corpus import corpus_documents

__all__ = ["write_repository", "write_tables"]

ROW_GROUP_BYTES = 16 * 2**20
FILES_PER_COMMIT = 3


def write_tables(*, inputs: Sequence[str], folder: str, names: Sequence[str]) -> dict[str, Any]:
    """Writes one table of the corpus's documents for each file name, in the format that its ending says."""
    import pyarrow as pa

    documents = [document.decode() for document in corpus_documents(inputs)]
    table = pa.table({"id": pa.array([f"{n:08d}" for n in range(len(documents))]), "text": pa.array(documents)})
    for name in names:
        _WRITERS["".join(Path(name).suffixes)](table, Path(folder, name))
    return {"documents": len(documents), "megabytes": sum(len(text.encode()) for text in documents) / 1e6}


def _jsonl(table: Any) -> bytes:
    rows = zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True)
    return b"".join(json.dumps({"id": name, "text": text}, ensure_ascii=False).encode() + b"\n" for name, text in rows)


def _write_jsonl(table: Any, path: Path) -> None:
    fs.write_atomic(path, _jsonl(table))


def _write_compressed(table: Any, path: Path) -> None:
    import pyarrow as pa

    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, {".gz": "gzip", ".zst": "zstd"}[path.suffix]) as stream:
        stream.write(_jsonl(table))
    fs.write_atomic(path, sink.getvalue().to_pybytes())


def _write_csv(table: Any, path: Path) -> None:
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(["id", "text"])
    writer.writerows(zip(table["id"].to_pylist(), table["text"].to_pylist(), strict=True))
    fs.write_atomic(path, text.getvalue().encode())


def _write_parquet(table: Any, path: Path) -> None:
    import pyarrow.parquet

    rows = max(1, round(table.num_rows * ROW_GROUP_BYTES / max(table.nbytes, 1)))
    pyarrow.parquet.write_table(table, path, row_group_size=rows, compression="zstd")


def _write_arrow(table: Any, path: Path) -> None:
    import pyarrow as pa

    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1000)


_WRITERS = {
    ".jsonl": _write_jsonl,
    ".jsonl.zst": _write_compressed,
    ".jsonl.gz": _write_compressed,
    ".csv": _write_csv,
    ".parquet": _write_parquet,
    ".arrow": _write_arrow,
}


def write_repository(*, inputs: Sequence[str], folder: str, commits: int) -> dict[str, Any]:
    """Makes a bare repository of so many commits, each adding or changing a few files of the corpus."""
    environment = {
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "PATH": "/usr/bin:/bin",
        "HOME": folder,
    }
    subprocess.run(["git", "init", "--quiet", "--bare", "--initial-branch=main", folder], check=True, env=environment)
    importer = subprocess.Popen(["git", "-C", folder, "fast-import", "--quiet"], stdin=subprocess.PIPE, env=environment)
    assert importer.stdin is not None
    with importer.stdin as stream:
        for piece in _history(corpus_documents(inputs), commits):
            stream.write(piece)
    if importer.wait():
        raise RuntimeError(f"git fast-import ended with status {importer.returncode}")
    return {"commits": commits}


def _history(documents: Sequence[bytes], commits: int) -> Iterator[bytes]:
    """A fast-import stream: each file begins as its first half and then grows and changes, a few lines at a time."""
    chosen = [document.splitlines(keepends=True) for document in documents if 40 < document.count(b"\n") < 4000]
    files = [lines[: len(lines) // 2] for lines in chosen]
    known: set[int] = set()
    for number in range(commits):
        message = b"Change %d: work on a few files\n\nWhat was there before is kept where it can be.\n" % number
        yield b"commit refs/heads/main\n"
        yield b"committer A U Thor <author@example.com> %d +0000\n" % (1_600_000_000 + 600 * number)
        yield b"data %d\n%s" % (len(message), message)
        for place in range(FILES_PER_COMMIT):
            file = (number * FILES_PER_COMMIT + place) * 7919 % len(files)
            lines, whole = files[file], chosen[file]
            if file in known:
                spot = (number * 31 + place) % max(1, len(lines) - 10)
                lines[spot : spot + 2] = [b"# changed by commit %d\n" % number, *whole[spot % len(whole) :][:6]]
            known.add(file)
            data = b"".join(lines)
            yield b"M 100644 inline part%d/file%d.py\ndata %d\n%s\n" % (file % 50, file, len(data), data)
        yield b"\n"
