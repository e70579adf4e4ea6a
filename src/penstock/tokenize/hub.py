"""A tokenizer named by its id on the Hugging Face hub, such as `gpt2` or `meta-llama/Llama-3.1-8B`.

In: an id. Out: a folder on this disk that holds its tokenizer files. Looked for in our own cache, then in the hub's own
(`HF_HUB_CACHE`, `HF_HOME`, `~/.cache/huggingface/hub`); only with `network=True` is it downloaded, through the package
huggingface_hub: the few files that describe a tokenizer, never code, never weights. What was downloaded is copied into
our cache, so that the second run needs neither the network nor that package.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path
from typing import Any

from penstock import fs
from penstock.errors import MissingExtraError, TokenizerError
from penstock.tokenize.cache import cache_folder
from penstock.tokenize.folders import TOKENIZER_FILES, holds_tokenizer

__all__ = ["hub_folder", "is_hub_id"]

_NAME = r"[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,95})"
_HUB_ID = re.compile(rf"{_NAME}(?:/{_NAME})?")
_FILE_ENDINGS = (".json", ".tiktoken", ".model", ".txt", ".bin", ".zip", ".gz")
OWN_FOLDER = "tokenizers"
# A tokenizer.json of 256,000 ids has some 35 MB; what is far larger is no tokenizer.
LARGEST_FILE_BYTES = 512 * 2**20


def is_hub_id(value: str) -> bool:
    """Whether a value that is no path can be an id of the hub: `name` or `owner/name`."""
    return (
        _HUB_ID.fullmatch(value) is not None
        and not value.lower().endswith(_FILE_ENDINGS)
        and not any(mark in value for mark in ("..", "--"))
        and value[-1] not in ".-"
    )


def hub_folder(value: str, *, network: bool) -> Path:
    """The folder with the tokenizer files of a hub id.

    Raises:
        TokenizerError: it isn't on this disk and the network isn't allowed, or the hub doesn't give it.
    """
    for folder in _candidates(value):
        if holds_tokenizer(folder):
            return folder
    if not network:
        raise TokenizerError(
            f"tokenizer {value!r} is no path, and no hub id that was downloaded before",
            hint="add --network to get it from the Hugging Face hub, or give a tokenizer.json, a folder or a .tiktoken"
            " file; without --tokenizer one is trained",
        )
    return _downloaded(value)


def _candidates(value: str) -> list[Path]:
    own = _own_folder(value)
    return ([own] if own is not None else []) + _snapshots(value)


def _own_folder(value: str) -> Path | None:
    root = cache_folder()
    return None if root is None else root / OWN_FOLDER / value.replace("/", "--")


def _snapshots(value: str) -> list[Path]:
    """Snapshots in the hub's cache, the one that `main` points to first, then by time."""
    # The hub's older ids without an owner are kept under the name given.
    repository = _hub_cache() / f"models--{value.replace('/', '--')}"
    snapshots: list[Path] = []
    with contextlib.suppress(OSError, ValueError):
        snapshots = sorted(
            (path for path in (repository / "snapshots").iterdir() if path.is_dir()),
            key=lambda path: (path.stat().st_mtime, path.name),
            reverse=True,
        )
    with contextlib.suppress(OSError, ValueError):
        main = (repository / "refs" / "main").read_text().strip()
        snapshots.sort(key=lambda path: path.name != main)
    return snapshots


def _hub_cache() -> Path:
    """Where huggingface_hub keeps files, by its own variables."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.path.expanduser(os.environ[variable]))  # noqa: PTH111  Path.expanduser raises without a home
    home = os.environ.get("HF_HOME") or str(Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface"))
    return Path(os.path.expanduser(home), "hub")  # noqa: PTH111


def _downloaded(value: str) -> Path:
    try:
        import huggingface_hub
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError:
        raise MissingExtraError("huggingface_hub", extra="hf", wanted_for=f"downloading tokenizer {value!r}") from None
    found: dict[str, Path] = {}
    try:
        for name in TOKENIZER_FILES:
            try:
                found[name] = Path(huggingface_hub.hf_hub_download(value, name))
            except LocalEntryNotFoundError:  # its way to say that the hub can't be reached: the next would wait as long
                raise
            except EntryNotFoundError:
                continue  # that repository has no such file
    except Exception as error:  # the client raises its own, the HTTP library's and the system's errors
        raise _refusal(value, error) from error
    folder = next((path.parent for path in found.values()), None)
    if folder is None or not holds_tokenizer(folder):
        raise TokenizerError(
            f"hub id {value!r} has no tokenizer files: {', '.join(found) or 'none'} of {', '.join(TOKENIZER_FILES)}",
            hint="name a repository that holds a tokenizer.json, for instance the base model's",
        )
    _keep(value, found)
    return folder


def _refusal(value: str, error: Exception) -> TokenizerError:
    first_line = (str(error).strip().splitlines() or [type(error).__name__])[0]
    status: Any = getattr(getattr(error, "response", None), "status_code", None)
    hint = "check the id and the connection, then run the same command again"
    if status in (401, 403):
        hint = "the repository doesn't exist or wants a login: accept its terms on the hub and run `hf auth login`"
    return TokenizerError(f"hub id {value!r} can't be downloaded: {first_line}", hint=hint)


def _keep(value: str, found: dict[str, Path]) -> None:
    """Copies the files into our cache; where that fails, the hub's own cache still has them."""
    own = _own_folder(value)
    if own is None:
        return
    with contextlib.suppress(OSError):
        temporary = fs.temporary_path(own)
        fs.make_folder(temporary)
        for name, path in found.items():
            if path.stat().st_size <= LARGEST_FILE_BYTES:
                fs.write_atomic(temporary / name, path.read_bytes())
        fs.remove_tree(own)
        fs.replace_tree(temporary, own)
