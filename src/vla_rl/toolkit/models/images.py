"""Preprocessing of camera frames into a network's input, on the device; bit-identical to what Pillow does with 8-bit
images. On a CPU Pillow resizes, image by image; on other devices a batch is resized in its fixed-point arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vla_rl.toolkit.models.networks import as_tensor

if TYPE_CHECKING:
    from vla_rl.core.types import ArrayOrTensor


def resize_with_pad(pixels: Tensor, size: int) -> Tensor:
    """Scale images [B, 3, H, W] of whole levels 0..255 into a square, keeping the aspect, with black padding around
    them: with Pillow's bilinear filter, as openpi does."""
    height, width = pixels.shape[2:]
    if (height, width) == (size, size):
        return pixels
    inner = _inner_size(height, width, size)
    pixels = resize_batch(pixels, *inner, "bilinear")
    top, left = (size - inner[0]) // 2, (size - inner[1]) // 2
    return F.pad(pixels, (left, size - inner[1] - left, top, size - inner[0] - top))


def resize_to_corner(pixels: Tensor, size: int) -> Tensor:
    """Scale as `resize_with_pad`, but without antialiasing and rounding, and with padding left and on top (SmolVLA)."""
    height, width = pixels.shape[2:]
    if (height, width) == (size, size):
        return pixels
    inner = _inner_size(height, width, size)
    pixels = F.interpolate(pixels, inner, mode="bilinear", align_corners=False)
    return F.pad(pixels, (size - inner[1], 0, size - inner[0], 0))


def crop_and_resize(pixels: Tensor, size: int) -> Tensor:
    """Scale the middle 0.95 of [B, 3, H, W], 0..255, to a square: bilinear, antialiased, truncated, as GR00T does."""
    high, wide = (int(side * 0.95) for side in pixels.shape[2:])
    top, left = round((pixels.shape[2] - high) / 2), round((pixels.shape[3] - wide) / 2)
    middle = pixels[:, :, top : top + high, left : left + wide].contiguous()  # contiguous is a third faster on a CPU
    return F.interpolate(middle, (size, size), mode="bilinear", antialias=True).clamp(0, 255).floor()


def _inner_size(height: int, width: int, size: int) -> tuple[int, int]:
    ratio = max(height, width) / size
    return int(height / ratio), int(width / ratio)


class ImageProcessor:
    """Converts each camera's images, uint8 [B, H, W, 3], to [B, cameras, 3, S, S] in [-1, 1]."""

    resize = staticmethod(resize_with_pad)

    def __init__(self, size: int, device: torch.device, dtype: torch.dtype) -> None:
        self._size = size
        self._device = device
        self._dtype = dtype

    def __call__(self, cameras: Sequence[ArrayOrTensor]) -> Tensor:
        return self.process_images([as_tensor(images, self._device) for images in cameras])

    def process_images(self, cameras: Sequence[Tensor]) -> Tensor:
        """Convert images that are on the device."""
        return torch.stack([self._process_camera(images) for images in cameras], dim=1).to(self._dtype)

    def _process_camera(self, images: Tensor) -> Tensor:
        pixels = images.permute(0, 3, 1, 2).float()
        return self.resize(pixels, self._size).div_(127.5).sub_(1)


class CornerImages(ImageProcessor):
    """An image processor that pads as lerobot's SmolVLA does."""

    resize = staticmethod(resize_to_corner)


class CroppedImages(ImageProcessor):
    """An image processor that crops and scales as GR00T does."""

    resize = staticmethod(crop_and_resize)


PRECISION = 22
"""Fractional bits of Pillow's weights for 8-bit images."""

Filter = Literal["bilinear", "bicubic"]


class _Kernel(NamedTuple):
    pillow: Image.Resampling
    reach: float
    """Distance from which on `weight` is 0, in pixels."""
    weight: Callable[[float], float]
    """Distance -> weight before normalisation."""


def resize_batch(pixels: Tensor, height: int, width: int, kind: Filter) -> Tensor:
    """Resize [B, 3, H, W] of whole levels 0..255 as Pillow's filter does, to whole levels, of the same dtype."""
    if tuple(pixels.shape[2:]) == (height, width):
        return pixels
    if pixels.device.type != "cpu":
        return resample_batch(pixels, height, width, kind)
    frames = pixels.permute(0, 2, 3, 1).to(torch.uint8).numpy()
    done = np.stack([np.asarray(_pillow_resize(Image.fromarray(frame), height, width, kind)) for frame in frames])
    return torch.from_numpy(done).permute(0, 3, 1, 2).to(pixels.dtype)


def _pillow_resize(image: Image.Image, height: int, width: int, kind: Filter) -> Image.Image:
    """Resize horizontally, then vertically. In one call Pillow 13 begins vertically for some, such as tall ones."""
    method = KERNELS[kind].pillow
    return image.resize((width, image.height), method).resize((width, height), method)


def resample_batch(pixels: Tensor, height: int, width: int, kind: Filter) -> Tensor:
    """Resize as Pillow does, but the whole batch on its device: rows, then columns, each rounded to levels."""
    batch, channels, before = pixels.shape[:3]
    lines = _resample_lines(pixels.permute(3, 0, 1, 2).flatten(1).int(), width, kind)
    lines = lines.view(width, batch, channels, before).permute(3, 0, 1, 2).flatten(1)
    resized = _resample_lines(lines, height, kind).view(height, width, batch, channels)
    return resized.permute(2, 3, 0, 1).to(pixels.dtype)


def _resample_lines(lines: Tensor, size: int, kind: Filter) -> Tensor:
    """Return lines int32 [before, N] resampled to [size, N]. Sums stay below 2**31, as in Pillow."""
    if len(lines) == size:
        return lines
    total = torch.full((size, lines.shape[1]), 1 << (PRECISION - 1), dtype=torch.int32, device=lines.device)
    for index, weight in zip(*_taps_on(lines.device, len(lines), size, kind), strict=True):
        total += lines[index] * weight[:, None]
    return (total >> PRECISION).clamp_(0, 255)


@lru_cache(maxsize=64)
def _taps_on(device: torch.device, before: int, after: int, kind: Filter) -> tuple[Tensor, Tensor]:
    """Return the input lines and their weights on a device: [taps, after] each. Copies to it take longer than sums."""
    first, weights = filter_taps(before, after, kind)
    index = np.minimum(first + np.arange(weights.shape[1])[:, None], before - 1)
    return torch.from_numpy(index).to(device), torch.from_numpy(weights.T.copy()).to(device)


@lru_cache(maxsize=64)
def filter_taps(before: int, after: int, kind: Filter) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the first input line of each output line, int64 [after], and the weights of it and the following lines in
    multiples of 2**-22, int32 [after, taps], by Pillow's rules: the kernel is widened when shrinking."""
    kernel = KERNELS[kind]
    scale = before / after
    widen = max(scale, 1.0)
    reach = kernel.reach * widen
    first = np.zeros(after, np.int64)
    weights = np.zeros((after, math.ceil(reach) * 2 + 1), np.int32)
    for x in range(after):
        centre = (x + 0.5) * scale
        # Pillow truncates after adding one half, where round() would choose even numbers.
        low = max(int(centre - reach + 0.5), 0)
        high = min(int(centre + reach + 0.5), before)
        raw = [kernel.weight((i - centre + 0.5) * (1.0 / widen)) for i in range(low, high)]
        total = 0.0
        for weight in raw:  # from Python 3.12 on `sum` compensates, which Pillow does not
            total += weight
        first[x] = low
        for i, weight in enumerate(raw):
            level = (weight / total if total else weight) * (1 << PRECISION)
            weights[x, i] = int(level - 0.5 if level < 0 else level + 0.5)
    return first, weights[:, : int(np.flatnonzero(weights.any(0)).max()) + 1]


def _triangle_weight(x: float) -> float:
    return max(1.0 - abs(x), 0.0)


def _cubic_weight(x: float) -> float:
    """Return the cubic convolution kernel (Keys 1981) with a = -0.5."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


KERNELS = {
    "bilinear": _Kernel(Image.Resampling.BILINEAR, 1.0, _triangle_weight),
    "bicubic": _Kernel(Image.Resampling.BICUBIC, 2.0, _cubic_weight),
}
