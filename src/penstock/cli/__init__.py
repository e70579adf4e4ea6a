"""The command line: parse, call, print. `main` is the only place that turns errors into text and exit codes.

0 done · 1 an error with its hint, or a store that isn't whole · 2 bad usage · 130 interrupted · 143 terminated
"""

from __future__ import annotations

import os
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar, NoReturn

from penstock.errors import (
    ConfigError,
    DamagedStoreError,
    DiskError,
    InputError,
    MissingExtraError,
    PenstockError,
    PlanError,
    ResumeError,
    StoreError,
    TokenizerError,
    TrainingError,
)

__all__ = ["main"]


# Longer than any clean-up should take; what it leaves undone, the next start does.
SECONDS_TO_CLEAN_UP = 3.0
# `timeout` and others send a signal to us and then to our group: that is no second thought.
SECONDS_OF_AN_ECHO = 0.3
# What every process of a distributed run meets, or has agreed on: one of them prints it.
SAME_ON_ALL_RANKS = (
    ConfigError, InputError, MissingExtraError, PlanError, ResumeError, StoreError, TokenizerError, TrainingError
)  # fmt: skip
COMMANDS_THAT_GO_ON = ("prepare", "push", "run")


class _Signalled(BaseException):
    """SIGINT or SIGTERM as an exception, so that locks and temporary files are cleaned up on the way out.

    Not KeyboardInterrupt: the parser would swallow that one without a word about how to go on.

    Attributes:
        met: the signal that came, whatever became of its exception.
    """

    met: ClassVar[int | None] = None

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or bool(os.environ.get("PENSTOCK_DEBUG"))
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, _raise_signalled)
        status = _run([word for word in arguments if word != "--debug"], debug=debug)
    except BaseException:
        # Imports take a third of a second, and those of C make an ImportError or a SyntaxError of any exception.
        if _Signalled.met is None:
            raise
        status = _interrupted(_Signalled.met)
    if os.environ.get("WORLD_SIZE", "1") != "1" and "RANK" in os.environ:
        _leave_before_threads(status)
    sys.exit(status)


def _leave_before_threads(status: int) -> NoReturn:
    """Ends one of several processes that train. Python isn't taken down: gloo's threads still give back tensors then,
    which now and then aborted a process that had done its work."""
    with suppress(OSError):  # a reader that went away
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(status)


def _raise_signalled(number: int, frame: Any) -> None:
    """The first signal cleans up. A second one ends the process at once, and so does time: an exception raised inside
    a destructor is lost, and a clean-up may hang on a dead disk. Being killed is safe, so that is too."""
    first = time.monotonic()
    _Signalled.met = number

    def again(another: int, frame: Any) -> None:
        if another == signal.SIGALRM or time.monotonic() - first > SECONDS_OF_AN_ECHO:
            _leave_at_once(number)

    for each in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(each, again)
    signal.setitimer(signal.ITIMER_REAL, SECONDS_TO_CLEAN_UP)
    raise _Signalled(number)


def _interrupted(number: int) -> int:
    for again in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
        signal.signal(again, lambda *_: os._exit(128 + number))  # it has been said
    _print_error(f"interrupted by {signal.Signals(number).name}", _how_to_go_on())
    return 128 + number


def _leave_at_once(number: int) -> NoReturn:
    # Past Python's own files, which the code that was interrupted may be writing to.
    os.write(2, f"error: interrupted by {signal.Signals(number).name}\nhint: {_how_to_go_on()}\n".encode())
    os._exit(128 + number)


def _how_to_go_on() -> str:
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    return "run the same command again" + ("; it goes on where it was" if command in COMMANDS_THAT_GO_ON else "")


def _run(arguments: list[str], *, debug: bool) -> int:
    import typer

    from penstock.cli.app import app

    try:
        result = typer.main.get_command(app)(arguments, prog_name="penstock", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except PenstockError as error:
        return _fail(error, debug=debug)
    except _usage_error() as error:
        context = getattr(error, "ctx", None)
        _print_error(error.format_message(), f"see `{context.command_path if context else 'penstock'} --help`")
        return 2
    except BrokenPipeError:
        # The reader of our output went away (`penstock … | head`): end quietly, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(DiskError.from_os_error(error, doing="a file operation on"), debug=debug)


def _usage_error() -> type[Any]:
    """What the parser raises for bad usage. Typer has used click's class and, since, a copy of it; both are the base of
    `BadParameter`, the one name that every version shows."""
    import typer

    base: type[Any] = typer.BadParameter.__mro__[1]
    return base


def _fail(error: PenstockError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    elif _is_told_by_rank_0(error):
        return 1
    _print_error(error.message, error.hint)
    return 1


def _is_told_by_rank_0(error: PenstockError) -> bool:
    is_follower = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("RANK", "0") != "0"
    return is_follower and isinstance(error, SAME_ON_ALL_RANKS) and not isinstance(error, DamagedStoreError)


def _print_error(message: str, hint: str) -> None:
    from penstock.cli.output import one_line

    print(f"error: {one_line(message)}", file=sys.stderr)
    print(f"hint: {one_line(hint)}", file=sys.stderr)
