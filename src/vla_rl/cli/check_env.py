"""`vla-rl check-env`: the contract check of a simulator as a table."""

from __future__ import annotations

import ast
import inspect
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
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
from vla_rl.testing.common.findings import Findings
from vla_rl.testing.envs import examine_env
from vla_rl.toolkit.processes import module_path
from vla_rl.toolkit.waiting import merge_works, works_now

FIRST_S = 10.0
"""Seconds until the first line of progress if stderr is not a terminal."""


def main(
    name: str,
    overrides: Sequence[str],
    modules: Sequence[str],
    num_envs: int,
    chunk: int,
    device: str,
    expert: bool,
    seconds: float,
    whole_range: bool,
) -> int:
    """Print the report. Return 0, or 1 with findings. Raises as `examine_named_env`. With the setting `python`, that
    interpreter runs the check and prints."""
    python = _read_env(name, overrides, modules).python
    if python is not None:
        settings = [text for text in overrides if text.partition("=")[0] != "python"]
        options = ["--num-envs", str(num_envs), "--chunk", str(chunk), "--device", device, "--seconds", str(seconds)]
        options += ["--expert" if expert else "--no-expert", "--whole-range" if whole_range else "--no-whole-range"]
        return _run_there(python, [name, *settings, *options, *(f"--plugin={module}" for module in modules)])
    with show_progress(f"check-env {name}") as on_section:
        findings = examine_named_env(
            name, overrides, modules, num_envs, chunk, device, expert, seconds, whole_range, on_section
        )
    _print_findings(f"{name}: {num_envs} envs, chunks of {chunk}, {device}", findings, seconds)
    return int(any(section.findings for section in findings.sections))


def examine_named_env(
    name: str,
    overrides: Sequence[str],
    modules: Sequence[str],
    num_envs: int,
    chunk: int,
    device: str,
    expert: bool,
    seconds: float,
    whole_range: bool = True,
    on_section: Callable[[str], None] = lambda name: None,
) -> Findings:
    """Raises UserError for settings that are wrong or a machine that lacks something, such as the device."""
    plugin = load("env", name, modules)
    env = _read_env(name, overrides, modules)
    if env.python is not None:
        raise UserError(
            f"python: {env.python}: a check runs in this interpreter when it is called from Python; call it there, or "
            f"use the command: vla-rl check-env {name} python={env.python}"
        )
    if plugin.preflight is not None:
        plugin.preflight(env.config)
    context = EnvContext(num_envs=num_envs, chunk=chunk, device=check_device(device))
    options: dict[str, Any] = {"expert": expert, "seconds": seconds, "whole_range": whole_range}
    try:
        return examine_env(plugin, env.config, context, **options, on_section=on_section)
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


def _run_there(python: Path, arguments: Sequence[str]) -> int:
    """Run the command in another interpreter, and return its exit code. Raises UserError where that lacks the
    project."""
    problems = interpreter_problems(python)
    if problems:
        raise UserError("\n".join(problems))
    command = [str(python), "-m", "vla_rl.cli.main", "check-env", *arguments]
    return subprocess.run(command, env=os.environ | {"PYTHONPATH": module_path()}, check=False).returncode


@contextmanager
def show_progress(title: str) -> Iterator[Callable[[str], None]]:
    """Report progress on stderr, from a thread: on a terminal in one line, elsewhere in a line now and then. -> a
    function that takes the name of what has begun."""
    now, over, line = ["starting"], Event(), StatusLine()

    def print_status() -> None:
        wanted = monotonic() + FIRST_S
        while not over.wait(0.25):
            work = merge_works(works_now())
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
        default = "required" if field.default is attrs.NOTHING else f"default {_format_default(field.default)}"
        kind = field.type.__name__ if type(field.type) is type else str(field.type).replace("typing.", "")
        about = textwrap.fill(documented.get(field.name, ""), 108)
        yield f"{field.name}: {kind}, {default}" + textwrap.indent(f"\n{about}" if about else "", "    ")


def _format_default(default: object) -> str:
    factory = getattr(default, "factory", None)
    shown = default if factory is None else factory()
    return "its own defaults" if attrs.has(type(shown)) else repr(shown)


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


def _print_findings(title: str, findings: Findings, seconds: float) -> None:
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
    console.print(title)
    console.print(table)
    count = sum(len(section.findings) for section in findings.sections)
    unseen = sum(len(section.notices) for section in findings.sections)
    summary = f"[bold red]{count} finding{'s' * (count > 1)}[/]" if count else "[green]keeps to the contract[/]"
    console.print(f"\n{summary}" + (f"; {unseen} not seen" if unseen else ""))
    taken = sum(section.seconds for section in findings.sections)
    if taken > 2 * seconds:
        longest = sorted(findings.sections, key=lambda section: -section.seconds)[:3]
        console.print(
            f"[dim]took {taken:.0f} s instead of about {seconds:g} (--seconds): the simulator's start, "
            "one call of each kind, about 40 chunks and the expert's episode are never cut; longest: "
            f"{', '.join(f'{section.name} {section.seconds:.0f} s' for section in longest)}[/]"
        )
