"""The metrics of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vla_rl.core.types import Episode, Rollout
from vla_rl.runtime.messages.reports import RolloutReport


def of_episodes(episodes: Sequence[Episode]) -> dict[str, float]:
    """Without a mean where none has ended."""
    n = len(episodes)
    totals = {
        "env/success_rate": sum(e.success_once for e in episodes),
        "env/success_at_end": sum(e.success_at_end for e in episodes),
        "env/return": sum(e.total_reward for e in episodes),
        "env/episode_length": sum(e.steps for e in episodes),
    }
    return {**{name: total / n for name, total in totals.items() if n}, "rollout/episodes": float(n)}


def of_work(done: RolloutReport) -> dict[str, float]:
    """Of all that was done since the last step, for later steps too."""
    again = {"rollout/replayed_steps": done.replayed, "rollout/restarted_streams": done.restarted}
    return {
        **{name: float(count) for name, count in again.items() if count},
        "rollout/env_steps": float(done.env_steps),
        "time/env": max(done.env_seconds.values(), default=0.0),
        "time/policy": max(done.policy_seconds.values(), default=0.0),
    }


def of_ages(rollout: Rollout, version: int) -> dict[str, float]:
    """Shares of the chunks by the versions that the weights have moved on since, and of the trajectories in which more
    than one version acted."""
    samples, versions = rollout.samples, rollout.versions
    ages, counts = (version - versions[samples]).unique(return_counts=True)
    lowest = versions.masked_fill(~samples, torch.iinfo(torch.int64).max).min(0).values
    highest = versions.masked_fill(~samples, -1).max(0).values
    shares = zip(ages.tolist(), (counts / counts.sum()).tolist(), strict=True)
    mixed = float((highest > lowest).float().mean())
    return {**{f"rollout/age_{age}": share for age, share in shares}, "rollout/mixed_versions": mixed}
