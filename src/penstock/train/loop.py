"""The training loop: a store in, checkpoints and a record of every step out.

`train` reads top to bottom: find where to start, decide, build, then per step: batch, learning rate, gradients over
micro-batches, clip, update, record; evaluate and save when due. Everything that the next step depends on is in the
checkpoint (weights, optimizer, data position, random state, choices), so a killed run that is resumed computes the same
losses to the last bit on a CPU, and on a GPU with `deterministic`.

Steps are numbered by updates done: the record of step 1 follows the first update, and `step-00000120` holds the model
after 120. `tokens` counts scored targets, never padding. Seconds of a step include the wait for its batch
(`data_seconds`); evaluations and saves are outside. The host waits for the device once a step, to read loss and norm.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from penstock import fs
from penstock.errors import DiskError, TrainingError
from penstock.load.torch import IGNORED_LABEL, TorchLoader
from penstock.pack import Plan
from penstock.pack.mixture import Mixture
from penstock.runlog import Record, RunLog
from penstock.store import Store
from penstock.tokenize import Tokenizer
from penstock.train.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    Checkpoint,
    load_parameters,
    plain_parameters,
    prune_checkpoints,
    read_tensors,
    save_checkpoint,
)
from penstock.train.choices import Choices, autocast_of, chosen, numeric_settings, reused_choices
from penstock.train.config import TrainConfig
from penstock.train.evaluate import evaluate, held_out_batches
from penstock.train.interruption import Interruption
from penstock.train.loss import Autocast, add_gradients
from penstock.train.model import Decoder, build_model, num_parameters
from penstock.train.monitor import HardwareMonitor
from penstock.train.optimizer import build_optimizer, load_optimizer_tensors, optimizer_tensors, set_learning_rate
from penstock.train.randomness import restore_random_state, saved_random_state, seed_everything
from penstock.train.sample import sampled_ids
from penstock.train.schedule import learning_rate_at
from penstock.train.start import (
    Progress,
    refuse_another_run,
    starting_point,
    training_mixture,
    training_plan,
    validation_plan,
)

__all__ = ["TrainResult", "train"]

LOCK_NAME = "train.lock"
SKIPPED_IN_A_ROW_LIMIT = 3
PROMPT_TOKENS = 16
SAMPLE_TEMPERATURE = 0.8

Tell = Callable[..., Record]


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """What a run came to. Figures cover the whole run, also what was done before a resume."""

    status: Literal["completed", "interrupted"]
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
class _Run:
    """The parts of a run under way, for the functions that the loop calls."""

    config: TrainConfig
    store: Store
    folder: Path
    tell: Tell
    tokenizer: Tokenizer
    model: Decoder
    optimizer: torch.optim.Optimizer
    loader: TorchLoader
    held_out: Plan | None
    prompt_ids: list[int]
    token_byte_lengths: Tensor
    choices: Choices
    autocast: Autocast
    interruption: Interruption


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
        tokenizer = store.tokenizer()
        shape = config.model.shape(vocab_size=tokenizer.vocab_size, seq_len=config.seq_len)
        mixture = training_mixture(config, mixed_with or {store.path.name: store})
        rows = mixture or training_plan(config, store)
        held_out = validation_plan(config, store, log)
        model = build_model(shape, seed=config.seed)
        if checkpoint is not None and progress.is_finished:
            tell("event", message=f"nothing to resume: the run has all its {progress.step} steps")
            return _result(progress, model=model, rows=rows, checkpoint=checkpoint, status="completed")
        choices = chosen(config, shape, log) if checkpoint is None else reused_choices(checkpoint.state["choices"], log)
        _record_settings(config, choices, log)
        stack.enter_context(numeric_settings(choices, deterministic=config.deterministic))

        # The model and its optimizer, new or as saved.
        seed_everything(config.seed)
        device = torch.device(choices.device)
        model.to(device).train()
        optimizer = build_optimizer(
            model,
            weight_decay=config.weight_decay,
            betas=config.betas,
            eps=config.eps,
            fused=choices.fused_optimizer,
        )
        loader = stack.enter_context(
            TorchLoader(
                rows,
                batch_rows=config.batch_rows,
                seed=config.seed,
                device=choices.device,
                prefetch_batches=config.prefetch_batches,
            )
        )
        run = _Run(
            config=config,
            store=store,
            folder=run_folder,
            tell=tell,
            tokenizer=tokenizer,
            model=model,
            optimizer=optimizer,
            loader=loader,
            held_out=held_out,
            prompt_ids=_prompt_ids(held_out or (mixture.plans[0] if mixture else training_plan(config, store))),
            token_byte_lengths=torch.from_numpy(tokenizer.token_byte_lengths()).to(device),
            choices=choices,
            autocast=autocast_of(choices),
            interruption=interruption,
        )
        if checkpoint is not None:
            _restore(run, checkpoint)
            tell("event", message=f"resumed from {checkpoint.path.name} at position {loader.position}")
        stack.enter_context(HardwareMonitor(log))

        first_step = progress.step
        while progress.step < config.steps:
            # The batch.
            step_started = time.perf_counter()
            first_row = loader.position
            batch = next(loader)
            data_seconds = time.perf_counter() - step_started

            # The gradient of its mean loss, whatever the micro-batch.
            learning_rate = learning_rate_at(
                progress.step,
                num_steps=config.steps,
                num_warmup_steps=config.num_warmup_steps,
                peak=config.peak_learning_rate,
                minimum=config.peak_learning_rate * config.min_learning_rate_ratio,
                schedule=config.schedule,
            )
            set_learning_rate(optimizer, learning_rate)
            mean_loss = add_gradients(
                model,
                batch,
                micro_batch_rows=choices.micro_batch_rows,
                document_boundaries=config.document_boundaries,
                autocast=run.autocast,
            )
            norm = _clipped_norm(model, config.max_grad_norm)
            loss, grad_norm = torch.stack((mean_loss, norm)).tolist()

            # The update, unless it would spoil the weights.
            is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
            if is_finite:
                optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            seconds = time.perf_counter() - step_started

            # The record.
            progress.count_step(loss=loss, is_finite=is_finite, tokens=batch.num_targets, seconds=seconds)
            is_last = progress.step == config.steps
            if _is_due(progress.step, config.log_every_steps) or is_last or not is_finite:
                tell(
                    "step",
                    step=progress.step,
                    loss=loss,
                    learning_rate=learning_rate,
                    grad_norm=grad_norm,
                    tokens=batch.num_targets,
                    seconds=round(seconds, 6),
                    data_seconds=round(data_seconds, 6),
                    position=loader.position,
                )
            if not is_finite:
                where = f"step {progress.step}, rows {first_row} to {loader.position - 1} of the data order"
                tell("event", message=f"update not applied at {where}: loss {loss}, gradient norm {grad_norm}")
                if progress.skipped_in_a_row == SKIPPED_IN_A_ROW_LIMIT:
                    raise TrainingError(
                        f"the loss or its gradient was not finite {SKIPPED_IN_A_ROW_LIMIT} times in a row, "
                        f"last at {where}: loss {loss}, gradient norm {grad_norm}",
                        hint="try a lower learning_rate or a longer warm-up, in a run with another --out",
                    )

            # What is due between steps; the last step's evaluation and save follow the loop.
            is_stopping = interruption.requested is not None or progress.step - first_step == config.stop_after_steps
            if is_last or is_stopping:
                break
            if _is_due(progress.step, config.eval_every_steps):
                _evaluate(run, progress)
            if _is_due(progress.step, config.checkpoint_every_steps):
                checkpoint = _save(run, progress, is_required=False) or checkpoint

        if progress.step == config.steps:
            _evaluate(run, progress)
            # A signal during the last evaluation ends it; resuming then evaluates and nothing else.
            progress.is_finished = interruption.requested is None
        else:
            reason = interruption.requested or f"stop_after_steps={config.stop_after_steps}"
            tell("event", message=f"stopping after step {progress.step} of {config.steps}: {reason}")
        if checkpoint is None or checkpoint.step != progress.step:
            checkpoint = _save(run, progress, is_required=True)
        status: Literal["completed", "interrupted"] = "completed" if progress.is_finished else "interrupted"
        return _result(progress, model=model, rows=rows, checkpoint=checkpoint, status=status)


def _is_due(step: int, every: int | None) -> bool:
    return every is not None and step % every == 0


def _clipped_norm(model: nn.Module, max_grad_norm: float | None) -> Tensor:
    """The norm of the whole gradient before clipping, which is then done in place."""
    parameters = list(model.parameters())
    norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm


def _record_settings(config: TrainConfig, choices: Choices, log: RunLog) -> None:
    """The choices that follow from the config alone."""
    accumulation = math.ceil(config.batch_rows / choices.micro_batch_rows)
    inside = config.document_boundaries
    given = [
        ("gradient_accumulation_steps", accumulation, f"{config.batch_rows} rows a step, whatever fits at once"),
        ("attention", "sdpa with a document mask" if inside else "sdpa, causal", "torch picks the kernel"),
        ("document_mask", inside, "attention stays inside documents" if inside else "document_boundaries is off"),
        ("packing", config.pack, f"{config.overlap} tokens of overlap" if config.overlap else "rows of seq_len tokens"),
        ("optimizer", "AdamW", "weight decay on matrices only"),
        (
            "warmup_steps",
            config.num_warmup_steps,
            "as set" if config.warmup_steps is not None else "ceil(ratio * steps)",
        ),
        (
            "learning_rate",
            config.peak_learning_rate,
            "as set" if config.learning_rate is not None else f"the peak that suits preset {config.model.preset}",
        ),
    ]
    for name, value, reason in given:
        log.append("choice", name=name, value=value, reason=reason)


def _prompt_ids(plan: Plan) -> list[int]:
    """The first few tokens of the longest piece of a document in one row; none if the row holds no text."""
    batch = next(held_out_batches(plan, batch_rows=1, device="cpu", limit_rows=1))
    is_text = batch.labels[0] != IGNORED_LABEL  # neither padding nor, with borders on, an end token
    documents = batch.document_ids[0][is_text]
    longest = documents.mode().values if len(documents) else 0
    ids: list[int] = batch.inputs[0][is_text & (batch.document_ids[0] == longest)][:PROMPT_TOKENS].tolist()
    return ids


def _evaluate(run: _Run, progress: Progress) -> None:
    """Scores the held-out rows and draws a sample; records both. A signal ends it without a record."""
    if run.held_out is None:
        return
    rows = held_out_batches(
        run.held_out,
        batch_rows=run.choices.micro_batch_rows,
        device=run.choices.device,
        limit_rows=run.config.eval_rows,
    )
    found = evaluate(
        run.model,
        rows,
        run.token_byte_lengths,
        document_boundaries=run.config.document_boundaries,
        autocast=run.autocast,
        should_stop=lambda: run.interruption.requested is not None,
    )
    if found is None:
        why = run.interruption.requested or "the held-out rows hold no target with bytes"
        run.tell("event", message=f"no evaluation at step {progress.step}: {why}")
        return
    progress.val_loss, progress.val_bits_per_byte = found.loss, found.bits_per_byte
    run.tell(
        "evaluation",
        step=progress.step,
        split="val",
        loss=found.loss,
        bits_per_byte=found.bits_per_byte,
        tokens=found.num_targets,
        seconds=round(found.seconds, 4),
    )
    if run.config.sample_tokens and run.prompt_ids:
        _sample(run, step=progress.step)


def _sample(run: _Run, *, step: int) -> None:
    ids = sampled_ids(
        run.model,
        run.prompt_ids,
        num_tokens=run.config.sample_tokens,
        end_id=run.tokenizer.end_id,
        seed=run.config.seed,
        temperature=SAMPLE_TEMPERATURE,
        autocast=run.autocast,
    )
    run.tell("sample", step=step, prompt=run.tokenizer.decode(run.prompt_ids), text=run.tokenizer.decode(ids))


def _restore(run: _Run, checkpoint: Checkpoint) -> None:
    """Puts back all that `_save` took."""
    load_parameters(run.model, read_tensors(checkpoint.path / MODEL_NAME))
    tensors = read_tensors(checkpoint.path / OPTIMIZER_NAME)
    load_optimizer_tensors(run.optimizer, plain_parameters(run.model), tensors)
    run.loader.load_state_dict(checkpoint.state["loader"])
    restore_random_state(checkpoint.state["random"])


def _save(run: _Run, progress: Progress, *, is_required: bool) -> Checkpoint | None:
    """Saves and prunes. A disk that refuses is recorded and the run goes on, unless this save `is_required`."""
    started = time.perf_counter()
    parameters = plain_parameters(run.model)
    try:
        checkpoint = save_checkpoint(
            run.folder,
            step=progress.step,
            model_tensors=parameters,
            optimizer_tensors=optimizer_tensors(run.optimizer, parameters),
            state={
                "progress": asdict(progress),
                "settings": run.config.bound_settings(),
                "settings_digest": run.config.digest(),
                "store_digest": run.store.digest,
                "shape": asdict(run.model.shape),
                "choices": asdict(run.choices),
                "loader": run.loader.state_dict(),
                "random": saved_random_state(),
            },
        )
        prune_checkpoints(run.folder, keep=run.config.keep_checkpoints, verified=checkpoint)
    except (OSError, DiskError) as error:
        if is_required:
            raise
        run.tell("event", message=f"checkpoint of step {progress.step} not saved, training goes on: {error}")
        return None
    run.tell(
        "checkpoint",
        step=checkpoint.step,
        path=checkpoint.path.relative_to(run.folder).as_posix(),
        bytes=checkpoint.num_bytes,
        seconds=round(time.perf_counter() - started, 4),
    )
    return checkpoint


def _result(
    progress: Progress,
    *,
    model: nn.Module,
    rows: Plan | Mixture,
    checkpoint: Checkpoint | None,
    status: Literal["completed", "interrupted"],
) -> TrainResult:
    return TrainResult(
        status=status,
        steps=progress.step,
        first_loss=progress.first_loss,
        final_loss=progress.final_loss,
        val_loss=progress.val_loss,
        val_bits_per_byte=progress.val_bits_per_byte,
        tokens=progress.tokens,
        seconds=progress.seconds,
        tokens_per_second=progress.tokens / progress.seconds if progress.seconds else 0.0,
        parameters=num_parameters(model),
        train_rows=rows.num_rows,
        checkpoint=checkpoint.path if checkpoint else None,
    )
