"""GRPO (Shao et al. 2024) as RLinf-VLA (2025, section 4.3) uses it for action chunks."""

from __future__ import annotations

import torch
from torch import Tensor

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Requirements, Rollout, Scores
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig, SoftGate
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.corrections import renormalise_masked
from vla_rl.toolkit.algorithms.groups import group_relative_advantages, select_groups
from vla_rl.toolkit.algorithms.policy_loss import MakeSurrogate, Surrogate, ppo_clip, proximal_policy_loss


class GRPO(Algorithm):
    """Group-relative policy optimisation: no critic, one advantage per trajectory."""

    def __init__(self, config: GRPOConfig, context: AlgorithmContext | None = None) -> None:
        self.config = config
        self.needs = config.needs | Requirements(groups=True)
        self.off_policy = config.off_policy
        self.advantage_scope = config.advantage_scope
        self.scope_reason = config.scope_reason

    def select(self, rollout: Rollout) -> Tensor:
        """Return which trajectories to train on: whole groups are dropped by success rate, equal scores or
        truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        """Return one advantage per trajectory, its score relative to its group's, at every chunk step with a valid
        action."""
        config = self.config
        return renormalise_masked(group_relative_advantages(rollout, config), rollout, config, config.aggregation)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the clipped (or softly gated) surrogate around the proximal policy, less the entropy bonus, plus the
        KL term."""
        config = self.config
        surrogate = ppo_clip(config) if config.soft_gate is None else soft_gate(config.soft_gate)
        return proximal_policy_loss(scores, batch, config, surrogate)


def soft_gate(gate: SoftGate) -> MakeSurrogate:
    """Return the softly gated surrogate (`functional.soft_surrogate`), which keeps a gradient for every entry."""

    def soft_gated_surrogate(log_probs: Tensor, old_log_probs: Tensor, advantages: Tensor) -> Surrogate:
        values = F.soft_surrogate(log_probs, old_log_probs, advantages, positive=gate.positive, negative=gate.negative)
        return Surrogate(values=values, clipped=torch.zeros_like(values, dtype=torch.bool))

    return soft_gated_surrogate
