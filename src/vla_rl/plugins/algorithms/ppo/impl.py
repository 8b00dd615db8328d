"""PPO (Schulman et al. 2017) with GAE over chunks or over single actions (RLinf-VLA 2025, section 4.3.2)."""

from __future__ import annotations

from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.ppo.config import PPOConfig
from vla_rl.toolkit.algorithms.policy_gradient import (
    PolicyGradientAlgorithm,
    VTrace,
    add_value_loss,
    compute_clipped_surrogate,
    gae_advantages,
    loss_terms,
    policy_loss,
    v_trace_advantages,
)


class PPO(PolicyGradientAlgorithm):
    """Proximal policy optimisation with a critic, optionally with V-trace for off-policy samples."""

    config: PPOConfig

    def advantages(self, rollout: Rollout) -> Advantages:
        """Return generalised advantages of chunk steps or of actions, or V-trace's, normalised over the rollout."""
        if isinstance(self.config.correction, VTrace):
            return v_trace_advantages(rollout, self.config, self.config.correction)
        return gae_advantages(rollout, self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the clipped surrogate around the proximal policy, less the entropy bonus, plus the KL term, plus the
        critic's loss."""
        terms = loss_terms(scores, batch, self.config)
        surrogate = compute_clipped_surrogate(terms, self.config)
        policy = policy_loss(terms, surrogate, batch, self.config)
        return add_value_loss(policy, scores, batch, self.config)
