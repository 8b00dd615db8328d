"""ManiSkill's manipulation tasks: instructions, which most of them lack, and reset states, which are seeds or numbers
of fixed placements."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from vla_rl.core.types import ResetState

_FACTS: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("tasks.yaml").read_text("utf-8"))
INSTRUCTIONS: dict[str, str] = _FACTS["instructions"]
"""Task -> instruction of the policy, unless the task or the spec gives another one."""
PANDA_TASKS = frozenset(_FACTS["panda_tasks"])
"""Tasks of one Panda arm with its gripper."""
PANDA_ACTIONS: dict[str, int] = _FACTS["panda_actions"]
"""Control mode of a Panda arm -> number of action dimensions."""
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
