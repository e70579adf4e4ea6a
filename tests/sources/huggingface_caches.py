"""Caches of Hugging Face made by hand, exactly as the two libraries lay them out, and a hub on the loopback.

test_huggingface.py holds the layouts against what the real libraries write.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pyarrow as pa
import pyarrow.parquet as pq

REVISION = "0123456789abcdef0123456789abcdef01234567"


def parquet(texts: Sequence[str]) -> bytes:
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"text": list(texts)}), sink)
    return sink.getvalue().to_pybytes()


def jsonl(texts: Sequence[str]) -> bytes:
    return "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()


def write_arrow(path: Path, texts: Sequence[str]) -> None:
    table = pa.table({"text": pa.array(texts, pa.string())})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table)


class HandMadeCaches:
    """A folder as HF_HOME names it."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.hub = home / "hub"
        self.datasets = home / "datasets"

    def processed(
        self,
        name: str,
        splits: Mapping[str, Sequence[Sequence[str]]],
        *,
        config: str = "default",
        config_folder: str | None = None,
        version: str = "0.0.0",
        build: str = "5d41402abc4b2a76",
    ) -> Path:
        """`name` as the processed cache writes it (`org___tiny_stories`); splits: shards of texts."""
        folder = self.datasets / name / (config_folder or config) / version / build
        folder.mkdir(parents=True)
        last = name.rpartition("___")[2]
        infos = {}
        for split, shards in splits.items():
            for number, texts in enumerate(shards):
                shard = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                write_arrow(folder / f"{last}-{split}{shard}.arrow", texts)
            infos[split] = {
                "name": split,
                "num_bytes": 1,
                "num_examples": sum(map(len, shards)),
                "dataset_name": last,
                **({"shard_lengths": [len(texts) for texts in shards]} if len(shards) > 1 else {}),
            }
        info = {"builder_name": "parquet", "dataset_name": last, "config_name": config, "splits": infos}
        (folder / "dataset_info.json").write_text(json.dumps(info))
        return folder

    def raw(
        self,
        name: str,
        files: Mapping[str, bytes],
        *,
        revision: str = REVISION,
        main: str | None = REVISION,
        listed: Mapping[str, int] | None = None,
    ) -> Path:
        """The snapshot of a repository in the hub cache; `listed`: sizes for trees/REVISION.json."""
        repository = self.hub / ("datasets--" + name.replace("/", "--"))
        snapshot = repository / "snapshots" / revision
        (repository / "blobs").mkdir(parents=True, exist_ok=True)
        snapshot.mkdir(parents=True)
        for path, data in files.items():
            blob = repository / "blobs" / hashlib.sha256(data).hexdigest()
            blob.write_bytes(data)
            link = snapshot / path
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(Path(*[".."] * (len(link.relative_to(repository).parts) - 1), "blobs", blob.name))
        if main:
            (repository / "refs").mkdir(exist_ok=True)
            (repository / "refs" / "main").write_text(main)
        if listed is not None:
            (repository / "trees").mkdir(exist_ok=True)
            entries = {path: {"size": size, "blob_id": "0" * 40} for path, size in listed.items()}
            (repository / "trees" / f"{revision}.json").write_text(json.dumps({"format_version": 1, "files": entries}))
        return snapshot


class _Hub(BaseHTTPRequestHandler):
    repositories: Mapping[str, Mapping[str, bytes]]
    asked: list[str]

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0)).decode()
        repository = unquote(urlsplit(self.path).path).removeprefix("/api/datasets/").partition("/paths-info/")[0]
        files = self.repositories.get(repository, {})
        wanted = json.loads(body).get("paths", []) if body.startswith("{") else []
        self._send(json.dumps([_entry(path, files[path]) for path in wanted if path in files]).encode())

    def _answer(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        self.asked.append(f"{self.command} {path}")
        if path.startswith("/api/datasets/"):
            self._api(path.removeprefix("/api/datasets/"))
        elif path.startswith("/datasets/") and "/resolve/" in path:
            name, _, rest = path.removeprefix("/datasets/").partition("/resolve/")
            data = self.repositories.get(name, {}).get(rest.partition("/")[2])
            if data is None:
                self._fail("EntryNotFound" if name in self.repositories else "RepoNotFound")
            else:
                self._send(data, with_body=with_body, etag=hashlib.sha256(data).hexdigest())
        else:
            self._fail("RepoNotFound")

    def _api(self, path: str) -> None:
        name = path.partition("/revision/")[0].partition("/tree/")[0]
        files = self.repositories.get(name)
        if files is None:
            self._fail("RepoNotFound")
        elif "/tree/" in path:
            below = path.partition("/tree/")[2].partition("/")[2]
            recursive = "recursive=true" in urlsplit(self.path).query.lower()
            self._send(json.dumps(_tree(files, f"{below}/" if below else "", recursive=recursive)).encode())
        else:
            siblings = [{"rfilename": at} for at in files]
            facts = {"id": name, "sha": REVISION, "siblings": siblings, "private": False, "tags": [], "downloads": 0}
            self._send(json.dumps(facts).encode())

    def _fail(self, code: str) -> None:
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _send(self, data: bytes, *, with_body: bool = True, etag: str = "") -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(data)))
        self.send_header("X-Repo-Commit", REVISION)
        if etag:
            self.send_header("ETag", f'"{etag}"')
        self.end_headers()
        if with_body:
            self.wfile.write(data)


def _entry(path: str, data: bytes) -> dict[str, object]:
    return {"type": "file", "path": path, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


def _tree(files: Mapping[str, bytes], below: str, *, recursive: bool) -> list[dict[str, object]]:
    inside = {path: data for path, data in files.items() if path.startswith(below)}
    direct = [_entry(path, data) for path, data in inside.items() if recursive or "/" not in path[len(below) :]]
    folders = sorted({below + path[len(below) :].partition("/")[0] for path in inside if "/" in path[len(below) :]})
    return direct + [{"type": "directory", "path": path, "size": 0, "oid": "0" * 40} for path in folders]


@contextmanager
def hub_server(repositories: Mapping[str, Mapping[str, bytes]]) -> Iterator[tuple[str, list[str]]]:
    """The address of a hub that has these repositories, and the list of what it is asked."""
    asked: list[str] = []
    handler = type("Hub", (_Hub,), {"repositories": repositories, "asked": asked})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
