"""Image preprocessing, bit-identical to what OpenVLA's image processor does with Pillow."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.types import ArrayOrTensor
from vla_rl.plugins.models.openvla.architecture import OpenVLAConfig
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.resampling import resize_batch

CROP_SIDE = math.sqrt(0.9)


class OpenVLAImageProcessor:
    """Converts images uint8 [B, H, W, 3] of each camera to [B, 6 * cameras, S, S]."""

    def __init__(self, config: OpenVLAConfig, device: torch.device, dtype: torch.dtype, center_crop: bool) -> None:
        self._size = config.image_sizes[0]
        self._strategy = config.image_resize_strategy
        self._device = device
        self._dtype = dtype
        self._center_crop = center_crop
        specs = config.find_backbones()
        self._mean = torch.tensor([s.mean for s in specs], device=device).view(-1, 3, 1, 1)
        self._std = torch.tensor([s.std for s in specs], device=device).view(-1, 3, 1, 1)
        self._fill = torch.tensor([int(m * 255) for m in specs[-1].mean], device=device).view(3, 1, 1)

    def __call__(self, cameras: Sequence[ArrayOrTensor]) -> Tensor:
        size = self._size
        normalised = torch.empty(len(cameras[0]), len(cameras), len(self._mean), 3, size, size, device=self._device)
        for i, images in enumerate(cameras):
            # In place: images are the largest tensors of a small policy, and each further copy of them costs time.
            torch.sub(self._scale_images(images).unsqueeze(1), self._mean, out=normalised[:, i]).div_(self._std)
        return normalised.flatten(1, 3).to(self._dtype)

    def _scale_images(self, images: ArrayOrTensor) -> Tensor:
        """Return images uint8 [B, H, W, 3] as [B, 3, S, S] of 0..1."""
        pixels = as_tensor(images, self._device).permute(0, 3, 1, 2)
        pixels = pixels.to(torch.float32, memory_format=torch.contiguous_format)
        if self._center_crop:
            pixels = center_crop(pixels, self._size)
        if self._strategy == "letterbox":
            pixels = pad_to_square(pixels, self._fill)
        return resize_pixels(pixels, self._size, keep_aspect=self._strategy != "resize-naive") / 255


def resize_pixels(pixels: Tensor, size: int, keep_aspect: bool) -> Tensor:
    """Resize [B, 3, H, W] of 0..255 to `size`: both sides, or (`keep_aspect`) the shorter one, with a centre crop of
    the longer one."""
    height, width = pixels.shape[2:]
    if not keep_aspect:
        return resize_batch(pixels, size, size, "bicubic")
    if height <= width:
        pixels = resize_batch(pixels, size, int(size * width / height), "bicubic")
    else:
        pixels = resize_batch(pixels, int(size * height / width), size, "bicubic")
    top, left = (round((side - size) / 2) for side in pixels.shape[2:])
    return pixels[:, :, top : top + size, left : left + size]


def pad_to_square(pixels: Tensor, fill: Tensor) -> Tensor:
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
