"""GRPO (Shao et al. 2024) as RLinf-VLA (2025, section 4.3) uses it for action chunks."""

from __future__ import annotations

from torch import Tensor

from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.grpo.config import GRPOConfig, SoftGate
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.policy_gradient import (
    LossTerms,
    PolicyGradientAlgorithm,
    Surrogate,
    compute_clipped_surrogate,
    group_relative_advantages,
    loss_terms,
    policy_loss,
    select_groups,
)


class GRPO(PolicyGradientAlgorithm):
    """Group-relative policy optimisation: no critic, one advantage per trajectory."""

    config: GRPOConfig

    def select(self, rollout: Rollout) -> Tensor:
        """Return which trajectories to train on: groups are dropped by success rate, equal scores or truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        """Return one advantage a trajectory, its score relative to its group's, at chunk steps with a valid action."""
        return group_relative_advantages(rollout, self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the clipped (or softly gated) surrogate around the proximal policy, less entropy, plus KL."""
        terms, gate = loss_terms(scores, batch, self.config), self.config.soft_gate
        surrogate = (
            compute_clipped_surrogate(terms, self.config) if gate is None else compute_soft_surrogate(terms, gate)
        )
        return policy_loss(terms, surrogate, batch, self.config)


def compute_soft_surrogate(terms: LossTerms, gate: SoftGate) -> Surrogate:
    """Return the softly gated surrogate (`functional.soft_surrogate`), which keeps a gradient for every entry."""
    triple = (terms.log_probs, terms.proximal_log_probs, terms.advantages)
    return Surrogate(values=F.soft_surrogate(*triple, positive=gate.positive, negative=gate.negative))
