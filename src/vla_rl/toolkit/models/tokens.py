"""Categorical distributions over the tokens of an action, as policies with bins share them."""

from __future__ import annotations

import torch
from torch import Tensor


def inverse_cdf(log_probs: Tensor, uniforms: Tensor) -> Tensor:
    """The bin whose stretch of the cumulative distribution holds the uniform. [..., bins], [...] -> int64 [...].

    A bin of probability 0 is never chosen.
    """
    cdf = log_probs.double().exp().cumsum(-1)
    total = cdf[..., -1]
    point = torch.minimum(uniforms.double() * total, torch.nextafter(total, torch.zeros_like(total)))
    return (cdf <= point.unsqueeze(-1)).sum(-1)


def choose(log_probs: Tensor, uniforms: Tensor | None) -> Tensor:
    """int64 [...]: the mode of [..., bins], or the one that the uniforms [...] draw."""
    return log_probs.argmax(-1) if uniforms is None else inverse_cdf(log_probs, uniforms)


def median(log_probs: Tensor) -> Tensor:
    """int64 [...]: of bins [..., bins] in the order of what they mean, the first up to which lies more than half of the
    probability.

    That is what a policy does on the whole. Its mode is not, where probability is spread over neighbours of which
    reinforcement learning has raised one, far from the middle.
    """
    return inverse_cdf(log_probs, log_probs.new_full(log_probs.shape[:-1], 0.5))


def entropy(log_probs: Tensor) -> Tensor:
    """[..., bins] -> [...], nats."""
    return -(log_probs.exp() * log_probs).sum(-1)
