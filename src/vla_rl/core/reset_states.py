"""Choice of the fixed initial state of each episode: keyed draws that do not depend on placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache

import numpy as np
from attrs import frozen

from vla_rl.core.randomness import generator
from vla_rl.core.types import Array, ResetState

TaskWeights = Mapping[str, float] | None
"""Sampling weight of each task (all above 0); None: every state is equally likely."""


def draw_state(
    states: Sequence[ResetState], seed: int, number: int, episode: int = 0, weights: TaskWeights = None
) -> ResetState:
    """Return the initial state of a group's episode number `episode`; `number` counts groups through the whole run. The
    states are a keyed shuffle of the split, reshuffled when it is used up. With `weights` a task is drawn by its
    weight, then the next of that task's states."""
    epoch, place = divmod(number, len(states))
    if weights is None:
        return states[int(_shuffle_states(len(states), seed, episode, epoch)[place])]
    tasks = _tasks_of(states)
    shares = tuple(weights[task] for task in tasks.names)
    return states[int(_draw_weighted_states(tasks, shares, seed, episode, epoch)[place])]


@frozen(eq=False)
class _Tasks:
    """Tasks of a split; hashed by identity, since a split may have many thousand states."""

    names: tuple[str, ...]
    of: Array
    """Index of each state's task in `names`, int64 [states]."""


_known: dict[int, tuple[Sequence[ResetState], _Tasks]] = {}
"""Cache of the last split that was drawn from, by its id. With the reference no other object gets that id."""


def _tasks_of(states: Sequence[ResetState]) -> _Tasks:
    if id(states) not in _known:
        names = {task: i for i, task in enumerate(dict.fromkeys(state.task for state in states))}
        of = np.array([names[state.task] for state in states], np.int64)
        _known.clear()
        _known[id(states)] = states, _Tasks(tuple(names), of)
    return _known[id(states)][1]


@lru_cache(maxsize=128)
def _shuffle_states(n: int, seed: int, episode: int, epoch: int) -> Array:
    return generator(seed, "reset-states", epoch, episode).permutation(n)


@lru_cache(maxsize=8)
def _draw_weighted_states(tasks: _Tasks, shares: tuple[float, ...], seed: int, episode: int, epoch: int) -> Array:
    """Return an index for each of a split's states, int64: a task drawn by its share, then its states in turn."""
    count = len(tasks.of)
    shuffled = _shuffle_states(count, seed, episode, epoch)
    task_of = tasks.of[shuffled]
    bounds = np.cumsum(shares)
    uniform = generator(seed, "tasks", epoch, episode).random(count)
    drawn = np.searchsorted(bounds, bounds[-1] * uniform, side="right")
    out = np.empty(count, np.int64)
    for task in range(len(tasks.names)):
        positions = np.flatnonzero(drawn == task)
        out[positions] = np.resize(shuffled[task_of == task], len(positions))
    return out
