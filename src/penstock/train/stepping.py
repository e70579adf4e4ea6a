"""One step: a batch, the gradient of its mean loss, one update.

In: a run and the step's number. Out: `Step`, its figures. An update that would spoil the weights, because loss or norm
isn't finite, is left out.

Where the device can leave it out by itself (a GPU with the fused AdamW), the host runs ahead: it queues the next step
before it reads the figures of this one, so that the device never waits for the host between two steps. Figures, order
and updates are the same. The caller says when it may: not before anything that looks at the weights, the data position
or the random state between the two steps, such as an evaluation, a save or the end.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from penstock.errors import DiskError, StoreError
from penstock.train.config import DEFAULT_DECAY_RATIO, TrainConfig
from penstock.train.distributed import whole_norm
from penstock.train.memory import add_gradients_within_memory
from penstock.train.optimizer import set_learning_rate
from penstock.train.run import Run
from penstock.train.schedule import learning_rate_at

__all__ = ["Step", "Stepper", "scheduled_rate"]

SECONDS_BETWEEN_LOOKS = 0.2


@dataclass(frozen=True, kw_only=True)
class Step:
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
        """Whether the update was applied."""
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, kw_only=True)
class _Queued:
    """A step that the device may still be at work on; `figures` are loss and norm, on the host once `done` has come."""

    figures: Tensor
    done: torch.cuda.Event | None
    learning_rate: float
    tokens: int
    started: float
    data_seconds: float
    position: int


class Stepper:
    """Takes the steps of a run, one after the other."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._can_run_ahead = can_run_ahead(run)
        self._ahead: _Queued | None = None
        self._failure: StoreError | DiskError | None = None  # to get the batch after the step returned last
        self._under_way: torch.cuda.Event | None = None  # the end of the step queued last
        self._settled_at = 0.0
        self._position = run.loader.position

    @property
    def position(self) -> int:
        """Where the step after the last one that `step` returned begins in the data order."""
        return self._position

    @property
    def is_ahead(self) -> bool:
        """Whether a step was queued whose figures nobody has yet: the run's weights and position are already its."""
        return self._ahead is not None

    def step(self, number: int, *, may_run_ahead: bool) -> Step | None:
        """Step `number`, counted from 0, done; with `may_run_ahead` the one after it is under way. None where the run
        is to stop before there is a batch."""
        if self._failure is not None:
            raise self._failure
        queued, self._ahead = self._ahead or self._queue(number), None
        if queued is None:
            return None
        if self._can_run_ahead and may_run_ahead:
            try:
                self._ahead = self._queue(number + 1)
            except (StoreError, DiskError) as error:  # of the batch: this step is done all the same
                self._failure = error
        return self._settled(queued)

    def _queue(self, number: int) -> _Queued | None:
        run = self._run
        # The batch. What comes over a network may take minutes, which nobody has who is told to end.
        started = time.perf_counter()
        position = run.loader.position
        while not run.loader.wait(SECONDS_BETWEEN_LOOKS):
            if run.interruption.requested is not None:
                return None
        batch = next(run.loader)
        # A wait that the device didn't notice, at work on the step before, cost nothing.
        is_busy = self._under_way is not None and not self._under_way.query()  # type: ignore[no-untyped-call]
        data_seconds = 0.0 if is_busy else time.perf_counter() - started

        # The gradient of its mean loss, whatever the micro-batch.
        learning_rate = scheduled_rate(run.config, number)
        set_learning_rate(run.optimizer, learning_rate)
        mean_loss, num_targets = add_gradients_within_memory(run, batch)
        norm = _clipped_norm(run.model, run.config.max_grad_norm)
        figures, done = self._update(torch.stack((mean_loss, norm)))
        return _Queued(
            figures=figures,
            done=done,
            learning_rate=learning_rate,
            tokens=num_targets,
            started=started,
            data_seconds=data_seconds,
            position=position,
        )

    def _update(self, figures: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
        """Updates the weights if loss and norm are finite; returns the two on the host, and when they will be there."""
        optimizer, done = self._run.optimizer, None
        is_finite = figures.isfinite().all()
        if self._can_run_ahead:
            # What torch's GradScaler tells a fused optimizer: with 1 here nothing is updated, not even its count.
            vars(optimizer)["found_inf"] = (~is_finite).float()
            optimizer.step()
        elif bool(is_finite):
            optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if figures.device.type == "cuda":
            on_host = torch.empty(figures.shape, dtype=figures.dtype, pin_memory=True)
            figures = on_host.copy_(figures, non_blocking=True)
            done = self._under_way = torch.cuda.current_stream().record_event()
        return figures, done

    def _settled(self, queued: _Queued) -> Step:
        """Waits for the step's end; its seconds count from its begin, or from the end of the step before if later."""
        if queued.done is not None:
            queued.done.synchronize()
        loss, grad_norm = queued.figures.tolist()
        now = time.perf_counter()
        seconds = now - max(queued.started, self._settled_at)
        self._settled_at, self._position = now, queued.position + self._run.config.batch_rows
        return Step(
            loss=loss,
            grad_norm=grad_norm,
            learning_rate=queued.learning_rate,
            tokens=queued.tokens,
            seconds=seconds,
            data_seconds=min(queued.data_seconds, seconds),
            position=queued.position,
        )


def can_run_ahead(run: Run) -> bool:
    """Whether the device can leave out an update by itself, and would otherwise wait for the host."""
    choices = run.choices
    is_fused = choices.optimizer == "adamw" and choices.fused_optimizer
    return choices.device == "cuda" and is_fused and run.world.parallel != "fsdp"


def scheduled_rate(config: TrainConfig, step: int) -> float:
    """The learning rate of a step, counted from 0."""
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
    norm = whole_norm(torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None]))
    if max_grad_norm is not None:
        torch.nn.utils.clip_grads_with_norm_(parameters, max_grad_norm, norm)
    return norm
