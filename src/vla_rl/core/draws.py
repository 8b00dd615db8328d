"""Which fixed state an episode starts from: keyed draws, the same under any placement."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from vla_rl.core.randomness import generator
from vla_rl.core.types import ResetState

Array = np.ndarray[Any, Any]


def draw_state(states: Sequence[ResetState], seed: int, step: int, index: int) -> ResetState:
    """The index-th reset state of rollout `step`: a keyed shuffle of the split, reshuffled when it is used up."""
    lap, place = divmod(index, len(states))
    return states[int(_shuffle(len(states), seed, step, lap)[place])]


def deal_states(
    states: Sequence[ResetState], seed: int, step: int, rounds: int, groups: int
) -> tuple[tuple[ResetState, ...], ...]:
    """States of a whole rollout: for each of its `rounds` one for each of the `groups` groups of rows.

    What is drawn is that of `draw_state` for all groups of the rollout. It is dealt out by task, so that a group of
    rows stays with its task from round to round: many simulators need seconds to build another one.
    """
    drawn = [draw_state(states, seed, step, i) for i in range(rounds * groups)]
    order = {task: i for i, task in enumerate(dict.fromkeys(state.task for state in states))}
    drawn.sort(key=lambda state: order[state.task])
    return tuple(tuple(drawn[index::rounds]) for index in range(rounds))


@lru_cache(maxsize=8)
def _shuffle(n: int, seed: int, step: int, lap: int) -> Array:
    return generator(seed, "reset-states", step, lap).permutation(n)
