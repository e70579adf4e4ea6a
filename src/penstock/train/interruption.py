"""Stopping a run from outside: SIGTERM and SIGINT become a question the loop asks between steps.

The handler only sets a flag, so the step in progress is finished and saved. A second Ctrl-C interrupts at once: whoever
presses it twice doesn't want to wait. Signals can be handled in the main thread only; elsewhere the flag stays down.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any

__all__ = ["Interruption"]


class Interruption:
    """A context manager; `requested` names the signal that came, or is None."""

    def __init__(self) -> None:
        self.requested: str | None = None
        self._previous: dict[signal.Signals, Any] = {}

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        self.requested = signal.Signals(number).name
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
