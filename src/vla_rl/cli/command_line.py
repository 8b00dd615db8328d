"""The command line, made from the public functions: their parameters are its words, their docstrings its help."""

from __future__ import annotations

import builtins
import functools
import inspect
import re
from collections.abc import Callable, Sequence
from copy import copy
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace, UnionType
from typing import Annotated, Any, NamedTuple, TypeVar, Union, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from vla_rl.cli.console import report_errors

F = TypeVar("F", bound=Callable[..., Any])

PYTHON_ONLY = "what no word of a command line can be"
"""Marks a parameter, as in `Annotated[Callable[[], None], PYTHON_ONLY]`. The command line fills `say` with `print`."""


class Command(NamedTuple):
    """A public function on the command line."""

    function: Callable[..., Any]
    name: str
    show: str
    json: bool


COMMANDS: list[Command] = []
"""In the order of `vla-rl --help`."""


def command(name: str = "", *, show: str = "", json: bool = False) -> Callable[[F], F]:
    """Add the function to the command line. Its first paragraph is the help, `Args` that of each parameter.

    Parameters are options, or positions with `Annotated[T, typer.Argument(metavar="SPEC")]`; `typer.Option(min=1)`
    gives a range. A path is a Path, a sequence an option in the singular that may be repeated.

    Args:
        name: of the command; empty: the function's.
        show: "module:function" in `vla_rl.cli` that prints the result, from it and all that was given. What it returns
            is the exit status, None: 0. Without it, a number that the function returns is.
        json: whether there is an option --json, which `show` is given.
    """

    def add_command(function: F) -> F:
        COMMANDS.append(Command(function, name or function.__name__.replace("_", "-"), show, json))
        return with_path_errors(function)

    return add_command


def add_commands(app: typer.Typer, commands: Sequence[Command] = COMMANDS) -> None:
    """Add commands to an application."""
    for added in commands:
        about = inspect.getdoc(added.function) or ""
        app.command(added.name, help=about.partition("\n\n")[0])(make_callback(added))


def make_callback(added: Command) -> Callable[..., None]:
    """Return the function with a command's words as its parameters, annotated as Typer reads them. It calls the
    public function and prints the result."""
    parameters = command_parameters(added.function)
    words = list(parameters.values())
    flags = {"json": "Print JSON."} if added.json else {}
    for flag, about in (flags | {"debug": "Show the traceback of an error."}).items():
        kind = Annotated[bool, OptionInfo(default=..., param_decls=(f"--{flag}",), help=about)]
        words.append(inspect.Parameter(flag, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind))

    def run_command(**values: Any) -> None:
        given = SimpleNamespace(debug=values["debug"], json=values.get("json", False))
        vars(given).update({name: values[word.name] for name, word in parameters.items()})
        arguments = {name: vars(given)[name] for name in parameters if vars(given)[name] not in (None, [])}
        if "say" in inspect.signature(added.function).parameters:
            arguments["say"] = print
        try:
            status = _show_result(added, added.function(**arguments), given)
        except Exception as exc:
            from vla_rl.core.errors import UserError

            if isinstance(exc, UserError) and hasattr(exc, "result"):  # only what was to be done with it failed
                _show_result(added, exc.result, given)
            raise
        if status:
            raise typer.Exit(status)

    run_command.__signature__ = inspect.Signature(words)  # type: ignore[attr-defined]
    run_command.__annotations__ = {word.name: word.annotation for word in words}
    return report_errors(run_command)


def command_parameters(function: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """Return each parameter of a function that the command line has, as Typer reads it."""
    hints = get_type_hints(function, localns=_Names({**vars(builtins), **function.__globals__}), include_extras=True)
    texts = argument_texts(function)
    words = {}
    for name, parameter in inspect.signature(function).parameters.items():
        hint, marks = hints[name], getattr(hints[name], "__metadata__", ())
        if PYTHON_ONLY in marks:
            continue
        kind = _word_type(hint.__origin__ if marks else hint)
        about = copy(next((mark for mark in marks if isinstance(mark, ParameterInfo)), OptionInfo(default=...)))
        about.help = texts.get(name)
        word, default = name, parameter.default
        if isinstance(about, OptionInfo):
            word = name.removesuffix("s") if get_origin(kind) is list else name
            about.param_decls = (f"--{word.replace('_', '-')}",) if default is False else about.param_decls
        if default in (None, ()):
            kind, default = kind | None, None
        words[name] = inspect.Parameter(
            word, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=Annotated[kind, about]
        )
    return words


def argument_texts(function: Callable[..., Any]) -> dict[str, str]:
    """Return the text of each parameter in the docstring's section `Args`."""
    section = re.split(r"\n(?=\S)", (inspect.getdoc(function) or "").partition("\nArgs:\n")[2])[0]
    entries = re.findall(r"^ {4}(\w+): (.+(?:\n {8}.+)*)", section, flags=re.MULTILINE)
    return {name: " ".join(text.split()) for name, text in entries}


def with_path_errors(function: F) -> F:
    """Raise UserError where the operating system does not take a path that was given."""

    @functools.wraps(function)
    def call_function(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except (OSError, ValueError) as exc:
            from vla_rl.core.paths import path_error

            arguments = inspect.signature(function).bind(*args, **kwargs).arguments
            error = path_error(
                exc, {name: Path(value) for name, value in arguments.items() if isinstance(value, str | Path)}
            )
            if error is None:
                raise
            raise error from exc

    return call_function  # type: ignore[return-value]


# ------------------------------------------------------------------------------------------------ internal


class _Names(dict[str, Any]):
    """Names for annotations, in which those that only type checkers import may be anything."""

    def __missing__(self, name: str) -> Any:
        return Any


def _word_type(hint: Any) -> Any:
    """Return what a word of the command line becomes for a parameter of this type."""
    kinds = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    for kind in kinds:
        if get_origin(kind) is Sequence:
            return list[_word_type(get_args(kind)[0])]  # type: ignore[misc]
    for kind in (Path, bool, int, float, str):
        if kind in kinds:
            return kind
    raise TypeError(f"no word of a command line can be a {hint}; mark the parameter with PYTHON_ONLY")


def _show_result(added: Command, result: Any, given: SimpleNamespace) -> int | None:
    if not added.show:
        return result if isinstance(result, int) else None
    module, _, name = added.show.partition(":")
    status: int | None = getattr(import_module(f"vla_rl.cli.{module}"), name)(result, given)
    return status
