"""Self-referential policy optimisation as siiRL implements it: progress rewards, then GRPO."""

from __future__ import annotations

import attrs
import numpy as np
import torch
from torch import Tensor

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.types import Advantages, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.srpo.config import SRPOConfig
from vla_rl.plugins.algorithms.srpo.encoder import Frames, TrajectoryEncoder
from vla_rl.plugins.algorithms.srpo.rewards import progress_rewards
from vla_rl.toolkit.algorithms.policy_gradient import (
    PolicyGradientAlgorithm,
    compute_clipped_surrogate,
    group_relative_advantages,
    loss_terms,
    policy_loss,
    select_groups,
)


class SRPO(PolicyGradientAlgorithm):
    """GRPO on shaped rewards. The encoder is loaded by the first call of `features`, so only in the process that
    embeds."""

    config: SRPOConfig

    def __init__(self, config: SRPOConfig, context: AlgorithmContext) -> None:
        super().__init__(config)
        self.device = config.device or context.device
        self.camera = config.camera
        self.encoder: TrajectoryEncoder | None = None

    def features(self, frames: tuple[Frames, ...]) -> Tensor:
        if self.encoder is None:
            self.encoder = TrajectoryEncoder(self.config, self.device)
        return self.encoder(frames)

    def shape_rewards(self, rollout: Rollout) -> Rollout:
        """Replace the rewards of every trajectory in a group that passes the success filter by one progress reward, at
        its last action. A trajectory without frames (an embedding of zeros) keeps the simulator's rewards."""
        if rollout.features is None:
            return rollout
        embeddings = rollout.features.numpy()
        selected = select_groups(rollout, attrs.evolve(self.config, filter_identical=False)).numpy()
        counted = selected & embeddings.any(1)
        tasks = rollout.tasks or ("the only one",) * len(embeddings)
        progress = progress_rewards(embeddings, rollout.success.numpy(), tasks, counted, self.config)
        rewarded = reward_at_last_action(rollout, torch.from_numpy(np.nan_to_num(progress.rewards)).float())
        return rollout.evolve(
            rewards=torch.where(torch.from_numpy(counted)[:, None], rewarded, rollout.rewards),
            findings={
                "reward": torch.from_numpy(progress.rewards),
                "distance": torch.from_numpy(progress.distances),
                "normalized_distance": torch.from_numpy(progress.normalized),
            },
        )

    def select(self, rollout: Rollout) -> Tensor:
        """Return which trajectories to train on: whole groups are dropped by success rate, equal (shaped) scores or
        truncation."""
        return select_groups(rollout, self.config)

    def advantages(self, rollout: Rollout) -> Advantages:
        """Return one advantage per trajectory, its shaped score relative to its group's, at every chunk step with a
        valid action."""
        advantages = group_relative_advantages(rollout, self.config)
        return attrs.evolve(advantages, metrics={**advantages.metrics, **shaping_metrics(rollout)})

    def loss(self, scores: Scores, batch: Batch) -> Loss:
        """Return the clipped surrogate around the proximal policy, less the entropy bonus, plus the KL term."""
        terms = loss_terms(scores, batch, self.config)
        return policy_loss(terms, compute_clipped_surrogate(terms, self.config), batch, self.config)


def reward_at_last_action(rollout: Rollout, rewards: Tensor) -> Tensor:
    """Return rewards float32 [T, N, C]: those given, [N], at the last valid action of each trajectory, 0 elsewhere."""
    valid = by_action(rollout.valid)
    left = valid.long().flip(0).cumsum(0).flip(0)  # number of valid actions from here on
    return by_chunk(torch.where(valid & (left == 1), rewards, torch.zeros(())), rollout.valid.shape[-1])


def shaping_metrics(rollout: Rollout) -> dict[str, float]:
    """Return metrics: the share of trajectories with a shaped reward, and the means of their distances and rewards."""
    if not rollout.findings:
        return {"srpo/shaped": 0.0}
    shaped = ~rollout.findings["distance"].isnan()
    metrics = {"srpo/shaped": float(shaped.double().mean())}
    if shaped.any():
        metrics["srpo/distance"] = float(rollout.findings["distance"][shaped].mean())
        metrics["srpo/reward"] = float(rollout.findings["reward"][shaped].mean())
    return metrics
