"""Sizes of RoboTwin's cameras."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vla_rl.core.errors import UserError, did_you_mean

CAMERA_SIZES = {"D435": (240, 320), "Large_D435": (480, 640), "L515": (180, 320), "Large_L515": (360, 640)}
"""Camera type in a task's settings -> height and width in pixels (`_camera_config.yml`)."""


def camera_sizes(
    cameras: tuple[str, ...], settings: Mapping[str, Any], image_height: int | None
) -> dict[str, tuple[int, int]]:
    """Return camera -> height and width of its images, as the task's settings and `image_height` have them. Raise
    UserError for an unknown camera type."""
    types = settings.get("camera") or {}
    sizes = {}
    for name in cameras:
        kind = types.get("head_camera_type" if name == "head" else "wrist_camera_type", "D435")
        if kind not in CAMERA_SIZES:
            near = did_you_mean(kind, CAMERA_SIZES)
            raise UserError(f"task_config: no camera type {kind!r}{near}\n  types: {', '.join(CAMERA_SIZES)}")
        sizes[name] = scale_size(CAMERA_SIZES[kind], image_height)
    return sizes


def scale_size(size: tuple[int, int], image_height: int | None) -> tuple[int, int]:
    """Return height and width of a camera's images in another height; None: its own."""
    height, width = size
    return size if image_height is None else (image_height, round(image_height * width / height))
