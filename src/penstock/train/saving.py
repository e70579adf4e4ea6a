"""Saving a run and putting it back.

In: a `Run` and its progress. Out: a checkpoint that holds everything the next step depends on, and the `checkpoint`
record. `restore` is the mirror of `save`: a part that one takes the other puts back.
"""

from __future__ import annotations

import time
from dataclasses import asdict

from penstock.errors import DiskError
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
from penstock.train.optimizer import load_optimizer_tensors, optimizer_tensors
from penstock.train.randomness import restore_random_state, saved_random_state
from penstock.train.run import Run
from penstock.train.start import Progress

__all__ = ["restore", "save"]


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Puts back all that `save` took."""
    load_parameters(run.model, read_tensors(checkpoint.path / MODEL_NAME))
    tensors = read_tensors(checkpoint.path / OPTIMIZER_NAME)
    load_optimizer_tensors(run.optimizer, plain_parameters(run.model), tensors)
    run.loader.load_state_dict(checkpoint.state["loader"])
    restore_random_state(checkpoint.state["random"])


def save(run: Run, progress: Progress, *, is_required: bool) -> Checkpoint | None:
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
