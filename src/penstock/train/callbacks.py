"""Code of the user that a run calls.

In: objects derived from `Callback`, given to `train(..., callbacks=[...])`. Each method gets the record that the run's
log got (runlog.py lists the fields) and may return True to end the run: it then saves, and can be resumed. What a
callback raises ends the run as well, after a save, as an error that names the callback. They are called by the thread
that trains, in the order given, and what they take counts as no step's time.

    class StopAtLoss(Callback):
        def on_step(self, step):
            return step["loss"] < 2.0
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.errors import TrainingError
from penstock.runlog import Record

if TYPE_CHECKING:
    from penstock.train.loop import TrainResult

__all__ = ["Callback", "Callbacks"]

_METHOD_OF_KIND = {"step": "on_step", "evaluation": "on_evaluation", "checkpoint": "on_save"}


class Callback:
    """Does nothing; override what you need. `True` asks the run to end."""

    def on_step(self, step: Record) -> bool | None:
        """After each update, also those that `log_every_steps` leaves out of the log."""

    def on_evaluation(self, evaluation: Record) -> bool | None:
        """After the held-out rows were scored; with several stores once for each, then once for all (no `store`)."""

    def on_save(self, checkpoint: Record) -> bool | None:
        """After a checkpoint was written; `path` is relative to the run's folder."""

    def on_end(self, result: TrainResult) -> None:
        """After the last save, also where the run was stopped; not after an error."""


class Callbacks:
    """Calls them, and remembers the first that asked to stop or failed."""

    def __init__(self, callbacks: Sequence[Callback] = ()) -> None:
        self._callbacks = tuple(callbacks)
        self._failure: TrainingError | None = None
        self.stop_reason: str | None = None

    def __bool__(self) -> bool:
        return bool(self._callbacks)

    def tell(self, record: Record) -> None:
        """Hands a record of the log to those who want its kind."""
        method = _METHOD_OF_KIND.get(record["kind"])
        if method is not None:
            self._call(method, record, where=f" at step {record['step']}")

    def end(self, result: TrainResult) -> None:
        """Tells them what the run came to."""
        self._call("on_end", result, where="")

    def raise_failure(self) -> None:
        """Raises what a callback raised; the run has been saved by then."""
        if self._failure is not None:
            raise self._failure from self._failure.__cause__

    def _call(self, method: str, argument: Any, *, where: str) -> None:
        for callback in self._callbacks:
            if self._failure is not None:
                return
            name = f"{type(callback).__name__}.{method}"
            try:
                wants_end = getattr(callback, method)(argument)
            except Exception as error:  # noqa: BLE001  anything can come from the user's code; raised after a save
                self._failure = TrainingError(
                    f"the callback {name} failed{where}: {error!r}",
                    hint="mend the callback and start again with resume: the run was saved before this error",
                )
                self._failure.__cause__ = error
                self.stop_reason = f"the callback {name} failed"
                return
            if wants_end is True and self.stop_reason is None:
                self.stop_reason = f"the callback {name} asked for it"
