"""GIPO (AcceRL, section 3.3): every sample keeps a gradient, which gets smaller the further the policy moved away."""

from __future__ import annotations

import attrs

from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.gipo.config import GIPOConfig
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.policy_gradient import (
    LossTerms,
    PolicyGradientAlgorithm,
    Surrogate,
    add_value_loss,
    gae_advantages,
    loss_terms,
    policy_loss,
)

DEAD = 1e-3
"""Trust weight below which a loss term counts as having no gradient (in the diagnostics only)."""
CLIP = 0.2
"""Clip range of the PPO that the metric `loss/clip_fraction` compares GIPO with."""


class GIPO(PolicyGradientAlgorithm):
    """Actor-critic with generalised advantages and a trust-weighted surrogate."""

    config: GIPOConfig
    off_policy = True

    def advantages(self, rollout: Rollout) -> Advantages:
        """Return generalised advantages (GAE) of chunk steps or of actions, normalised over the whole rollout."""
        return gae_advantages(rollout, self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the trust-weighted surrogate, less the entropy bonus, plus the KL terms (to the reference and to the
        behaviour policy), each loss term with its weight; plus the critic's loss."""
        config = self.config
        terms = loss_terms(scores, batch, config)
        policy = policy_loss(terms, compute_trust_surrogate(terms, config.sigma), batch, config)
        if config.behaviour_kl_coef:
            moved = F.kl_estimate(terms.behaviour_log_probs, terms.log_probs, "k3")
            total = policy.total + config.behaviour_kl_coef * F.weighted_sum(moved, terms.weights)
            policy = attrs.evolve(policy, total=total)
        return add_value_loss(policy, scores, batch, config)


def compute_trust_surrogate(terms: LossTerms, sigma: float) -> Surrogate:
    """Return the trust-weighted surrogate (`functional.trust_surrogate`)."""
    log_probs, old, advantages = terms.log_probs, terms.behaviour_log_probs, terms.advantages
    trust = F.trust_weights(log_probs, old, sigma=sigma)
    return Surrogate(
        values=F.trust_surrogate(log_probs, old, advantages, sigma=sigma),
        clipped=F.find_clipped(log_probs, old, advantages, low=CLIP, high=CLIP),
        dead=trust < DEAD,
        trust=trust,
    )
