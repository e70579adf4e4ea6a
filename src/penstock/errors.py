"""Every error a user can meet.

    PenstockError
    ├── InputError            a source that is missing, empty or unreadable
    ├── TokenizerError        a tokenizer that can't be loaded or can't do what is asked
    ├── StoreError            an output or store that can't be used as asked
    │   ├── NotAStoreError    a path that holds no store
    │   ├── StoreBusyError    another process holds the store's lock
    │   └── DamagedStoreError bytes on disk differ from what was committed
    ├── PlanError             rows that can't be made as asked
    ├── ResumeError           a state of another store, plan or run
    ├── ConfigError           a setting that is unknown, malformed or impossible here
    ├── TrainingError         a run that can't go on
    ├── DiskError             the operating system refused a file operation
    ├── WorkerDiedError       a worker process was killed
    └── MissingExtraError     an optional package that isn't installed

An error is two lines: what happened with the value met and the value expected, then the way out (`hint`).
The command line prints both and exits 1; nothing else turns them into text.
"""

from __future__ import annotations

import difflib
import errno
from collections.abc import Iterable
from typing import Any

__all__ = [
    "RESUME",
    "RUN_AGAIN",
    "ConfigError",
    "DamagedStoreError",
    "DiskError",
    "InputError",
    "MissingExtraError",
    "NotAStoreError",
    "PenstockError",
    "PlanError",
    "ResumeError",
    "StoreBusyError",
    "StoreError",
    "TokenizerError",
    "TrainingError",
    "WorkerDiedError",
    "nearest_first",
]


class PenstockError(Exception):
    """Base of every error that a user can act on."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Any, ...]:
        """Carries message and hint from a worker process to its parent; the default calls the class without a hint."""
        return _rebuilt, (type(self), self.message, self.hint)


def _rebuilt(kind: type[PenstockError], message: str, hint: str) -> PenstockError:
    error = kind.__new__(kind)
    PenstockError.__init__(error, message, hint=hint)  # not the class's own: MissingExtraError takes other arguments
    return error


class InputError(PenstockError):
    """A source is missing, empty or unreadable."""


class TokenizerError(PenstockError):
    """A tokenizer can't be loaded, or can't do what is asked of it."""


class StoreError(PenstockError):
    """A store can't be used as asked."""


class NotAStoreError(StoreError):
    """The path holds no store."""


class StoreBusyError(StoreError):
    """Another process is writing to the store."""


class DamagedStoreError(StoreError):
    """Bytes on disk differ from what was committed."""


class PlanError(PenstockError):
    """Rows can't be made as asked."""


class ResumeError(PenstockError):
    """A saved state belongs to something else."""


class ConfigError(PenstockError):
    """A setting is unknown, malformed or impossible here."""


class TrainingError(PenstockError):
    """A training run can't go on."""


class WorkerDiedError(PenstockError):
    """A worker process ended without saying why."""


class MissingExtraError(PenstockError):
    """An optional package isn't installed."""

    def __init__(self, package: str, *, extra: str, wanted_for: str) -> None:
        super().__init__(
            f"{wanted_for} needs the package {package!r}, which isn't installed",
            hint=f"pip install 'penstock[{extra}]'",
        )


# How a command goes on when the cause is mended.
RUN_AGAIN = "run the same command again"
RESUME = f"{RUN_AGAIN} with --resume"

_OS_HINTS = {
    errno.ENOSPC: "free some space or choose another disk, then {again}; it goes on where it was",
    errno.EDQUOT: "your disk quota is used up: free some space, then {again}",
    errno.EROFS: "the file system is read-only: choose another output folder",
    errno.EACCES: "check the permissions of that folder, or choose another output folder",
    errno.EPERM: "check the permissions of that folder, or choose another output folder",
    errno.EMFILE: "too many open files: raise the limit with `ulimit -n 4096` and {again}",
    errno.ENOLCK: "that file system has no file locks: choose an output folder on a local disk",
    errno.ENOTSUP: "that file system lacks an operation penstock needs: choose an output folder on a local disk",
    errno.ENOSYS: "that file system lacks an operation penstock needs: choose an output folder on a local disk",
    errno.EIO: "the disk reported an I/O error: check it (dmesg), then {again}",
}


class DiskError(PenstockError):
    """The operating system refused a file operation."""

    _way_out = ""  # the hint with how to go on left open; empty where that is no part of it

    @classmethod
    def from_os_error(cls, error: OSError, *, doing: str, again: str = RUN_AGAIN) -> DiskError:
        """Says which file, what was being done and what the system answered."""
        where = f" {error.filename!r}" if error.filename else ""
        way_out = _OS_HINTS.get(error.errno or 0, "nothing committed was changed; mend the cause and {again}")
        made = cls(f"{doing}{where} failed: {error.strerror or error}", hint=way_out.format(again=again))
        made._way_out = way_out
        return made

    def go_on_by(self, again: str) -> None:
        """Has the hint say how this command goes on: where the error was met, the cause alone was known."""
        if self._way_out:
            self.hint = self._way_out.format(again=again)


MOST_NAMES = 16


def nearest_first(name: str, known: Iterable[str]) -> str:
    """The known names as one string, those most like `name` first: for messages about an unknown name."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=max(1, len(names)), cutoff=0.4)
    ordered = [*close, *(other for other in names if other not in close)]
    # A hint is one line: of many names the unlikely ones help nobody.
    shown = ordered if len(ordered) <= MOST_NAMES else [*ordered[:MOST_NAMES], f"and {len(ordered) - MOST_NAMES} more"]
    return ", ".join(shown)
