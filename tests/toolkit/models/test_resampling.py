"""Batched resizing on tensors against Pillow, image by image: no level may differ."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from vla_rl.toolkit.models.images import KERNELS, Filter, ImageProcessor, resample_batch, resize_batch, resize_with_pad

SHAPES = [(256, 256), (96, 128), (480, 640), (37, 200), (64, 64), (64, 100), (65, 64), (300, 41)]


def frames(height: int, width: int, count: int = 2) -> Any:
    """Noise, which exercises every rounding and overshoot, and a smooth image."""
    rng = np.random.default_rng(height * 1000 + width)
    noise = rng.integers(0, 256, (count - 1, height, width, 3), dtype=np.uint8)
    y, x = np.mgrid[:height, :width]
    smooth = np.stack([(127 + 127 * np.sin(x / 9 + k) * np.cos(y / 7)).astype(np.uint8) for k in range(3)], axis=2)
    return np.concatenate([noise, smooth[None]])


def channels_first(images: Any) -> torch.Tensor:
    return torch.from_numpy(images).permute(0, 3, 1, 2).float()


def across_then_down(image: Image.Image, height: int, width: int, kind: Filter) -> Image.Image:
    """What Pillow does in one call, except that version 13 goes down first for some sizes."""
    method = KERNELS[kind].pillow
    return image.resize((width, image.height), method).resize((width, height), method)


@pytest.mark.parametrize("kind", ["bilinear", "bicubic"])
@pytest.mark.parametrize(("height", "width"), SHAPES)
@pytest.mark.parametrize("size", [(64, 64), (224, 224), (50, 301)])
def test_resize_is_pillows(height: int, width: int, size: tuple[int, int], kind: Filter) -> None:
    images = frames(height, width)
    theirs = np.stack([np.asarray(across_then_down(Image.fromarray(image), *size, kind)) for image in images])
    for ours in (
        resize_batch(channels_first(images), *size, kind),
        resample_batch(channels_first(images), *size, kind),
    ):
        assert ours.dtype == torch.float32
        np.testing.assert_array_equal(ours.permute(0, 2, 3, 1).numpy(), theirs)


def openpi(image: Image.Image, size: int) -> Any:
    """openpi's `resize_with_pad` of one image (client's image_tools, Apache-2.0), in its arithmetic."""
    ratio = max(image.width / size, image.height / size)
    height, width = int(image.height / ratio), int(image.width / ratio)
    square = Image.new("RGB", (size, size), 0)
    place = (max(0, int((size - width) / 2)), max(0, int((size - height) / 2)))
    square.paste(across_then_down(image, height, width, "bilinear"), place)
    return np.asarray(square)


def test_padded_images_are_openpis() -> None:
    """Shapes of cameras, squares that its arithmetic leaves a black line in, and shapes of any aspect."""
    rng = np.random.default_rng(0)
    shapes = [*SHAPES, (225, 225), (464, 464), (900, 900), (720, 1280), (84, 84)]
    shapes += [(int(height), int(width)) for height, width in rng.integers(20, 500, (40, 2))]
    for height, width in shapes:
        images = frames(height, width)
        for size in (64, 224):
            expected = np.stack([openpi(Image.fromarray(image), size) for image in images])
            ours = resize_with_pad(channels_first(images), size).permute(0, 2, 3, 1).numpy()
            np.testing.assert_array_equal(ours, expected, f"{height} x {width} to {size}")
    pixels = ImageProcessor(64, torch.device("cpu"), torch.float32)([frames(96, 128)])
    expected = np.stack([openpi(Image.fromarray(image), 64) for image in frames(96, 128)])
    assert torch.equal(pixels[:, 0], channels_first(expected) / 127.5 - 1)


def test_one_call_of_pillow_gives_the_same_for_cameras() -> None:
    for height, width in ((256, 256), (480, 640), (640, 480), (720, 1280), (84, 84), (128, 128)):
        image = Image.fromarray(frames(height, width)[0])
        scale = 224 / max(height, width)
        size = (int(height * scale), int(width * scale))
        whole = image.resize(size[::-1], Image.Resampling.BILINEAR)
        assert np.array_equal(whole, across_then_down(image, *size, "bilinear"))
