"""What `gym_hil` needs of an interpreter."""

from __future__ import annotations

from importlib.util import find_spec

from vla_rl.core.installation import pip_command


def find_missing() -> str | None:
    """Return what is missing to use the plugin, or None."""
    command = f"{pip_command('install')} --no-deps gym-hil"
    return None if find_spec("gym_hil") else f"gym-hil: {command} (devices also need its dependencies)"
