"""The training loop: a store in, checkpoints and a record of every step out.

`train` reads top to bottom: find where to start, build the run (run.py), then per step: batch, learning rate, gradients
over micro-batches, clip, update, record; evaluate (watching.py) and save (saving.py) when due. Everything that the next
step depends on is in the checkpoint (weights, optimizer, data position, random state, choices), so a killed run that is
resumed computes the same losses to the last bit on a CPU, and on a GPU with `deterministic`.

Steps are numbered by updates done: the record of step 1 follows the first update, and `step-00000120` holds the model
after 120. `tokens` counts scored targets, never padding. Seconds of a step include the wait for its batch
(`data_seconds`, where the device had nothing else to do); evaluations and saves are outside. On a GPU the host is a
step ahead of the device where nothing is due between the two (stepping.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torch import nn

from penstock import fs
from penstock.errors import RESUME, DiskError, StoreError, TrainingError
from penstock.runlog import Record, RunLog
from penstock.store import Store
from penstock.train.callbacks import Callback, Callbacks
from penstock.train.checkpoint import CHECKPOINTS_NAME, Checkpoint
from penstock.train.config import TrainConfig
from penstock.train.distributed import (
    SilentLog,
    device_of_ranks,
    joined,
    shared_world,
    world_of_environment,
)
from penstock.train.interruption import Interruption
from penstock.train.model import num_parameters
from penstock.train.monitor import HardwareMonitor
from penstock.train.run import Run, assemble, new_model, training_data, with_length
from penstock.train.saving import Saver, restore
from penstock.train.start import Progress, refuse_another_run, starting_point
from penstock.train.stepping import Step, Stepper, scheduled_rate
from penstock.train.tracking import open_trackers
from penstock.train.watching import has_lost_patience, record_passes, watch

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
    best_step: int | None  # of the lowest held-out loss
    best_val_loss: float | None
    best_checkpoint: Path | None  # of that step, where `keep_best` kept it
    stop_reason: str | None  # why it was completed before its last step
    tokens: int
    seconds: float
    tokens_per_second: float
    parameters: int
    train_rows: int  # of one pass over the data
    checkpoint: Path | None


def train(
    config: TrainConfig,
    store: Store,
    run_folder: Path,
    log: RunLog,
    *,
    resume: bool = False,
    mixed_with: Mapping[str, Store] | None = None,
    on_progress: Callable[[Record], None] | None = None,
    callbacks: Sequence[Callback] = (),
) -> TrainResult:
    """Trains the built-in decoder on a store until the config's last step, a signal, or an error.

    Args:
        config: the settings.
        store: an open store with a `train` split, and a `val` split if there is to be an evaluation.
        run_folder: where checkpoints go; one process at a time may train in it.
        log: where every step, choice and event is recorded.
        mixed_with: all stores of a mixture by name, `store` the first of them; each one's `val` is evaluated.
        resume: go on from the newest whole checkpoint, or start if there is none.
        on_progress: given each record the loop writes, as it is written.
        callbacks: called as the run goes on, and may end it; see callbacks.py.

    Raises:
        ConfigError: a setting that is impossible here, or a folder that holds another run already.
        ResumeError: the checkpoint is of another store, config or plan.
        TrainingError: the loss wasn't finite three times in a row, or a callback failed.
        DiskError: the last checkpoint, or the log, couldn't be written.
    """

    world = world_of_environment()
    log = log if world.is_main else SilentLog()
    called = Callbacks(callbacks if world.is_main else ())
    listeners: list[Callable[[Record], None]] = [called.tell]
    if on_progress is not None and world.is_main:
        listeners.insert(0, on_progress)

    def tell(kind: str, **fields: Any) -> Record:
        record = log.append(kind, **fields)
        for listen in listeners:
            listen(record)
        return record

    def warn(message: str) -> None:
        tell("event", message=message)

    with ExitStack() as stack:
        stack.enter_context(fs.fail_as_disk_error(f"writing the run in {run_folder}:", again=RESUME))
        stack.enter_context(joined(world, device_of_ranks(config.device)))
        interruption = stack.enter_context(Interruption(world))

        # Where to start.
        with world.main_first():
            if world.is_main:
                fs.make_folder(run_folder)
                stack.enter_context(fs.FolderLock(run_folder / LOCK_NAME))
            checkpoint = starting_point(run_folder, warn, resume=resume)
        progress = Progress()
        if checkpoint is not None:
            refuse_another_run(checkpoint, config, store)
            progress = Progress(**checkpoint.state["progress"])

        # What is to be done, with what.
        data = training_data(config, store, mixed_with, warn)
        config, length = with_length(config, data, tell)
        model = new_model(config, data)
        if checkpoint is not None and progress.is_finished:
            why = progress.stop_reason or f"the run has all its {progress.step} steps"
            tell("event", message=f"nothing to resume: {why}")
            return _result(progress, run_folder, model=model, train_rows=data.rows.num_rows, checkpoint=checkpoint)
        world = shared_world(world, config, model, log)
        run = assemble(
            config,
            store,
            data,
            model,
            length=length,
            folder=run_folder,
            log=log,
            tell=tell,
            interruption=interruption,
            callbacks=called,
            checkpoint=checkpoint,
            stack=stack,
            world=world,
        )
        if checkpoint is not None:
            restore(run, checkpoint)
            tell("event", message=f"resumed from {checkpoint.path.name} at position {run.loader.position}")
        log.append("stream", **run.loader.state_dict())  # what `inspect --step` needs of a mixture: its stages
        saver = stack.enter_context(Saver(newest=checkpoint))
        stack.enter_context(HardwareMonitor(log, seconds_between_samples=config.hardware_interval_seconds))
        trackers = stack.enter_context(
            open_trackers(
                config,
                run_folder,
                first_step=progress.step,
                tell_event=warn,
                is_main=world.is_main,
            )
        )
        listeners.append(trackers.tell)

        checkpoint = _train_steps(run, progress, saver)
        trackers.is_completed = progress.is_finished
        result = _result(progress, run_folder, model=run.model, train_rows=data.rows.num_rows, checkpoint=checkpoint)
        called.raise_failure()
        called.end(result)
        called.raise_failure()
        return result


def _train_steps(run: Run, progress: Progress, saver: Saver) -> Checkpoint | None:
    """Steps until the last one, or until something ends the run; returns the last checkpoint.

    Data that can't be had (a server that is gone, a full cache) ends the run like a signal, saved, and is raised then.
    """
    stepper, failure = Stepper(run), None
    try:
        _take_steps(run, progress, saver, stepper)
    except (StoreError, DiskError) as error:
        # Other processes wait for this one inside a step; and what was begun ahead is in the weights, but not counted.
        if run.world.size > 1 or stepper.is_ahead:
            raise
        failure = error
        run.tell("event", message=f"stopping after step {progress.step} of {run.config.num_steps}: {error.message}")
    checkpoint = saver.finish(run, progress, protected=_kept(run, progress))
    if failure is not None:
        raise failure
    return checkpoint


def _take_steps(run: Run, progress: Progress, saver: Saver, stepper: Stepper) -> None:
    """The steps, and what is due between them and after the last."""
    config = run.config
    first_step = progress.step
    _look(run, progress)  # what the stop before a resume left undone at this very step
    while stepper.is_ahead or (progress.stop_reason is None and not _is_over(run, progress, first_step)):
        step = stepper.step(progress.step, may_run_ahead=_may_run_ahead(run, progress, first_step, stepper.position))
        if step is None:
            break
        progress.count_step(loss=step.loss, is_finite=step.is_finite, tokens=step.tokens, seconds=step.seconds)
        _record_step(run, progress, step)
        if not step.is_finite:
            _refuse_repeated_skips(run, progress, step)
        run.interruption.agree(also=run.callbacks.stop_reason)

        # What is due between steps; the last step's evaluation and save follow the loop.
        if stepper.is_ahead:
            continue  # nothing is due, and what was begun is done before anything ends
        if _is_over(run, progress, first_step):
            break
        _look(run, progress)
        is_best = config.keeps_best and progress.best_step == progress.step
        if progress.stop_reason is None and (is_best or _is_due(progress.step, config.checkpoint_every_steps)):
            saver.save(run, progress, protected=_kept(run, progress))
        saver.poll(run)

    if progress.step == config.num_steps:
        _look(run, progress)
        # A signal during the last evaluation ends it; resuming then evaluates and nothing else.
        progress.is_finished = run.interruption.requested is None
    elif progress.stop_reason is not None:
        progress.is_finished = True
        run.tell(
            "event", message=f"ended early after step {progress.step} of {config.num_steps}: {progress.stop_reason}"
        )
    else:
        reason = _stop_cause(run, progress, first_step)
        run.tell("event", message=f"stopping after step {progress.step} of {config.num_steps}: {reason}")


def _may_run_ahead(run: Run, progress: Progress, first_step: int, position: int) -> bool:
    """Whether the step after the next may begin before the next one's end: nothing is due or may end in between.

    `position` is where the next step begins in the data order.
    """
    config, step = run.config, progress.step + 1
    stop_after = config.stop_after_steps
    is_last = step >= config.num_steps or (stop_after is not None and step - first_step >= stop_after)
    is_due = _is_due(step, config.eval_every_steps) or _is_due(step, config.checkpoint_every_steps)
    # A pass may end with an evaluation, and is summed up.
    ends_pass = (position + config.batch_rows) // run.length.rows_per_pass > position // run.length.rows_per_pass
    may_end = run.interruption.requested is not None or bool(run.callbacks)
    return not (is_last or is_due or ends_pass or may_end)


def _is_over(run: Run, progress: Progress, first_step: int) -> bool:
    return progress.step >= run.config.num_steps or _stop_cause(run, progress, first_step) is not None


def _stop_cause(run: Run, progress: Progress, first_step: int) -> str | None:
    """Why this start of the run must end before its last step: it can be resumed."""
    stop_after = run.config.stop_after_steps
    if stop_after is not None and progress.step - first_step >= stop_after:
        return f"stop_after_steps={stop_after}"
    # Of several processes only what they have agreed on counts: all must stop after the same step.
    return run.interruption.requested or (run.callbacks.stop_reason if run.world.size == 1 else None)


def _look(run: Run, progress: Progress) -> None:
    """Evaluates if the step that was done last is one for it, sums up the pass it ended, and asks for patience.

    May be called again for the same step: what was recorded isn't recorded twice.
    """
    config, step = run.config, progress.step
    if step == 0:
        return
    first_row = run.loader.position - config.batch_rows
    is_last = step == config.num_steps
    ends_pass = run.loader.position // run.length.rows_per_pass > first_row // run.length.rows_per_pass
    is_due = is_last or _is_due(step, config.eval_every_steps) or (ends_pass and config.is_by_passes)
    if is_due and progress.val_step != step:
        watch(run, progress)
    if run.interruption.requested is not None:
        return
    is_ending = is_last or (progress.val_step == step and has_lost_patience(run, progress))
    if progress.pass_first_step <= step and (ends_pass or is_ending):
        rate = scheduled_rate(config, step - 1)
        record_passes(run, progress, learning_rate=rate, first_row=first_row, is_last=is_ending)


def _kept(run: Run, progress: Progress) -> set[str]:
    """The names of checkpoints that pruning leaves alone."""
    return {f"step-{progress.best_step:08d}"} if run.config.keeps_best and progress.best_step is not None else set()


def _record_step(run: Run, progress: Progress, step: Step) -> None:
    """Writes the step's record if it is due; callbacks get it in any case."""
    fields: dict[str, Any] = {
        "step": progress.step,
        "loss": step.loss,
        "learning_rate": step.learning_rate,
        "grad_norm": step.grad_norm,
        "tokens": step.tokens,
        "seconds": round(step.seconds, 6),
        "data_seconds": round(step.data_seconds, 6),
        "position": step.position + run.config.batch_rows,
    }
    if run.peak_flops is not None:
        fields["mfu_percent"] = round(100 * run.flops_per_step / step.seconds / run.peak_flops, 3)
    is_last = progress.step == run.config.num_steps
    if _is_due(progress.step, run.config.log_every_steps) or is_last or not step.is_finite:
        run.tell("step", **fields)
    else:
        run.callbacks.tell({"kind": "step", "time": time.time(), **fields})


def _refuse_repeated_skips(run: Run, progress: Progress, step: Step) -> None:
    """Records an update that wasn't applied; the third in a row ends the run."""
    last_row = step.position + run.config.batch_rows - 1
    where = f"step {progress.step}, rows {step.position} to {last_row} of the data order"
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


def _result(
    progress: Progress, run_folder: Path, *, model: nn.Module, train_rows: int, checkpoint: Checkpoint | None
) -> TrainResult:
    best = run_folder / CHECKPOINTS_NAME / f"step-{progress.best_step or 0:08d}"
    return TrainResult(
        status="completed" if progress.is_finished else "interrupted",
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.final_loss,
        val_loss=progress.val_loss,
        val_bits_per_byte=progress.val_bits_per_byte,
        best_step=progress.best_step,
        best_val_loss=progress.best_loss,
        best_checkpoint=best if best.is_dir() else None,
        stop_reason=progress.stop_reason,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
        parameters=num_parameters(model),
        train_rows=train_rows,
        checkpoint=checkpoint.path if checkpoint else None,
    )
