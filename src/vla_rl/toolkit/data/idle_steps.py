"""Steps in which nothing moves and no command changes: the key `drop_no_ops` of data plugins, and a finding."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array

STILL = 1e-4
"""Norm of the motion part of an action below which it is a no-op (OpenVLA)."""
UNCHANGED = 0.002
"""Share of a number's range within an episode up to which it is unchanged: encoders jitter by a tick or two."""
logger = logging.getLogger(__name__)


def find_no_ops(actions: Array) -> Array:
    """Return which actions [T, A], differences, move neither arm nor gripper (last), bool [T]: OpenVLA's rule."""
    motion = actions[:, :-1] if actions.shape[1] > 1 else actions
    moves = np.linalg.norm(motion, axis=1) >= STILL
    grips = np.diff(actions[:, -1], prepend=actions[:1, -1]) != 0
    idle: Array = ~(moves | grips)
    return idle


def find_idle_steps(episodes: Sequence[tuple[Array, Array | None]]) -> list[Array]:
    """Return which steps of each episode are idle, bool [T]: state and action are those of the last step that is not,
    whatever actions mean. So an episode that creeps keeps a step for each change. Without a state: `find_no_ops`.

    Args:
        episodes: actions float32 [T, A] and states [T, S] of all episodes.
    """
    numbers = [actions if state is None else np.concatenate([actions, state], axis=1) for actions, state in episodes]
    ranges = np.median([np.ptp(rows, axis=0) for rows in numbers if len(rows)], axis=0)  # one may have other units
    return [
        find_no_ops(actions) if state is None else _find_repeated(rows, UNCHANGED * ranges)
        for rows, (actions, state) in zip(numbers, episodes, strict=True)
    ]


def _find_repeated(rows: Array, tolerance: Array) -> Array:
    """Return which rows [T, D] are within the tolerance [D] of the last one that is not, bool [T]."""
    repeated = np.zeros(len(rows), bool)
    last = 0
    for step in range(1, len(rows)):
        repeated[step] = bool((np.abs(rows[step] - rows[last]) <= tolerance).all())
        last = last if repeated[step] else step
    return repeated


def choose_moving_steps(source: str, episodes: Sequence[tuple[Array, Array | None]]) -> list[Array]:
    """Return each episode's steps that are not idle, int64; log the others (`find_idle_steps`). UserError for none."""
    moving = [np.flatnonzero(~idle) for idle in find_idle_steps(episodes)]
    steps, left = sum(len(actions) for actions, _ in episodes), sum(map(len, moving))
    if not left:
        raise UserError(f"{source}: drop_no_ops leaves no step, since nothing moves in any; set drop_no_ops: false")
    logger.warning("%s: drop_no_ops leaves out %d of %d steps, in which nothing moves", source, steps - left, steps)
    return moving
