"""GRPO (Shao et al. 2024) as RLinf-VLA (2025, section 4.3) uses it for action chunks."""

from __future__ import annotations

from torch import Tensor

from vla_rl.core.hookspecs import Algorithm
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.grpo import GRPOConfig
from vla_rl.toolkit.algorithms.groups import group_verdict, select_groups
from vla_rl.toolkit.algorithms.losses import clipped_policy_loss


class GRPO(Algorithm):
    def __init__(self, config: GRPOConfig):
        self.config = config
        self.needs = frozenset({"groups", *config.needs})

    def select(self, rollout: Rollout) -> Tensor:
        """Drop whole groups: by success rate, by equal scores, by truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        return group_verdict(rollout, self.config)

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        return clipped_policy_loss(scores, batch, self.config)
