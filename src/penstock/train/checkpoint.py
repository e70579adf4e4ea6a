"""Checkpoints: whole or absent, checked by hash, newest whole one first.

    RUN/checkpoints/step-00000120/
        model.safetensors       parameters by plain name
        optimizer.safetensors   exp_avg.<name>, exp_avg_sq.<name>, step.<name>
        state.json              step, loader and random state, settings, choices; size and hash of the files beside it,
                                and `digest`, the hash of all the rest of itself

A run whose parameters are sharded writes `shard-00001-….safetensors` and so on in place of the first two files
(sharded_checkpoint.py).

In: named tensors and a JSON state. Out: a folder that appears under its name only when every byte of it is on the disk.
A save is written under a temporary name and renamed; it is read back and verified before older ones go. Loading takes
the newest checkpoint whose every hash agrees; a damaged one is passed over and named in the run's log.

Cost: one write and two passes of BLAKE3, about 3 GB/s each; a few MiB of memory. A save that is written while training
goes on (saving.py) needs a copy of the tensors in host memory.
"""

from __future__ import annotations

import json
import mmap
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from penstock import fs
from penstock.errors import DiskError, ResumeError
from penstock.hashing import RunningStrongHash, digest_of, strong_hash
from penstock.train.safetensors_pieces import safetensors_pieces

__all__ = [
    "Checkpoint",
    "checkpoint_folders",
    "find_latest",
    "host_copies",
    "is_sharded",
    "load_parameters",
    "plain_parameters",
    "prune_checkpoints",
    "read_tensors",
    "remove_unfinished_saves",
    "save_checkpoint",
    "trained_parameters",
    "verified_checkpoint",
    "with_progress",
]

CHECKPOINTS_NAME = "checkpoints"
STATE_FORMAT = 1
MODEL_NAME = "model.safetensors"
OPTIMIZER_NAME = "optimizer.safetensors"
STATE_NAME = "state.json"

_FOLDER_NAME = re.compile(r"step-(\d{8,})")
SHARD_NAME = re.compile(r"shard-\d{5}-model-00001-of-00001\.safetensors")
# State is some 40 KB; a limit keeps a damaged or hostile file from filling the memory before it is refused.
_STATE_LIMIT_BYTES = 16 * 2**20


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """A checkpoint whose every byte was verified."""

    path: Path
    step: int
    state: dict[str, Any]
    num_bytes: int


class _Damage(Exception):  # noqa: N818 - a finding passed inside this module, not an error a user meets
    """Why a checkpoint can't be used; starts with the file's name."""


def plain_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Parameters by name, tied ones once, without what `torch.compile` and data-parallel wrappers add to names."""
    return {_plain_name(name): parameter for name, parameter in model.named_parameters()}


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Those that training changes, by plain name: what checkpoints hold."""
    return {name: parameter for name, parameter in plain_parameters(model).items() if parameter.requires_grad}


def _plain_name(name: str) -> str:
    return name.removeprefix("module.").replace("_orig_mod.", "").removeprefix("module.")


@torch.no_grad()
def load_parameters(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Copies saved parameters into the model; refuses another model's by name and shape."""
    parameters = trained_parameters(model)
    odd = sorted(set(parameters) ^ set(tensors))
    odd += [name for name in parameters if name in tensors and tensors[name].shape != parameters[name].shape]
    if odd:
        raise ResumeError(
            f"the saved model differs from this one in {len(odd)} tensors, the first is {odd[0]!r}",
            hint="the checkpoint is of another model: start a new run with another --out",
        )
    for name, parameter in parameters.items():
        parameter.copy_(tensors[name])


def host_copies(tensors: Mapping[str, Tensor], buffers: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors as they are now, in host memory; whatever is done to the originals later doesn't change them.

    `buffers` keeps the memory from one call to the next: pinning pages for a GPU's copies costs more than the copies.
    """
    for name in [name for name in buffers if name not in tensors]:
        del buffers[name]
    on_gpu = False
    for name, tensor in tensors.items():
        buffer = buffers.get(name)
        if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
            buffer = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            buffers[name] = buffer
        buffer.copy_(tensor.detach(), non_blocking=True)
        on_gpu |= tensor.is_cuda
    if on_gpu:
        torch.cuda.synchronize()
    return dict(buffers)


def save_checkpoint(
    run_folder: Path,
    *,
    step: int,
    model_tensors: Mapping[str, Tensor],
    optimizer_tensors: Mapping[str, Tensor],
    state: Mapping[str, Any],
) -> Checkpoint:
    """Writes one checkpoint and reads it back. An `OSError` or `DiskError` leaves the older ones as they were."""
    with unfinished_folder(run_folder, step) as temporary:
        files = {
            MODEL_NAME: write_tensors(temporary / MODEL_NAME, model_tensors),
            OPTIMIZER_NAME: write_tensors(temporary / OPTIMIZER_NAME, optimizer_tensors),
        }
        return committed(temporary, run_folder, step=step, files=files, state=state)


@contextmanager
def unfinished_folder(run_folder: Path, step: int) -> Iterator[Path]:
    """A new folder under a temporary name, for `committed` to rename; removed if an `OSError` ends the block."""
    final = _folder_of(run_folder, step)
    fs.make_folder(final.parent)
    temporary = fs.temporary_path(final)
    try:
        fs.make_folder(temporary)
        yield temporary
    except OSError:
        # Gives the space back at once: the run goes on, and its log needs some. What is left waits for the next start.
        if temporary.exists():
            fs.remove_tree(temporary)
        raise


def committed(
    temporary: Path, run_folder: Path, *, step: int, files: Mapping[str, Any], state: Mapping[str, Any]
) -> Checkpoint:
    """Writes the state beside the files, gives the folder its name, and reads all of it back."""
    final = _folder_of(run_folder, step)
    document = {**state, "format": STATE_FORMAT, "step": step, "files": files}
    document["digest"] = digest_of(document)
    fs.write_atomic(temporary / STATE_NAME, json.dumps(document, indent=1).encode())
    # Whole checkpoints of this step aren't saved again, so what bears the name is a damaged one.
    fs.remove_tree(final)
    fs.replace_tree(temporary, final)
    try:
        return _verified(final)
    except _Damage as damage:
        raise DiskError(
            f"the checkpoint {final} reads back differently from what was written: {damage}",
            hint="check the disk (dmesg), and choose another --out on a healthy one",
        ) from damage


def with_progress(checkpoint: Checkpoint, progress: Mapping[str, Any]) -> Checkpoint:
    """The same checkpoint, its run having come further without a step: the state alone is replaced, or stays."""
    document = {**checkpoint.state, "progress": dict(progress)}
    document["digest"] = digest_of({key: value for key, value in document.items() if key != "digest"})
    path, data = checkpoint.path / STATE_NAME, json.dumps(document, indent=1).encode()
    num_bytes = checkpoint.num_bytes - path.stat().st_size + len(data)
    fs.write_atomic(path, data)
    return replace(checkpoint, state=document, num_bytes=num_bytes)


def _folder_of(run_folder: Path, step: int) -> Path:
    return run_folder / CHECKPOINTS_NAME / f"step-{step:08d}"


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes a safetensors file; returns its size and hash."""
    hashed = RunningStrongHash()
    with fs.atomic_file(path) as file:
        for piece in safetensors_pieces(tensors):
            file.write(piece)
            hashed.update(piece)
    return {"bytes": file.bytes_written, "blake3": hashed.digest().hex()}


def read_tensors(path: Path, *, device: str = "cpu") -> dict[str, Tensor]:
    """The tensors of one file of a verified checkpoint."""
    return load_file(path, device=device)


def checkpoint_folders(run_folder: Path) -> list[Path]:
    """Folders named as checkpoints, newest first, whole or not."""
    folder = run_folder / CHECKPOINTS_NAME
    found = folder.iterdir() if folder.is_dir() else iter(())
    return sorted((path for path in found if _FOLDER_NAME.fullmatch(path.name)), key=_step_of, reverse=True)


def is_sharded(checkpoint: Checkpoint) -> bool:
    """Whether a checkpoint is made of the shards of several ranks (sharded_checkpoint.py)."""
    return all(SHARD_NAME.fullmatch(name) for name in checkpoint.state["files"])


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def find_latest(run_folder: Path, *, warn: Callable[[str], object] | None = None) -> Checkpoint | None:
    """The newest whole checkpoint. `warn` is told of damaged ones on the way; if all are, raises `ResumeError`."""
    damages = []
    for folder in checkpoint_folders(run_folder):
        try:
            return _verified(folder)
        except _Damage as damage:
            damages.append(f"{folder.name}/{damage}")
            if warn is not None:
                warn(f"damaged checkpoint passed over: {damages[-1]}")
    if damages:
        raise ResumeError(
            f"none of the {len(damages)} checkpoints in {run_folder} is whole; the newest: {damages[0]}",
            hint="restore the folder from a backup, or start again with another --out",
        )
    return None


def verified_checkpoint(folder: Path) -> Checkpoint:
    """The checkpoint in a folder; raises `ResumeError` if it isn't whole."""
    try:
        return _verified(folder)
    except _Damage as damage:
        raise ResumeError(
            f"the checkpoint {folder} is damaged: {damage}", hint="restore it from a backup, or take another one"
        ) from damage


def _verified(folder: Path) -> Checkpoint:
    """The checkpoint in a folder if every file is there with its size and hash; raises `_Damage` if not."""
    state = _verified_state(folder / STATE_NAME)
    if state["step"] != _step_of(folder):
        raise _Damage(f"{STATE_NAME}: says step {state['step']}, but the folder is named otherwise")
    num_bytes = (folder / STATE_NAME).stat().st_size
    for name in _expected_files(state):
        _verify_file(folder / name, state["files"][name])
        num_bytes += state["files"][name]["bytes"]
    return Checkpoint(path=folder, step=state["step"], state=state, num_bytes=num_bytes)


def _verified_state(path: Path) -> dict[str, Any]:
    try:
        if path.stat().st_size > _STATE_LIMIT_BYTES:
            raise _Damage(f"{path.name}: larger than {_STATE_LIMIT_BYTES} bytes")
        state = json.loads(path.read_bytes())
    except OSError as error:
        raise _Damage(f"{path.name}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise _Damage(f"{path.name}: not a JSON document") from error
    if not isinstance(state, dict) or state.get("format") != STATE_FORMAT:
        raise _Damage(f"{path.name}: not a state of format {STATE_FORMAT}")
    if digest_of({key: value for key, value in state.items() if key != "digest"}) != state.get("digest"):
        raise _Damage(f"{path.name}: content and digest differ")
    return state


def _expected_files(state: Mapping[str, Any]) -> list[str]:
    """The two files of a plain checkpoint, or all shards of the others; never a name that leads elsewhere."""
    files = state.get("files")
    names = sorted(files) if isinstance(files, dict) else []
    is_sharded = bool(names) and all(SHARD_NAME.fullmatch(name) for name in names)
    if not is_sharded and names != [MODEL_NAME, OPTIMIZER_NAME]:
        raise _Damage(f"{STATE_NAME}: names the files {names[:4]}, expected {MODEL_NAME} and {OPTIMIZER_NAME}")
    return names


def _verify_file(path: Path, expected: Mapping[str, Any]) -> None:
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if size != expected["bytes"]:
                raise _Damage(f"{path.name}: {size} bytes, expected {expected['bytes']}")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content, memoryview(content) as view:
                found = strong_hash(view).hex()
    except OSError as error:
        raise _Damage(f"{path.name}: {error.strerror}") from error
    if found != expected["blake3"]:
        raise _Damage(f"{path.name}: hash {found[:16]}, expected {expected['blake3'][:16]}")


def prune_checkpoints(run_folder: Path, *, keep: int, verified: Checkpoint, protected: Collection[str] = ()) -> None:
    """Removes all but the `keep` newest and those whose folder's name is in `protected` (the best one, for instance).

    `verified`, just saved, always stays. Folders of later steps than `verified` are damaged ones that a resume passed
    over: they count as none.
    """
    folders = [folder for folder in checkpoint_folders(run_folder) if folder.name not in protected]
    older = [folder for folder in folders if _step_of(folder) < verified.step]
    newer = [folder for folder in folders if _step_of(folder) > verified.step]
    for folder in [*newer, *older[keep - 1 :]]:
        fs.remove_tree(folder)


def remove_unfinished_saves(run_folder: Path) -> int:
    """Removes what a killed save left behind; returns how many. Call it under the run's lock."""
    return fs.remove_leftovers(run_folder / CHECKPOINTS_NAME)
