"""robosuite's operational space controller (OSC_POSE) and its gripper, in a dozen calls for each physics step instead
of some seventy.

The bits are those of robosuite. Its own compiled functions get arrays of the same memory layout, on which the order of
sums depends. Products that it leaves to NumPy are NumPy's here as well: compiled functions use SciPy's library for
them. All else works on single elements.
"""

from __future__ import annotations

from typing import Any

import mujoco
import numpy as np
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error
from robosuite.utils.numba import jit_decorator

from vla_rl.core.types import Array

OLD_MASSES = tuple(int(part) for part in mujoco.__version__.split(".")[:2]) < (3, 10)
"""Whether MuJoCo is older than 3.10, where `mj_fullM` takes other arguments."""
OPENING = np.array([-1.0, 1.0])
"""Opening directions of the two fingers."""


class RobotControl:
    """Controls of a Panda arm and its gripper in one simulator."""

    def __init__(self, model: mujoco.MjModel, data: mujoco.MjData, robot: Any) -> None:
        self._model = model
        self._data = data
        self._robot = robot
        self._site = robot.eef_site_id
        joints, dofs = (
            slice(indices[0], indices[-1] + 1)  # those of an arm are consecutive
            for indices in (robot._ref_joint_pos_indexes, robot._ref_joint_vel_indexes)
        )
        count = len(robot._ref_joint_vel_indexes)
        self._velocities = data.qvel
        self._bias = data.qfrc_bias[dofs]
        self._jacobians = np.zeros((2, 3, model.nv))
        self._masses = np.zeros((model.nv, model.nv))
        self._hand_velocity = np.zeros((2, 3))
        self._given = (
            *self._jacobians[:, :, dofs],
            self._masses[dofs, dofs],
            data.qpos[joints],
            data.qvel[dofs],
            data.site_xpos[self._site],
            data.site_xmat[self._site].reshape(3, 3),
            *self._hand_velocity,
        )
        self._linear_masses = np.zeros((3, 3), order="F")
        self._angular_masses = np.zeros((3, 3), order="F")
        self._force = np.zeros(3)
        self._torque = np.zeros(3)
        self._jacobian = np.zeros((count, 6))
        self._posture_torques = np.zeros(count)
        self._wrench = np.zeros(6)
        self._torques = np.zeros(count)
        gripper_actuators = np.array(robot._ref_joint_gripper_actuator_indexes)
        low, high = model.actuator_ctrlrange[gripper_actuators].T
        self._limits = (
            *robot.torque_limits,
            data.ctrl,
            np.array(robot._ref_joint_actuator_indexes),
            gripper_actuators,
            0.5 * (high + low),
            0.5 * (high - low),
        )
        self.grip = np.zeros(len(OPENING))
        """Where the fingers are to be, float64 [2]: -1 to 1, in the direction of their joints."""

    @property
    def is_read(self) -> bool:
        """Whether robosuite's controller keeps to what it has read of the arm, as in the first physics step after a
        reset, where it has read it before the scene was changed."""
        return not self._robot.controller.new_update

    def set_goal(self, action: Array) -> None:
        """Set the goal of the hand, relative to where it is, and the direction of the fingers.

        Args:
            action: float64 [7].
        """
        controller, is_read = self._robot.controller, self.is_read
        if not is_read:
            controller.ee_pos = self._data.site_xpos[self._site].copy()
            controller.ee_ori_mat = self._data.site_xmat[self._site].reshape(3, 3).copy()
            controller.new_update = False  # else it would read all the rest as well
        controller.set_goal(action[:6])
        controller.new_update = not is_read
        self._opening = OPENING * self._robot.gripper.speed * np.sign(action[6:])

    def write_controls(self) -> None:
        """Write the controls of the next physics step, which lead hand and fingers to their goals."""
        controller = self._robot.controller
        torques = controller.run_controller() if self.is_read else self._compute_torques(controller)
        limit_controls(torques, self.grip, self._opening, *self._limits)

    def _compute_torques(self, controller: Any) -> Array:
        """Return the torques that lead the hand to its goal, float64 [7], in Nm, valid until the next call."""
        torques = self._torques
        linear, angular = self._jacobians
        mujoco.mj_jacSite(self._model, self._data, linear, angular, self._site)
        mujoco.mj_fullM(self._model, *((self._masses, self._data.qM) if OLD_MASSES else (self._data, self._masses)))
        linear.dot(self._velocities, self._hand_velocity[0])
        angular.dot(self._velocities, self._hand_velocity[1])
        solve_arm(
            *self._given,
            controller.goal_pos,
            controller.goal_ori,
            controller.kp,
            controller.kd,
            controller.initial_joint,
            self._linear_masses,
            self._angular_masses,
            self._force,
            self._torque,
            self._jacobian,
            self._posture_torques,
        )
        self._linear_masses.dot(self._force, self._wrench[:3])
        self._angular_masses.dot(self._torque, self._wrench[3:])
        self._jacobian.dot(self._wrench, torques)
        torques += self._bias
        torques += self._posture_torques
        return torques


@jit_decorator  # type: ignore[untyped-decorator]
def solve_arm(
    linear: Array,
    angular: Array,
    masses: Array,
    angles: Array,
    speeds: Array,
    hand_position: Array,
    hand_rotation: Array,
    linear_velocity: Array,
    angular_velocity: Array,
    goal_position: Array,
    goal_rotation: Array,
    stiffness: Array,
    damping: Array,
    posture: Array,
    linear_masses: Array,
    angular_masses: Array,
    force: Array,
    torque: Array,
    jacobian: Array,
    posture_torques: Array,
) -> None:
    """Compute what the torques of an arm are made of. All arrays are float64.

    Args:
        linear: Jacobian of the hand's position in the arm's joints, [3, 7].
        angular: Jacobian of its rotation, [3, 7].
        masses: mass matrix of the arm, [7, 7].
        angles: of the arm's joints, [7].
        speeds: [7].
        hand_position: [3], in metres.
        hand_rotation: matrix, [3, 3].
        linear_velocity: of the hand, [3].
        angular_velocity: of the hand, [3].
        goal_position: [3].
        goal_rotation: matrix, [3, 3].
        stiffness: for the position and the rotation, [6].
        damping: [6].
        posture: angles to keep to where the hand allows it, [7].
        linear_masses: receives the mass with which the hand resists forces, [3, 3].
        angular_masses: receives that with which it resists torques, [3, 3].
        force: receives the force that pulls the hand to its goal, [3].
        torque: receives the torque that turns it, [3].
        jacobian: receives the transposed Jacobian, [7, 6].
        posture_torques: receives the torques that keep the posture and do not move the hand, [7].
    """
    turn = orientation_error(goal_rotation, hand_rotation)
    for axis in range(3):
        way = goal_position[axis] - hand_position[axis]
        force[axis] = way * stiffness[axis] + -linear_velocity[axis] * damping[axis]
        torque[axis] = turn[axis] * stiffness[3 + axis] + -angular_velocity[axis] * damping[3 + axis]
    jacobian[:, :3] = linear.T
    jacobian[:, 3:] = angular.T
    masses_of_arm = np.asfortranarray(masses)
    _, of_forces, of_torques, without_hand = opspace_matrices(
        masses_of_arm, jacobian.T, np.asfortranarray(linear), np.asfortranarray(angular)
    )
    linear_masses[:] = of_forces
    angular_masses[:] = of_torques
    posture_torques[:] = nullspace_torques(masses_of_arm, without_hand, posture, angles, speeds)


@jit_decorator  # type: ignore[untyped-decorator]
def limit_controls(
    torques: Array,
    grip: Array,
    opening: Array,
    low: Array,
    high: Array,
    controls: Array,
    actuators: Array,
    gripper_actuators: Array,
    grip_bias: Array,
    grip_weight: Array,
) -> None:
    """Write the controls of arm and gripper within their limits.

    Args:
        torques: float64 [7].
        grip: float64 [2], where the fingers are to be; is moved.
        opening: float64 [2], by how much it is moved.
        low: float64 [7], least torques.
        high: float64 [7], greatest torques.
        controls: receives the controls, float64 [nu].
        actuators: int64 [7]: where the arm's are in `controls`.
        gripper_actuators: int64 [2].
        grip_bias: float64 [2], centre of the fingers' controls.
        grip_weight: float64 [2], half their range.
    """
    for joint in range(len(torques)):
        controls[actuators[joint]] = np.minimum(np.maximum(torques[joint], low[joint]), high[joint])
    for finger in range(len(grip)):
        grip[finger] = np.minimum(np.maximum(grip[finger] + opening[finger], -1.0), 1.0)
        controls[gripper_actuators[finger]] = grip_bias[finger] + grip_weight[finger] * grip[finger]
