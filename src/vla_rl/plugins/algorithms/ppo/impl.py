"""PPO (Schulman et al. 2017) with GAE over chunks or over single actions (RLinf-VLA 2025, section 4.3.2)."""

from __future__ import annotations

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.ppo import PPOConfig
from vla_rl.toolkit.algorithms.losses import clipped_policy_loss, critic_verdict, with_critic


class PPO(Algorithm):
    def __init__(self, config: PPOConfig):
        self.config = config
        self.needs = frozenset({"values", *config.needs})
        self.value_granularity = config.advantage

    def advantages(self, rollout: Rollout) -> Advantages:
        return critic_verdict(rollout, self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        return with_critic(clipped_policy_loss(scores, batch, self.config), scores, batch, self.config)
