"""Reset states: the seeds, or the fixed placements, that start episodes."""

from __future__ import annotations

from vla_rl.core.types import ResetState

IDS_PER_TASK = 1_000_000
"""An id is this times the task's position among the tasks of the spec, plus a number."""
EVAL_STATES, FIRST_TRAIN = 100, 1000
"""Where tasks draw their scenes, the number is the seed of `reset`: below EVAL_STATES, or from FIRST_TRAIN on."""
HELD_OUT = 3
"""Where tasks choose among fixed placements, the number is the placement's; every third is held out."""


def states_of(split: str, index: int, task: str, train_states: int, placements: int) -> list[ResetState]:
    """Those of "train" or "eval" for the task at position `index`.

    Args:
        placements: how many fixed ones there are; 0: the task draws its scenes.
    """
    if placements:
        numbers = [i for i in range(placements) if (i % HELD_OUT == 0) == (split == "eval")]
    else:
        numbers = list(range(EVAL_STATES) if split == "eval" else range(FIRST_TRAIN, FIRST_TRAIN + train_states))
    kept = numbers if split == "eval" else numbers[:train_states]
    return [ResetState(id=index * IDS_PER_TASK + number, task=task) for number in kept]
