"""SRPO's progress reward: the distance of a failed trajectory to the batch's own successes, in embedding space."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array
from vla_rl.plugins.algorithms.srpo.config import RewardSettings

CLUSTER_MIN_SAMPLES = 2
"""DBSCAN's min_samples, as in siiRL: two successes near each other make a cluster, a single one does not."""
STEEPNESS, MIDPOINT = 10.0, 0.5
"""Sigmoid of a failure's relative distance d in [0, 1], as in siiRL's published recipe: the nearest failure gets 0.99
of `reward_scale`, the farthest 0.01, one halfway a half."""
FLAT = 1e-6
"""Range of a task's distances below which they count as equal: every failure gets relative distance 0.5."""


@frozen(kw_only=True, eq=False)
class TrajectoryProgress:
    """Progress of the N trajectories of a batch, float64 [N] each; NaN where it is not defined."""

    rewards: Array
    """Reward: 1 for a success, `reward_scale * sigmoid(...)` for a failure, 0 for a failure whose task has no
    success."""
    distances: Array
    """Euclidean distance of a failure to the nearest centre of its task's successes, in the encoder's units."""
    normalized: Array
    """Distance scaled to [0, 1] among the failures of the same task."""


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
