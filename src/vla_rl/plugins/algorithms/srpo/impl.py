"""Self-referential policy optimisation as siiRL implements it: progress rewards (the distance of a failed trajectory to
the batch's own successes, in embedding space), then GRPO."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch import Tensor

from vla_rl.core.contexts import AlgorithmContext
from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.types import Advantages, Array, Batch, Loss, Rollout, Scores
from vla_rl.plugins.algorithms.srpo.config import RewardSettings, SRPOConfig
from vla_rl.plugins.algorithms.srpo.encoder import Frames, TrajectoryEncoder
from vla_rl.toolkit.algorithms.policy_gradient import (
    PolicyGradientAlgorithm,
    compute_clipped_surrogate,
    group_relative_advantages,
    loss_terms,
    policy_loss,
    select_groups,
)

CLUSTER_MIN_SAMPLES = 2
"""DBSCAN's min_samples, as in siiRL: two successes near each other make a cluster, a single one does not."""
STEEPNESS, MIDPOINT = 10.0, 0.5
"""Sigmoid of a failure's relative distance d in [0, 1], as in siiRL's published recipe: the nearest failure gets 0.99
of `reward_scale`, the farthest 0.01, one halfway a half."""
FLAT = 1e-6
"""Range of a task's distances below which they count as equal: every failure gets relative distance 0.5."""


@attrs.frozen(kw_only=True, eq=False)
class TrajectoryProgress:
    """Progress of the N trajectories of a batch, float64 [N] each; NaN where it is not defined."""

    rewards: Array
    """Reward: 1 for a success, `reward_scale * sigmoid(...)` for a failure, 0 for a failure whose task has no
    success."""
    distances: Array
    """Euclidean distance of a failure to the nearest centre of its task's successes, in the encoder's units."""
    normalized: Array
    """Distance scaled to [0, 1] among the failures of the same task."""


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


def success_centres(successes: Array, settings: RewardSettings) -> Array:
    """Return the centres [K, D] of the successes' embeddings float32 [S, D]: means of DBSCAN's clusters, which are
    found after scaling each dimension to unit variance, in raw units; the plain mean when there is no cluster."""
    from sklearn.cluster import DBSCAN
    from sklearn.preprocessing import StandardScaler

    scaler = StandardScaler()
    scaled = scaler.fit_transform(successes)
    labels = DBSCAN(eps=settings.cluster_eps, min_samples=CLUSTER_MIN_SAMPLES).fit(scaled).labels_
    clusters = [scaled[labels == label].mean(0) for label in np.unique(labels[labels >= 0])]
    return np.asarray(scaler.inverse_transform(np.stack(clusters)) if clusters else successes.mean(0, keepdims=True))


def progress_rewards(
    embeddings: Array, success: Array, tasks: Sequence[str], counted: Array, settings: RewardSettings
) -> TrajectoryProgress:
    """Return the rewards of the trajectories of one batch, compared within their task (siiRL's SRPO).

    Args:
        embeddings: float32 [N, D].   success: bool [N].   tasks: N task names.
        counted: bool [N]: trajectories that take part; the others neither serve as targets nor get a reward.
    """
    rewards, distances, normalized = (np.full(len(success), np.nan) for _ in range(3))
    rewards[counted] = success[counted]
    names = np.asarray(tasks)
    for task in dict.fromkeys(tasks):
        members = counted & (names == task)
        good, bad = members & success, members & ~success
        if not good.any() or not bad.any():
            continue
        centres = success_centres(embeddings[good], settings).astype(np.float64)
        gaps = embeddings[bad].astype(np.float64)[:, None] - centres
        nearest = np.linalg.norm(gaps, axis=-1).min(1)
        low, high = nearest.min(), nearest.max()
        within = np.full(len(nearest), 0.5) if high - low < FLAT else (nearest - low) / (high - low)
        distances[bad], normalized[bad] = nearest, within
        rewards[bad] = settings.reward_scale / (1 + np.exp(-STEEPNESS * (MIDPOINT - within)))
    return TrajectoryProgress(rewards=rewards, distances=distances, normalized=normalized)


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
