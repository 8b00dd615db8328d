"""Whether the installed MuJoCo is whole. Since MuJoCo 4.0 three distributions write one folder. When pip replaces one
version by another, it removes files that a distribution of the same name or another one has just written, and says
nothing; nor does `pip check`."""

from __future__ import annotations

import csv
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from attrs import frozen

from vla_rl.core.errors import UserError
from vla_rl.core.installation import pip_command

PARTS = ("mujoco", "mujoco-core", "mujoco-studio")
"""Distributions that write the folder `mujoco`."""


@frozen
class MujocoFault:
    """What is wrong with the installed MuJoCo."""

    detail: str
    fix: str
    """Command that repairs it."""


def find_damage(path: Sequence[str] | None = None) -> MujocoFault | None:
    """Return what is wrong with the installed MuJoCo; None: nothing, or it is not installed.

    Args:
        path: folders that are searched for distributions; None: those of this interpreter.
    """
    folders = sys.path if path is None else list(path)
    first_dists = {name: next(iter(metadata.distributions(name=name, path=folders)), None) for name in PARTS}
    installed = {name: dist for name, dist in first_dists.items() if dist is not None}
    if PARTS[0] not in installed:
        return None
    version = installed[PARTS[0]].version
    others = [f"{name} {dist.version}" for name, dist in installed.items() if dist.version != version]
    missing = [
        f"{file} of {name} {dist.version}"
        for name, dist in installed.items()
        for file in _recorded_files(dist)
        if file.startswith("mujoco/") and not file.endswith(".pyc") and not Path(str(dist.locate_file(file))).is_file()
    ]
    if others:
        detail = f"mujoco {version} is mixed with {' and '.join(others)}, which write the same folder"
    elif missing:
        more = f" and {len(missing) - 1} other files" if len(missing) > 1 else ""
        detail = f"mujoco {version} lacks {missing[0]}{more}, which the installation of another version has removed"
    else:
        return None
    return MujocoFault(detail, replace_command(version))


def replace_command(version: str) -> str:
    """Return the command that replaces whatever MuJoCo is installed by this version."""
    return f"{pip_command('uninstall -y')} {' '.join(PARTS)} && {pip_command('install')} mujoco=={version}"


def require_whole_mujoco(user: str) -> None:
    """Raise UserError, with the command that repairs it, if the installed MuJoCo is not whole.

    Args:
        user: who needs it, for the message.
    """
    if damage := find_damage():
        raise UserError(f"{user} needs MuJoCo, and {damage.detail}\n  repair it with: {damage.fix}")


def _recorded_files(dist: metadata.Distribution) -> list[str]:
    """Return the files that pip wrote. From Python 3.12 on, `dist.files` leaves out those that are missing."""
    return [row[0] for row in csv.reader((dist.read_text("RECORD") or "").splitlines()) if row]
