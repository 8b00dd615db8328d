"""Groups of trajectories that started from one state (GRPO and relatives): scores, filters, advantages and metrics."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from vla_rl.core.types import Advantages, Rollout
from vla_rl.toolkit.algorithms import functional as F
from vla_rl.toolkit.algorithms.checks import check_finite
from vla_rl.toolkit.algorithms.losses import aggregation_weights, by_action
from vla_rl.toolkit.algorithms.settings import GroupSettings


def trajectory_scores(rollout: Rollout) -> Tensor:
    """Return the sum of the rewards of each column's first episode, float32 [N]."""
    first = F.valid_until_end(by_action(rollout.terminated | rollout.truncated))
    rewards = torch.where(first, by_action(rollout.rewards), torch.zeros(()))
    check_finite(rewards=rewards)
    return rewards.sum(0)


def select_groups(rollout: Rollout, settings: GroupSettings) -> Tensor:
    """Return the trajectories of the groups that the settings' filters keep, bool [N]. A group is kept or dropped as a
    whole."""
    truncated = rollout.truncated.any(-1).any(0)
    scores = trajectory_scores(rollout)
    keep = torch.ones_like(truncated)
    for group in rollout.groups.unique():
        members = rollout.groups == group
        success = float(rollout.success[members].double().mean())
        bounds = settings.filter
        if (
            (bounds is not None and not bounds.lower <= success <= bounds.upper)
            or (settings.filter_identical and F.all_equal(scores[members]))
            or (settings.filter_truncated and bool(truncated[members].any()))
        ):
            keep[members] = False
    return keep


def group_relative_advantages(rollout: Rollout, settings: GroupSettings) -> Advantages:
    """Return one advantage per trajectory, its score relative to its group's, at every chunk step with a valid action,
    with the weights of the loss and metrics of the scores."""
    scores, samples = trajectory_scores(rollout), rollout.samples
    relative = F.group_advantages(
        scores,
        rollout.groups,
        baseline=settings.baseline,
        normalize_by_std=settings.normalize_by_std,
    )
    weights, counts = aggregation_weights(rollout, settings.log_prob, settings.aggregation)
    return Advantages(
        advantages=torch.where(samples, relative.expand(samples.shape), torch.zeros(())),
        weights=weights,
        counts=counts,
        metrics=score_metrics(scores, rollout.groups, settings.baseline),
    )


def score_metrics(scores: Tensor, groups: Tensor, baseline: Literal["mean", "leave-one-out"]) -> dict[str, float]:
    """Return metrics of scores [N], and of their differences from the groups' baselines before a division by the
    std."""
    above = F.group_advantages(scores, groups, baseline=baseline, normalize_by_std=None)
    return {
        "advantage/score_mean": float(scores.mean()) if len(scores) else 0.0,
        "advantage/std": float(above.std()) if len(scores) > 1 else 0.0,
    }
