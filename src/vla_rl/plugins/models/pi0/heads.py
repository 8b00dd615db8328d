"""Parts beside the public network: the critic and the noise network of Flow-Noise. Their weights stay in float32."""

from __future__ import annotations

import math
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def _layers(widths: list[int], seed: int, gain: float) -> nn.ModuleList:
    """Linear layers whose weights are a function of the seed; the last one starts small."""
    layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
    rng = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in layers:
            std = (0.01 if layer is layers[-1] else gain) / math.sqrt(layer.in_features)
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=rng) * std)
            layer.bias.zero_()
    return layers


class ValueHead(nn.Module):
    """Critic on the expert's output [B, H, D] -> float32 [B], from the mean over the horizon, or, with `per_action`,
    [B, C], one value from the token of each executed action."""

    def __init__(self, dim: int, hidden: tuple[int, ...], per_action: int | None, detach: bool, seed: int) -> None:
        super().__init__()
        self.per_action, self.detach = per_action, detach
        self.layers = _layers([dim, *hidden, 1], seed, math.sqrt(2.0))

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        x = x.mean(1) if self.per_action is None else x[:, : self.per_action]
        for layer in self.layers[:-1]:
            x = F.relu(layer(x))
        return self.layers[-1](x).squeeze(-1)


class NoiseHead(nn.Module):
    """Standard deviation of each element of the next chunk, from the expert's output: [B, H, D] -> [B, H, A].

    An MLP of 128 and 64 (tanh) whose squashed output moves the log-variance between the bounds (RLinf).
    """

    def __init__(self, dim: int, outputs: int, bounds: tuple[float, float], seed: int) -> None:
        super().__init__()
        self.low, self.high = math.log(bounds[0]), math.log(bounds[1])
        self.layers = _layers([dim, 128, 64, outputs], seed, 1.0)

    def forward(self, hidden: Tensor) -> Tensor:
        x = hidden.float()
        for layer in self.layers[:-1]:
            x = torch.tanh(layer(x))
        return torch.exp(self.low + (self.high - self.low) * (torch.tanh(self.layers[-1](x)) + 1) / 2)
