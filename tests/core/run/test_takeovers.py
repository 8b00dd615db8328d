"""Rollouts that algorithms see end where another source takes over."""

from __future__ import annotations

import torch

from vla_rl.core.run.selection import end_at_takeovers
from vla_rl.core.types import Rollout

P, H = 0, 1  # policy, human


def rollout_of(source, *, valid=None, terminated=(), truncated=(), rewards=None):
    """A rollout of one column from its chunks: `source` [T][C]; ends as (chunk, action)."""
    source = torch.tensor(source, dtype=torch.int8)[:, None]
    valid = torch.ones_like(source, dtype=torch.bool) if valid is None else torch.tensor(valid)[:, None]
    ends = {}
    for name, places in (("terminated", terminated), ("truncated", truncated)):
        ends[name] = torch.zeros_like(valid)
        for chunk, action in places:
            ends[name][chunk, 0, action] = True
    steps = len(source)
    return Rollout(
        step=1,
        rewards=torch.ones(source.shape) * valid if rewards is None else torch.tensor(rewards)[:, None],
        valid=valid,
        log_probs=torch.zeros((*source.shape, 1)),
        values=None,
        next_values=None,
        groups=torch.zeros(1, dtype=torch.int64),
        success=torch.ones(1, dtype=torch.bool),
        versions=torch.zeros((steps, 1), dtype=torch.int64),
        episodes=(),
        source=source,
        executed_actions=torch.zeros((*source.shape, 2)),
        **ends,
    )


def column(tensor):
    return tensor[:, 0].int().tolist()


def test_a_takeover_within_a_chunk_ends_the_episode_before_it():
    """The policy has the episode back in the last chunk, in which it ends; nothing of that counts."""
    cut = end_at_takeovers(rollout_of([[P, P], [P, H], [P, P]], terminated=[(2, 1)]))
    assert column(cut.valid) == [[1, 1], [1, 0], [0, 0]]
    assert column(cut.terminated) == [[0, 0], [1, 0], [0, 0]]
    assert column(cut.rewards) == [[1, 1], [1, 0], [0, 0]]
    assert not cut.success.any() and not cut.truncated.any()
    assert cut.source is None and cut.executed_actions is None


def test_a_takeover_at_the_border_of_chunks_ends_the_chunk_before():
    cut = end_at_takeovers(rollout_of([[P, P], [H, H], [P, P]], truncated=[(2, 1)]))
    assert column(cut.valid) == [[1, 1], [0, 0], [0, 0]]
    assert column(cut.terminated) == [[0, 1], [0, 0], [0, 0]] and not cut.truncated.any()


def test_an_episode_that_begins_with_a_takeover_has_no_samples():
    cut = end_at_takeovers(rollout_of([[H, P], [P, P]], terminated=[(1, 1)]))
    assert not cut.samples.any() and not cut.terminated.any() and not cut.rewards.any()


def test_later_episodes_of_a_stream_count_again():
    """auto_reset: the first episode ends in chunk 1, whose second action is dropped; the success is that of the first
    episode."""
    source = [[P, P], [P, P], [P, H], [P, P], [P, P]]
    valid = [[True, True], [True, False], [True, True], [True, True], [True, True]]
    cut = end_at_takeovers(rollout_of(source, valid=valid, terminated=[(1, 0), (3, 1)]))
    assert column(cut.valid) == [[1, 1], [1, 0], [1, 0], [0, 0], [1, 1]]
    assert column(cut.terminated) == [[0, 0], [1, 0], [1, 0], [0, 0], [0, 0]]
    assert cut.success.all()


def test_a_source_after_the_end_means_nothing():
    cut = end_at_takeovers(rollout_of([[P, P], [P, H]], valid=[[True, True], [True, False]], terminated=[(1, 0)]))
    assert column(cut.valid) == [[1, 1], [1, 0]] and column(cut.terminated) == [[0, 0], [1, 0]] and cut.success.all()


def test_a_rollout_without_takeovers_is_left_alone():
    rollout = rollout_of([[P, P]]).evolve(source=None, executed_actions=None)
    assert end_at_takeovers(rollout) is rollout
