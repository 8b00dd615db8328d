"""Actions <-> bins. The lowest bin means the lowest number of the range, the last one the highest."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.toolkit.models.lerobot import FeatureScale
from vla_rl.toolkit.models.scaling import FeatureScaler


class BinCodec:
    def __init__(self, scale: FeatureScale, bins: int, device: torch.device) -> None:
        """
        Args:
            scale: of a mode that maps the actions' range to [-1, 1].
        """
        self.bins, self._scaler = bins, FeatureScaler(scale, device)

    def places(self, actions: Tensor) -> Tensor:
        """[..., A] in the simulator's units -> float32 [..., A] in 0 ... bins - 1, between bins where they lie so."""
        x = self._scaler.normalise(actions, self._scaler.dim).clamp(-1, 1)
        return (x + 1) * ((self.bins - 1) / 2)

    def encode(self, actions: Tensor) -> Tensor:
        """[..., A] -> int64 [..., A], the nearest bins."""
        return self.places(actions).round().long()

    def decode(self, bins: Tensor) -> Tensor:
        """int64 [..., A] -> float32 [..., A]."""
        return self._scaler.restore(bins.float() * (2 / (self.bins - 1)) - 1)


def targets(places: Tensor, bins: int, deviation: float) -> Tensor:
    """Distributions [..., bins] of Gaussian shape around places [...] among the bins, which they are the mean of but at
    the ends."""
    distance = torch.arange(bins, device=places.device) - places.unsqueeze(-1)
    return torch.softmax(-0.5 * (distance / deviation) ** 2, dim=-1)
