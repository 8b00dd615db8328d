"""PPO (Schulman et al. 2017) with GAE over chunks or over single actions (RLinf-VLA 2025, section 4.3.2)."""

from __future__ import annotations

from typing import Any

import attrs

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.ppo import PPOConfig
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.corrections import proximal_policy, step_log_weights, v_trace, without_dropped
from vla_rl.toolkit.algorithms.losses import (
    critic_advantages,
    critic_loss,
    entries_of,
    limits_as_ends,
    policy_diagnostics,
    regularised,
    steps_of,
)


class PPO(Algorithm):
    def __init__(self, config: PPOConfig):
        self.config = config
        self.needs = frozenset({"values", *config.needs})
        self.corrects = config.corrects
        self.scope = config.scope
        self.value_granularity = config.advantage

    def advantages(self, rollout: Rollout) -> Advantages:
        """Generalised advantages of chunk steps or of actions, or V-trace's, normalised over the whole rollout."""
        config = self.config
        if config.time_limit == "terminal":
            rollout = limits_as_ends(rollout)
        steps = steps_of(rollout, config.advantage)
        data = (steps.rewards, steps.values, steps.next_values, steps.terminated, steps.truncated)
        rates: dict[str, Any] = {"gamma": config.gamma, "lam": config.lam, "valid": steps.valid}
        if config.correction == "v-trace":
            old = step_log_weights(rollout, config.advantage)
            advantages, targets = v_trace(*data, old, rho_bar=config.rho_bar, c_bar=config.c_bar, **rates)
            weights = old.exp().clamp(max=config.rho_bar)
            made = critic_advantages(rollout, steps, advantages / weights, targets, config)
            # Normalised first: what pi_old would not do gets no gradient from the mean either.
            return attrs.evolve(made, advantages=made.advantages * steps.unflatten(weights))
        made = critic_advantages(rollout, steps, *F.gae(*data, **rates), config)
        return without_dropped(made, rollout, config, config.aggregation)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """The clipped surrogate around the proximal policy, less the entropy bonus, plus the KL term, each entry by its
        weight; and the critic's loss."""
        config = self.config
        e = entries_of(scores, batch, config.log_prob)
        old = proximal_policy(e, batch, config)
        low, high, dual = config.clip_low, config.clip_high, config.dual_clip
        triple = (e.log_probs, old.log_probs, e.advantages)
        surrogate = old.weights * F.clipped_surrogate(*triple, low=low, high=high, dual_clip=dual)
        clipped = F.clipped(*triple, low=low, high=high, dual_clip=dual)
        objective, kl = regularised(surrogate, e, batch, config)
        value, value_statistics = critic_loss(scores, batch, config)
        maxima, statistics = policy_diagnostics(
            e, batch, clipped=clipped, dead=clipped | old.dropped, trust=old.trust, reference_kl=kl
        )
        return Loss(
            total=F.weighted_sum(objective, e.weights) + config.value_coef * value,
            metrics={"loss/policy": F.weighted_sum(surrogate, e.weights).detach(), "loss/value": value.detach()},
            maxima=maxima,
            statistics={**statistics, **old.statistics(e.mask), **value_statistics},
        )
