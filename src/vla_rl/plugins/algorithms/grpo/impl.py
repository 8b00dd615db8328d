"""GRPO (Shao et al. 2024) as RLinf-VLA (2025, section 4.3) uses it for action chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.core import functional as F
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.objectives import aggregation_weights, clipped_policy_loss
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.grpo import GRPOConfig


class GRPO(Algorithm):
    needs = frozenset({"groups"})

    def __init__(self, config: GRPOConfig):
        self.config = config

    def select(self, rollout: Rollout) -> Tensor:
        """Drop whole groups: by success rate, by equal scores, by truncation."""
        scores = trajectory_scores(rollout)
        truncated = rollout.truncated.any(-1).any(0)
        keep = torch.ones(len(scores), dtype=torch.bool)
        for group in rollout.groups.unique():
            members = rollout.groups == group
            inside, success = scores[members], rollout.success[members].float().mean()
            bounds = self.config.filter
            if (
                (bounds is not None and not bounds.lower <= float(success) <= bounds.upper)
                or (self.config.filter_identical and bool((inside == inside[0]).all()))
                or (self.config.filter_truncated and bool(truncated[members].any()))
            ):
                keep[members] = False
        return keep

    def advantages(self, rollout: Rollout) -> Advantages:
        scores = trajectory_scores(rollout)
        per_trajectory = F.group_advantages(scores, rollout.groups, normalize_by_std=self.config.normalize_by_std)
        samples = rollout.samples
        weights, counts = aggregation_weights(rollout, self.config.log_prob, self.config.aggregation)
        return Advantages(
            advantages=torch.where(samples, per_trajectory.expand(samples.shape), torch.zeros(())),
            weights=weights,
            counts=counts,
            metrics={"advantage/score_mean": float(scores.mean()) if len(scores) else 0.0},
        )

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        return clipped_policy_loss(
            scores,
            batch,
            granularity=self.config.log_prob,
            low=self.config.clip_low,
            high=self.config.clip_high,
            dual_clip=self.config.dual_clip,
            entropy_coef=self.config.entropy_coef,
        )


def trajectory_scores(rollout: Rollout) -> Tensor:
    """Sum of the rewards of each column's first episode, [N]."""
    ended = (rollout.terminated | rollout.truncated).permute(0, 2, 1).flatten(0, 1)
    rewards = rollout.rewards.permute(0, 2, 1).flatten(0, 1)
    return (rewards * F.valid_until_end(ended)).sum(0)
