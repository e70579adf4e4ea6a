"""Running out of memory without losing the run: the same step again, in smaller pieces.

In: a run and a batch. Out: the gradient of the batch's mean loss, over all ranks. Where a forward or backward pass, or
the optimizer's first allocation, finds no memory, the gradients so far are dropped, the cache of free blocks is
given back, the micro-batch is halved, and the step is computed anew from the same batch and the same random state. The
global batch, the order of the data and the update are the same; a sum over more pieces may differ in its last bits.

Ranks agree: if one has no memory, all take smaller pieces. Not with fsdp, whose ranks wait for each other inside every
block: one that fails there leaves the others waiting, so the run ends with a word about it. An update that fails for
want of memory after the first step may have changed some of the weights: it ends the run too.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from penstock.errors import TrainingError
from penstock.load.torch import TorchBatch
from penstock.train.choices import halved
from penstock.train.loss import add_gradients
from penstock.train.optimizer import allocate_state
from penstock.train.run import Run

__all__ = ["add_gradients_within_memory", "is_out_of_memory"]


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether a device, or the system, had no memory left; on a CPU torch says so in the message only."""
    return isinstance(error, torch.OutOfMemoryError) or "DefaultCPUAllocator" in str(error)


def add_gradients_within_memory(run: Run, batch: TorchBatch) -> tuple[Tensor, int]:
    """The mean loss of the whole batch, and its number of targets; halves `run.choices.micro_batch_rows` as needed.

    Raises:
        TrainingError: one row at a time is still too much, or a share of the ranks can't be repeated (fsdp).
    """
    world = run.world
    num_targets = int(world.sums(batch.num_targets)[0])
    while True:
        random_state = _random_state(run.choices.device)
        share, failure = _attempt(run, batch, num_targets)
        if failure and world.parallel == "fsdp":
            raise _too_large(run, failure, rows=run.choices.micro_batch_rows)
        is_short = world.any(bool(failure))  # asked by every rank, also by one that knows
        if share is not None and not is_short:
            world.sum_gradients(run.model)
            return world.whole_loss(share), num_targets
        _take_smaller_pieces(run, batch, failure or "another rank ran out of memory")
        _restore_random_state(random_state, run.choices.device)


def _attempt(run: Run, batch: TorchBatch, num_targets: int) -> tuple[Tensor | None, str]:
    """This rank's share of the loss, or why there is no memory for it.

    The error itself isn't kept: its traceback holds the very tensors that must go.
    """
    is_first_update = not run.optimizer.state
    try:
        share = add_gradients(
            run.model,
            batch,
            micro_batch_rows=run.choices.micro_batch_rows,
            document_boundaries=run.config.document_boundaries,
            autocast=run.autocast,
            loss_kernel=run.choices.loss_kernel,
            divisor=run.world.loss_divisor(num_targets),
            before_micro_batch=lambda is_last: run.world.before_micro_batch(run.model, is_last=is_last),
        )
        if is_first_update:
            allocate_state(run.optimizer)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        if is_first_update:
            run.optimizer.state.clear()
        return None, str(error).partition("\n")[0]
    return share, ""


def _take_smaller_pieces(run: Run, batch: TorchBatch, reason: str) -> None:
    run.optimizer.zero_grad(set_to_none=True)
    if run.choices.device == "cuda":
        torch.cuda.empty_cache()
    rows = min(run.choices.micro_batch_rows, len(batch))
    choices = halved(replace(run.choices, micro_batch_rows=rows))
    if choices is None:
        raise _too_large(run, reason, rows=rows)
    run.choices, smaller = choices, choices.micro_batch_rows
    pieces, why = -(-len(batch) // smaller), f"out of memory with {rows} rows at a time"
    run.tell("event", message=f"{why}: the same step again with {smaller}, in {pieces} pieces ({reason})")
    for name, value in (("micro_batch_rows", smaller), ("gradient_accumulation_steps", pieces)):
        run.log.append("choice", name=name, value=value, reason=why)


def _too_large(run: Run, reason: str, *, rows: int) -> TrainingError:
    if run.world.parallel == "fsdp" and rows > 1:
        hint = f"start a new run with micro_batch_rows={-(-rows // 2)}: ranks that share a model can't repeat a step"
    else:
        hint = "use a shorter seq_len, a smaller model, optimizer=adamw-8bit or activation_checkpointing=full"
    return TrainingError(
        f"out of memory with {rows} rows of {run.config.seq_len} tokens at a time: {reason}", hint=hint
    )


def _random_state(device: str) -> list[Tensor]:
    """What a model with dropout draws from, on the CPU and on this process's GPU."""
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state()] if device == "cuda" else [])]


def _restore_random_state(state: list[Tensor], device: str) -> None:
    torch.set_rng_state(state[0])
    if device == "cuda":
        torch.cuda.set_rng_state(state[1])
