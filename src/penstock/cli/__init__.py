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


class _Terminated(BaseException):
    """SIGTERM, as an exception, so that locks and temporary files are cleaned up on the way out."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Runs one command and exits."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments or bool(os.environ.get("PENSTOCK_DEBUG"))
    signal.signal(signal.SIGTERM, _raise_terminated)
    sys.exit(_run([word for word in arguments if word != "--debug"], debug=debug))


def _raise_terminated(number: int, frame: Any) -> None:
    raise _Terminated


def _run(arguments: list[str], *, debug: bool) -> int:
    import click
    import typer

    from penstock.cli.app import app

    try:
        result = typer.main.get_command(app)(arguments, prog_name="penstock", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except PenstockError as error:
        return _fail(error, debug=debug)
    except click.exceptions.Abort:
        return _interrupted("interrupted", 130)
    except click.ClickException as error:
        command = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "penstock"
        _print_error(error.format_message().replace("\n", " "), f"see `{command} --help`")
        return 2
    except KeyboardInterrupt:
        return _interrupted("interrupted", 130)
    except _Terminated:
        return _interrupted("terminated", 143)
    except BrokenPipeError:
        # The reader of our output went away (`penstock … | head`): end quietly, as other tools do.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        return _fail(DiskError.from_os_error(error, doing="a file operation on"), debug=debug)


def _fail(error: PenstockError, *, debug: bool) -> int:
    if debug:
        traceback.print_exception(error)
    _print_error(error.message, error.hint)
    return 1


def _interrupted(what: str, code: int) -> int:
    _print_error(what, "nothing committed was changed; run the same command again, and it goes on where it was")
    return code


def _print_error(message: str, hint: str) -> None:
    from penstock.cli.output import one_line

    print(f"error: {one_line(message)}", file=sys.stderr)
    print(f"hint: {one_line(hint)}", file=sys.stderr)
