"""The command line: parse, call, print. `main` is the only place that turns errors into text and exit codes.

0 done · 1 an error with its hint, or a store that isn't whole · 2 bad usage · 130 interrupted · 143 terminated
"""

from __future__ import annotations

import os
import signal
import sys
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

from penstock.errors import DiskError, PenstockError

__all__ = ["main"]


class _Signalled(BaseException):
    """SIGINT or SIGTERM as an exception, so that locks and temporary files are cleaned up on the way out.

    Not KeyboardInterrupt: the parser would swallow that one without a word about how to go on.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or bool(os.environ.get("PENSTOCK_DEBUG"))
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _raise_signalled)
    sys.exit(_run([word for word in arguments if word != "--debug"], debug=debug))


def _raise_signalled(number: int, frame: Any) -> None:
    raise _Signalled(number)


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
    except _Signalled as error:
        hint = "nothing committed was changed; run the same command again, and it goes on where it was"
        _print_error(f"stopped by {error}", hint)
        return 128 + error.number
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
    _print_error(error.message, error.hint)
    return 1


def _print_error(message: str, hint: str) -> None:
    from penstock.cli.output import one_line

    print(f"error: {one_line(message)}", file=sys.stderr)
    print(f"hint: {one_line(hint)}", file=sys.stderr)
