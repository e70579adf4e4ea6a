"""Stopping a run from outside: SIGTERM and SIGINT become a question the loop asks between steps.

The handler only sets a flag, so the step in progress is finished and saved. A second Ctrl-C interrupts at once: whoever
presses it twice doesn't want to wait. Signals can be handled in the main thread only; elsewhere the flag stays down.

Several processes hear of a signal at different moments, or only one of them does. Their answer changes when they
`agree`, all at the same point of the run, and nowhere else: they must leave the loop after the same step.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

from penstock.train.distributed import World

__all__ = ["Interruption"]


class Interruption:
    """A context manager; `requested` names the signal that came, or is None."""

    def __init__(self, world: World | None = None) -> None:
        self._world = world or World()
        self._heard: str | None = None
        self._agreed: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    @property
    def requested(self) -> str | None:
        """Why the run is to stop, the same on all ranks; a single process needn't agree with itself."""
        return self._heard if self._world.size == 1 else self._agreed

    def agree(self, *, also: str | None = None) -> bool:
        """Whether any rank heard a signal, or has another reason (`also`) to stop; every rank must call it."""
        if self._world.size > 1:
            reason = self._heard or also
            if self._world.any(reason is not None):
                self._agreed = reason or self._agreed or "a signal to another rank"
        return self.requested is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self._heard = signal.Signals(number).name
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.default_int_handler)

    def __enter__(self) -> Interruption:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, handler in self._previous.items():
            # None stands for a handler that wasn't installed from Python, which can't be put back by name.
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
