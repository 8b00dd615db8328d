"""Reset states: seeds, or numbers of fixed placements, that start episodes."""

from __future__ import annotations

from vla_rl.core.types import ResetState

IDS_PER_TASK = 1_000_000
"""Distance between the state ids of two tasks: an id is this times the task's position in the spec, plus a number."""
EVAL_STATES, FIRST_TRAIN = 100, 1000
"""Seeds of the splits for tasks that draw their scenes: eval has seeds below EVAL_STATES, train those from FIRST_TRAIN
on."""
HELD_OUT = 3
"""Held-out share for tasks that choose among fixed placements: placement numbers that this divides belong to eval."""


def states_of(split: str, index: int, task: str, train_states: int, placements: int) -> list[ResetState]:
    """Return the reset states of "train" or "eval" for the task at position `index`.

    Args:
        placements: number of fixed placements; 0: the task draws its scenes.
    """
    if placements:
        numbers = [i for i in range(placements) if (i % HELD_OUT == 0) == (split == "eval")]
    else:
        numbers = list(range(EVAL_STATES) if split == "eval" else range(FIRST_TRAIN, FIRST_TRAIN + train_states))
    selected = numbers if split == "eval" else numbers[:train_states]
    return [ResetState(id=index * IDS_PER_TASK + number, task=task) for number in selected]
