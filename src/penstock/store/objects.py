"""A folder of objects behind a URL: what is there, how large, its bytes, putting one there.

In: `s3://bucket/store` and the like. Out: names with sizes, and chunks of bytes. Nothing here believes what arrives:
callers compare it with checksums. A request that fails for a reason that may pass (a timeout, a reset connection) is
made again with growing pauses; what is missing or forbidden is said at once. Memory: one chunk a transfer.

s3, gs and az go through obstore where it is installed; else, and everything else, through fsspec and its packages
(s3fs, gcsfs, adlfs).
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from penstock import fs
from penstock.errors import (
    ConfigError,
    DamagedStoreError,
    DiskError,
    MissingExtraError,
    PenstockError,
    StoreError,
    nearest_first,
)
from penstock.store.layout import BLOCK_BYTES

__all__ = ["CHUNK_BYTES", "ObjectFolder"]

Result = TypeVar("Result")

CHUNK_BYTES = 128 * BLOCK_BYTES
PAUSES = (0.5, 1.0, 2.0)
"""Seconds between the tries of a request; one more try than pauses."""

_OBJECT_STORES = {"s3": "s3", "s3a": "s3", "gs": "gs", "gcs": "gs", "az": "az", "abfs": "abfs", "abfss": "abfss"}
_WRITABLE = (*_OBJECT_STORES, "file", "memory")
# Chosen, not all that fsspec knows: some of its file systems start programs or lead to other addresses.
_KNOWN = (*_WRITABLE, "hf", "http", "https")
_STREAMED = ("http", "https")
"""Servers that may ignore the range asked for, and lists of files without sizes."""

_CLIENT_OPTIONS = {"connect_timeout": "10s", "timeout": "120s"}
_RETRY_CONFIG: dict[str, Any] = {"max_retries": 0}
_NO_CREDENTIALS = "give credentials the usual way (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; docs/remote.md)"


class ObjectFolder:
    """What lies below a URL. Naming the URL is asking for the network: nothing else here reaches for it.

    Raises, whatever is asked of it:
        DamagedStoreError: the object isn't there.
        StoreError: the server can't be reached or refuses.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        parts = urlsplit(self.url)
        self._protocol = parts.scheme.lower()
        if self._protocol not in _KNOWN:
            raise ConfigError(
                f"{self._protocol}:// is no kind of address that stores are read from",
                hint=f"use one of {nearest_first(self._protocol, _KNOWN)}, each with ://",
            )
        if parts.password is not None:
            raise ConfigError(
                f"the {self._protocol}:// address holds a password", hint=f"leave it out and {_NO_CREDENTIALS}"
            )
        self._root = self.url
        self._opened: tuple[int, Any] | None = None

    # Asking

    def sizes(self, folder: str) -> dict[str, int | None]:
        """Names in a folder with their sizes, None where the server doesn't tell; nothing where there is none."""

        def listed() -> dict[str, int | None]:
            files = self._files()
            files.invalidate_cache()
            try:
                entries = files.ls(f"{self._root}/{folder}", detail=True)
            except FileNotFoundError:
                return {}
            return {entry["name"].rstrip("/").rpartition("/")[2]: entry.get("size") for entry in entries}

        return self._asked(listed, folder)

    def read(self, name: str, *, most: int) -> bytes:
        """A small object, whole; one that is larger than `most` isn't read."""
        parts = []
        num_bytes = 0
        for chunk in self.chunks(name, None):
            parts.append(chunk)
            num_bytes += len(chunk)
            if num_bytes > most:
                raise self.damaged(name, f"it has more than the {most} bytes that are read of it")
        return b"".join(parts)

    def chunks(self, name: str, num_bytes: int | None) -> Iterator[bytes]:
        """The bytes of an object in chunks of `CHUNK_BYTES`, the last one perhaps shorter.

        An object that isn't `num_bytes` long is damage, seen before or after its bytes are.
        """
        if self._protocol in _STREAMED:
            yield from self._streamed(name, num_bytes)
            return
        info = self._asked(lambda: self._files().info(self._path(name), refresh=True), name)
        if info.get("type") == "directory":
            raise self.damaged(name, "it is missing")
        self._check_size(name, info["size"], num_bytes)
        for start in range(0, info["size"], CHUNK_BYTES):
            end = min(start + CHUNK_BYTES, info["size"])
            yield self._asked(partial(self._range, name, start, end), name)

    def _range(self, name: str, start: int, end: int) -> bytes:
        found: bytes = self._files().cat_file(self._path(name), start=start, end=end)
        if len(found) != end - start:  # cut off on the way
            raise EOFError(f"{len(found)} of {end - start} bytes came")
        return found

    def _streamed(self, name: str, num_bytes: int | None) -> Iterator[bytes]:
        with self._asked(lambda: self._files().open(self._path(name), "rb", block_size=0), name) as file:
            total = 0
            pending = bytearray()
            while more := self._once(lambda: file.read(2**20), name):
                pending += more
                total += len(more)
                if num_bytes is not None and total > num_bytes:
                    break
                while len(pending) >= CHUNK_BYTES:
                    yield bytes(pending[:CHUNK_BYTES])
                    del pending[:CHUNK_BYTES]
            self._check_size(name, total, num_bytes)
            if pending:
                yield bytes(pending)

    def _check_size(self, name: str, found: int, expected: int | None) -> None:
        if expected is not None and found != expected:
            raise self.damaged(name, f"it has {found} bytes, committed were {expected}")

    def tag(self, name: str) -> tuple[int, str] | None:
        """Size and entity tag of an object; None where there is no such object."""

        def asked() -> tuple[int, str] | None:
            try:
                info = self._files().info(self._path(name), refresh=True)
            except FileNotFoundError:
                return None
            tag = info.get("e_tag") or info.get("ETag") or ""
            return None if info.get("type") == "directory" else (info["size"], str(tag).strip('"'))

        return self._asked(asked, name)

    # Putting

    def check_writable(self) -> None:
        """Refuses what can only be read."""
        if self._protocol not in _WRITABLE:
            raise ConfigError(
                f"{self._protocol}:// can't be pushed to: it has no way to create an object only if it is absent",
                hint="push to s3://, gs://, az:// or a folder; to the hub, upload the store's folder with `hf upload`",
            )

    def put(self, name: str, file: Path) -> None:
        """Makes a local file the content of an object."""
        if self._protocol == "file":
            target = Path(self._path(name))
            with fs.fail_as_disk_error(f"pushing to {self.url}"), file.open("rb") as source:
                fs.make_folder(target.parent)
                with fs.atomic_file(target) as copy:
                    while chunk := source.read(CHUNK_BYTES):
                        copy.write(chunk)
            return
        self._asked(lambda: self._files().put_file(str(file), self._path(name)), name)

    def create(self, name: str, data: bytes) -> bool:
        """Makes an object unless one of that name is there: the commit. Returns whether this call made it."""
        if self._protocol == "file":
            target = Path(self._path(name))
            with fs.fail_as_disk_error(f"pushing to {self.url}"):
                fs.make_folder(target.parent)
                return fs.create_if_absent(target, data)
        return self._asked(lambda: self._created(name, data), name)

    def _created(self, name: str, data: bytes) -> bool:
        try:
            self._files().pipe_file(self._path(name), data, mode="create")
        except FileExistsError:
            return False
        return True

    # How

    def _path(self, name: str) -> str:
        if self._protocol == "file":
            return f"{urlsplit(self._root).path}/{name}"
        return f"{self._root}/{name}"

    def _files(self) -> Any:
        """The file system; a forked process makes its own, because connections don't survive a fork."""
        if self._opened is None or self._opened[0] != os.getpid():
            self._opened = (os.getpid(), self._new_files())
        return self._opened[1]

    def _new_files(self) -> Any:
        if self._protocol in _OBJECT_STORES and _has_obstore():
            bucket = self.url.partition("://")[2].partition("/")[0]
            return _Bucket(f"{_OBJECT_STORES[self._protocol]}://{bucket}", self._object_store_options())
        import fsspec

        try:
            return fsspec.filesystem(self._protocol, skip_instance_cache=self._protocol != "memory")
        except ImportError as error:
            package = "obstore" if self._protocol in _OBJECT_STORES else (error.name or "aiohttp")
            raise MissingExtraError(package, extra="remote", wanted_for=f"{self._protocol}://") from None

    def _refuse_fork(self) -> None:
        """obstore's threads are gone in a forked process, and it would wait for them for ever."""
        global _obstore_user
        if _obstore_user not in (None, os.getpid()):
            raise StoreError(
                f"{self.url} can't be read in a process forked from one that has read it",
                hint='start such processes anew: DataLoader(..., multiprocessing_context="spawn")',
            )
        _obstore_user = os.getpid()

    def _object_store_options(self) -> dict[str, Any]:
        self._refuse_fork()
        client: dict[str, Any] = dict(_CLIENT_OPTIONS)
        endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL") or ""
        if endpoint.startswith("http://"):  # named by the user, for instance a server on this machine
            client["allow_http"] = True
        return {"client_options": client, "retry_config": _RETRY_CONFIG}

    # What may go wrong

    def damaged(self, name: str, problem: str) -> DamagedStoreError:
        """The error for an object that isn't what was committed."""
        return DamagedStoreError(
            f"{self.url}/{name} is damaged: {problem}",
            hint="push the store there again from a whole copy: penstock push STORE URL",
        )

    def _asked(self, ask: Callable[[], Result], name: str) -> Result:
        """Asks until there is an answer, or no hope of one."""
        for pause in PAUSES:
            try:
                return self._once(ask, name)
            except _MayPassError:
                time.sleep(pause)
        try:
            return self._once(ask, name)
        except _MayPassError as error:
            raise StoreError(
                f"{self.url}/{name} can't be reached: {error.reason} ({len(PAUSES) + 1} tries)",
                hint="check the address, the network and the server's state, then run the same command again",
            ) from error.__cause__

    def _once(self, ask: Callable[[], Result], name: str) -> Result:
        try:
            return ask()
        except PenstockError:
            raise
        except (FileNotFoundError, IsADirectoryError, NotADirectoryError) as error:
            if "NoSuchBucket" in str(error):
                raise self._no_bucket() from None
            raise self.damaged(name, "it is missing") from None
        except _network_errors() as error:
            raise self._meaning(error, name) from error

    def _meaning(self, error: BaseException, name: str) -> Exception:
        text = " ".join(str(error).split())
        kind = type(error).__name__
        if "NoSuchBucket" in text:
            return self._no_bucket()
        if _is_about_credentials(error, kind, text):
            return StoreError(f"{self.url}: there are no credentials for it", hint=_NO_CREDENTIALS)
        if isinstance(error, PermissionError) or kind in ("PermissionDeniedError", "UnauthenticatedError"):
            return StoreError(f"{self.url}/{name}: the server refuses access", hint=_NO_CREDENTIALS)
        if isinstance(error, OSError) and self._protocol == "file":
            return DiskError.from_os_error(error, doing="reading")
        return _MayPassError(f"{kind}: {text[:200]}")

    def _no_bucket(self) -> StoreError:
        return StoreError(
            f"{self.url}: there is no such bucket", hint="check its name, or make it; penstock doesn't make buckets"
        )


class _Bucket:
    """What is asked of a file system here, by obstore's own calls.

    Behind its fsspec interface, threads of obstore's come back to Python once more after they have answered; where
    Python is ending by then, the process aborts. So did one of fifteen short commands on two busy cores.
    """

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        import obstore.store

        self._ask: Any = obstore
        self._store = obstore.store.from_url(url, **options)

    def invalidate_cache(self) -> None:
        """Nothing is cached."""

    def ls(self, path: str, *, detail: bool) -> list[dict[str, Any]]:
        """Name and size of the objects in a folder."""
        objects = self._ask.list_with_delimiter(self._store, _key(path))["objects"]
        return [{"name": found["path"], "size": found["size"]} for found in objects]

    def info(self, path: str, *, refresh: bool) -> dict[str, Any]:
        """Size and entity tag of an object."""
        found = self._ask.head(self._store, _key(path))
        return {"size": found["size"], "e_tag": found["e_tag"]}

    def cat_file(self, path: str, *, start: int, end: int) -> bytes:
        """Some bytes of an object."""
        found: bytes = self._ask.get_range(self._store, _key(path), start=start, end=end).to_bytes()
        return found

    def put_file(self, file: str, path: str) -> None:
        """Makes a file the content of an object."""
        self._ask.put(self._store, _key(path), Path(file))

    def pipe_file(self, path: str, data: bytes, *, mode: str) -> None:
        """Makes an object unless there is one."""
        from obstore.exceptions import AlreadyExistsError

        try:
            self._ask.put(self._store, _key(path), data, mode=mode)
        except AlreadyExistsError as error:
            raise FileExistsError(path) from error


def _key(path: str) -> str:
    """An object's name in its bucket."""
    return path.partition("://")[2].partition("/")[2]


class _MayPassError(Exception):
    """A failure that another try may not meet."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


def _is_about_credentials(error: BaseException, kind: str, text: str) -> bool:
    # Without any, obstore asks the cloud's own metadata address, which answers only inside that cloud.
    words = (
        "/latest/api/token",
        "/latest/meta-data",
        "metadata.google.internal",
        "Unable to locate credentials",
        "InvalidAccessKeyId",
    )
    return kind == "NoCredentialsError" or any(word in text for word in words)


_obstore_user: int | None = None


def _has_obstore() -> bool:
    import importlib.util

    return importlib.util.find_spec("obstore") is not None


def _network_errors() -> tuple[type[BaseException], ...]:
    """The classes that failed requests raise, of those packages that are in use."""
    found: list[type[BaseException]] = [OSError, EOFError, TimeoutError]
    names = {
        "obstore.exceptions": ["BaseError"],
        "aiohttp": ["ClientError"],
        "botocore.exceptions": ["BotoCoreError", "ClientError"],
        "httpx": ["HTTPError"],
    }
    for module, classes in names.items():
        if module in sys.modules:
            found += [getattr(sys.modules[module], name) for name in classes]
    return tuple(found)
