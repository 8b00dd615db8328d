"""Image preprocessing, bit-identical to what OpenVLA's image processor does with Pillow.

On a CPU Pillow resizes, image by image; on other devices a batch is resized there, in Pillow's fixed-point arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F

from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.toolkit.models.networks import as_tensor

if TYPE_CHECKING:
    from vla_rl.core.types import ArrayOrTensor

CROP_SIDE = math.sqrt(0.9)
PRECISION = 22
"""Fractional bits of Pillow's weights for 8-bit images."""


class OpenVLAImageProcessor:
    """Converts images uint8 [B, H, W, 3] of each camera to [B, 6 * cameras, S, S]."""

    def __init__(self, config: OpenVLAConfig, device: torch.device, dtype: torch.dtype, center_crop: bool) -> None:
        self._size = config.image_sizes[0]
        self._strategy = config.image_resize_strategy
        self._device = device
        self._dtype = dtype
        self._center_crop = center_crop
        specs = config.backbones()
        self._mean = torch.tensor([s.mean for s in specs], device=device).view(-1, 1, 1)
        self._std = torch.tensor([s.std for s in specs], device=device).view(-1, 1, 1)
        self._fill = torch.tensor([int(m * 255) for m in specs[-1].mean], device=device).view(3, 1, 1)

    def __call__(self, cameras: Sequence[ArrayOrTensor]) -> Tensor:
        return torch.cat([self._camera(images) for images in cameras], dim=1).to(self._dtype)

    def _camera(self, images: ArrayOrTensor) -> Tensor:
        pixels = as_tensor(images, self._device).permute(0, 3, 1, 2).float()
        if self._center_crop:
            pixels = center_crop(pixels, self._size)
        if self._strategy == "letterbox":
            pixels = letterbox(pixels, self._fill)
        pixels = fit(pixels, self._size, keep_aspect=self._strategy != "resize-naive") / 255
        return (pixels.repeat(1, 2, 1, 1) - self._mean) / self._std


def fit(pixels: Tensor, size: int, keep_aspect: bool) -> Tensor:
    """Resize [B, 3, H, W] of 0..255 to `size`: both sides, or (`keep_aspect`) the shorter one, with a centre crop of
    the longer one."""
    height, width = pixels.shape[2:]
    if not keep_aspect:
        return resize(pixels, size, size)
    if height <= width:
        pixels = resize(pixels, size, int(size * width / height))
    else:
        pixels = resize(pixels, int(size * height / width), size)
    top, left = (round((side - size) / 2) for side in pixels.shape[2:])
    return pixels[:, :, top : top + size, left : left + size]


def resize(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize [B, 3, H, W] as Pillow's bicubic filter does, to whole levels in 0..255."""
    if tuple(pixels.shape[2:]) == (height, width):
        return pixels
    if pixels.device.type != "cpu":
        return resample(pixels, height, width)
    frames = pixels.permute(0, 2, 3, 1).to(torch.uint8).numpy()
    done = np.stack([np.asarray(pillow_resize(Image.fromarray(frame), height, width)) for frame in frames])
    return torch.from_numpy(done).permute(0, 3, 1, 2).to(pixels.dtype)


def pillow_resize(image: Image.Image, height: int, width: int) -> Image.Image:
    """Resize horizontally, then vertically. In one call Pillow 13, unlike older versions, goes vertically first where
    it widens and flattens."""
    across = image.resize((width, image.height), Image.Resampling.BICUBIC)
    return across.resize((width, height), Image.Resampling.BICUBIC)


def resample(pixels: Tensor, height: int, width: int) -> Tensor:
    """Resize as Pillow does, but the whole batch on its device: horizontally, then vertically, each rounded to whole
    levels."""
    batch, channels, before = pixels.shape[:3]
    lines = _resample(pixels.permute(3, 0, 1, 2).flatten(1).int(), width)
    lines = lines.view(width, batch, channels, before).permute(3, 0, 1, 2).flatten(1)
    return _resample(lines, height).view(height, width, batch, channels).permute(2, 3, 0, 1).to(pixels.dtype)


def _resample(lines: Tensor, size: int) -> Tensor:
    """Return lines int32 [before, N] resampled to [size, N]. Sums stay below 2**31, as in Pillow."""
    if len(lines) == size:
        return lines
    starts, weights = bicubic_taps(len(lines), size)
    first, taps = torch.from_numpy(starts).to(lines.device), torch.from_numpy(weights).to(lines.device)
    total = torch.full((size, lines.shape[1]), 1 << (PRECISION - 1), dtype=torch.int32, device=lines.device)
    for offset in range(taps.shape[1]):
        total += lines[(first + offset).clamp(max=len(lines) - 1)] * taps[:, offset, None]
    return (total >> PRECISION).clamp_(0, 255)


@lru_cache(maxsize=64)
def bicubic_taps(before: int, after: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the first input line of each output line, int64 [after], and the weights of it and the following lines in
    multiples of 2**-22, int32 [after, taps], by Pillow's rules (Keys' kernel with a = -0.5, widened when shrinking)."""
    scale = before / after
    widen = max(scale, 1.0)
    reach = 2.0 * widen
    first = np.zeros(after, np.int64)
    weights = np.zeros((after, math.ceil(reach) * 2 + 1), np.int32)
    for x in range(after):
        centre = (x + 0.5) * scale
        low = max(int(centre - reach + 0.5), 0)
        high = min(int(centre + reach + 0.5), before)
        raw = [_keys((i - centre + 0.5) * (1.0 / widen)) for i in range(low, high)]
        factor = 1.0 / sum(raw) if sum(raw) != 0 else 1.0
        first[x] = low
        for i, weight in enumerate(raw):
            level = weight * factor * (1 << PRECISION)
            weights[x, i] = int(level - 0.5 if level < 0 else level + 0.5)
    return first, weights[:, : int(np.flatnonzero(weights.any(0)).max()) + 1]


def _keys(x: float) -> float:
    """Return the cubic convolution kernel (Keys 1981) with a = -0.5."""
    a, x = -0.5, abs(x)
    if x < 1.0:
        return ((a + 2.0) * x - (a + 3.0)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2.0 else 0.0


def letterbox(pixels: Tensor, fill: Tensor) -> Tensor:
    """Pad the shorter side to a square with a colour."""
    height, width = pixels.shape[2:]
    side = max(height, width)
    top, left = (side - height) // 2, (side - width) // 2
    square = fill.to(pixels).expand(len(pixels), 3, side, side).clone()
    square[:, :, top : top + height, left : left + width] = pixels
    return square


def center_crop(pixels: Tensor, size: int) -> Tensor:
    """Crop the central 0.9 of the area of [B, 3, H, W] (0..255), scaled bilinearly to a square."""
    axis = torch.linspace(-CROP_SIDE, CROP_SIDE, size, device=pixels.device)
    y, x = torch.meshgrid(axis, axis, indexing="ij")
    grid = torch.stack([x, y], dim=2).expand(len(pixels), -1, -1, -1)
    cropped = F.grid_sample(pixels / 255, grid, mode="bilinear", align_corners=True)
    return (cropped.clamp(0, 1) * 255.5).floor()
