"""What several algorithms share between `functional.py` and their plugins: the clipped policy loss with its
diagnostics, the critic's loss, and the flattening of [T, N, C] to one time axis."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.core import functional as F
from vla_rl.core.types import Batch, Loss, Rollout, Scores


def by_action(tensor: Tensor) -> Tensor:
    """[T, N, C] -> [T * C, N]: one time axis of actions."""
    steps, columns, chunk = tensor.shape
    return tensor.permute(0, 2, 1).reshape(steps * chunk, columns)


def by_chunk(flat: Tensor, chunk: int) -> Tensor:
    """[T * C, N] -> [T, N, C], inverse of `by_action`."""
    return flat.reshape(-1, chunk, flat.shape[1]).permute(0, 2, 1)


def aggregation_weights(rollout: Rollout, granularity: str, aggregation: str) -> tuple[Tensor, Tensor]:
    """Weights and counts of `functional.loss_weights` at the ratio's granularity: "chunk" [T, N], else [T, N, C]."""
    ended = rollout.terminated | rollout.truncated
    if granularity == "chunk":
        return F.loss_weights(rollout.samples, ended.any(-1), aggregation)
    chunk = ended.shape[-1]
    weights, counts = F.loss_weights(by_action(rollout.valid), by_action(ended), aggregation)
    return by_chunk(weights, chunk), by_chunk(counts, chunk)


def clipped_policy_loss(
    scores: Scores,
    batch: Batch,
    *,
    granularity: F.Granularity,
    low: float,
    high: float,
    dual_clip: float | None,
    entropy_coef: float,
) -> Loss:
    """PPO's clipped loss at the granularity of the ratio ("chunk", "action" or "token") minus the entropy bonus, with
    the diagnostics that every policy loss reports: approx_kl (k3), clip_fraction in [0, 1], entropy, lag."""
    new = F.reduce_tokens(scores.log_probs, batch.valid, granularity)
    old = F.reduce_tokens(batch.log_probs, batch.valid, granularity)
    entropy = F.reduce_tokens(scores.entropy, batch.valid, granularity)
    weights = F.expand_to(batch.weights, new, mean=True)
    advantages = F.expand_to(batch.advantages, new)

    policy = F.weighted_sum(F.clipped_surrogate(new, old, advantages, low=low, high=high, dual_clip=dual_clip), weights)
    mean_entropy = F.weighted_sum(entropy, weights)
    with torch.no_grad():
        outside = F.clipped(new, old, advantages, low=low, high=high).float()
        metrics = {
            "loss/policy": policy.detach(),
            "loss/clip_fraction": F.weighted_sum(outside, weights),
            "policy/approx_kl": F.weighted_sum(F.kl_estimate(old, new, "k3"), weights),
            "policy/entropy": mean_entropy.detach(),
            "policy/lag": F.weighted_sum(F.expand_to(batch.lag.float(), new), weights),
        }
        maxima = {"policy/ratio_max": torch.where(weights != 0, F.log_ratio(new, old).exp(), 1.0).max()}
    total = policy - entropy_coef * mean_entropy if entropy_coef else policy
    return Loss(total=total, metrics=metrics, maxima=maxima)


def critic_loss(scores: Scores, batch: Batch, *, clip: float | None, huber_delta: float | None) -> Tensor:
    """Weighted sum of `functional.value_loss` at the critic's granularity."""
    if scores.values is None or batch.values is None or batch.returns is None or batch.value_weights is None:
        raise F.ShapeError(
            "the critic's loss needs values, returns and value weights; the model or the rollout has none"
        )
    entries = F.value_loss(scores.values, batch.returns, batch.values, clip=clip, huber_delta=huber_delta)
    return F.weighted_sum(entries, batch.value_weights)
