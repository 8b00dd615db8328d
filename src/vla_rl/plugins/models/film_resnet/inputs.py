"""Preprocessing of frames for the network."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.types import ArrayOrTensor
from vla_rl.toolkit.models.networks import as_tensor


def to_pixels(images: ArrayOrTensor, size: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Return images uint8 [B, H, W, 3] as [B, 3, S, S] in [-1, 1], in channels-last memory format, the fastest for
    convolutions on CPUs."""
    x = as_tensor(images, device).permute(0, 3, 1, 2).float()
    if tuple(x.shape[2:]) != (size, size):
        x = F.interpolate(x, (size, size), mode="bilinear", antialias=True)
    return (x / 127.5 - 1).to(dtype, memory_format=torch.channels_last)


def shift_images(images: ArrayOrTensor, offsets: ArrayOrTensor, device: torch.device) -> Tensor:
    """Return images uint8 [B, H, W, 3], each shifted by its offset (int64 [B, 2], down and right), edges repeated."""
    x, move = as_tensor(images, device), as_tensor(offsets, device)
    rows, columns = (
        (torch.arange(size, device=device) - move[:, axis, None]).clamp(0, size - 1)
        for axis, size in enumerate(x.shape[1:3])
    )
    each = torch.arange(len(x), device=device)
    return x[each[:, None, None], rows[:, :, None], columns[:, None, :]]
