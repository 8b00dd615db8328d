"""`vla-rl check-env`: the contract check of a simulator as a table."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from vla_rl.core.errors import PluginError
from vla_rl.core.plugins import load
from vla_rl.core.spec import read_env
from vla_rl.core.testing.envs import examine_env
from vla_rl.core.testing.findings import Findings
from vla_rl.core.types import Context


def main(
    name: str, overrides: Sequence[str], modules: Sequence[str], rows: int, chunk: int, device: str, expert: bool
) -> int:
    """Print the report. -> 0, or 1 with findings. Raises UserError for settings that are wrong or a machine that lacks
    something."""
    env = read_env(name, overrides, modules)
    plugin = load("env", name, modules)
    if plugin.preflight is not None:
        plugin.preflight(env.config)
    try:
        found = examine_env(plugin, env.config, Context(num_envs=rows, chunk=chunk, device=device), expert=expert)
    except ModuleNotFoundError as exc:
        raise PluginError(f"env {name!r} needs {exc.name!r}; try: pip install 'vla-rl[{plugin.extra}]'") from exc
    _print(f"{name}: {rows} rows, chunks of {chunk}, {device}", found)
    return int(any(section.findings for section in found.sections))


def _print(title: str, found: Findings) -> None:
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
    for section in found.sections:
        mark, style = ("✗", "bold red") if section.findings else ("–", "dim") if section.skipped else ("✓", "green")
        said = Text("\n".join(section.findings) or section.skipped, style="dim" if section.skipped else "")
        table.add_row(Text(mark, style=style), section.name, f"{section.seconds:.1f} s", said)
    console.print(title)
    console.print(table)
    count = sum(len(section.findings) for section in found.sections)
    console.print(f"\n[bold red]{count} findings[/]" if count else "\n[green]keeps to the contract[/]")
