"""The training loop: a store in, checkpoints and a record of every step out.

`train` reads top to bottom: find where to start, build the run (run.py), then per step: batch, learning rate, gradients
over micro-batches, clip, update, record; evaluate (watching.py) and save (saving.py) when due. Everything that the next
step depends on is in the checkpoint (weights, optimizer, data position, random state, choices), so a killed run that is
resumed computes the same losses to the last bit on a CPU, and on a GPU with `deterministic`.

Steps are numbered by updates done: the record of step 1 follows the first update, and `step-00000120` holds the model
after 120. `tokens` counts scored targets, never padding. Seconds of a step include the wait for its batch
(`data_seconds`); evaluations and saves are outside. The host waits for the device once a step, to read loss and norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock import fs
from penstock.errors import TrainingError
from penstock.runlog import Record, RunLog
from penstock.store import Store
from penstock.train.checkpoint import Checkpoint
from penstock.train.config import DEFAULT_DECAY_RATIO, TrainConfig
from penstock.train.interruption import Interruption
from penstock.train.loss import add_gradients
from penstock.train.model import num_parameters
from penstock.train.monitor import HardwareMonitor
from penstock.train.optimizer import set_learning_rate
from penstock.train.run import Run, assemble, new_model, training_data, with_length
from penstock.train.saving import restore, save
from penstock.train.schedule import learning_rate_at
from penstock.train.start import Progress, refuse_another_run, starting_point
from penstock.train.watching import watch

__all__ = ["TrainResult", "train"]

LOCK_NAME = "train.lock"
SKIPPED_IN_A_ROW_LIMIT = 3

Status = Literal["completed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to. Figures cover the whole run, also what was done before a resume."""

    status: Status
    steps: int
    first_loss: float | None  # of the first step whose loss was finite
    final_loss: float | None  # of the last such step
    val_loss: float | None  # of the last evaluation, if there was one
    val_bits_per_byte: float | None
    tokens: int
    seconds: float
    tokens_per_second: float
    parameters: int
    train_rows: int  # of one pass over the data
    checkpoint: Path | None


@dataclass(frozen=True, kw_only=True)
class _Step:
    """What one step computed; `position` is that of its first row."""

    loss: float
    grad_norm: float
    learning_rate: float
    tokens: int
    seconds: float
    data_seconds: float
    position: int

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


def train(
    config: TrainConfig,
    store: Store,
    run_folder: Path,
    log: RunLog,
    *,
    resume: bool = False,
    mixed_with: Mapping[str, Store] | None = None,
    on_progress: Callable[[Record], None] | None = None,
) -> TrainResult:
    """Trains the built-in decoder on a store until the config's last step, a signal, or an error.

    Args:
        config: the settings.
        store: an open store with a `train` split, and a `val` split if there is to be an evaluation.
        run_folder: where checkpoints go; one process at a time may train in it.
        log: where every step, choice and event is recorded.
        mixed_with: all stores of a mixture by name, `store` the first of them; evaluation is on `store` alone.
        resume: go on from the newest whole checkpoint, or start if there is none.
        on_progress: given each record the loop writes, as it is written.

    Raises:
        ConfigError: a setting that is impossible here, or a folder that holds another run already.
        ResumeError: the checkpoint is of another store, config or plan.
        TrainingError: the loss wasn't finite three times in a row.
        DiskError: the last checkpoint, or the log, couldn't be written.
    """

    def tell(kind: str, **fields: Any) -> Record:
        record = log.append(kind, **fields)
        if on_progress is not None:
            on_progress(record)
        return record

    with ExitStack() as stack:
        stack.enter_context(fs.fail_as_disk_error(f"writing the run in {run_folder}:"))
        fs.make_folder(run_folder)
        stack.enter_context(fs.FolderLock(run_folder / LOCK_NAME))
        interruption = stack.enter_context(Interruption())

        # Where to start.
        checkpoint = starting_point(run_folder, log, resume=resume)
        progress = Progress()
        if checkpoint is not None:
            refuse_another_run(checkpoint, config, store)
            progress = Progress(**checkpoint.state["progress"])

        # What is to be done, with what.
        data = training_data(config, store, mixed_with, log)
        config = with_length(config, data, tell)
        model = new_model(config, data)
        if checkpoint is not None and progress.is_finished:
            tell("event", message=f"nothing to resume: the run has all its {progress.step} steps")
            return _result(progress, model=model, train_rows=data.rows.num_rows, checkpoint=checkpoint)
        run = assemble(
            config,
            store,
            data,
            model,
            folder=run_folder,
            log=log,
            tell=tell,
            interruption=interruption,
            checkpoint=checkpoint,
            stack=stack,
        )
        if checkpoint is not None:
            restore(run, checkpoint)
            tell("event", message=f"resumed from {checkpoint.path.name} at position {run.loader.position}")
        log.append("stream", **run.loader.state_dict())  # what `inspect --step` needs of a mixture: its stages
        stack.enter_context(HardwareMonitor(log))

        checkpoint = _train_steps(run, progress, checkpoint)
        return _result(progress, model=run.model, train_rows=data.rows.num_rows, checkpoint=checkpoint)


def _train_steps(run: Run, progress: Progress, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Steps until the last one or a signal, with what is due between them; returns the last checkpoint."""
    config = run.config
    first_step = progress.step
    while progress.step < config.num_steps:
        step = _take_step(run, number=progress.step)
        progress.count_step(loss=step.loss, is_finite=step.is_finite, tokens=step.tokens, seconds=step.seconds)
        is_last = progress.step == config.num_steps
        if _is_due(progress.step, config.log_every_steps) or is_last or not step.is_finite:
            _record_step(run, progress, step)
        if not step.is_finite:
            _refuse_repeated_skips(run, progress, step)

        # What is due between steps; the last step's evaluation and save follow the loop.
        is_stopping = run.interruption.requested is not None or progress.step - first_step == config.stop_after_steps
        if is_last or is_stopping:
            break
        if _is_due(progress.step, config.eval_every_steps):
            watch(run, progress)
        if _is_due(progress.step, config.checkpoint_every_steps):
            checkpoint = save(run, progress, is_required=False) or checkpoint

    if progress.step == config.num_steps:
        watch(run, progress)
        # A signal during the last evaluation ends it; resuming then evaluates and nothing else.
        progress.is_finished = run.interruption.requested is None
    else:
        reason = run.interruption.requested or f"stop_after_steps={config.stop_after_steps}"
        run.tell("event", message=f"stopping after step {progress.step} of {config.num_steps}: {reason}")
    if checkpoint is None or checkpoint.step != progress.step:
        checkpoint = save(run, progress, is_required=True)
    return checkpoint


def _take_step(run: Run, *, number: int) -> _Step:
    """One batch, one update; the update is left out where it would spoil the weights. `number` counts from 0."""
    # The batch.
    started = time.perf_counter()
    position = run.loader.position
    batch = next(run.loader)
    data_seconds = time.perf_counter() - started

    # The gradient of its mean loss, whatever the micro-batch.
    learning_rate = _learning_rate(run.config, number)
    set_learning_rate(run.optimizer, learning_rate)
    mean_loss = add_gradients(
        run.model,
        batch,
        micro_batch_rows=run.choices.micro_batch_rows,
        document_boundaries=run.config.document_boundaries,
        autocast=run.autocast,
    )
    norm = _clipped_norm(run.model, run.config.max_grad_norm)
    loss, grad_norm = torch.stack((mean_loss, norm)).tolist()

    # The update.
    if math.isfinite(loss) and math.isfinite(grad_norm):
        run.optimizer.step()
    run.optimizer.zero_grad(set_to_none=True)
    return _Step(
        loss=loss,
        grad_norm=grad_norm,
        learning_rate=learning_rate,
        tokens=batch.num_targets,
        seconds=time.perf_counter() - started,
        data_seconds=data_seconds,
        position=position,
    )


def _learning_rate(config: TrainConfig, step: int) -> float:
    return learning_rate_at(
        step,
        num_steps=config.num_steps,
        num_warmup_steps=config.num_warmup_steps,
        peak=config.peak_learning_rate,
        minimum=config.peak_learning_rate * config.min_learning_rate_ratio,
        schedule=config.schedule,
        power=1.0 if config.schedule_power is None else config.schedule_power,
        cycles=config.schedule_cycles or 1,
        decay_ratio=DEFAULT_DECAY_RATIO if config.decay_ratio is None else config.decay_ratio,
    )


def _clipped_norm(model: nn.Module, max_grad_norm: float | None) -> Tensor:
    """The norm of the whole gradient before clipping, which is then done in place."""
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm


def _record_step(run: Run, progress: Progress, step: _Step) -> None:
    run.tell(
        "step",
        step=progress.step,
        loss=step.loss,
        learning_rate=step.learning_rate,
        grad_norm=step.grad_norm,
        tokens=step.tokens,
        seconds=round(step.seconds, 6),
        data_seconds=round(step.data_seconds, 6),
        position=run.loader.position,
    )


def _refuse_repeated_skips(run: Run, progress: Progress, step: _Step) -> None:
    """Records an update that wasn't applied; the third in a row ends the run."""
    where = f"step {progress.step}, rows {step.position} to {run.loader.position - 1} of the data order"
    figures = f"loss {step.loss}, gradient norm {step.grad_norm}"
    run.tell("event", message=f"update not applied at {where}: {figures}")
    if progress.skipped_in_a_row == SKIPPED_IN_A_ROW_LIMIT:
        raise TrainingError(
            f"the loss or its gradient was not finite {SKIPPED_IN_A_ROW_LIMIT} times in a row, "
            f"last at {where}: {figures}",
            hint="try a lower learning_rate or a longer warm-up, in a run with another --out",
        )


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _result(progress: Progress, *, model: nn.Module, train_rows: int, checkpoint: Checkpoint | None) -> TrainResult:
    return TrainResult(
        status="completed" if progress.is_finished else "interrupted",
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.final_loss,
        val_loss=progress.val_loss,
        val_bits_per_byte=progress.val_bits_per_byte,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
        parameters=num_parameters(model),
        train_rows=train_rows,
        checkpoint=checkpoint.path if checkpoint else None,
    )
