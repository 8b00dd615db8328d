"""`vla-rl check-env`: the contract check of a simulator as a table."""

from __future__ import annotations

import ast
import inspect
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from threading import Event, Thread
from time import monotonic
from typing import Any

import attrs

from vla_rl.core.catalogue import load, missing_package
from vla_rl.core.contexts import EnvContext
from vla_rl.core.errors import SpecError, UserError
from vla_rl.core.spec.sections import EnvSpec
from vla_rl.core.spec.spec import read_env
from vla_rl.runtime.checks.interpreter import interpreter_problems
from vla_rl.runtime.comm.status_line import EVERY_S, StatusLine
from vla_rl.runtime.placement.hardware import check_device
from vla_rl.testing.common.findings import Findings, Section
from vla_rl.testing.envs import examine_env
from vla_rl.toolkit.processes import module_path
from vla_rl.toolkit.waiting import list_running_work, merge_works

FIRST_S = 10.0
"""Seconds until the first line of progress if stderr is not a terminal."""


def examine_named_env(
    name: str, overrides: Sequence[str], modules: Sequence[str], context: Mapping[str, Any], options: Mapping[str, Any]
) -> Findings:
    """Examine a simulator, with progress on stderr; with the setting `python` in that interpreter.

    Args:
        context: of the simulator, by the names of `EnvContext`.   options: of `examine_env`.
    Raises UserError for settings that are wrong or a machine that lacks something, such as the device.
    """
    plugin = load("env", name, modules)
    env = _read_env(name, overrides, modules)
    if env.python is not None:
        settings = [text for text in overrides if text.partition("=")[0] != "python"]
        return _examine_there(env.python, (name, settings, modules, context, options))
    if plugin.preflight is not None:
        plugin.preflight(env.config)
    built_with = EnvContext(**{**context, "device": check_device(context["device"])})
    with show_progress(f"check-env {name}") as on_section:
        try:
            return examine_env(plugin, env.config, built_with, **options, on_section=on_section)
        except ModuleNotFoundError as exc:
            raise missing_package("env", name, exc, modules) from exc


def _read_env(name: str, overrides: Sequence[str], modules: Sequence[str]) -> EnvSpec:
    """Read the simulator's settings. Raises UserError that lists its keys."""
    try:
        return read_env(name, overrides, modules)
    except SpecError as exc:
        keys = "\n".join(f"  {line}" for line in _describe_keys(load("env", name, modules).config))
        problems = "\n".join(f"  {text}" for text in exc.errors)
        raise UserError(
            f"env {name!r} cannot be set up:\n{problems}\nits keys, as in vla-rl check-env {name} key=value:\n{keys}"
        ) from exc


def _examine_there(python: Path, arguments: tuple[Any, ...]) -> Findings:
    """Examine in another interpreter. Raises UserError where that lacks the project, or ends without findings."""
    problems = interpreter_problems(python)
    if problems:
        raise UserError("\n".join(problems))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "findings"
        command = [str(python), "-m", __name__, json.dumps(arguments), str(file)]
        status = subprocess.run(command, env=os.environ | {"PYTHONPATH": module_path()}, check=False).returncode
        if not file.exists():
            raise UserError(f"{python} ended with status {status} before the check did; what it printed is above")
        answer = json.loads(file.read_text(encoding="utf-8"))
    if isinstance(answer, str):
        raise UserError(answer)
    findings = Findings(arguments[0])
    for section in answer:
        texts = {name: tuple(section[name]) for name in ("findings", "notices")}
        findings.sections.append(Section(**{**section, **texts}))
    return findings


def _answer_examination(arguments: str, file: str) -> None:
    """Write the sections that another interpreter has asked for, or the text of a UserError."""
    try:
        answer: object = [attrs.asdict(section) for section in examine_named_env(*json.loads(arguments)).sections]
    except UserError as exc:
        answer = str(exc)
    except KeyboardInterrupt:
        sys.exit("interrupted")
    Path(file).write_text(json.dumps(answer), encoding="utf-8")


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Report progress on stderr, from a thread: on a terminal in one line, elsewhere in a line now and then. -> a
    function that takes the name of what has begun."""
    now, over, line = ["starting"], Event(), StatusLine()

    def print_status() -> None:
        wanted = monotonic() + FIRST_S
        while not over.wait(0.25):
            work = merge_works(list_running_work())
            about = now[0] + (f", {work.what}: {work.done} of {work.total}" if work and work.total else "")
            if sys.stderr.isatty():
                line.show_progress(f"{title}: {about}", 0, 0)
            elif monotonic() >= wanted:
                print(f"{title}: {about}", file=sys.stderr, flush=True)
                wanted = monotonic() + EVERY_S

    thread = Thread(target=print_status, name="progress", daemon=True)
    thread.start()
    try:
        yield lambda name: now.__setitem__(0, name)
    finally:
        over.set()
        thread.join()
        line.clear()


def _describe_keys(config: type) -> Iterator[str]:
    """Return each key with its type, its default and the line of documentation below it."""
    documented = _read_docstrings(config)
    for field in attrs.fields(config):
        factory = getattr(field.default, "factory", None)
        default = field.default if factory is None else factory()
        shown = "its own defaults" if attrs.has(type(default)) else repr(default)
        kind = field.type.__name__ if type(field.type) is type else str(field.type).replace("typing.", "")
        about = textwrap.fill(documented.get(field.name, ""), 108)
        presence = "required" if default is attrs.NOTHING else f"default {shown}"
        yield f"{field.name}: {kind}, {presence}" + textwrap.indent(f"\n{about}" if about else "", "    ")


def _read_docstrings(config: type) -> dict[str, str]:
    """Return each field's docstring, of base classes too; without those whose source is not available."""
    reported: dict[str, str] = {}
    for base in filter(attrs.has, reversed(config.__mro__)):
        try:
            (body,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError, ValueError, SyntaxError):
            continue
        lines = body.body if isinstance(body, ast.ClassDef) else []
        for field, below in pairwise(lines):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(below, ast.Expr):
                text = below.value.value if isinstance(below.value, ast.Constant) else ""
                reported[field.target.id] = " ".join(str(text).split())
    return reported


def print_findings(findings: Findings, given: Any) -> int:
    """Print a line a section, with its findings. Return 1 if there are any."""
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(width=None if sys.stdout.isatty() else 120, highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, show_edge=False)
    for _ in range(2):
        table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, justify="right", style="dim")
    table.add_column(overflow="fold")
    for section in findings.sections:
        mark, style = ("✗", "bold red") if section.findings else ("–", "dim") if section.skipped else ("✓", "green")
        findings_text = Text("\n".join(section.findings))
        for aside in (section.skipped, *section.notices):
            findings_text.append(("\n" if findings_text else "") + aside, style="dim")
        table.add_row(Text(mark, style=style), section.name, f"{section.seconds:.1f} s", findings_text)
    console.print(f"{given.name}: {given.num_envs} envs, chunks of {given.chunk}, {given.device}")
    console.print(table)
    count = sum(len(section.findings) for section in findings.sections)
    unseen = sum(len(section.notices) for section in findings.sections)
    summary = f"[bold red]{count} finding{'s' * (count > 1)}[/]" if count else "[green]keeps to the contract[/]"
    console.print(f"\n{summary}" + (f"; {unseen} not seen" if unseen else ""))
    taken = sum(section.seconds for section in findings.sections)
    if taken > 2 * given.seconds:
        longest = sorted(findings.sections, key=lambda section: -section.seconds)[:3]
        console.print(
            f"[dim]took {taken:.0f} s instead of about {given.seconds:g} (--seconds): the simulator's start, "
            "one call of each kind, about 40 chunks and the expert's episode are never cut; longest: "
            f"{', '.join(f'{section.name} {section.seconds:.0f} s' for section in longest)}[/]"
        )
    return int(count > 0)


if __name__ == "__main__":
    _answer_examination(*sys.argv[1:])
