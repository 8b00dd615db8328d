"""Categorical distributions over the tokens of an action, shared by policies with binned actions."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """Sample bins by inverse CDF: return the bin whose interval of the cumulative distribution contains the uniform
    number, [..., bins], [...] -> int64 [...]. A bin of probability 0 is never chosen."""
    cdf = log_probs.double().exp().cumsum(-1)
    total = cdf[..., -1]
    point = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cdf <= point.unsqueeze(-1)).sum(-1)


def choose_bins(log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
    """Return the mode of [..., bins], or the bins that the uniform numbers [...] sample; int64 [...]."""
    return log_probs.argmax(-1) if uniforms is None else inverse_cdf(log_probs, uniforms)


def median_bins(log_probs: Tensor) -> Tensor:
    """Return the median bin of [..., bins], int64 [...]: the first that, with those before, has over half. The median
    is the policy's typical action. The mode is not, if probability is spread over neighbouring bins of which
    reinforcement learning has raised one, far from the middle."""
    return inverse_cdf(log_probs, log_probs.new_full(log_probs.shape[:-1], 0.5))


def take_bins(log_probs: Tensor, bins: Tensor) -> Tensor:
    """Return the log-probs [...] of bins int64 [...], of log-probs [..., bins]."""
    return log_probs.gather(-1, bins.unsqueeze(-1)).squeeze(-1)


def categorical_entropy(log_probs: Tensor) -> Tensor:
    """Return the entropy of [..., bins] as [...], in nats."""
    return -(log_probs.exp() * log_probs).sum(-1)
