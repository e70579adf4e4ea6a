"""Saving a run while it goes on, and putting it back.

In: a `Run` and its progress. Out: a checkpoint that holds everything the next step depends on, and the `checkpoint`
record. `restore` is the mirror of `Saver.save`: a part that one takes the other puts back.

At a save the state of that very step is copied to host memory (pinned, for a GPU); a thread writes it, one at a time: a
save that comes while the last one is still being written waits for it. The record says how long the write took
(`seconds`) and how long training stood still for it (`waited_seconds`: that wait and the copy). What the thread came to
is collected between steps by the thread that trains, so that records and callbacks have one caller. The last save of a
run is awaited and must succeed; an earlier one that the disk refuses is recorded and the run goes on.

Of several processes rank 0 writes; a sharded model (fsdp) is written by all of them, at the step, while training waits
(sharded_checkpoint.py).

Memory: a copy of weights and optimizer state. `async_checkpoints: false` does without it and lets training wait for the
disk.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from penstock.errors import DiskError, TrainingError
from penstock.pack.mixture import Mixture
from penstock.train.building import refuse_another_base
from penstock.train.checkpoint import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    Checkpoint,
    host_copies,
    is_sharded,
    load_parameters,
    prune_checkpoints,
    read_tensors,
    save_checkpoint,
    trained_parameters,
    with_progress,
)
from penstock.train.optimizer import load_optimizer_tensors, optimizer_tensors
from penstock.train.randomness import restore_random_state, saved_random_state, seed_everything
from penstock.train.run import Run
from penstock.train.start import Progress

__all__ = ["Saver", "restore"]


def restore(run: Run, checkpoint: Checkpoint) -> None:
    """Puts back all that a save took, in a world of any size."""
    refuse_another_base(run.model, checkpoint)
    parameters = trained_parameters(run.model)
    if is_sharded(checkpoint) or run.world.parallel == "fsdp":
        from penstock.train.sharded_checkpoint import loaded_tensors  # its torch modules take a while to import

        tensors = loaded_tensors(checkpoint, parameters)
        load_parameters(run.model, {name: tensors.pop(name) for name in parameters if name in tensors})
    else:
        load_parameters(run.model, read_tensors(checkpoint.path / MODEL_NAME))
        tensors = read_tensors(checkpoint.path / OPTIMIZER_NAME)
    load_optimizer_tensors(run.optimizer, parameters, tensors)
    run.loader.load_state_dict(checkpoint.state["loader"])
    _change_weights(run)
    states = checkpoint.state.get("random_of_ranks", [checkpoint.state["random"]])
    if run.world.rank < len(states):
        restore_random_state(states[run.world.rank])
    else:
        seed_everything(run.config.seed + run.world.rank + checkpoint.step)  # a rank that wasn't there before


def _change_weights(run: Run) -> None:
    """Gives the sources of a mixture the weights of the config, where it names any and they are others."""
    rows, before = run.data.rows, run.loader.weights
    if not isinstance(rows, Mixture) or not run.config.names_weights:
        return
    weights = rows.schedule().stages[-1].weights
    named = {source.name: weight for source, weight in zip(rows.sources, weights, strict=True)}
    changed = [f"{name} {before[name]:g} to {weight:g}" for name, weight in named.items() if weight != before[name]]
    if changed:
        run.loader.change_weights(named)
        run.tell("event", message=f"weights change at position {run.loader.position}: {', '.join(changed)}")


@dataclass(kw_only=True)
class _Write:
    """One write under way, and what it came to."""

    step: int
    waited_seconds: float
    checkpoint: Checkpoint | None = None
    error: BaseException | None = None
    seconds: float = 0.0
    thread: threading.Thread | None = None


@dataclass
class Saver:
    """Saves a run's checkpoints; a context manager that ends with no write under way.

    With several processes all of them call `save` and `finish`, at the same steps.
    """

    newest: Checkpoint | None = None
    """The newest checkpoint known to be whole, on rank 0; where the run started until one is saved."""
    _write: _Write | None = None
    _buffers: dict[str, Tensor] = field(default_factory=dict)

    def save(self, run: Run, progress: Progress, *, is_required: bool = False, protected: Collection[str] = ()) -> None:
        """Takes the state as it is now and has it written; folders named in `protected` aren't pruned.

        A disk that refuses is recorded, now or when the write ends, and the run goes on unless the save `is_required`.
        """
        started = time.perf_counter()
        self.wait(run)
        run.world.settle(run.model)
        parameters = trained_parameters(run.model)
        moments = optimizer_tensors(run.optimizer, parameters)
        state = _state_of(run, progress)
        write: Callable[[], Checkpoint | None]
        if run.world.parallel == "fsdp":
            from penstock.train.sharded_checkpoint import save_sharded

            tensors = {**parameters, **moments}
            write = partial(save_sharded, run.folder, step=progress.step, tensors=tensors, state=state, world=run.world)
        elif run.world.is_main:
            tensors = {**parameters, **moments}
            if run.config.async_checkpoints:
                tensors = host_copies(tensors, self._buffers)
            write = partial(
                save_checkpoint,
                run.folder,
                step=progress.step,
                model_tensors={name: tensors[name] for name in parameters},
                optimizer_tensors={name: tensors[name] for name in moments},
                state=state,
            )
        else:
            return
        self._write = _Write(step=progress.step, waited_seconds=time.perf_counter() - started)
        work = partial(_run_write, self._write, write, run.folder, run.config.keep_checkpoints, protected)
        if run.config.async_checkpoints and run.world.parallel != "fsdp":
            self._write.thread = threading.Thread(target=work, name="penstock-save", daemon=True)
            self._write.thread.start()
        else:
            work()
            self._write.waited_seconds += self._write.seconds
        if is_required or self._write.thread is None:
            self.wait(run, is_required=is_required)

    def poll(self, run: Run) -> None:
        """Records the write under way if it has ended."""
        if self._write is not None and self._write.thread is not None and not self._write.thread.is_alive():
            self.wait(run)

    def wait(self, run: Run, *, is_required: bool = False) -> None:
        """Waits for the write under way, and records what it came to."""
        write, self._write = self._write, None
        if write is None:
            return
        if write.thread is not None:
            write.thread.join()
        if isinstance(write.error, OSError | DiskError) and not is_required:
            message = f"checkpoint of step {write.step} not saved, training goes on: {write.error}"
            run.tell("event", message=message)
        elif write.error is not None:
            raise write.error
        elif write.checkpoint is not None:
            self.newest = write.checkpoint
            run.tell(
                "checkpoint",
                step=write.step,
                path=write.checkpoint.path.relative_to(run.folder).as_posix(),
                bytes=write.checkpoint.num_bytes,
                seconds=round(write.seconds, 4),
                waited_seconds=round(write.waited_seconds, 4),
            )

    def finish(self, run: Run, progress: Progress, *, protected: Collection[str] = ()) -> Checkpoint | None:
        """The checkpoint of the step the run has come to, on rank 0: the last save, awaited, or one made now."""
        self.wait(run)
        is_saved = self.newest is not None and self.newest.step == progress.step
        is_current = is_saved and self.newest is not None and self.newest.state["progress"] == progress.as_state()
        is_saved, is_current = run.world.from_main([is_saved, is_current])
        if not is_current:
            error: OSError | DiskError | None = None
            try:
                if not is_saved:
                    self.save(run, progress, is_required=True, protected=protected)
                elif self.newest is not None and run.world.is_main:
                    # A resumed run had nothing left but its last evaluation: the tensors are as they were.
                    self.newest = with_progress(self.newest, progress.as_state())
            except (OSError, DiskError) as caught:
                error = caught
            if run.world.any(error is not None):
                raise error or TrainingError(
                    "rank 0 couldn't save the last checkpoint", hint="make room on its disk, then start with --resume"
                )
        return self.newest

    def __enter__(self) -> Saver:
        return self

    def __exit__(self, *error: object) -> None:
        # Under the run's lock still: nobody may find a save of ours under way. Its record is lost with the run's error.
        if self._write is not None and self._write.thread is not None:
            self._write.thread.join()


def _run_write(
    write: _Write, make: Callable[[], Checkpoint | None], folder: Path, keep: int, protected: Collection[str]
) -> None:
    started = time.perf_counter()
    try:
        write.checkpoint = make()
        if write.checkpoint is not None:
            prune_checkpoints(folder, keep=keep, verified=write.checkpoint, protected=protected)
    except BaseException as error:  # noqa: BLE001  raised, or recorded, by the thread that trains
        write.error = error
    write.seconds = time.perf_counter() - started


def _state_of(run: Run, progress: Progress) -> dict[str, Any]:
    random_states = run.world.gathered(saved_random_state())
    return {
        "progress": progress.as_state(),
        "settings": run.config.bound_settings(),
        "settings_digest": run.config.digest(),
        "store_digest": run.store.digest,
        "shape": asdict(run.model.shape),
        "model": run.model.description(),
        "tokenizer": {"digest": run.data.tokenizer.digest, "end_id": run.data.tokenizer.end_id},
        "choices": asdict(run.choices),
        "loader": run.loader.state_dict(),
        "random": random_states[0],
        **({"random_of_ranks": random_states, "parallel": run.world.parallel} if run.world.size > 1 else {}),
    }
