"""Parts of networks that model plugins of several families share."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


def sine_cosine_positions(patches: int, dim: int) -> Tensor:
    """[patches, dim] of a square grid: a quarter of the channels each for sin and cos of x and y."""
    side, quarter = math.isqrt(patches), dim // 4
    frequency = math.pi / 2 ** torch.arange(quarter, dtype=torch.float32).mul(5 / max(quarter - 1, 1))
    angle = torch.arange(side, dtype=torch.float32)[:, None] * frequency
    axis = torch.cat([angle.sin(), angle.cos()], dim=1)
    grid = torch.cat([axis[:, None].expand(-1, side, -1), axis[None].expand(side, -1, -1)], dim=2)
    return nn.functional.pad(grid.reshape(patches, -1), (0, dim - 4 * quarter))
