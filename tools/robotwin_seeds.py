"""Write the seeds of RoboTwin's `stack_blocks_two` with both blocks near one place, for a small policy.

    python tools/robotwin_seeds.py examples/robotwin_seeds

The red block is on the left, 17 to 25 cm from the middle of the table, the green one on the right; both are within 6 cm
in depth and are turned by at most 17 degrees: 4 of 1,000 seeds. Blocks are placed here as RoboTwin places them, by the
numbers that NumPy's generator gives after the seed, so neither RoboTwin nor its expert runs.
"""

from __future__ import annotations

import json
import sys
from itertools import count, islice
from pathlib import Path

import numpy as np

TASK = "stack_blocks_two"
FIRST = {"eval": 100_000, "train": 300_000}
"""Split -> the seed from which on seeds are tried."""
NUMBER = {"eval": 100, "train": 500}
"""Split -> number of seeds."""
OUTWARDS_M = (0.17, 0.25)
DEPTH_M = (-0.06, 0.0)
TURN_RAD = 0.3

Pose = tuple[float, float, float]
"""x [m], y [m] and rotation [rad] of a block."""


def block_pose(draws: np.random.RandomState) -> Pose:
    """Draw the pose of a block; the numbers are drawn in RoboTwin's order."""
    x, y = draws.uniform(-0.28, 0.28), draws.uniform(-0.08, 0.05)
    while abs(x) < 0.15 and y > 0:
        y = draws.uniform(-0.08, 0)
    _height, _roll, _pitch, turn = (draws.uniform(-limit, limit) for limit in (0, 0, 0, 0.75))
    return x, y, turn


def blocks(seed: int) -> list[Pose]:
    """Return the poses of the red and the green block of a seed."""
    draws = np.random.RandomState(seed)  # RoboTwin's: np.random.seed(seed)
    draws.uniform()  # height of the table
    draws.randn(3)  # direction in which the head camera moves, by nothing
    draws.uniform()
    placed: list[Pose] = []
    while len(placed) < 2:
        x, y, turn = block_pose(draws)
        in_the_middle = abs(x) < 0.05 or x**2 + (y + 0.1) ** 2 < 0.0225
        touches = any((x - other[0]) ** 2 + (y - other[1]) ** 2 < 0.01 for other in placed)
        if not in_the_middle and not touches:
            placed.append((x, y, turn))
    return placed


def is_near(pose: Pose, side: int) -> bool:
    """Return whether a block is in the region on the left (side -1) or on the right (1)."""
    x, y, turn = pose
    return OUTWARDS_M[0] < side * x < OUTWARDS_M[1] and DEPTH_M[0] < y < DEPTH_M[1] and abs(turn) < TURN_RAD


def seeds(split: str, number: int) -> list[int]:
    """Return the first seeds of a split with both blocks in their regions."""

    def near(seed: int) -> bool:
        red, green = blocks(seed)
        return is_near(red, -1) and is_near(green, 1)

    return list(islice(filter(near, count(FIRST[split])), number))


def main() -> None:
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    for split, number in NUMBER.items():
        content = {TASK: {"success_seeds": seeds(split, number)}}
        (folder / f"{split}.json").write_text(json.dumps(content) + "\n")


if __name__ == "__main__":
    main()
