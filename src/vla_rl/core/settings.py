"""Checks that settings of several simulators share. Light: specs are read with them."""

from __future__ import annotations

SMALLEST, LARGEST = 8, 1024
"""Height and width of a camera's pictures, in pixels."""


def check_camera_size(name: str, size: int) -> None:
    """Raise ValueError unless pictures of this many pixels a side can be drawn and seen."""
    if not SMALLEST <= size <= LARGEST:
        raise ValueError(f"camera {name!r} has {size} pixels; give {SMALLEST} to {LARGEST} (224 for most checkpoints)")
