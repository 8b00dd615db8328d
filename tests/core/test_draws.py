"""Which states a rollout starts from."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest

from vla_rl.core.draws import deal_states, draw_state
from vla_rl.core.types import ResetState

STATES = [ResetState(id=100 * task + i, task=f"t{task}") for task in range(4) for i in range(10)]


@pytest.mark.parametrize(("rounds", "groups"), [(1, 4), (6, 4), (30, 8)])
def test_a_rollout_is_the_keyed_draw_dealt_out_by_task(rounds, groups):
    dealt = deal_states(STATES, 7, 3, rounds, groups)
    drawn = Counter(draw_state(STATES, 7, 3, i).id for i in range(rounds * groups))
    assert Counter(state.id for round_states in dealt for state in round_states) == drawn
    tasks = [[dealt[r][g].task for r in range(rounds)] for g in range(groups)]
    switches = sum(a != b for of_group in tasks for a, b in pairwise(of_group))
    assert switches <= 3, "a group of rows changes its task only where the tasks meet"


def test_steps_differ():
    assert deal_states(STATES, 7, 1, 2, 4)[0] != deal_states(STATES, 7, 2, 2, 4)[0]
