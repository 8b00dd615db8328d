"""Takeovers in data for policy gradients: an episode ends for the policy where another source takes over.

A policy gradient needs actions that the policy chose, and what came of its own choices. Neither holds from a takeover
on: other actions were executed than those whose log-probs were recorded, and later rewards are the helper's merit as
well. So algorithms see a takeover as a terminal state without further reward. That is an ordinary decision process, in
which the data are on-policy. Trainers that learn from other people's actions use the whole rollout instead.
"""

from __future__ import annotations

from vla_rl.core.samples import by_action, by_chunk
from vla_rl.core.types import ActionSource, Rollout


def end_at_takeovers(rollout: Rollout) -> Rollout:
    """Return the rollout with every episode cut before the first action that the policy did not choose.

    The last action before a takeover is `terminated`; from there to the end of the episode nothing is valid and rewards
    are 0. A column whose first episode had a takeover did not succeed. A chunk in which the policy is taken over counts
    up to that action. Without takeovers the rollout is returned unchanged.
    """
    if rollout.source is None:
        return rollout
    import torch

    valid = by_action(rollout.valid)
    ended = by_action(rollout.terminated | rollout.truncated)
    taken = by_action(rollout.source != ActionSource.POLICY) & valid
    after = torch.zeros_like(valid)
    """Actions from a takeover to the end of its episode, bool [T * C, N]."""
    helped = torch.zeros_like(valid[0])
    first_helped = torch.zeros_like(valid[0])
    in_first = torch.ones_like(valid[0])
    for t in range(len(valid)):
        helped = helped | taken[t]
        after[t] = helped
        first_helped |= helped & in_first
        in_first &= ~ended[t]
        helped = helped & ~ended[t]
    last = torch.zeros_like(valid)
    """Last actions before a takeover."""
    follows = torch.zeros_like(valid[0])
    for t in reversed(range(len(valid))):
        last[t] = valid[t] & ~after[t] & ~ended[t] & follows
        follows = torch.where(valid[t], after[t], follows)
    kept = by_chunk(valid & ~after, rollout.valid.shape[-1])
    return rollout.evolve(
        valid=kept,
        rewards=torch.where(kept, rollout.rewards, torch.zeros(())),
        terminated=(rollout.terminated & kept) | by_chunk(last, kept.shape[-1]),
        truncated=rollout.truncated & kept,
        success=rollout.success & ~first_helped,
        source=None,
        executed_actions=None,
    )
