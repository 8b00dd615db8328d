"""Which fixed state an episode starts from, and how often a task comes up: keyed draws that no placement changes."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from vla_rl.core.randomness import generator
from vla_rl.core.types import Episode, ResetState

Array = np.ndarray[Any, Any]
TaskWeights = Mapping[str, float] | None
"""Task -> its weight (all above 0); None: each state alike."""


def draw_state(
    states: Sequence[ResetState], seed: int, step: int, index: int, weights: TaskWeights = None
) -> ResetState:
    """The index-th reset state of rollout `step`: a keyed shuffle of the split, reshuffled when it is used up. With
    `weights` the task is drawn by its weight, and then the next of its own states."""
    lap, place = divmod(index, len(states))
    if weights is None:
        return states[int(_shuffle(len(states), seed, step, lap)[place])]
    tasks = tuple(state.task for state in states)
    shares = tuple(weights[task] for task in dict.fromkeys(tasks))
    return states[int(_weighted(tasks, shares, seed, step, lap)[place])]


def deal_states(
    states: Sequence[ResetState], seed: int, step: int, rounds: int, groups: int, weights: TaskWeights = None
) -> tuple[tuple[ResetState, ...], ...]:
    """States of a whole rollout: for each of its `rounds` one for each of the `groups` groups of rows.

    What is drawn is that of `draw_state` for all groups of the rollout. It is dealt out by task, so that a group of
    rows stays with its task from round to round: many simulators need seconds to build another one.
    """
    drawn = [draw_state(states, seed, step, i, weights) for i in range(rounds * groups)]
    order = {task: i for i, task in enumerate(dict.fromkeys(state.task for state in states))}
    drawn.sort(key=lambda state: order[state.task])
    return tuple(tuple(drawn[index::rounds]) for index in range(rounds))


class TaskWindows:
    """Dynamic weighted resampling (AcceRL, eq. 11): of each task the last `window` outcomes, over all workers; a task
    weighs its failures among them + `smoothing`.

    What a rollout brings counts from the next step on. So a step that is played again, after a run was stopped in the
    middle of it, finds the weights that it had.
    """

    def __init__(self, tasks: Iterable[str], window: int, smoothing: float):
        self.smoothing = smoothing
        self.failed: dict[str, deque[bool]] = {task: deque(maxlen=window) for task in dict.fromkeys(tasks)}
        self.newest: tuple[int, list[tuple[str, bool]]] = (0, [])

    def weights(self, step: int) -> dict[str, float]:
        """Task -> weight for the rollout of `step`."""
        recorded, outcomes = self.newest
        if recorded < step:
            for task, failed in outcomes:
                self.failed[task].append(failed)
        self.newest = (step, [])
        return {task: sum(failed) + self.smoothing for task, failed in self.failed.items()}

    def record(self, step: int, episodes: Iterable[Episode]) -> None:
        """What came of the rollout of `step`. Order within a step: by episode, then by row, whatever the placement."""
        ordered = sorted(episodes, key=lambda e: (e.episode, e.row))
        self.newest = (step, [(e.task, not e.success_once) for e in ordered])

    def save(self, file: Path) -> None:
        state = {"failed": {task: list(failed) for task, failed in self.failed.items()}, "newest": self.newest}
        file.write_text(json.dumps(state))

    def load(self, file: Path) -> None:
        """Go on from what was saved; without a file (of a run that sampled uniformly) from nothing."""
        if not file.is_file():
            return
        state = json.loads(file.read_text())
        for task, failed in self.failed.items():
            failed.extend(state["failed"].get(task, ()))
        step, outcomes = state["newest"]
        self.newest = (step, [(task, failed) for task, failed in outcomes if task in self.failed])


@lru_cache(maxsize=8)
def _shuffle(n: int, seed: int, step: int, lap: int) -> Array:
    return generator(seed, "reset-states", step, lap).permutation(n)


@lru_cache(maxsize=8)
def _weighted(tasks: tuple[str, ...], shares: tuple[float, ...], seed: int, step: int, lap: int) -> Array:
    """As many draws as there are states, int64: the task of each by its share, then that task's states in turn."""
    names = {task: i for i, task in enumerate(dict.fromkeys(tasks))}
    shuffled = _shuffle(len(tasks), seed, step, lap)
    task_of = np.array([names[task] for task in tasks])[shuffled]
    bounds = np.cumsum(shares)
    drawn = np.searchsorted(bounds, bounds[-1] * generator(seed, "tasks", step, lap).random(len(tasks)), side="right")
    out = np.empty(len(tasks), np.int64)
    for task in range(len(names)):
        places = np.flatnonzero(drawn == task)
        out[places] = np.resize(shuffled[task_of == task], len(places))
    return out
