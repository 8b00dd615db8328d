"""The command line is made from the public functions: names, defaults, texts and calls of both are the same."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.main import get_command
from typer.testing import CliRunner

import vla_rl
from vla_rl.cli import commands
from vla_rl.cli.command_line import COMMANDS, PYTHON_ONLY, Command, add_commands, argument_texts, make_callback
from vla_rl.cli.main import app
from vla_rl.core.errors import UserError

LINE = get_command(app).commands
NO_COMMANDS = {"open_run"}
"""Public functions of `cli.commands` that are for Python alone."""
MADE = {command.name: command for command in COMMANDS}


def is_for_python_alone(parameter: inspect.Parameter) -> bool:
    """Whether the annotation says so, as it is written or by an alias of `cli.commands`."""
    named = getattr(commands, parameter.annotation, None)
    return "PYTHON_ONLY" in parameter.annotation or PYTHON_ONLY in getattr(named, "__metadata__", ())


def test_every_public_function_is_a_command_and_every_command_a_public_function():
    public = {name for name in vla_rl.__all__ if getattr(vla_rl, name).__module__ == commands.__name__}
    assert {command.function.__name__ for command in COMMANDS} == public - NO_COMMANDS
    assert LINE.keys() == MADE.keys() and len(LINE) == len(COMMANDS)
    for command in COMMANDS:
        assert inspect.unwrap(getattr(vla_rl, command.function.__name__)) is command.function


@pytest.mark.parametrize("name", MADE)
def test_a_command_has_the_parameters_of_its_function(name):
    function = MADE[name].function
    params = {param.name: param for param in LINE[name].params}
    assert params.pop("debug").is_flag and ("json" in params) == MADE[name].json
    params.pop("json", None)
    asked = {
        key: parameter
        for key, parameter in inspect.signature(function).parameters.items()
        if not is_for_python_alone(parameter)
    }
    assert list(params) == [key if key in params else key.removesuffix("s") for key in asked], (
        "positions and options, by the function's names; an option that may be repeated in the singular"
    )
    texts = argument_texts(function)
    for (key, parameter), param in zip(asked.items(), params.values(), strict=True):
        assert param.required == (parameter.default is inspect.Parameter.empty), key
        assert param.required or (param.default or None) == (parameter.default or None), key
        assert param.help == texts[key] and len(param.help) > 5, f"{key} has no text in the docstring's Args"
        assert param.param_type_name == "argument" or f"--{param.name.replace('_', '-')}" in param.opts
    assert texts.keys() == inspect.signature(function).parameters.keys(), "Args of the docstring are the parameters"


@pytest.mark.parametrize("name", MADE)
def test_a_command_has_the_help_of_its_function(name):
    assert LINE[name].help == inspect.getdoc(MADE[name].function).partition("\n\n")[0]
    assert CliRunner().invoke(app, [name, "--help"]).exit_code == 0


@pytest.mark.parametrize("name", [name for name, command in MADE.items() if command.show])
def test_what_prints_a_result_is_there(name):
    module, _, function = MADE[name].show.partition(":")
    assert len(inspect.signature(getattr(import_module(f"vla_rl.cli.{module}"), function)).parameters) == 2


@pytest.mark.parametrize("name", MADE)
def test_a_command_is_on_the_page_about_python_and_in_the_reference(name):
    docs = Path(__file__).parents[2] / "docs"
    function = MADE[name].function.__name__
    link = f"`{function}`](../reference/runs.md#vla_rl.{function})"
    assert link in (docs / "how-to" / "use-from-python.md").read_text()
    assert f"::: vla_rl.{function}\n" in (docs / "reference" / "runs.md").read_text()


class Broken(UserError):
    """An error that comes with a result."""

    result = "half"


calls: list[dict[str, Any]] = []


def paint(
    what: Annotated[str | Path, typer.Argument(metavar="WALL")],
    *,
    names: Annotated[Sequence[str], typer.Argument(metavar="[NAME]...")] = (),
    layers: Sequence[str | Path] = (),
    deep_size: Annotated[int, typer.Option(min=1, max=9)] = 3,
    fast: bool = False,
    careful: bool = True,
    colour: str | None = None,
    done: Annotated[Any, PYTHON_ONLY] = None,
    say: Annotated[Any, PYTHON_ONLY] = None,
) -> str:
    """Paint a wall.

    For Python alone.

    Args:
        what: The wall; its
            text has two lines.
        names: Of painters.
        layers: One layer.
        deep_size: Of a brush.
        fast: Be quick.
        careful: Be good.
        colour: Of the paint.
        done: Called.
        say: Called.

    Returns it."""
    calls.append({key: value for key, value in locals().items() if key != "say"})
    say("painting")
    if colour == "broken":
        raise Broken("the brush broke")
    return f"{what} is painted"


def show_paint(result: str, given: Any) -> int:
    print(result, given.deep_size, given.json, given.debug)
    return 4


@pytest.fixture
def painter(monkeypatch: pytest.MonkeyPatch) -> typer.Typer:
    monkeypatch.setattr("vla_rl.cli.main.show_paint", show_paint, raising=False)
    made = typer.Typer(rich_markup_mode=None, pretty_exceptions_enable=False)
    add_commands(made, [Command(paint, "paint", "main:show_paint", json=True)])
    calls.clear()
    return made


def test_defaults_are_those_of_the_function(painter):
    result = CliRunner().invoke(painter, ["north"])
    assert (result.exit_code, result.stdout) == (4, "painting\nnorth is painted 3 False False\n")
    paint("north", say=len)
    first, second = calls
    assert first == {**second, "what": Path("north")}


def test_words_of_every_kind_reach_the_function(painter):
    words = "north --layer a ann --layer b bob --deep-size 9 --fast --no-careful --colour red --json --debug"
    result = CliRunner().invoke(painter, words.split())
    assert (result.exit_code, result.stdout) == (4, "painting\nnorth is painted 9 True True\n")
    (call,) = calls
    assert call == {
        "what": Path("north"),
        "names": ["ann", "bob"],
        "layers": [Path("a"), Path("b")],
        "deep_size": 9,
        "fast": True,
        "careful": False,
        "colour": "red",
        "done": None,
    }


@pytest.mark.parametrize(
    "words", [[], ["north", "--deep-size", "10"], ["north", "--no-fast"], ["north", "--layers", "a"], ["x", "--done", "1"]]
)  # fmt: skip
def test_other_words_are_refused(painter, words):
    result = CliRunner().invoke(painter, words)
    assert result.exit_code == 2 and not calls


def test_the_help_is_that_of_the_docstring(painter):
    text = " ".join(CliRunner().invoke(painter, ["--help"]).stdout.split())
    assert "Paint a wall." in text and "For Python alone" not in text and "--done" not in text
    assert "The wall; its text has two lines." in text and "Of a brush. [default: 3; 1<=x<=9]" in text


def test_a_result_that_an_error_comes_with_is_printed_before_it(painter):
    result = CliRunner().invoke(painter, ["north", "--colour", "broken"])
    assert (result.exit_code, result.stdout) == (2, "painting\nhalf 3 False False\n")
    assert result.stderr == "the brush broke\n"


def test_a_parameter_that_is_no_word_is_named(monkeypatch):
    def spoil(what: bytes) -> None:
        """Spoil."""

    with pytest.raises(TypeError, match=r"no word of a command line can be a <class 'bytes'>; mark the parameter"):
        make_callback(Command(spoil, "spoil", "", json=False))
