"""Processes and addresses of Ray: interpreters of workers, what Ray started here, whether a cluster answers."""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from vla_rl.core.errors import UserError


def interpreter(python: Path) -> dict[str, Any]:
    """Ray's runtime environment with another interpreter. It finds the user's modules as this one does, and its own
    packages, never ours."""
    prefixes = (sys.prefix, sys.base_prefix)
    own = [path for path in map(str, (Path.cwd(), *sys.path)) if path and not path.startswith(prefixes)]
    return {"py_executable": str(python), "env_vars": {"PYTHONPATH": os.pathsep.join(dict.fromkeys(own))}}


def ray_processes() -> list[psutil.Process]:
    """Those that this process started, and all of theirs."""
    found: list[psutil.Process] = []
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if any("/ray/" in part for part in child.cmdline()):
                found += [child, *child.children(recursive=True)]
    return found


def check_reachable(address: str) -> None:
    """Ray itself tries for minutes. Raises UserError when nothing listens at host:port."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except OSError as exc:
        raise UserError(f"no Ray cluster could be reached at runtime.address={address!r}: {exc}") from exc
