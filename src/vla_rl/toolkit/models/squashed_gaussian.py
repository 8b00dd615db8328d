"""Squashed Gaussian: a normal distribution whose samples go through tanh into (-1, 1), for policies without bins.
Haarnoja et al. 2018 (arXiv:1801.01290), appendix C: a = tanh(u) with u ~ N(mean, std) has the log-density log N(u) -
log(1 - tanh(u)^2)."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from attrs import frozen
from torch import Tensor
from torch.nn import functional as F

LOG_STD = (-5.0, 2.0)
"""Range of log standard deviations."""
NODES = 64
"""Nodes of the quadrature of an entropy: right to 0.03 nats at the widest deviation, to 0.001 below 1."""


@frozen(eq=False)
class SquashedGaussian:
    """Independent squashed Gaussians, float32 [...] each."""

    mean: Tensor
    log_std: Tensor

    @staticmethod
    def of_outputs(outputs: Tensor, temperature: float = 1.0) -> SquashedGaussian:
        """Return the distributions [...] of a network's outputs [..., 2]: means, and numbers whose tanh moves log
        standard deviations through `LOG_STD`. The temperature multiplies standard deviations."""
        low, high = LOG_STD
        mean, spread = outputs.float().unbind(-1)
        log_std = low + (high - low) * (torch.tanh(spread) + 1) / 2
        return SquashedGaussian(mean, log_std + math.log(temperature))

    def sample(self, normals: Tensor | None) -> Tensor:
        """Return samples before tanh, with gradient (reparameterisation), or the means where `normals` is None."""
        return self.mean if normals is None else self.mean + self.log_std.exp() * normals

    def log_prob(self, unsquashed: Tensor) -> Tensor:
        """Return the log-densities of tanh(unsquashed) within (-1, 1)."""
        z = (unsquashed - self.mean) * torch.exp(-self.log_std)
        normal = -0.5 * z.square() - self.log_std - 0.5 * math.log(2 * math.pi)
        return normal - log_slope(unsquashed)

    def entropy(self) -> Tensor:
        """Return entropies in nats: the Gaussians' plus means of log(1 - tanh(u)^2), by Gauss-Hermite quadrature."""
        points, shares = _quadrature_nodes(self.mean.device)
        u = self.mean.unsqueeze(-1) + self.log_std.exp().unsqueeze(-1) * points
        return self.log_std + 0.5 * math.log(2 * math.pi * math.e) + (log_slope(u) * shares).sum(-1)


@cache
def _quadrature_nodes(device: torch.device) -> tuple[Tensor, Tensor]:
    """Return the nodes and weights float32 [NODES] of a mean over a standard normal distribution."""
    nodes, weights = np.polynomial.hermite_e.hermegauss(NODES)
    points = torch.as_tensor(nodes, dtype=torch.float32, device=device)
    return points, torch.as_tensor(weights / weights.sum(), dtype=torch.float32, device=device)


def log_slope(unsquashed: Tensor) -> Tensor:
    """Return log(1 - tanh(u)^2) of each number u, without cancellation for large ones."""
    return 2 * (math.log(2) - unsquashed - F.softplus(-2 * unsquashed))
