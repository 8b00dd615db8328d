"""Scenes of the table: four objects, a gripper and a task, drawn once for each split.

The table is the square [-1, 1] x [-1, 1]; x points right and y up. Objects 0-2 are what the task chooses from (three
blocks to pick from, or three plates to put on, of different colours); object 3 is a distractor plate (`pick`) or the
block in the gripper (`put`).
"""

from __future__ import annotations

from functools import cache

import numpy as np
from attrs import frozen

from vla_rl.core.randomness import generator
from vla_rl.core.types import Array
from vla_rl.plugins.envs.tabletop.tasks import COLOURS, TASKS

SPLITS = {"train": (0, 24_000), "eval": (1_000_000, 800)}
"""Split -> (first state id, number of states). State i of a split has task i modulo the number of tasks."""
THINGS = 4
REACH = 0.8
"""Bound of object positions: they are within [-REACH, REACH]."""
START = 0.35
"""Bound of the gripper's start: it is within [-START, START]."""
GAP = 0.42
"""Least distance between two objects, and between an object and the start of the gripper (Chebyshev)."""
_TRIES = 8
_BLOCK = 2000


@frozen(kw_only=True, eq=False)
class TabletopScenes:
    """A table of S scenes as NumPy arrays."""

    task: Array
    """int64 [S]: index into `TASKS`."""
    gripper: Array
    """float32 [S, 2]: position of the gripper."""
    position: Array
    """float32 [S, 4, 2]: positions of the objects."""
    colour: Array
    """int64 [S, 4]: index into `COLOURS`."""
    is_plate: Array
    """bool [S, 4]: plate, else block."""
    target: Array
    """int64 [S]: object that the instruction names."""
    starts_held: Array
    """bool [S]: object 3 starts in the gripper."""

    def __len__(self) -> int:
        return len(self.task)


def draw_scenes(rng: np.random.Generator, count: int) -> TabletopScenes:
    """Draw scenes, tasks in turn; the same generator state gives the same scenes."""
    task = np.arange(count) % len(TASKS)
    starts_held = np.array([t.verb == "put" for t in TASKS])[task]
    gripper, position = _draw_positions(rng, count, starts_held)
    palette = np.argsort(rng.random((count, len(COLOURS))), axis=1)[:, : THINGS - 1]
    target = rng.integers(THINGS - 1, size=count)
    target_colour = np.array([t.colour for t in TASKS])[task]
    rows = np.arange(count)
    # The wanted colour takes the target's place; where it was drawn elsewhere, the two swap.
    present = palette == target_colour[:, None]
    palette = np.where(present, palette[rows, target][:, None], palette)
    palette[rows, target] = target_colour
    extra = rng.integers(len(COLOURS), size=count)
    colour = np.concatenate([palette, extra[:, None]], axis=1)
    is_plate = np.repeat(starts_held[:, None], THINGS, axis=1)
    is_plate[:, -1] = ~starts_held
    return TabletopScenes(
        task=task,
        gripper=gripper,
        position=position,
        colour=colour,
        is_plate=is_plate,
        target=target,
        starts_held=starts_held,
    )


@cache
def split_scenes(split: str) -> TabletopScenes:
    """Return all scenes of a split, which depend on its name alone. The arrays are shared: do not write to them."""
    return draw_scenes(generator(0, f"tabletop/{split}"), SPLITS[split][1])


def _draw_positions(rng: np.random.Generator, count: int, starts_held: Array) -> tuple[Array, Array]:
    """Return positions of the gripper [S, 2] and of objects [S, 4, 2], none closer than GAP: the first of many draws
    that fits."""
    gripper = np.empty((count, 2), np.float32)
    position = np.empty((count, THINGS, 2), np.float32)
    left = np.arange(count)
    while len(left):
        block, left = left[:_BLOCK], left[_BLOCK:]
        starts = rng.uniform(-START, START, (len(block), _TRIES, 1, 2))
        things = rng.uniform(-REACH, REACH, (len(block), _TRIES, THINGS, 2))
        held = starts_held[block, None, None]
        things[:, :, -1] = np.where(held, starts[:, :, 0], things[:, :, -1])
        points = np.concatenate([starts, things], axis=2)
        distance = np.abs(points[:, :, :, None] - points[:, :, None]).max(-1)
        distance += np.eye(THINGS + 1) * 9
        distance[:, :, 0, -1] += 9 * held[..., 0]  # the gripper is where the block it holds is
        distance[:, :, -1, 0] += 9 * held[..., 0]
        fits = distance.min((2, 3)) >= GAP
        first, has_fit = fits.argmax(1), fits.any(1)
        gripper[block[has_fit]] = starts[has_fit, first[has_fit], 0]
        position[block[has_fit]] = things[has_fit, first[has_fit]]
        left = np.concatenate([left, block[~has_fit]])
    return gripper, position
