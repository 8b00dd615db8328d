"""Diffusion of frames as in EDM (Karras et al. 2022, arXiv 2206.00364) with the choices of DIAMOND (Alonso et al. 2024,
arXiv 2405.12399; eloialonso/diamond 5bcd159): offset noise, clamped 8-bit predictions, few steps. A denoised frame is
`c_skip x + c_out F(c_in x, c_noise, past)`, with noisy frame x and network F."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

SIGMA_DATA = 0.5
SIGMA_OFFSET_NOISE = 0.3


class Conditioners(NamedTuple):
    """Preconditioning coefficients, [B, 1, 1, 1] each, c_noise [B]; or scalars for a scalar noise level."""

    c_in: Tensor
    c_out: Tensor
    c_skip: Tensor
    c_noise: Tensor


def build_sigmas(num_steps: int, sigma_min: float, sigma_max: float, rho: int) -> Tensor:
    """Return the noise levels of a sampler, float32 [num_steps + 1], from `sigma_max` down to `sigma_min`, and 0 at the
    end: (max^(1/rho) + i / (n - 1) (min^(1/rho) - max^(1/rho)))^rho (Karras et al., eq. 5)."""
    low, high = sigma_min ** (1 / rho), sigma_max ** (1 / rho)
    sigmas = (high + torch.linspace(0, 1, num_steps) * (low - high)) ** rho
    return torch.cat((sigmas, sigmas.new_zeros(1)))


def compute_conditioners(
    sigma: Tensor, sigma_data: float = SIGMA_DATA, sigma_offset_noise: float = SIGMA_OFFSET_NOISE
) -> Conditioners:
    """Return the coefficients for noise levels [B], with s = sqrt(sigma^2 + offset^2) and d = sigma_data: c_in = 1 /
    sqrt(s^2 + d^2), c_skip = d^2 / (s^2 + d^2), c_out = s sqrt(c_skip), c_noise = ln(s) / 4."""
    s = (sigma**2 + sigma_offset_noise**2).sqrt()
    c_in = 1 / (s**2 + sigma_data**2).sqrt()
    c_skip = sigma_data**2 / (s**2 + sigma_data**2)
    c_out = s * c_skip.sqrt()
    c_noise = s.log() / 4
    return Conditioners(_as_images(c_in), _as_images(c_out), _as_images(c_skip), c_noise.reshape(-1))


def apply_noise(x: Tensor, sigma: Tensor, offset: Tensor, noise: Tensor, sigma_offset_noise: float) -> Tensor:
    """Add noise of the levels `sigma` [B], and an offset per channel, to frames [B, channels, H, W].

    Args:
        offset: standard normal [B, channels, 1, 1].
        noise: standard normal, shape of x.
    """
    return x + sigma_offset_noise * offset + noise * _as_images(sigma)


def training_sigmas(
    normals: Tensor, loc: float = -0.4, scale: float = 1.2, sigma_min: float = 2e-3, sigma_max: float = 20.0
) -> Tensor:
    """Return noise levels [B] for training, from standard normals: log-normal, clipped."""
    return (normals * scale + loc).exp().clip(sigma_min, sigma_max)


def network_target(x: Tensor, noisy: Tensor, c: Conditioners) -> Tensor:
    """Return the network's regression target for noisy frames whose clean ones are x."""
    return (x - c.c_skip * noisy) / c.c_out


@torch.no_grad()
def wrap_model_output(noisy: Tensor, output: Tensor, c: Conditioners) -> Tensor:
    """Return the denoised frames in [-1, 1], quantised to 8 bits as by a camera: truncated, not rounded (DIAMOND)."""
    return quantise_frames(c.c_skip * noisy + c.c_out * output)


def quantise_frames(frames: Tensor) -> Tensor:
    return frames.clamp(-1, 1).add(1).div(2).mul(255).byte().div(255).mul(2).sub(1)


@torch.no_grad()
def sample_frames(denoise: Callable[[Tensor, Tensor], Tensor], x: Tensor, sigmas: Tensor, order: int = 1) -> Tensor:
    """Sample frames from standard normals x (unscaled), by Euler's method (order 1) or Heun's (2), without churn.

    Args:
        denoise: (noisy frames, noise level: a scalar) -> denoised frames.
        sigmas: from `build_sigmas`.
    """
    for sigma, following in pairwise(sigmas):
        slope = (x - denoise(x, sigma)) / sigma
        ahead = x + slope * (following - sigma)
        if order == 2 and following > 0:
            other = (ahead - denoise(ahead, following)) / following
            ahead = x + (slope + other) / 2 * (following - sigma)
        x = ahead
    return x


def _as_images(values: Tensor) -> Tensor:
    return values.reshape(values.shape + (1,) * (4 - values.ndim))
