"""Where a run starts: at step 0, or where its newest whole checkpoint ends.

In: a run folder, a config, a store. Out: the checkpoint to go on from, or None; or an error that shows both sides where
the checkpoint is of another store or config. Also `Progress`, what a run has come to so far, which checkpoints carry.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError, PlanError, ResumeError
from penstock.pack import Plan, make_plan
from penstock.pack.mixture import Mixture, make_mixture
from penstock.runlog import RunLog
from penstock.store import Store
from penstock.train.checkpoint import Checkpoint, checkpoint_folders, find_latest, remove_unfinished_saves
from penstock.train.config import FREE_KEYS, TrainConfig

__all__ = [
    "Progress",
    "refuse_another_run",
    "starting_point",
    "training_mixture",
    "training_plan",
    "validation_plan",
]


@dataclass(kw_only=True)
class Progress:
    """What a run has come to; the loop moves it on, and a checkpoint keeps it."""

    step: int = 0
    tokens: int = 0
    seconds: float = 0.0
    first_loss: float | None = None
    final_loss: float | None = None
    skipped_in_a_row: int = 0
    val_loss: float | None = None
    val_bits_per_byte: float | None = None
    is_finished: bool = False

    def count_step(self, *, loss: float, is_finite: bool, tokens: int, seconds: float) -> None:
        """Adds one step; a loss that isn't finite counts as skipped and leaves the figures alone."""
        self.step += 1
        self.seconds += seconds
        self.skipped_in_a_row = 0 if is_finite else self.skipped_in_a_row + 1
        self.tokens += tokens
        if is_finite:
            self.first_loss = loss if self.first_loss is None else self.first_loss
            self.final_loss = loss


def starting_point(run_folder: Path, log: RunLog, *, resume: bool) -> Checkpoint | None:
    """The checkpoint to go on from. Removes what a killed save left; call it under the run's lock.

    Raises:
        ConfigError: the folder holds a run already, and resuming wasn't asked for.
        ResumeError: none of its checkpoints is whole.
    """
    num_removed = remove_unfinished_saves(run_folder)
    if num_removed:
        log.append("event", message=f"removed {num_removed} unfinished checkpoints of a run that was killed")
    folders = checkpoint_folders(run_folder)
    if folders and not resume:
        raise ConfigError(
            f"{run_folder} already holds a run: its newest checkpoint is {folders[0].name}",
            hint="go on with it with --resume, or start another run with another --out",
        )
    if resume and not folders:
        log.append("event", message="no checkpoint to resume from: starting at step 0")
    return find_latest(run_folder, log=log)


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
    saved, given = checkpoint.state["settings"], config.bound_settings()
    changed = [
        f"{key} was {saved.get(key, 'unknown')}, is {given.get(key, 'unknown')}"
        for key in sorted(saved.keys() | given.keys())
        if saved.get(key) != given.get(key)
    ]
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


def validation_plan(config: TrainConfig, store: Store, log: RunLog) -> Plan | None:
    """The rows of the `val` split, or None, recorded with the reason, if there are none."""
    if "val" not in store.manifest.splits:
        names = ", ".join(store.manifest.splits)
        log.append("event", message=f"no held-out evaluation: expected a split 'val', the store has {names}")
        return None
    try:
        plan = training_plan(config, store, split="val")
    except PlanError as error:
        log.append("event", message=f"no held-out evaluation: {error.message}")
        return None
    if plan.num_rows == 0:
        log.append("event", message="no held-out evaluation: the val split has no rows")
        return None
    return plan
