"""Where a run starts: at step 0, or where its newest whole checkpoint ends.

In: a run folder, a config, a store. Out: the checkpoint to go on from, or None; or an error that shows both sides where
the checkpoint is of another store or config. Also `Progress`, what a run has come to so far, which checkpoints carry.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, PlanError, ResumeError
from penstock.pack import Plan, make_plan
from penstock.pack.mixture import Mixture, make_mixture
from penstock.store import Store
from penstock.train.checkpoint import Checkpoint, checkpoint_folders, find_latest, remove_unfinished_saves
from penstock.train.config import FREE_KEYS, TrainConfig

__all__ = [
    "Progress",
    "refuse_another_run",
    "starting_point",
    "training_mixture",
    "training_plan",
    "validation_plans",
]


@dataclass(kw_only=True)
class Progress:
    """What a run has come to; the loop moves it on, and a checkpoint keeps it.

    Attributes:
        val_step: the step of the last evaluation.
        best_loss: the lowest held-out loss, of step `best_step`; lower by less than `min_delta` doesn't count.
        evaluations_without_gain: since then.
        pass_nats, pass_tokens, pass_seconds, pass_first_step: of the pass over the rows under way.
        stop_reason: why the run ended before its last step, for good.
    """

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    final_loss: float | None = None
    skipped_in_a_row: int = 0
    val_step: int | None = None
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    best_step: int | None = None
    best_loss: float | None = None
    evaluations_without_gain: int = 0
    pass_first_step: int = 1
    pass_nats: float = 0.0
    pass_tokens: int = 0
    pass_seconds: float = 0.0
    stop_reason: str | None = None
    is_finished: bool = False

    def count_step(self, *, loss: float, is_finite: bool, tokens: int, seconds: float) -> None:
        """Adds one step; a loss that isn't finite counts as skipped and leaves the figures alone."""
        self.step += 1
        self.seconds += seconds
        self.pass_seconds += seconds
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        self.tokens += tokens
        if is_finite:
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.final_loss = loss
            self.pass_nats += loss * tokens
            self.pass_tokens += tokens

    def count_evaluation(self, *, loss: float, bits_per_byte: float, min_delta: float) -> None:
        """Adds one evaluation; it is the best so far if its loss is lower than the best by at least `min_delta`."""
        self.val_step, self.val_loss, self.val_bits_per_byte = self.step, loss, bits_per_byte
        # Written so that a loss which isn't a number is never the best.
        if loss < math.inf and (
            self.best_loss is None or (loss < self.best_loss and self.best_loss - loss >= min_delta)
        ):
            self.best_step, self.best_loss, self.evaluations_without_gain = self.step, loss, 0
        else:
            self.evaluations_without_gain += 1

    def as_state(self) -> dict[str, Any]:
        """The fields as a checkpoint has them: a held-out loss that isn't finite is no JSON number, and left out."""
        fields = asdict(self)
        for name in ("val_loss", "val_bits_per_byte"):
            if fields[name] is not None and not math.isfinite(fields[name]):
                fields[name] = None
        return fields


def starting_point(run_folder: Path, warn: Callable[[str], object], *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from; `warn` is told what was found. Removes what a killed save left: call it locked.

    Raises:
        ConfigError: the folder holds a run already, and resuming wasn't asked for.
        ResumeError: none of its checkpoints is whole.
    """
    num_removed = remove_unfinished_saves(run_folder)
    if num_removed:
        warn(f"removed {num_removed} unfinished checkpoints of a run that was killed")
    folders = checkpoint_folders(run_folder)
    if folders and not resume:
        raise ConfigError(
            f"{run_folder} already holds a run: its newest checkpoint is {folders[0].name}",
            hint="go on with it with --resume, or start another run with another --out",
        )
    if resume and not folders:
        warn("no checkpoint to resume from: starting at step 0")
    return find_latest(run_folder, warn=warn)


def refuse_another_run(checkpoint: Checkpoint, config: TrainConfig, store: Store) -> None:
    """Raises `ResumeError`, with both values, if the checkpoint was saved under another store or config."""
    saved_digest = checkpoint.state["store_digest"]
    if saved_digest != store.digest:
        raise ResumeError(
            f"the run was trained on store {saved_digest}, this store is {store.digest}",
            hint="resume with the same store (STORE@VERSION names an older version), or start with another --out",
        )
    if checkpoint.state["settings_digest"] == config.digest():
        return
    given = config.bound_settings()
    # A key that Penstock has learned since: the run went by what is its default now.
    saved = {**TrainConfig().bound_settings(), **checkpoint.state["settings"]}
    if config.is_by_passes:
        saved.pop("steps", None)
    changed = [
        f"{key} was {saved.get(key, 'unknown')}, is {given.get(key, 'unknown')}"
        for key in sorted(saved.keys() | given.keys())
        if saved.get(key) != given.get(key)
    ]
    if not changed:
        return
    raise ResumeError(
        f"the run was started with another config: {'; '.join(changed)}",
        hint=f"use the same values, or start with another --out; free to change are {', '.join(sorted(FREE_KEYS))}",
    )


def training_plan(config: TrainConfig, store: Store, *, split: str = "train") -> Plan:
    """The rows of a split as the config has them packed."""
    return make_plan(
        store,
        policy=config.pack,
        split=split,
        seq_len=config.seq_len,
        overlap=config.overlap,
        boundaries=config.document_boundaries,
        overlap_loss=config.overlap_loss,
    )


def training_mixture(config: TrainConfig, stores: Mapping[str, Store]) -> Mixture | None:
    """The sources of a run on several stores, or on one with `mix`; None for a run on one store as it is."""
    if len(stores) < 2 and not config.mix and not config.mix_epochs:
        return None
    return make_mixture(
        stores,
        config.mix,
        epochs=config.mix_epochs,
        temperature=config.mix_temperature,
        policy=config.pack,
        seq_len=config.seq_len,
        overlap=config.overlap,
        boundaries=config.document_boundaries,
        overlap_loss=config.overlap_loss,
    )


def validation_plans(
    config: TrainConfig, stores: Mapping[str, Store], warn: Callable[[str], object]
) -> dict[str, Plan]:
    """The rows of each store's `val` split, by the store's name; `warn` is told why one has none."""
    plans = {}
    for name, store in stores.items():
        plan, why = _validation_plan(config, store)
        if plan is not None:
            plans[name] = plan
        else:
            warn(f"no held-out evaluation{f' on {name}' if len(stores) > 1 else ''}: {why}")
    if not plans and config.patience is not None:
        warn(f"patience is {config.patience}, which does nothing without held-out rows")
    return plans


def _validation_plan(config: TrainConfig, store: Store) -> tuple[Plan | None, str]:
    """The rows, or None and why."""
    if "val" not in store.manifest.splits:
        return None, f"expected a split 'val', the store has {', '.join(store.manifest.splits)}"
    try:
        plan = training_plan(config, store, split="val")
    except PlanError as error:
        return None, error.message
    return (plan, "") if plan.num_rows else (None, "the val split has no rows")
