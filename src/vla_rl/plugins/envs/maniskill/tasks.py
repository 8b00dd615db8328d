"""ManiSkill's manipulation tasks: instructions, which most of them lack, and reset states, which are seeds or numbers
of fixed placements."""

from __future__ import annotations

from typing import Any

from vla_rl.core.paths import read_table
from vla_rl.core.types import ResetState

_FACTS: dict[str, Any] = read_table(__file__, "tasks.yaml")
INSTRUCTIONS: dict[str, str] = _FACTS["instructions"]
"""Task -> instruction of the policy, unless the task or the spec gives another one."""
PANDA_TASKS = frozenset(_FACTS["panda_tasks"])
"""Tasks of one Panda arm with its gripper."""
PANDA_ACTIONS: dict[str, int] = _FACTS["panda_actions"]
"""Control mode of a Panda arm -> number of action dimensions."""
IDS_PER_TASK = 1_000_000
"""Distance between the state ids of two tasks: an id is this times the task's position in the spec, plus a number."""
FIRST_TRAIN = 1000
"""First seed of the train split for tasks that draw their scenes; eval has lower ones."""
HELD_OUT = 3
"""Held-out share for tasks that choose among fixed placements: placement numbers that this divides belong to eval."""


def states_of(split: str, index: int, task: str, count: int, placements: int) -> list[ResetState]:
    """Return the reset states of "train" or "eval" for the task at position `index`.

    Args:
        count: states of the split, at most.
        placements: number of fixed placements; 0: the task draws its scenes.
    """
    if placements:
        numbers = [i for i in range(placements) if (i % HELD_OUT == 0) == (split == "eval")]
    else:
        first = 0 if split == "eval" else FIRST_TRAIN
        numbers = list(range(first, first + count))
    return [ResetState(id=index * IDS_PER_TASK + number, task=task) for number in numbers[:count]]
