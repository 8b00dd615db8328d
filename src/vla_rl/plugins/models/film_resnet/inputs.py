"""Conversion between the simulator's values and the network's: frames to pixels, actions to bins and back. The lowest
bin is the lower end of the range, the last bin the upper end."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from vla_rl.core.types import ArrayOrTensor
from vla_rl.toolkit.models.checkpoints.lerobot import FeatureScale
from vla_rl.toolkit.models.networks import as_tensor
from vla_rl.toolkit.models.scaling import FeatureScaler


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


class BinCodec:
    """Converts between actions and bins."""

    def __init__(self, scale: FeatureScale, bins: int, device: torch.device) -> None:
        """Create the codec.

        Args:
            scale: scaling with a mode that maps the actions' range to [-1, 1].
        """
        self.bins = bins
        self._scaler = FeatureScaler(scale, device)

    def bin_positions(self, actions: Tensor) -> Tensor:
        """Return the positions of actions [..., A] (in the simulator's units) among the bins: float32 [..., A] in 0 ...
        bins - 1, fractions between two bins."""
        x = self._scaler.normalise_feature(actions, self._scaler.dim).clamp(-1, 1)
        return (x + 1) * ((self.bins - 1) / 2)

    def encode_actions(self, actions: Tensor) -> Tensor:
        """Return the nearest bins of actions [..., A], int64 [..., A]."""
        return self.bin_positions(actions).round().long()

    def decode_bins(self, bins: Tensor) -> Tensor:
        """Return the actions of bins int64 [..., A], float32 [..., A]."""
        return self._scaler.restore_units(bins.float() * (2 / (self.bins - 1)) - 1)


def target_distributions(bin_positions: Tensor, bins: int, deviation: float) -> Tensor:
    """Return target distributions [..., bins]: Gaussians around the positions `places` [...] among the bins, whose mean
    is that position except near the ends."""
    distance = torch.arange(bins, device=bin_positions.device) - bin_positions.unsqueeze(-1)
    return torch.softmax(-0.5 * (distance / deviation) ** 2, dim=-1)
