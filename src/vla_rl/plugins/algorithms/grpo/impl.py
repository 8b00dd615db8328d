"""GRPO (Shao et al. 2024) as RLinf-VLA (2025, section 4.3) uses it for action chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.grpo.settings import GRPOConfig
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.corrections import proximal_policy, without_dropped
from vla_rl.toolkit.algorithms.groups import select_groups, trajectory_advantages, trajectory_scores
from vla_rl.toolkit.algorithms.losses import entries_of, policy_diagnostics, regularised


class GRPO(Algorithm):
    def __init__(self, config: GRPOConfig):
        self.config = config
        self.needs = frozenset({"groups", *config.needs})
        self.corrects = config.corrects
        self.scope = config.scope

    def select(self, rollout: Rollout) -> Tensor:
        """Drop whole groups: by success rate, by equal scores, by truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        """One number a trajectory, its score relative to its group's, at every chunk step with a valid action."""
        config, scores = self.config, trajectory_scores(rollout)
        relative = F.group_advantages(
            scores,
            rollout.groups,
            baseline=config.baseline,
            normalize_by_std=config.normalize_by_std,
            std_of=config.std_of,
        )
        made = trajectory_advantages(rollout, scores, relative, config)
        return without_dropped(made, rollout, config, config.aggregation)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """The clipped (or softly gated) surrogate around the proximal policy, less the entropy bonus, plus the KL term,
        each entry by its weight."""
        config = self.config
        e = entries_of(scores, batch, config.log_prob)
        old = proximal_policy(e, batch, config)
        low, high, dual = config.clip_low, config.clip_high, config.dual_clip
        triple = (e.log_probs, old.log_probs, e.advantages)
        if config.soft_gate is None:
            surrogate = old.weights * F.clipped_surrogate(*triple, low=low, high=high, dual_clip=dual)
            clipped = F.clipped(*triple, low=low, high=high, dual_clip=dual)
        else:
            gate = config.soft_gate
            surrogate = old.weights * F.soft_surrogate(*triple, positive=gate.positive, negative=gate.negative)
            clipped = torch.zeros_like(e.mask)
        objective, kl = regularised(surrogate, e, batch, config)
        maxima, statistics = policy_diagnostics(
            e, batch, clipped=clipped, dead=clipped | old.dropped, trust=old.trust, reference_kl=kl
        )
        return Loss(
            total=F.weighted_sum(objective, e.weights),
            metrics={"loss/policy": F.weighted_sum(surrogate, e.weights).detach()},
            maxima=maxima,
            statistics={**statistics, **old.statistics(e.mask)},
        )
