"""RoboTwin's scripted expert: its solution of a scene, recorded as joint targets that chunks of any length can follow.
The expert (`play_once`) plans whole motions and plays them itself, so it cannot be asked for the next action. Its
motions are recorded once for each scene, and an episode follows them from its beginning."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from attrs import frozen

from vla_rl.core.types import Array
from vla_rl.plugins.envs.robotwin.installation import Installation

JOINTS_ONLY = "control: end_effector has no expert, whose solutions are joint targets"
PHYSICS_STEPS = 25
"""Physics steps of RoboTwin (1/250 s) for each recorded target, so 10 targets a second."""


@frozen(kw_only=True, eq=False)
class ExpertMotion:
    """The expert's solution of one scene."""

    targets: Array
    """Joint targets, float32 [T, 14], one each 0.1 s."""
    things: Mapping[str, str]
    """Objects that the instruction names: placeholder -> file of an object's names, or an arm."""

    def take_chunk(self, start: int, length: int) -> Array:
        """Return the targets of `length` actions from number `start` on; the last target repeats."""
        return self.targets[np.clip(np.arange(start, start + length), 0, len(self.targets) - 1)]


def solve_scene(robotwin: Installation, task: Any, name: str, seed: int) -> ExpertMotion | None:
    """Set up a scene and let the expert play it. Return its solution, or None where the objects do not come to rest or
    the expert fails. The scene is left as it then is.

    Args:
        task: RoboTwin's object of the task called `name`.
    """
    try:
        task.setup_demo(now_ep_num=seed, seed=seed, is_test=True, **robotwin.setup_arguments(name))
    except robotwin.unstable_error():
        return None
    low, high = robotwin.joint_bounds()
    targets = [joint_targets(task.robot)]
    steps = 0
    original = task.scene.step

    def record_step() -> None:
        nonlocal steps
        original()
        steps += 1
        if steps % PHYSICS_STEPS == 0:
            targets.append(joint_targets(task.robot))

    task.scene.step = record_step
    try:
        info = task.play_once()
    except Exception:  # planners fail in many ways; RoboTwin's evaluation counts all as a bad seed
        return None
    finally:
        task.scene.step = original
    if not (task.plan_success and task.check_success()):
        return None
    targets.append(joint_targets(task.robot))
    inside = np.clip(np.stack(targets[1:]), np.asarray(low, np.float32), np.asarray(high, np.float32))
    return ExpertMotion(targets=inside, things=dict(info["info"]))


def joint_targets(robot: Any) -> Array:
    """Return the targets that the joints were last given, float32 [14], in the order of an action."""
    return np.array([*robot.get_left_arm_jointState(), *robot.get_right_arm_jointState()], np.float32)
