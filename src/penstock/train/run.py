"""The parts of a run: its data, its model and what they are trained with.

In: a config, an open store, a log. Out: `Data`, the rows to train on and those held out; and `Run`, everything that the
loop, the evaluations and the saves share, with the model on its device. `assemble` builds in a fixed order, since model
and batches draw from seeded randomness: another order would be another run. A checkpoint's choices are taken over.

Memory: the model, its optimizer's state and the loader's batches ahead; the store stays on the disk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import Tensor

from penstock import fs
from penstock.hardware import probe
from penstock.load.torch import IGNORED_LABEL, TorchLoader
from penstock.pack import Plan
from penstock.pack.mixture import Mixture
from penstock.runlog import Record, RunLog
from penstock.store import Store
from penstock.tokenize import Tokenizer
from penstock.train import building
from penstock.train.callbacks import Callbacks
from penstock.train.checkpoint import Checkpoint
from penstock.train.choices import Choices, autocast_of, chosen, numeric_settings, reused_choices
from penstock.train.config import TrainConfig
from penstock.train.distributed import World, place_model
from penstock.train.evaluate import held_out_batches
from penstock.train.interruption import Interruption
from penstock.train.language_model import LanguageModel
from penstock.train.length import Length, run_length
from penstock.train.loss import Autocast
from penstock.train.optimizer import build_optimizer
from penstock.train.randomness import seed_everything
from penstock.train.start import training_mixture, training_plan, validation_plans
from penstock.train.tuning.applying import applied

__all__ = ["Data", "Run", "Tell", "assemble", "keep_tokenizer", "new_model", "training_data", "with_length"]

PROMPT_TOKENS = 16
TOKENIZER_NAME = "tokenizer.json"

Tell = Callable[..., Record]


@dataclass(frozen=True, kw_only=True)
class Data:
    """What is read: the rows of training, those held out by store, and one plan to take a prompt from."""

    tokenizer: Tokenizer
    rows: Plan | Mixture
    first_plan: Plan
    held_out: dict[str, Plan]


@dataclass(kw_only=True)
class Run:
    """The parts of a run under way, for the functions that the loop calls.

    `choices` alone is ever replaced: by memory.py, where the micro-batch turns out too large.
    """

    config: TrainConfig
    store: Store
    folder: Path
    log: RunLog
    tell: Tell
    data: Data
    length: Length
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    loader: TorchLoader
    prompt_ids: list[int]
    token_byte_lengths: Tensor
    choices: Choices
    autocast: Autocast
    interruption: Interruption
    callbacks: Callbacks
    world: World
    flops_per_step: int
    peak_flops: float | None  # of all devices together, where it is known


def training_data(
    config: TrainConfig, store: Store, mixed_with: Mapping[str, Store] | None, warn: Callable[[str], object]
) -> Data:
    """The rows of a run on one store, or on a mixture of which `store` is the first."""
    stores = mixed_with or {store.path.name: store}
    mixture = training_mixture(config, stores)
    rows = mixture or training_plan(config, store)
    return Data(
        tokenizer=store.tokenizer(),
        rows=rows,
        first_plan=rows.plans[0] if isinstance(rows, Mixture) else rows,
        held_out=validation_plans(config, stores, warn),
    )


def with_length(config: TrainConfig, data: Data, tell: Tell) -> tuple[TrainConfig, Length]:
    """The config with its number of steps, and the length, which is recorded with what it follows from."""
    length = run_length(config, data.rows)
    sized = config.model_copy(update={"steps": length.steps})
    tell("length", **asdict(length), warmup_steps=sized.num_warmup_steps)
    return sized, length


def new_model(config: TrainConfig, data: Data) -> LanguageModel:
    """The model as it is before its first step, on the CPU."""
    return building.new_model(config, data.tokenizer)


def keep_tokenizer(folder: Path, tokenizer: Tokenizer) -> None:
    """Puts the tokenizer into the run's folder: the model says nothing without it, and the store may move."""
    if not (folder / TOKENIZER_NAME).exists():
        fs.write_atomic(folder / TOKENIZER_NAME, tokenizer.spec.source_json)


def assemble(
    config: TrainConfig,
    store: Store,
    data: Data,
    model: LanguageModel,
    *,
    length: Length,
    folder: Path,
    log: RunLog,
    tell: Tell,
    interruption: Interruption,
    callbacks: Callbacks,
    checkpoint: Checkpoint | None,
    stack: ExitStack,
    world: World,
) -> Run:
    """Decides what to compute with, and builds the rest of the run around a new model.

    `stack` takes what must be undone at the run's end: torch's switches and the loader's threads. The weights of a
    checkpoint are put back by `saving.restore`; here its choices alone are read.
    """
    if world.is_main:
        keep_tokenizer(folder, data.tokenizer)
    is_sharded = world.parallel == "fsdp"
    choices = (
        chosen(config, model, log, world_size=world.size, is_sharded=is_sharded)
        if checkpoint is None
        else reused_choices(checkpoint.state["choices"], log, is_sharded=is_sharded)
    )
    choices = Choices(**world.from_main(asdict(choices)))  # what was measured on one device counts for all
    _record_settings(config, choices, log, world)
    stack.enter_context(numeric_settings(choices, deterministic=config.deterministic))

    seed_everything(config.seed + world.rank)  # ranks hold the same weights, and drop out different ones
    device = torch.device(choices.device)
    stack.enter_context(applied(model, choices))
    place_model(model, world, device=choices.device)
    model.train()
    optimizer = build_optimizer(
        model,
        weight_decay=config.weight_decay,
        betas=config.betas,
        eps=config.eps,
        fused=choices.fused_optimizer,
        kind=choices.optimizer,
        library=choices.optimizer_library,
    )
    loader = stack.enter_context(
        TorchLoader(
            data.rows,
            batch_rows=config.batch_rows,
            seed=config.seed,
            device=choices.device,
            prefetch_batches=config.prefetch_batches,
            rank=world.rank,
            world_size=world.size,
            **config.stream.options(data.rows, seed=config.seed, batch_rows=config.batch_rows),
        )
    )
    return Run(
        config=config,
        store=store,
        folder=folder,
        log=log,
        tell=tell,
        data=data,
        length=length,
        model=model,
        optimizer=optimizer,
        loader=loader,
        prompt_ids=_prompt_ids(next(iter(data.held_out.values()), data.first_plan)),
        token_byte_lengths=torch.from_numpy(data.tokenizer.estimated_byte_lengths()).to(device),
        choices=choices,
        autocast=autocast_of(choices),
        interruption=interruption,
        callbacks=callbacks,
        world=world,
        flops_per_step=model.flops_per_token(config.seq_len) * config.batch_rows * config.seq_len,
        peak_flops=_peak_flops(choices, log, world),
    )


def _record_settings(config: TrainConfig, choices: Choices, log: RunLog, world: World) -> None:
    """The choices that follow from the config alone."""
    accumulation = math.ceil(config.batch_rows // world.size / choices.micro_batch_rows)
    rows = f"{config.batch_rows} rows a step" + (f" over {world.size} processes" if world.size > 1 else "")
    inside = config.document_boundaries
    given = [
        ("gradient_accumulation_steps", accumulation, f"{rows}, whatever fits at once"),
        ("document_mask", inside, "attention stays inside documents" if inside else "document_boundaries is off"),
        ("packing", config.pack, f"{config.overlap} tokens of overlap" if config.overlap else "rows of seq_len tokens"),
        *config.stream.choices(),
        (
            "warmup_steps",
            config.num_warmup_steps,
            "as set" if config.warmup_steps is not None else "ceil(ratio * steps)",
        ),
        (
            "learning_rate",
            config.peak_learning_rate,
            "as set" if config.learning_rate is not None else f"the peak that suits {config.model.summary}",
        ),
    ]
    for name, value, reason in given:
        log.append("choice", name=name, value=value, reason=reason)


def _peak_flops(choices: Choices, log: RunLog, world: World) -> float | None:
    """The dense bf16 peak of all GPUs of the run, which MFU is a share of; None on a CPU or an unknown card."""
    if choices.device == "cpu":
        return None
    gpus = probe().gpus
    peak = gpus[0].peak_bf16_flops if gpus else None
    if peak is not None:
        formula = "MFU = FLOPs per token x batch_rows x seq_len / seconds of the step / peak"
        peak *= world.size
        reason = f"dense bfloat16 peak of {world.size} x {gpus[0].name} by its data sheet; {formula}"
        log.append("choice", name="peak_flops", value=peak, reason=reason)
    return peak


def _prompt_ids(plan: Plan) -> list[int]:
    """The first few tokens of the longest piece of a document in one row; none if the row holds no text."""
    batch = next(held_out_batches(plan, batch_rows=1, device="cpu", limit_rows=1))
    is_text = batch.labels[0] != IGNORED_LABEL  # neither padding nor, with borders on, an end token
    documents = batch.document_ids[0][is_text]
    longest = documents.mode().values if len(documents) else 0
    ids: list[int] = batch.inputs[0][is_text & (batch.document_ids[0] == longest)][:PROMPT_TOKENS].tolist()
    return ids
