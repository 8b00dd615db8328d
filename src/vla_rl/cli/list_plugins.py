"""`vla-rl plugins`: the catalogue as a table. Imports declarations, and neither settings nor what they build."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from vla_rl.core.catalogue import KINDS, installed_plugins, load_declaration
from vla_rl.core.declarations import EnvPlugin
from vla_rl.core.errors import PluginError
from vla_rl.core.installation import OWN_DIST
from vla_rl.core.requirements import install_command, keep_build, missing_requirements, unmet_base

PIPE_WIDTH = 140
"""Width of the table where no terminal shows it."""
NARROW = 60
"""Columns that the summary needs in the line of its plugin."""
GAP = "  "
GREEN, YELLOW, RESET = "\033[32m", "\033[33m", "\033[0m"


def plugin_rows() -> list[dict[str, Any]]:
    """One row a plugin on offer: kind, name, dist, version, ready, status, summary."""
    entries = []
    for kind in KINDS:
        for name, offers in installed_plugins(kind).items():
            for item in offers:
                status, summary = "ready", ""
                try:
                    plugin = load_declaration(kind, name)
                    summary = plugin.summary
                    missing = missing_requirements(item.dist, plugin.extra)
                    if missing:
                        status = f"needs {', '.join(missing)}: {install_command(item.dist, plugin.extra)}"
                    elif isinstance(plugin, EnvPlugin) and plugin.lacks is not None:
                        status = plugin.lacks() or status
                except PluginError as exc:
                    status = str(exc)
                entries.append(
                    {
                        "kind": kind,
                        "name": name,
                        "dist": item.dist,
                        "version": item.version,
                        "ready": status == "ready",
                        "status": status,
                        "summary": summary,
                    }
                )
    return entries


def print_plugins(rows: list[dict[str, Any]], given: Any) -> None:
    """Print the table, or JSON for machines."""
    if given.json:
        print(json.dumps(rows, indent=1))
        return
    if unmet := unmet_base():
        print(f"{OWN_DIST} needs {', '.join(unmet)}: {keep_build(unmet)}\n")
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else PIPE_WIDTH
    coloured = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    for line in table_lines(rows, width, coloured):
        print(line)


def table_lines(entries: list[dict[str, Any]], width: int, coloured: bool = False) -> Iterator[str]:
    """Yield the lines of a table of `plugin_rows` that is at most `width` columns wide. The last column has the
    summary, after what is missing; it stands below each plugin where the terminal is too narrow for that."""
    names = ("kind", "name", "dist", "version")
    widths = [max([len(name), *(len(entry[name]) for entry in entries)]) for name in names]
    ready_width = len("not ready")
    left = sum(widths) + ready_width + len(GAP) * (len(names) + 1)
    stacked = width - left < NARROW
    indent = "    " if stacked else " " * left

    def head_of(cells: Mapping[str, str], ready: str, colour: str) -> str:
        columns = [cells[name].ljust(size) for name, size in zip(names, widths, strict=True)]
        return GAP.join([*columns, f"{colour}{ready}{RESET if colour else ''}" + " " * (ready_width - len(ready)), ""])

    yield (head_of({name: name for name in names}, "ready", "") + ("" if stacked else "summary")).rstrip()
    yield "-" * width
    for entry in entries:
        ready = entry["ready"]
        colour = (GREEN if ready else YELLOW) if coloured else ""
        head = head_of(entry, "ready" if ready else "not ready", colour)
        lines = [] if ready else textwrap.wrap(entry["status"], width - len(indent), break_on_hyphens=False)
        lines += textwrap.wrap(entry["summary"], width - len(indent), break_on_hyphens=False)
        if stacked or not lines:
            yield head.rstrip()
        else:
            yield head + lines.pop(0)
        yield from (indent + line for line in lines)
