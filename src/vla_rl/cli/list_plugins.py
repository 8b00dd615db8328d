"""`vla-rl plugins`: the catalogue as a table. Imports the cheap part of each plugin, and nothing that it builds."""

from __future__ import annotations

import sys
from typing import Any

from vla_rl.core.catalogue import (
    KINDS,
    install_command,
    installed,
    keep_build,
    load,
    missing_requirements,
    unmet_base,
)
from vla_rl.core.errors import PluginError
from vla_rl.core.installation import OWN_DIST


def rows() -> list[dict[str, Any]]:
    """One row a plugin on offer: kind, name, dist, version, ready, status, summary."""
    entries = []
    for kind in KINDS:
        for name, offers in installed(kind).items():
            for item in offers:
                status, summary = "ready", ""
                try:
                    plugin = load(kind, name)
                    summary = plugin.summary
                    missing = missing_requirements(item.dist, plugin.extra)
                    if missing:
                        status = f"needs {', '.join(missing)}: {install_command(item.dist, plugin.extra)}"
                    elif plugin.lacks is not None:
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


def main(as_json: bool) -> None:
    """Print the table, or JSON for machines."""
    if as_json:
        import json

        print(json.dumps(rows(), indent=1))
        return
    if unmet := unmet_base():
        print(f"{OWN_DIST} needs {', '.join(unmet)}: {keep_build(unmet)}\n")
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("kind", "name", "dist", "version"):
        table.add_column(heading, no_wrap=True)
    table.add_column("status", overflow="fold")
    table.add_column("summary", overflow="fold")
    for row in rows():
        status = Text(row["status"], style="green" if row["ready"] else "yellow")
        table.add_row(*(row[key] for key in ("kind", "name", "dist", "version")), status, row["summary"])
    Console(width=None if sys.stdout.isatty() else 140).print(table)
