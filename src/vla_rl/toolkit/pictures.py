"""Pictures of cameras."""

from __future__ import annotations

import numpy as np

from vla_rl.core.types import Array


def resized(picture: Array, size: tuple[int, int]) -> Array:
    """Return a copy of a picture, uint8 [H, W, 3], in this size (height, width), by antialiased bilinear
    interpolation.
    """
    if picture.shape[:2] == size:
        return picture.copy()
    from PIL import Image  # few pictures have another size

    scaled = Image.fromarray(np.ascontiguousarray(picture)).resize(size[::-1], Image.Resampling.BILINEAR)
    return np.array(scaled)
