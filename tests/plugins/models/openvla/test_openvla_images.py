"""Image preprocessing against Pillow, image by image: no level may differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageOps

from vla_rl.plugins.models.openvla.architecture import preset_config
from vla_rl.plugins.models.openvla.base import OpenVLAImageProcessor

CPU = torch.device("cpu")
SHAPES = [(256, 256), (96, 128), (480, 640), (37, 200), (64, 64), (64, 100), (65, 64), (300, 41)]


def frames(height: int, width: int, count: int = 2) -> Any:
    """Noise, which exercises every rounding and overshoot, and a smooth image."""
    rng = np.random.default_rng(height * 1000 + width)
    noise = rng.integers(0, 256, (count - 1, height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([(127 + 127 * np.sin(x / 9 + k) * np.cos(y / 7)).astype(np.uint8) for k in range(3)], axis=2)
    return np.concatenate([noise, smooth[None]])


def across_then_down(image: Image.Image, height: int, width: int) -> Image.Image:
    """What Pillow does in one call, except that version 13 goes down first for some sizes."""
    return image.resize((width, image.height), Image.Resampling.BICUBIC).resize(
        (width, height), Image.Resampling.BICUBIC
    )


@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize("strategy", ["resize-naive", "letterbox", "resize-crop"])
def test_strategies_are_pillows(strategy: str, height: int, width: int) -> None:
    sizes = preset_config("fast")
    sizes.image_resize_strategy = strategy
    images = frames(height, width)
    got = OpenVLAImageProcessor(sizes, CPU, torch.float32, center_crop=False)([images])
    for image, ours in zip(images, got, strict=True):
        scaled = Image.fromarray(image)
        if strategy == "resize-naive":
            scaled = across_then_down(scaled, 64, 64)
        else:
            if strategy == "letterbox":
                side = max(height, width)
                left, top = (side - width) // 2, (side - height) // 2
                border = (left, top, side - width - left, side - height - top)
                scaled = ImageOps.expand(scaled, border, (127, 127, 127))
            wide, high = (int(64 * side / min(scaled.size)) for side in scaled.size)
            scaled = across_then_down(scaled, high, wide)
            left, top = (round((side - 64) / 2) for side in scaled.size)
            scaled = scaled.crop((left, top, left + 64, top + 64))
        pixels = torch.from_numpy(np.array(scaled)).permute(2, 0, 1).float() / 255
        mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
        std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
        assert torch.equal(ours, torch.cat([(pixels - mean) / std, (pixels - 0.5) / 0.5]))
