"""GIPO (AcceRL, section 3.3): every sample keeps a gradient, and old ones a small one."""

from __future__ import annotations

import torch
from attrs import evolve

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.gipo import GIPOConfig
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.losses import critic_verdict, entries_of, policy_loss, with_critic

DEAD = 1e-3
"""Trust below which an entry counts as without gradient."""
CLIP = 0.2
"""Of the PPO that `loss/clip_fraction` compares with."""


class GIPO(Algorithm):
    def __init__(self, config: GIPOConfig):
        self.config = config
        fresh = {"fresh-values"} if config.recompute_values else set()
        self.needs = frozenset({"values", *fresh, *config.needs})
        self.value_granularity = config.advantage

    def advantages(self, rollout: Rollout) -> Advantages:
        return critic_verdict(rollout, self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        config = self.config
        e = entries_of(scores, batch, config.log_prob)
        surrogate = F.trust_surrogate(e.log_probs, e.old_log_probs, e.advantages, sigma=config.sigma)
        with torch.no_grad():
            trust = F.trust_weights(e.log_probs, e.old_log_probs, sigma=config.sigma)
            clipped = F.clipped(e.log_probs, e.old_log_probs, e.advantages, low=CLIP, high=CLIP)
        loss = policy_loss(surrogate, e, scores, batch, config, clipped=clipped, dead=trust < DEAD, trust=trust)
        if config.behaviour_kl_coef:
            divergence = F.kl_estimate(e.old_log_probs, e.log_probs, "k3")
            penalty = config.behaviour_kl_coef * F.weighted_sum(divergence, e.weights)
            loss = evolve(loss, total=loss.total + penalty)
        return with_critic(loss, scores, batch, config)
