"""Resizing of batches of images, bit-identical to what Pillow does with 8-bit images.

On a CPU Pillow resizes, image by image; on other devices a batch is resized there, in Pillow's fixed-point arithmetic.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image
from torch import Tensor

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
