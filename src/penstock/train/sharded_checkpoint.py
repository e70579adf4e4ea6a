"""Checkpoints of a model that is spread over ranks: each writes what it holds; any number of them can read it.

    RUN/checkpoints/step-00000120/
        shard-00001-model-00001-of-00001.safetensors    what rank 0 holds of every tensor, and where it belongs
        shard-00002-model-00001-of-00001.safetensors    the same of rank 1, and so on
        state.json                                      as of any checkpoint (checkpoint.py)

In: tensors by name, sharded (`DTensor`) or whole. Out: a checkpoint that is whole or absent, as any other. The shards
are written and read by torch.distributed.checkpoint in its safetensors format, which keeps each piece's offset in the
file's own header. Its other format has a pickled `.metadata` file; this one has none, and torch.load is never called.
Its files go through fs.py; rank 0 alone makes the folder, writes state.json with all sizes and hashes, and renames.

`loaded_tensors` reads sharded checkpoints and plain ones alike, into tensors that are laid out like the parameters:
a rank reads only its own part. Memory: one serialised copy of a rank's part while it is written.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from penstock import fs
from penstock.errors import DiskError, ResumeError
from penstock.hashing import strong_hash
from penstock.train.checkpoint import Checkpoint, committed, unfinished_folder
from penstock.train.distributed import World

__all__ = ["loaded_tensors", "save_sharded"]


def save_sharded(
    run_folder: Path, *, step: int, tensors: Mapping[str, Tensor], state: Mapping[str, Any], world: World
) -> Checkpoint | None:
    """Writes one checkpoint, all ranks together, and reads it back; given on rank 0, None on the others.

    Raises:
        DiskError: on all ranks, if any of them couldn't write. The older checkpoints are as they were.
    """
    checkpoint = None
    if not world.is_main:
        folder = _told_by_main(world)
        _write_shard(folder, tensors, world)
        _told_by_main(world)
        return None
    error: OSError | DiskError | None = None
    try:
        with unfinished_folder(run_folder, step) as temporary:
            world.from_main({"value": str(temporary)})
            files = _write_shard(temporary, tensors, world)
            checkpoint = committed(temporary, run_folder, step=step, files=files, state=state)
    except (OSError, DiskError) as caught:
        error = caught
    if not isinstance(error, _ToldToAllError):
        world.from_main({"error": str(error)} if error else {"value": ""})
    if error is not None:
        raise error
    return checkpoint


class _ToldToAllError(OSError):
    """An error of writing shards, which all ranks have heard of."""


def _told_by_main(world: World) -> Path:
    answer = world.from_main(None)
    if "error" in answer:
        raise DiskError(f"rank 0 couldn't save: {answer['error']}", hint="make room on the disk of --out")
    return Path(answer["value"])


def _write_shard(folder: Path, tensors: Mapping[str, Tensor], world: World) -> dict[str, Any]:
    """Writes this rank's part; returns the sizes and hashes of all ranks' files."""
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    files = _HashedFiles()
    writer.fs = files
    writer.sync_files = False  # `fs` does it
    error = ""
    try:
        save({name: _detached(tensor) for name, tensor in tensors.items()}, storage_writer=writer)
    except CheckpointException as caught:
        error = "; ".join(f"rank {rank}: {failure[0]}" for rank, failure in caught.failures.items())
    answers = world.gathered({"error": error, "files": files.written})
    if any(answer["error"] for answer in answers):
        raise _ToldToAllError(next(answer["error"] for answer in answers if answer["error"]))
    return {name: entry for answer in answers for name, entry in answer["files"].items()}


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if isinstance(tensor, nn.Parameter) else tensor


class _HashedFiles(FileSystem):
    """The file system under torch's writer: whole files only, by fs.py, with size and hash of each kept."""

    def __init__(self) -> None:
        self.written: dict[str, dict[str, Any]] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[io.IOBase]:
        """A new file, written in one piece."""
        buffer = _OnePiece()
        yield buffer
        fs.write_atomic(Path(path), buffer.data)
        entry = {"bytes": len(buffer.data), "blake3": strong_hash(buffer.data).hex()}
        self.written[Path(path).name] = entry

    def mkdir(self, path: Any) -> None:
        """The folder is there."""


class _OnePiece(io.RawIOBase):
    """Keeps the one piece that is written, without a copy."""

    data: bytes = b""

    def write(self, data: Any) -> int:
        self.data = self.data + data if self.data else data
        return len(data)

    def tell(self) -> int:
        return len(self.data)

    def writable(self) -> bool:
        return True


def loaded_tensors(checkpoint: Checkpoint, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
    """Every tensor of a verified checkpoint by name, sharded like the parameter that it belongs to.

    `exp_avg.<name>` and so on are laid out like parameter `<name>` where they have its shape; anything else is whole.
    """
    reader = HuggingFaceStorageReader(str(checkpoint.path))
    found = reader.read_metadata().state_dict_metadata
    tensors = {}
    for name, entry in found.items():
        parameter = parameters.get(name)
        if parameter is None:
            parameter = parameters.get(name.partition(".")[2])
        if not isinstance(entry, TensorStorageMetadata):
            raise ResumeError(f"{name!r} of {checkpoint.path} is no tensor", hint="start again with another --out")
        if parameter is not None and parameter.shape == entry.size:
            tensors[name] = torch.zeros_like(parameter, dtype=entry.properties.dtype, requires_grad=False)
        else:
            tensors[name] = torch.zeros(entry.size, dtype=entry.properties.dtype)
    with warnings.catch_warnings():
        # Each rank reads by itself what it needs: there is nothing to agree on.
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        load(tensors, storage_reader=reader, no_dist=True)
    return tensors
