"""What all commands share at the console: errors without a traceback, exit statuses, streams that take all letters."""

from __future__ import annotations

import codecs
import contextlib
import functools
import io
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import typer
from typer.models import OptionInfo

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


def report_errors(command: F) -> F:
    """Print what the user can fix without a traceback and exit with 2; 130 after an interrupt."""

    @functools.wraps(command)
    def run_command(*args: Any, **kwargs: Any) -> Any:
        _take_signals_as_ctrl_c()
        try:
            result = command(*args, **kwargs)
            sys.stdout.flush()
            return result
        except KeyboardInterrupt:
            _print_errors("interrupted")
            raise typer.Exit(INTERRUPTED) from None
        except Exception as exc:
            from vla_rl.core.errors import UserError
            from vla_rl.core.plan import DoesNotFit

            cause = getattr(exc, "cause", None)  # of an error that came from another process
            error = cause if isinstance(cause, UserError | DoesNotFit) else exc
            if not isinstance(error, UserError | DoesNotFit):
                error = _path_error(exc, command, kwargs) or exc
            if kwargs.get("debug") or not isinstance(error, UserError | DoesNotFit):
                raise
            _print_errors(str(error), *getattr(error, "__notes__", ()))
            raise typer.Exit(getattr(error, "exit_code", 2)) from None
        except BaseException as exc:  # nothing of ours raises one
            if kwargs.get("debug"):
                raise
            ended = f"a plugin ended the process: {type(exc).__name__}: {exc}; --debug shows where"
            _print_errors(ended, *getattr(exc, "__notes__", ()))
            raise typer.Exit(2) from None

    return run_command  # type: ignore[return-value]


def open_closed_streams() -> None:
    """Lead standard streams that the caller has closed (`>&-`) to the null device: else the next file that is opened
    gets their number, and what libraries print goes into it."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(number, mode, encoding="utf-8", closefd=False))


def print_all_letters() -> None:
    """No letter that a terminal cannot show ends a command. In the locale `C`, as in containers, UTF-8 is printed,
    as Python itself does unless that is switched off."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            if codecs.lookup(stream.encoding).name in ("ascii", "utf-8"):
                stream.reconfigure(encoding="utf-8", errors="surrogateescape")
            else:
                stream.reconfigure(errors="replace")


# ------------------------------------------------------------------------------------------------ internal


def _print_errors(*lines: str) -> None:
    """Print lines to stderr. If no one reads it any more, the exit status alone says what happened."""
    try:
        for line in lines:
            typer.echo(line, err=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # else Python fails once more when it ends


def _take_signals_as_ctrl_c() -> None:
    """Take SIGTERM and SIGUSR1 as Ctrl-C, also before a run begins, and after it has ended: imports take seconds. Runs
    install their own handlers."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        if threading.current_thread() is threading.main_thread() and signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, signal.default_int_handler)


def _path_error(exc: Exception, command: Callable[..., Any], arguments: dict[str, Any]) -> Exception | None:
    """Return the error of a path that was given, or of the output's place; None if the exception is another error."""
    from vla_rl.core.paths import path_error

    paths: dict[str, Path] = {}
    hints = get_type_hints(command, include_extras=True)
    for name, value in arguments.items():
        (about,) = hints[name].__metadata__
        called = f"--{name.replace('_', '-')}" if isinstance(about, OptionInfo) else about.metavar or name.upper()
        files = [file for file in (value if isinstance(value, list) else [value]) if isinstance(file, Path)]
        paths |= {called if len(files) == 1 else f"{called} ({i})": file for i, file in enumerate(files, 1)}
    error = path_error(exc, paths)
    if error is not None and isinstance(exc, OSError) and exc.filename is None:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.close()  # if it is stdout that takes nothing, Python would complain once more at its end
    return error
