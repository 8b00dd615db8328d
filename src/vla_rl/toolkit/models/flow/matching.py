"""Flow-matching policies, which denoise an action chunk by a learnt velocity: sampling, scoring and cloning.

One denoising step is a Gaussian: x_{i+1} ~ N(mean, std), with t_i = 1 - i / K, from noise (t = 1) to actions. With v
the velocity at (x, t) and d = 1 / K:

    ODE         mean = x - d v                                          std = 0
    Flow-SDE    mean = x - d v - s^2 d / (2 t) (x + (1 - t) v)          std = s sqrt(d),  s = a sqrt(t / (1 - t))
    Flow-CPS    mean = x - d v - (t - d)(1 - cos(pi a / 2)) (x + (1 - t) v)    std = (t - d) sin(pi a / 2)
    Flow-Noise  mean = x - d v                                          std from a network

Flow-CPS replaces part of the remaining noise by new noise of the same size, so its last step is the ODE's. At t = 1 the
denominator of s takes 1 - t_1 instead of 0 (RLinf). The network receives the time as the original counts it: openpi in
float32 by repeated addition, lerobot exactly. With K = 10 the other way moves samples by 1e-4.

Sources: pi_RL (arXiv 2510.25889), Flow-GRPO (arXiv 2505.05470), Flow-CPS (arXiv 2509.05952).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class FlowSchedule:
    """Times of K denoising steps, and the noise and drift that Flow-SDE or Flow-CPS adds to each."""

    def __init__(
        self, steps: int, level: float, device: torch.device, exact: bool = False, method: str = "flow_sde"
    ) -> None:
        grid = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
        time = grid[:-1]
        self.steps = steps
        self.indices = torch.arange(steps, device=device)
        """Number of each step, int64 [K]."""
        self.delta = 1.0 / steps
        self.noisy_steps = steps - (method == "flow_cps")
        """Number of steps, counted from the first, that may be stochastic."""
        std, drift = (_compute_cps if method == "flow_cps" else _compute_sde)(grid, level)
        times = [torch.tensor(1.0)]
        while len(times) < steps:
            times.append(times[-1] - torch.tensor(self.delta))
        self.time = (time.float() if exact else torch.stack(times)).to(device)
        self.std = std.float().to(device)
        self.drift = drift.float().to(device)

    def step_mean(self, x: Tensor, velocity: Tensor, index: Tensor, noisy: Tensor | None) -> Tensor:
        """Return the mean of step `index` (int64 [B]) from x [B, H, D]; `noisy` (bool [B]) ones get the drift."""
        mean = x - self.delta * velocity
        if noisy is None:
            return mean
        drift = torch.where(noisy, self.drift[index], 0.0)[:, None, None]
        return mean - drift * (x + (1 - self.time[index])[:, None, None] * velocity)


def _compute_sde(grid: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return Flow-SDE's standard deviation and the factor of its drift [K] between the times `grid` [K + 1], evenly
    spaced. `level`: the factor of sigma."""
    time, delta = grid[:-1], 1.0 / (len(grid) - 1)
    # The first step, from pure noise, would divide by 0: it takes the next time, as RLinf's does.
    remaining = torch.where(time == 1, 1 - grid[1], 1 - time)
    sigma = level * (time / remaining).sqrt()
    return sigma * math.sqrt(delta), sigma**2 * delta / (2 * time)


def _compute_cps(grid: Tensor, level: float) -> tuple[Tensor, Tensor]:
    """Return Flow-CPS's standard deviation and drift of each step between the times of the grid."""
    angle = math.pi / 2 * level
    return grid[1:] * math.sin(angle), grid[1:] * (1 - math.cos(angle))


def training_times(rng: np.random.Generator, count: int) -> np.ndarray[tuple[int], np.dtype[np.float32]]:
    """Draw times for flow-matching training, float32 [count], denser near the noise (Black et al. 2024)."""
    # As in openpi, no time is 0, where nothing is left to denoise.
    return (rng.beta(1.5, 1.0, count) * 0.999 + 0.001).astype(np.float32)


def log_density(x: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Return the log-density of each element of x under N(mean, std); 0 where std is 0, a deterministic step."""
    safe = torch.where(std > 0, std, 1.0)
    density = -0.5 * ((x - mean) / safe) ** 2 - safe.log() - 0.5 * math.log(2 * math.pi)
    return torch.where(std > 0, density, 0.0)


def gaussian_entropy(std: Tensor) -> Tensor:
    """Return the entropy of each element in nats; 0 where std is 0."""
    safe = torch.where(std > 0, std, 1.0)
    return torch.where(std > 0, safe.log() + 0.5 * math.log(2 * math.pi * math.e), 0.0)
