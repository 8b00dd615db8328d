"""Images of cameras."""

from __future__ import annotations

import numpy as np

from vla_rl.core.types import Array


def resized(image: Array, size: tuple[int, int]) -> Array:
    """Return a copy of an image, uint8 [H, W, 3], in this size (height, width), by antialiased interpolation."""
    if image.shape[:2] == size:
        return image.copy()
    from PIL import Image  # few images have another size

    scaled = Image.fromarray(np.ascontiguousarray(image)).resize(size[::-1], Image.Resampling.BILINEAR)
    return np.array(scaled)
