"""GRPO (Shao et al. 2024) as RLinf-VLA (2025, section 4.3) uses it for action chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.grpo import GRPOConfig
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.groups import score_metrics, select_groups, trajectory_scores
from vla_rl.toolkit.algorithms.losses import aggregation_weights, entries_of, policy_diagnostics, reference_log_probs


class GRPO(Algorithm):
    def __init__(self, config: GRPOConfig):
        self.config = config
        self.needs = frozenset({"groups", *config.needs})

    def select(self, rollout: Rollout) -> Tensor:
        """Drop whole groups: by success rate, by equal scores, by truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        """One number a trajectory, its score relative to its group's, at every chunk step with a valid action."""
        config, samples = self.config, rollout.samples
        scores = trajectory_scores(rollout)
        relative = F.group_advantages(
            scores, rollout.groups, baseline=config.baseline, normalize_by_std=config.normalize_by_std
        )
        weights, counts = aggregation_weights(rollout, config.log_prob, config.aggregation)
        return Advantages(
            advantages=torch.where(samples, relative.expand(samples.shape), torch.zeros(())),
            weights=weights,
            counts=counts,
            metrics=score_metrics(scores, rollout.groups, config.baseline),
        )

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """The clipped surrogate, less the entropy bonus, plus the KL term, each entry by its weight."""
        config = self.config
        e = entries_of(scores, batch, config.log_prob)
        low, high, dual = config.clip_low, config.clip_high, config.dual_clip
        surrogate = F.clipped_surrogate(e.log_probs, e.old_log_probs, e.advantages, low=low, high=high, dual_clip=dual)
        clipped = F.clipped(e.log_probs, e.old_log_probs, e.advantages, low=low, high=high, dual_clip=dual)
        objective, kl = surrogate, None
        if config.entropy_coef:
            objective = objective - config.entropy_coef * e.entropy
        if config.kl_coef:
            kl = F.kl_estimate(e.log_probs, reference_log_probs(batch, config.log_prob), config.kl_estimator)
            objective = objective + config.kl_coef * kl
        maxima, statistics = policy_diagnostics(e, batch, clipped=clipped, reference_kl=kl)
        return Loss(
            total=F.weighted_sum(objective, e.weights),
            metrics={"loss/policy": F.weighted_sum(surrogate, e.weights).detach()},
            maxima=maxima,
            statistics=statistics,
        )
