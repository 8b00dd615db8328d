"""What `lerobot_robot` needs of an interpreter."""

from __future__ import annotations

from importlib.util import find_spec


def find_missing() -> str | None:
    """Return what is missing to use the plugin, or None."""
    return None if find_spec("lerobot") else "lerobot, in this interpreter or in another one that env.python names"
