"""`transitions`: where samples stand in their trajectories, and which of them have a successor."""

from __future__ import annotations

import pytest
import torch

from vla_rl.core.errors import UserError
from vla_rl.core.manager import wrap
from vla_rl.plugins.algorithms.transitions.impl import TransitionFields
from vla_rl.testing import synthetic
from vla_rl.toolkit.algorithms.declarations import check_declarations
from vla_rl.toolkit.algorithms.result_checks import ResultGuard
from vla_rl.toolkit.no_settings import NoSettings


def test_fields_by_hand():
    """Two trajectories of three chunks of two actions; the first one ends in its second chunk."""
    rollout = _rollout()
    algorithm = TransitionFields(NoSettings())
    check_declarations(algorithm, "transitions")
    result = wrap(
        "algorithm", algorithm, "transitions", [("checks", ResultGuard("transitions", algorithm.extras))]
    ).advantages(rollout)
    extras = result.extras
    assert extras["transition_continues"].tolist() == [[True, True], [False, True], [False, False]]
    assert extras["transition_terminated"].tolist() == [[False, False], [True, False], [False, False]]
    assert extras["transition_step"].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert extras["transition_column"].tolist() == [[0, 1]] * 3
    assert torch.equal(extras["transition_rewards"], rollout.rewards)
    assert result.weights.tolist() == [[1, 1], [1, 1], [0, 1]]


def test_a_new_episode_in_the_next_chunk_does_not_continue_the_last_one():
    rollout = _rollout()
    truncated = torch.zeros_like(rollout.truncated)
    truncated[0, 1, 1] = True
    continues = (
        TransitionFields(NoSettings()).advantages(rollout.evolve(truncated=truncated)).extras["transition_continues"]
    )
    assert continues.tolist() == [[True, False], [False, True], [False, False]]


def _rollout():
    rollout = synthetic.rollout(chunk=2)
    shape = (3, 2, 2)
    valid = torch.ones(shape, dtype=torch.bool)
    valid[1, 0, 1] = False
    valid[2, 0] = False
    terminated = torch.zeros(shape, dtype=torch.bool)
    terminated[1, 0, 0] = True
    return rollout.evolve(
        rewards=torch.arange(12.0).reshape(shape) * valid,
        valid=valid,
        terminated=terminated,
        truncated=torch.zeros(shape, dtype=torch.bool),
    )


def test_it_has_no_loss():
    with pytest.raises(UserError, match="for trainers of transitions"):
        TransitionFields(NoSettings()).loss(None, None)
