"""Test which reset states tickets start from."""

from __future__ import annotations

from collections import Counter

import pytest

from vla_rl.core.reset_states import draw_state
from vla_rl.core.types import ResetState

STATES = [ResetState(id=100 * task + i, task=f"t{task}") for task in range(4) for i in range(10)]
WEIGHTS = {"t0": 1.0, "t1": 1.0, "t2": 4.0, "t3": 2.0}


def test_every_state_comes_up_before_any_comes_up_again():
    for lap in range(3):
        drawn = [draw_state(STATES, 7, 40 * lap + i).id for i in range(40)]
        assert sorted(drawn) == [state.id for state in STATES]


@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_draws_are_keyed_by_seed_number_and_episode(weights):
    def drawn(seed, first, episode):
        return [draw_state(STATES, seed, first + i, episode, weights).id for i in range(20)]

    assert drawn(7, 0, 0) == drawn(7, 0, 0)
    assert len({tuple(drawn(*key)) for key in ((7, 0, 0), (8, 0, 0), (7, 40, 0), (7, 0, 1), (7, 40, 1))}) == 5


def test_tasks_come_up_by_their_weight():
    drawn = Counter(draw_state(STATES, 0, i, weights=WEIGHTS).task for i in range(4000))
    assert {task: round(count / 4000 * 8) for task, count in drawn.items()} == WEIGHTS


def test_states_of_a_task_take_turns():
    heavy = [draw_state(STATES, 0, i, weights={**WEIGHTS, "t2": 1e9}).id for i in range(40)]
    assert sorted(heavy) == sorted([200 + i for i in range(10)] * 4)
    assert len(set(heavy[:10])) == 10
