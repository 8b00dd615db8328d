"""Metrics of a rollout."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vla_rl.core.events import robot_metrics
from vla_rl.core.types import BOUND_TOLERANCE, ActionSource, EnvInfo, Episode, Rollout
from vla_rl.runtime.messages.reports import RolloutReport


def episode_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """Return the means over episodes; there are none where no episode has ended."""
    count = len(episodes)
    totals = {
        "env/success_rate": sum(e.success_once for e in episodes),
        "env/success_at_end": sum(e.success_at_end for e in episodes),
        "env/return": sum(e.total_reward for e in episodes),
        "env/episode_length": sum(e.steps for e in episodes),
    }
    return {
        **{name: total / count for name, total in totals.items() if count},
        **robot_metrics("env", episodes),
        "rollout/episodes": float(count),
    }


def work_metrics(work: RolloutReport) -> dict[str, float]:
    """Return the metrics of all work since the last step, including work for later steps."""
    recovery = {"rollout/replayed_steps": work.replayed, "rollout/restarted_streams": work.restarted}
    return {
        **{name: float(count) for name, count in recovery.items() if count},
        "rollout/env_steps": float(work.env_steps),
        "time/env": max(work.env_seconds.values(), default=0.0),
        "time/policy": max(work.policy_seconds.values(), default=0.0),
    }


def outside_bounds(rollout: Rollout, info: EnvInfo) -> tuple[dict[str, float], str]:
    """Return the number of valid actions of others than the policy that are outside of the simulator's bounds, as a
    metric if it is not 0, and a text about the worst of them."""
    if rollout.executed_actions is None or rollout.source is None:
        return {}, ""
    others = rollout.valid & (rollout.source != ActionSource.POLICY)
    actions = rollout.executed_actions[others]
    low, high = torch.tensor(info.action_low), torch.tensor(info.action_high)
    beyond = torch.maximum(low - actions, actions - high)
    outside = (beyond > BOUND_TOLERANCE).any(-1)
    if not outside.any():
        return {}, ""
    row, dim = divmod(int(beyond.argmax()), len(low))
    count = int(outside.sum())
    text = (
        f"{count} of {len(actions)} actions of whoever took over were outside of the simulator's bounds: "
        f"{actions[row, dim]:g} in dimension {dim}, not within [{low[dim]:g}, {high[dim]:g}]. Trainers learn from them "
        f"as they are; look at the scale of the takeover device, or of what the simulator reports as executed"
    )
    return {"env/outside_bounds": float(count)}, text


def lag_metrics(rollout: Rollout, version: int) -> dict[str, float]:
    """Return the share of chunks at each policy lag, and the share of trajectories in which several versions acted."""
    samples = rollout.samples
    versions = rollout.versions
    lags, counts = (version - versions[samples]).unique(return_counts=True)
    lowest = versions.masked_fill(~samples, torch.iinfo(torch.int64).max).min(0).values
    highest = versions.masked_fill(~samples, -1).max(0).values
    shares = zip(lags.tolist(), (counts / counts.sum()).tolist(), strict=True)
    mixed = float((highest > lowest).float().mean())
    return {**{f"rollout/policy_lag_{lag}": share for lag, share in shares}, "rollout/mixed_versions": mixed}
