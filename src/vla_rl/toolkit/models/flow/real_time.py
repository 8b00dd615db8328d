"""Real-time chunking: a new chunk continues the last one, which is still being executed.

Black, Galliker and Levine 2025 (arXiv 2506.07339), Algorithm 1. While a chunk is inferred the robot executes `delay`
actions of the last one. The new chunk is denoised under the condition that it begins with these; it changes the later
actions of the last chunk the more, the later they are. With t = 1 - tau from noise to actions, the velocity v towards
the noise, and x_0 = x - t v the chunk that would result:

    v' = v - min(limit, ((1 - t)^2 + t^2) / (t (1 - t))) (last - x_0) diag(weights) dx_0 / dx
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

LIMIT = 5.0
"""Limit of the guidance (the paper's beta): with few denoising steps more overshoots."""


def guidance_weights(left: int, delay: int, horizon: int) -> Tensor:
    """Return how strongly each of the horizon's actions is tied to the last chunk, float32 [H]: 1 until the new chunk
    arrives, then falling to 0 at the last chunk's end (equation 5)."""
    index = torch.arange(horizon, dtype=torch.float64)
    share = ((left - index) / (left - delay + 1)).clamp(0, 1)
    falling = share * torch.expm1(share) / (np.e - 1)
    return torch.where(index < delay, 1.0, torch.where(index < left, falling, 0.0)).float()


def guide_velocity(
    velocity: Callable[[Tensor], Tensor], x: Tensor, time: Tensor, last: Tensor, weights: Tensor, limit: float = LIMIT
) -> Tensor:
    """Return the velocity [B, H, A] at x towards the noise, guided to the last chunk.

    Args:
        velocity: the network's velocity, [B, H, A] -> [B, H, A].
        x: the chunk being denoised.
        time: [B], 1 for noise, 0 for actions.
        last: [B, H, A], any numbers where weights are 0.
        weights: [B, H, 1] or [B, H, A].
    """
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        t = time[:, None, None]
        free = velocity(x)
        clean = x - t * free
        error = (weights * (last - clean)).detach()
        (pull,) = torch.autograd.grad(clean, x, error)
    # Infinite at both ends of the time, where the limit holds.
    strength = (((1 - t) ** 2 + t**2) / (t * (1 - t)).clamp(min=torch.finfo(t.dtype).tiny)).clamp(max=limit)
    return free.detach() - strength * pull
