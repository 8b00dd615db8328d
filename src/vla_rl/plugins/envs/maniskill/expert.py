"""Scripted experts for a Panda arm. They read the simulator's poses, which a policy never sees. Each is a function of
the current state alone, so that it continues from any state, slips included."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from vla_rl.core.errors import UserError
from vla_rl.plugins.envs.maniskill.scene import ManiSkillScene, SavedScene

METRES_PER_UNIT = 0.1
"""Displacement in metres for an action of 1, in both control modes."""
ACTION_DIMS = {"pd_ee_delta_pos": 4, "pd_ee_delta_pose": 7}
OPEN, CLOSED = 1.0, -1.0
CUBE = 0.04
"""Edge of a cube in metres."""

Move = tuple[Tensor, Tensor]
"""Goal of the hand in metres [N, 3], and the gripper's action [N]."""


def rehearse_chunk(twin: ManiSkillScene, start: SavedScene, length: int) -> Tensor:
    """Return the next actions [N, length, A] from a state, found by stepping a separate simulator. Raise UserError for
    a task or control mode without an expert."""
    task, mode = twin.recipe.task, twin.recipe.control_mode
    if task not in EXPERTS or mode not in ACTION_DIMS:
        raise UserError(
            f"maniskill has no scripted expert for {task} with {mode}; it has for: {', '.join(EXPERTS)}, "
            f"with {' or '.join(ACTION_DIMS)}"
        )
    twin.restore(start, range(twin.num_envs))
    actions = []
    for _ in range(length):
        goal, gripper = EXPERTS[task](twin.env)
        action = torch.zeros(twin.num_envs, ACTION_DIMS[mode], device=twin.device)
        action[:, :3] = ((goal - _hand_position(twin.env)) / METRES_PER_UNIT).clip(-1, 1)
        action[:, -1] = gripper
        actions.append(action)
        twin.step(action)
    return torch.stack(actions, dim=1)


def pick_cube(env: Any) -> Move:
    """Grasp the cube, then move the cube, not the hand, to the goal."""
    hand, cube = _hand_position(env), env.cube.pose.p
    held = env.agent.is_grasping(env.cube)
    goal, gripper = _grasp_cube(hand, cube)
    return _choose_rows(held, env.goal_site.pose.p + hand - cube, goal), torch.where(held, CLOSED, gripper)


def stack_cube(env: Any) -> Move:
    """Grasp the first cube, lift it over the second, lower it and release it."""
    hand, cube = _hand_position(env), env.cubeA.pose.p
    place = env.cubeB.pose.p + _upward_offset(hand, CUBE)
    held, offset = env.agent.is_grasping(env.cubeA), place - cube
    over = _horizontal_distance(offset) < 0.008
    down = over & (offset[:, 2].abs() < 0.005)
    high = -offset[:, 2] > 0.03
    carried = hand + offset + _upward_offset(hand, 0.05)
    carried[~high & ~over, :2] = hand[~high & ~over, :2]
    carried[over] = (hand + offset)[over]
    goal, gripper = _grasp_cube(hand, cube)
    goal, gripper = _choose_rows(held, carried, goal), torch.where(held, CLOSED, gripper)
    goal = _choose_rows(down, hand + _upward_offset(hand, 0.05) * ~held[:, None], goal)
    return goal, torch.where(down, OPEN, gripper)


def push_cube(env: Any) -> Move:
    """Move the closed hand behind the cube and down, then push the cube along x until it is in the target."""
    hand, cube = _hand_position(env), env.obj.pose.p
    behind = cube - torch.tensor([0.09, 0.0, 0.0], device=cube.device)
    in_line = ((hand - behind)[:, 1].abs() < 0.015) & (hand[:, 0] < cube[:, 0] - 0.015)
    low = hand[:, 2] < 0.04
    goal = behind + _upward_offset(hand, 0.08)
    goal = _choose_rows(in_line & ((hand - behind)[:, 0].abs() < 0.03), behind, goal)
    goal = _choose_rows(in_line & low, torch.cat([env.goal_region.pose.p[:, :1], cube[:, 1:]], dim=1), goal)
    return goal, torch.full_like(hand[:, 0], CLOSED)


EXPERTS: dict[str, Callable[[Any], Move]] = {
    "PickCube-v1": pick_cube,
    "PushCube-v1": push_cube,
    "StackCube-v1": stack_cube,
}


def _grasp_cube(hand: Tensor, cube: Tensor) -> Move:
    """Move over the cube, down to it, and close the gripper."""
    near = _horizontal_distance(cube - hand) < 0.015
    at_cube = (cube - hand).norm(dim=1) < 0.015
    goal = _choose_rows(near, cube, cube + _upward_offset(hand, 0.08))
    return goal, torch.where(at_cube, CLOSED, OPEN)


def _hand_position(env: Any) -> Tensor:
    position: Tensor = env.agent.tcp_pose.p
    return position


def _upward_offset(like: Tensor, metres: float) -> Tensor:
    return torch.tensor([0.0, 0.0, metres], device=like.device)


def _horizontal_distance(offset: Tensor) -> Tensor:
    result: Tensor = offset[:, :2].norm(dim=1)
    return result


def _choose_rows(chosen: Tensor, one: Tensor, other: Tensor) -> Tensor:
    return torch.where(chosen[:, None], one, other)
