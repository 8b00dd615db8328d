"""What `gym_hil` needs of an interpreter."""

from __future__ import annotations

from importlib.util import find_spec


def find_missing() -> str | None:
    """Return what is missing to use the plugin, or None."""
    return (
        None if find_spec("gym_hil") else "gym-hil: pip install --no-deps gym-hil (devices also need its dependencies)"
    )
