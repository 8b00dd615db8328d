"""GIPO (AcceRL, section 3.3): every sample keeps a gradient, and old ones a small one."""

from __future__ import annotations

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.gipo import GIPOConfig
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.losses import (
    add_entropy_and_kl,
    critic_advantages,
    critic_loss,
    critic_steps,
    gae_of,
    loss_terms,
    policy_diagnostics,
)

DEAD = 1e-3
"""Trust below which an entry counts as without gradient."""
CLIP = 0.2
"""Of the PPO that `loss/clip_fraction` compares with."""


class GIPO(Algorithm):
    off_policy = True

    def __init__(self, config: GIPOConfig):
        self.config = config
        fresh = {"fresh-values"} if config.recompute_values else set()
        self.needs = frozenset({"values", *fresh, *config.needs})
        self.scope = config.scope
        self.value_granularity = config.advantage

    def advantages(self, rollout: Rollout) -> Advantages:
        """Generalised advantages of chunk steps or of actions, normalised over the whole rollout."""
        rollout, steps = critic_steps(rollout, self.config)
        return critic_advantages(rollout, steps, *gae_of(steps, self.config), self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """The trust-weighted surrogate, less the entropy bonus, plus the KL terms (from the reference and from the
        policy that acted), each entry by its weight; and the critic's loss."""
        config = self.config
        e = loss_terms(scores, batch, config.log_prob)
        surrogate = F.trust_surrogate(e.log_probs, e.old_log_probs, e.advantages, sigma=config.sigma)
        objective, kl = add_entropy_and_kl(surrogate, e, batch, config)
        total = F.weighted_sum(objective, e.weights)
        if config.behaviour_kl_coef:
            moved = F.kl_estimate(e.old_log_probs, e.log_probs, "k3")
            total = total + config.behaviour_kl_coef * F.weighted_sum(moved, e.weights)
        value, value_statistics = critic_loss(scores, batch, config)
        trust = F.trust_weights(e.log_probs, e.old_log_probs, sigma=config.sigma)
        clipped = F.clipped(e.log_probs, e.old_log_probs, e.advantages, low=CLIP, high=CLIP)
        maxima, statistics = policy_diagnostics(
            e, batch, clipped=clipped, dead=trust < DEAD, trust=trust, reference_kl=kl
        )
        return Loss(
            total=total + config.value_coef * value,
            metrics={"loss/policy": F.weighted_sum(surrogate, e.weights).detach(), "loss/value": value.detach()},
            maxima=maxima,
            statistics={**statistics, **value_statistics},
        )
