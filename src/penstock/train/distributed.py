"""Several processes on one node that train one model: who they are, what they share, how they agree.

In: the environment that `torchrun` gives each process. Out: a `World`, through which the ranks agree on numbers, flags
and short JSON values, and two ways to hold the model.

    ddp     Every rank holds all of it. Gradients are summed over the ranks after a step's last micro-batch, in pieces
            of some 32 MiB. Torch's own wrapper would send them during the backward pass; it isn't used because no rank
            may wait for another inside forward or backward: one that runs out of memory there must be able to say so
            (memory.py), and any loss kernel, compiled or not, works without a wrapper around the model.
    fsdp    Every rank holds a share of each parameter, gradient and optimizer state (`fully_shard` over the model's
            blocks); what a block needs is gathered when it is its turn. Gradients are exchanged in the last
            micro-batch's backward pass.

Each rank runs its share of the rows of the same global batches as a single process. The loss is divided by the number
of targets of the whole batch, over all ranks, so the gradient is the sum over the ranks in both ways.

What the ranks tell each other beside tensors travels as JSON through CPU memory (gloo), in any case a few KB a step.
With one process nothing here touches torch.distributed.
"""

from __future__ import annotations

import datetime
import json
import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn

from penstock.engines.processes import die_with
from penstock.errors import ConfigError, TrainingError, WorkerDiedError
from penstock.runlog import Record, RunLog
from penstock.train.config import TrainConfig
from penstock.train.language_model import LanguageModel

__all__ = [
    "Parallel",
    "SilentLog",
    "World",
    "chosen_parallel",
    "device_of_ranks",
    "joined",
    "place_model",
    "shared_world",
    "whole_norm",
    "world_of_environment",
]

Parallel = Literal["none", "ddp", "fsdp"]

# How long a rank waits for the others: longer than a large checkpoint takes, short enough for a night.
TIMEOUT = datetime.timedelta(minutes=10)
BUCKET_BYTES = 32 * 2**20
# float32 weights and gradients and the two moments of AdamW.
BYTES_PER_PARAMETER = 16
# The rest of a GPU is for activations.
SHARE_FOR_STATE = 0.6
# How gloo says that another process is gone or hangs; it raises plain RuntimeErrors.
_SIGNS_OF_A_LOST_RANK = ("closed by peer", "reset by peer", "Socket", "Timed out", "timed out", "Broken pipe", "NCCL")


@dataclass(frozen=True, kw_only=True)
class World:
    """The processes of a run. Its methods are collective: every rank calls them, in the same order."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    parallel: Parallel = "none"

    @property
    def is_main(self) -> bool:
        """Whether this process writes the run's records and checkpoints."""
        return self.rank == 0

    @contextmanager
    def main_first(self) -> Iterator[None]:
        """The block, on rank 0 and then on the others; if it fails there they don't begin."""
        if not self.is_main:
            failure = self.from_main(None)
            if failure:
                raise TrainingError(f"rank 0 couldn't begin: {failure}", hint="see what rank 0 says")
            yield
            return
        try:
            yield
        except BaseException as error:
            self.from_main(str(error) or type(error).__name__)
            raise
        self.from_main("")

    def any(self, flag: bool) -> bool:
        """Whether any rank says yes."""
        return self.sums(float(flag))[0] > 0

    def sums(self, *values: float) -> list[float]:
        """Each value summed over the ranks, the same on all of them. Exact for counts below 2**53."""
        if self.size == 1:
            return list(values)
        total = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(total)
        return total.tolist()

    def from_main(self, value: Any) -> Any:
        """Rank 0's value, which must be JSON; what the others pass is ignored."""
        return self.gathered(value if self.is_main else None)[0]

    def gathered(self, value: Any) -> list[Any]:
        """Every rank's value, which must be JSON, by rank."""
        if self.size == 1:
            return [value]
        data = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        dist.all_gather(lengths, torch.tensor([len(data)]))
        longest = max(int(length) for length in lengths)
        padded = torch.zeros(longest, dtype=torch.uint8)
        padded[: len(data)] = data
        texts = [torch.empty(longest, dtype=torch.uint8) for _ in range(self.size)]
        dist.all_gather(texts, padded)
        return [json.loads(bytes(text[: int(n)].numpy())) for text, n in zip(texts, lengths, strict=True)]

    def summed(self, tensor: Tensor) -> Tensor:
        """A tensor on the run's device, summed over the ranks in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def loss_divisor(self, num_targets: int) -> float:
        """What a rank divides its sum of losses by, of `num_targets` in the whole batch.

        `fully_shard` takes the mean of the ranks' gradients where their sum is wanted.
        """
        return max(1, num_targets) / (self.size if self.parallel == "fsdp" else 1)

    def whole_loss(self, share: Tensor) -> Tensor:
        """The mean loss of the whole batch from the ranks' shares, which `loss_divisor` divided."""
        return self.summed(share / self.size if self.parallel == "fsdp" else share)

    def before_micro_batch(self, model: nn.Module, *, is_last: bool) -> None:
        """Called before each micro-batch: gradients are exchanged in the last one only."""
        if self.parallel == "fsdp":
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]

    def settle(self, model: nn.Module) -> None:
        """Leaves nothing gathered: after an evaluation the parameters outside the blocks still are."""
        if self.parallel == "fsdp":
            model.reshard()  # type: ignore[operator]

    def sum_gradients(self, model: nn.Module) -> None:
        """Sums the ranks' gradients after the last micro-batch; with fsdp the backward pass has done it."""
        if self.parallel != "ddp":
            return
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        waiting = []
        for bucket in _buckets(gradients):
            flat = torch.cat([gradient.flatten() for gradient in bucket])
            waiting.append((bucket, flat, dist.all_reduce(flat, async_op=True)))
        for bucket, flat, work in waiting:
            work.wait()
            pieces = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, piece in zip(bucket, pieces, strict=True):
                gradient.copy_(piece.view_as(gradient))


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type in runs of about `BUCKET_BYTES`, in a fixed order."""
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):
        bucket: list[Tensor] = []
        num_bytes = 0
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            bucket.append(tensor)
            num_bytes += tensor.numel() * tensor.element_size()
            if num_bytes >= BUCKET_BYTES:
                yield bucket
                bucket, num_bytes = [], 0
        if bucket:
            yield bucket


def world_of_environment(environment: Mapping[str, str] = os.environ) -> World:
    """The world that `torchrun` describes in its variables; one process where there are none."""
    if "RANK" not in environment or "WORLD_SIZE" not in environment:
        return World()
    numbers = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        text = environment.get(name, environment["RANK"])
        if not text.isdecimal():
            raise ConfigError(
                f"the environment variable {name} is {text!r}, expected a number",
                hint="start with `torchrun --standalone --nproc-per-node N -m penstock train …`, or unset RANK",
            )
        numbers[name] = int(text)
    if not numbers["RANK"] < numbers["WORLD_SIZE"]:
        raise ConfigError(
            f"RANK is {numbers['RANK']} and WORLD_SIZE is {numbers['WORLD_SIZE']}, expected a rank below the size",
            hint="start with `torchrun --standalone --nproc-per-node N -m penstock train …`, or unset RANK",
        )
    return World(rank=numbers["RANK"], size=numbers["WORLD_SIZE"], local_rank=numbers["LOCAL_RANK"])


def chosen_parallel(
    wanted: str, *, size: int, num_parameters: int, gpu_memory_bytes: int | None
) -> tuple[Parallel, str]:
    """The way to hold the model, and why. Rules only: the same on every rank."""
    if size == 1:
        return "none", "one process" if wanted in ("auto", "none") else f"{wanted} has nothing to share in one process"
    if wanted == "none":
        raise ConfigError(
            f"parallel is none, but {size} processes were started",
            hint="set parallel=auto, ddp or fsdp, or start one process without torchrun",
        )
    if wanted == "ddp":
        return "ddp", "as set"
    if wanted == "fsdp":
        return "fsdp", "as set"
    state = num_parameters * BYTES_PER_PARAMETER
    if gpu_memory_bytes is not None and state > SHARE_FOR_STATE * gpu_memory_bytes:
        return "fsdp", f"{state >> 20} MiB of weights and optimizer state are too many for each GPU to hold all of them"
    return "ddp", f"each of {size} processes can hold the {state >> 20} MiB of weights and optimizer state"


def _shortened(error: RuntimeError) -> str:
    """The first sentence, without the place in gloo's source."""
    return str(error).partition("\n")[0].rpartition("] ")[2].partition(". ")[0][:120] or type(error).__name__


def shared_world(world: World, config: TrainConfig, model: nn.Module, log: RunLog) -> World:
    """The world with the way its ranks hold this model, which is recorded."""
    memory = None
    if world.size > 1 and device_of_ranks(config.device) == "cuda":
        memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    size = sum(parameter.numel() for parameter in model.parameters())
    parallel, reason = chosen_parallel(config.parallel, size=world.size, num_parameters=size, gpu_memory_bytes=memory)
    if world.size > 1 or config.parallel not in ("auto", "none"):
        log.append("choice", name="parallel", value=parallel, reason=reason)
        log.append("choice", name="world_size", value=world.size, reason="processes that torchrun started")
    return replace(world, parallel=parallel)


@contextmanager
def joined(world: World, device: str) -> Iterator[None]:
    """Connects the ranks for the block. One that dies or hangs ends it on all others, with a word.

    Raises:
        ConfigError: there are more processes than GPUs.
        WorkerDiedError: another rank ended or stopped answering.
    """
    if world.size == 1:
        yield
        return
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with(os.getppid())  # a launcher that is killed can't end us itself
    if device == "cuda":
        if world.local_rank >= torch.cuda.device_count():
            raise ConfigError(
                f"process {world.local_rank} of this machine has no GPU: torch finds {torch.cuda.device_count()}",
                hint=f"start with --nproc-per-node {max(1, torch.cuda.device_count())}",
            )
        torch.cuda.set_device(world.local_rank)
    try:
        backend = "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo"
        dist.init_process_group(backend, rank=world.rank, world_size=world.size, timeout=TIMEOUT)
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and not any(sign in str(error) for sign in _SIGNS_OF_A_LOST_RANK):
            raise
        if "TORCHELASTIC_RUN_ID" in os.environ and threading.current_thread() is threading.main_thread():
            signal.signal(
                signal.SIGTERM, signal.SIG_IGN
            )  # torchrun's, for the same reason, would take the word from us
        raise WorkerDiedError(
            f"rank {world.rank} of {world.size} lost another rank, which ended or hangs ({_shortened(error)})",
            hint="the lines above say why, if it had time to; then start the same command with --resume",
        ) from error
    # Not after an error: NCCL waits here for ranks that are gone. The end of the process closes all.
    dist.destroy_process_group()


def device_of_ranks(wanted: str) -> str:
    """Where the ranks will compute, which decides how they are connected."""
    return "cuda" if wanted != "cpu" and torch.cuda.is_available() else "cpu"


class SilentLog(RunLog):
    """The log of ranks that write none: records are made and dropped."""

    def __init__(self) -> None:
        pass

    def append(self, kind: str, **fields: Any) -> Record:
        """The record, written nowhere."""
        return {"kind": kind, **fields}

    def flush(self) -> None:
        """Nothing to do."""

    def close(self) -> None:
        """Nothing to do."""


def place_model(model: LanguageModel, world: World, *, device: str) -> None:
    """Moves the model to its device and makes the ranks' models one, in place.

    A sharded model is moved block by block: all of it need not fit in one device's memory.
    """
    if world.parallel != "fsdp":
        model.to(device)
        if world.parallel == "ddp":
            for tensor in (*model.parameters(), *model.buffers()):
                dist.broadcast(tensor.detach(), src=0)
        return
    try:
        from torch.distributed.checkpoint import hf_storage  # noqa: F401  what its checkpoints are written with
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
    except ImportError as error:
        raise ConfigError(
            f"parallel is fsdp, which torch {torch.__version__} lacks: {error}",
            hint="set parallel=ddp, or update torch",
        ) from error

    mesh = init_device_mesh(device, (world.size,))
    for block in model.blocks():
        fully_shard(block, mesh=mesh)
    # What is left (embedding, last norm, head) stays whole from the forward to the backward pass: the loss reads
    # `head_weight` after `hidden` has returned.
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    register_fsdp_forward_method(model, "hidden")
    model.to(device)


def whole_norm(norm: Tensor) -> Tensor:
    """The norm over all ranks of what `get_total_norm` found; with fsdp it holds this rank's part."""
    from torch.distributed.tensor import DTensor

    return norm.full_tensor() if isinstance(norm, DTensor) else norm
