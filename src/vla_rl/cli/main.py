"""`vla-rl`: commands import what they need when they run, so that `--help` is instant."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
from typing import Annotated, NoReturn

import typer

import vla_rl.cli.commands  # noqa: F401 - which are the commands
from vla_rl.cli.command_line import add_commands
from vla_rl.cli.console import INTERRUPTED, open_closed_streams, print_all_letters

app = typer.Typer(
    name="vla-rl",
    help="Train vision-language-action models by reinforcement learning.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_commands(app)


@app.callback(invoke_without_command=True)
def root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    """Train vision-language-action models by reinforcement learning."""
    if version:
        from vla_rl.version import __version__

        typer.echo(__version__)
        raise typer.Exit


def main() -> NoReturn:
    """The console script."""
    open_closed_streams()
    print_all_letters()
    try:
        app()
    except SystemExit as exc:
        if exc.code == INTERRUPTED:  # workers are gone; what libraries still do at exit must not change the status
            with contextlib.suppress(BaseException):
                atexit._run_exitfuncs()  # noqa: SLF001 - libraries close what they opened; Python has no public way
            for stream in (sys.stdout, sys.stderr):
                with contextlib.suppress(OSError):  # closed by its reader, or a terminal that is gone
                    stream.flush()
            os._exit(INTERRUPTED)
        raise
    raise SystemExit(0)


if __name__ == "__main__":
    main()
