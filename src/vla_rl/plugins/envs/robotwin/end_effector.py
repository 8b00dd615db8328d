"""End-effector actions: for each arm a pose in the world, position [m] and quaternion (w, x, y, z), and the gripper.
RoboTwin plans a motion to each pose; where it finds none, the arm stays."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import numpy as np

from vla_rl.core.types import Array

WORKSPACE = ((-0.6, 0.6), (-0.5, 0.3), (0.74, 1.3))
"""Bounds of a position [m]: x to the right, y away from the robot, z up; the table's top is at 0.74."""
BOUNDS = (*WORKSPACE, *[(-1.0, 1.0)] * 4, (0.0, 1.0)) * 2
QUATERNIONS = (slice(3, 7), slice(11, 15))


def move_to_poses(task: Any, action: Array) -> None:
    """Execute one action, float [16]. Quaternions are normalised; (0, 0, 0, 0) counts as no rotation."""
    poses = np.array(action, np.float64)
    for part in QUATERNIONS:
        length = np.linalg.norm(poses[part])
        poses[part] = poses[part] / length if length > 1e-6 else (1.0, 0.0, 0.0, 0.0)
    with arms_may_stay(task.robot):
        task.take_action(poses, action_type="ee")


@contextmanager
def arms_may_stay(robot: Any) -> Generator[None]:
    """Report plans without points and planners' errors as failed plans, inside the context: then the arm stays.

    An arm whose target is its own pose has a plan without points. If the other arm moves, RoboTwin's `take_action`
    divides by their number; if both stay, it moves no gripper either.
    mplib raises RuntimeError where it finds a path and no motion along it, as for some poses out of reach.
    """
    sides = ("left_plan_path", "right_plan_path")
    for name in sides:
        plan = getattr(robot, name)

        def plan_with_points(*args: Any, plan: Any = plan, **kwargs: Any) -> Any:
            try:
                result = plan(*args, **kwargs)
            except RuntimeError:
                return {"status": "Fail"}
            stays = result["status"] == "Success" and not len(result["position"])
            return {**result, "status": "Fail"} if stays else result

        setattr(robot, name, plan_with_points)
    try:
        yield
    finally:
        for name in sides:
            delattr(robot, name)
