"""What stands in for physics: a robot of 14 numbers, a goal for it, and images that show both. Of the double only."""
# ruff: noqa: NPY002  the sources draw from NumPy's global generator

import numpy as np

GRIPPERS = [6, 13]
NEAR = 0.05
"""Within this of the goal, in every number, the task is solved."""
SUB_STEPS = 10
"""Physics steps of one action; success is looked for at each, as the real tasks do at 250 a second."""

REACH = 1.0
"""Positions further than this [m] along an axis are out of reach."""
EXPERT_STEPS = 260
"""Physics steps of the expert's motion: ten targets and a part of one."""


def goal(seed):
    """float64 [14] of this seed's scene, drawn from NumPy's global generator as the real tasks place their things."""
    np.random.seed(seed)
    values = np.random.uniform(-1, 1, 14)
    values[GRIPPERS] = np.random.uniform(0.2, 0.8, 2)
    return values


def unstable(seed):
    """Whether things do not come to rest: every tenth seed, and all of 500 to 599 of each thousand."""
    return seed % 10 == 3 or seed % 1000 // 100 == 5


def too_hard(seed):
    """Whether the expert finds no plan."""
    return seed % 10 == 4


def expert_raises(seed):
    return seed % 10 == 6


def draw_image(size, shade, numbers):
    """uint8 [H, W, 3], not contiguous, since the sources cut the fourth channel off: the red channel is `shade`, and
    each number is the height of a column in the green one."""
    height, width = size
    image = np.zeros((height, width, 4), np.uint8)
    image[..., 0], image[..., 3] = shade, 255
    columns = np.clip((np.asarray(numbers) + 10) / 20 * height, 0, height - 1).astype(int)
    for i, top in enumerate(columns):
        image[top:, i * width // len(columns) : (i + 1) * width // len(columns), 1] = 200
    fine = (np.abs(np.asarray(numbers) % 0.2 - 0.1) * 2550).astype(np.uint8)  # without jumps, which rounding would show
    image[..., 2] = np.repeat(fine, -(-width // len(fine)))[:width]
    return image[:, :, :3]
