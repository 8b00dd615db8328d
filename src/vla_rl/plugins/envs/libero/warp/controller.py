"""robosuite 1.4's operational space controller (OSC_POSE) for a batch of Panda arms, in torch.

One world's formulas are those of `robosuite/controllers/osc.py`, with the settings of LIBERO: gains of 150, critical
damping, position and orientation decoupled, and the redundant joint drawn to the posture after the reset. Khatib 1987.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

STIFFNESS, POSTURE_STIFFNESS = 150.0, 10.0
"""Gains of the hand's pose and of the posture. Damping is critical: twice the root."""
REACH = (0.05, 0.05, 0.05, 0.5, 0.5, 0.5)
"""Displacement of the hand's goal for an action of 1: metres, radians."""
GRIPPER_SPEED = 0.01
"""Change of the gripper's command in a sub-step."""


class ArmState(NamedTuple):
    """What the controller reads of N arms, in float32 or float64."""

    jacobian: Tensor
    """[N, 6, 7]: of the hand's site, translation before rotation."""
    masses: Tensor
    """[N, 7, 7]: joint-space mass matrix."""
    bias: Tensor
    """[N, 7]: gravity, Coriolis and centrifugal torques."""
    positions: Tensor
    """[N, 7]: joint angles [rad]."""
    velocities: Tensor
    """[N, 7]: joint velocities [rad/s]."""
    hand: Tensor
    """[N, 3]: position of the hand's site [m]."""
    rotation: Tensor
    """[N, 3, 3]: its orientation."""


class ArmGoal(NamedTuple):
    """What the controller of N arms remembers between sub-steps."""

    hand: Tensor
    """[N, 3]: goal of the hand's position [m]."""
    rotation: Tensor
    """[N, 3, 3]: goal of its orientation."""
    posture: Tensor
    """[N, 7]: joint angles after the reset [rad]."""
    grip: Tensor
    """[N]: command of the gripper, -1 open to 1 closed."""


def set_goal(goal: ArmGoal, arm: ArmState, actions: Tensor) -> ArmGoal:
    """Return the goals after new actions [N, 7]. An action without rotation leaves the goal of the orientation."""
    scaled = actions[:, :6].clamp(-1.0, 1.0) * actions.new_tensor(REACH)
    turned = _rotation_of(scaled[:, 3:]) @ arm.rotation
    turns = (scaled[:, 3:] != 0).any(1)[:, None, None]
    return goal._replace(hand=arm.hand + scaled[:, :3], rotation=torch.where(turns, turned, goal.rotation))


def move_grip(goal: ArmGoal, actions: Tensor) -> ArmGoal:
    """Return the goals after a sub-step of the gripper, which moves by the sign of an action's last number."""
    return goal._replace(grip=(goal.grip + GRIPPER_SPEED * actions[:, 6].sign()).clamp(-1.0, 1.0))


def compute_torques(arm: ArmState, goal: ArmGoal) -> Tensor:
    """Return the arms' torques [N, 7], before they are clipped to the actuators' limits. Arms whose matrices are
    singular get numbers that are not finite; others are unaffected."""
    inverse = torch.linalg.inv_ex(arm.masses)[0]
    linear, angular = arm.jacobian[:, :3], arm.jacobian[:, 3:]
    spread = inverse @ arm.jacobian.mT  # M^-1 J^T, [N, 7, 6]
    velocity = _product(arm.jacobian, arm.velocities)
    damping = 2 * STIFFNESS**0.5
    force = STIFFNESS * (goal.hand - arm.hand) - damping * velocity[:, :3]
    torque = STIFFNESS * _orientation_error(goal.rotation, arm.rotation) - damping * velocity[:, 3:]
    wrench = torch.cat(
        [
            _product(torch.linalg.inv_ex(linear @ spread[:, :, :3])[0], force),
            _product(torch.linalg.inv_ex(angular @ spread[:, :, 3:])[0], torque),
        ],
        dim=1,
    )
    relax = POSTURE_STIFFNESS * (goal.posture - arm.positions) - 2 * POSTURE_STIFFNESS**0.5 * arm.velocities
    posture = _product(arm.masses, relax)
    # The nullspace projection's transpose, (I - M^-1 J^T L J)^T, with L the inverse of J M^-1 J^T.
    coupled = _product(torch.linalg.inv_ex(arm.jacobian @ spread)[0], _product(spread.mT, posture))
    return _product(arm.jacobian.mT, wrench - coupled) + posture + arm.bias


def _orientation_error(desired: Tensor, current: Tensor) -> Tensor:
    """Return half the sum of the cross products of the axes (columns) of two orientations, [N, 3]."""
    crossed: Tensor = torch.linalg.cross(current, desired, dim=1)
    return 0.5 * crossed.sum(2)


def _rotation_of(turns: Tensor) -> Tensor:
    """Return the matrices [N, 3, 3] of rotation vectors [N, 3] (Rodrigues). robosuite rounds its own to 32 bits, so
    they differ by about 1e-7."""
    angle: Tensor = turns.norm(dim=1).clamp(min=torch.finfo(turns.dtype).tiny)[:, None, None]
    cross = turns.new_zeros(len(turns), 3, 3)
    cross[:, (2, 0, 1), (1, 2, 0)] = turns
    cross[:, (1, 2, 0), (2, 0, 1)] = -turns
    cross = cross / angle
    identity = torch.eye(3, dtype=turns.dtype, device=turns.device)
    return identity + angle.sin() * cross + (1 - angle.cos()) * (cross @ cross)


def _product(matrices: Tensor, vectors: Tensor) -> Tensor:
    return (matrices @ vectors[:, :, None])[:, :, 0]
