"""robosuite's control step without the work whose result is never read.

The official step runs 25 sub-steps. In each it computes all of the physics three times from equal positions and
velocities (for itself, for the controller, to integrate), asks every observable whether it is due, looks names up,
and measures contacts pair by pair in Python. Here positions and velocities are computed once per sub-step. What
depends on the solver's warm start is computed as often and in the same order as there, so every bit of the state is
equal. robosuite's operational space controller (OSC_POSE) and its gripper take a dozen calls for each physics step
instead of some seventy.

The bits are those of robosuite. Its own compiled functions get arrays of the same memory layout, on which the order of
sums depends. Products that it leaves to NumPy are NumPy's here as well: compiled functions use SciPy's library for
them. All else works on single elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import mujoco
import numpy as np
from robosuite.utils.control_utils import nullspace_torques, opspace_matrices, orientation_error
from robosuite.utils.numba import jit_decorator

from vla_rl.core.types import Array

STATE = mujoco.mjtState.mjSTATE_INTEGRATION
"""State components that the future depends on, the solver's warm start included."""
CHANGING = ("body_pos", "body_quat", "site_rgba", "cam_pos", "cam_quat")
"""Model arrays that resets and steps change: fixtures are placed, burners light up, LIBERO-Plus moves a camera."""
ALL_BUT_SOLVER = mujoco.mjtStage.mjSTAGE_VEL
"""Stages to skip where positions and velocities have not changed since the last pass."""


class SensorView(NamedTuple):
    """State that the official environment's sensors and cameras see: that of one sub-step, usually the last but one of
    a step. Sensors are read after integration, so joint positions are new, and all that is derived from them is as
    before."""

    geometry: Array
    """float64 [nq]: joint positions before the sub-step, to which poses of bodies, sites and cameras belong."""
    positions: Array
    """float64 [nq]: joint positions after the sub-step."""
    colours: Array
    """float32 [sites, 4]: RGBA of sites, some of which light up, like a stove's burner."""


class SavedStep(NamedTuple):
    """Saved state to return to, in this simulator or another one of the same task."""

    state: Array
    model: dict[str, Array]
    controller: dict[str, Any]
    loop: dict[str, Any]
    grip: Array


class ControlLoop:
    """Steps one LIBERO environment with a Panda arm under OSC_POSE.

    Args:
        env: the robosuite environment.
        fast_physics: solve once per sub-step instead of three times. Bit-identical only where the extra passes leave no
            trace in the solver, as in newer versions of MuJoCo; with those it is done in any case.
    """

    def __init__(self, env: Any, fast_physics: bool) -> None:
        self._env = env
        self._robot = robot = env.robots[0]
        self._model = env.sim.model._model
        self._data = env.sim.data._data
        self._period = 1.0 / env.control_freq
        self._once = fast_physics or not self._passes_differ()
        self._substeps = int(env.control_timestep / env.model_timestep)
        self._robot_control = RobotControl(self._model, self._data, robot)
        self._model.opt.disableflags |= mujoco.mjtDisableBit.mjDSBL_SENSOR  # of forces: no one reads them
        env.check_contact = self._are_touching
        self._geoms_of = cache(self._geoms_of_model)
        self.restart_control()

    def _passes_differ(self) -> bool:
        """Return whether a forward pass changes the warm start of the next one, as in older versions of MuJoCo."""
        mark = self._data.qacc_warmstart[0] = 1.0
        mujoco.mj_forward(self._model, self._data)
        return bool(self._data.qacc_warmstart[0] != mark)

    # ------------------------------------------------------------------------------------------------ episodes

    def restart_control(self) -> None:
        """Take over the state that robosuite's reset left. Its sensors are read after a reset and after a placement."""
        self._robot_control.grip[:] = 0.0
        self._since = 0.0
        self._sampled = False
        self._advance_sensor_clock()
        self._advance_sensor_clock()
        self.seen = self._read_sensors(self._data.qpos.copy())

    def save_step(self) -> SavedStep:
        """Return all that the future depends on."""
        state = np.zeros(mujoco.mj_stateSize(self._model, STATE))
        mujoco.mj_getState(self._model, self._data, state, STATE)
        model = {name: getattr(self._model, name).copy() for name in CHANGING}
        loop = {name: vars(self)[name] for name in ("_since", "_sampled", "seen")}
        controller = {name: value for name, value in vars(self._robot.controller).items() if name != "sim"}
        return SavedStep(state, model, controller, loop, self._robot_control.grip.copy())

    def load_step(self, saved: SavedStep) -> None:
        """Continue from a saved state as if nothing had happened since, to the last bit. Poses of bodies and all else
        that follows from the state are those of before until the next step."""
        for name, values in saved.model.items():
            getattr(self._model, name)[:] = values
        mujoco.mj_setState(self._model, self._data, saved.state, STATE)
        vars(self._robot.controller).update(saved.controller)
        vars(self).update(saved.loop)
        self._robot_control.grip[:] = saved.grip

    @contextmanager
    def undo_steps(self) -> Iterator[None]:
        """Undo all steps made inside the context."""
        saved = self.save_step()
        try:
            yield
        finally:
            self.load_step(saved)

    # --------------------------------------------------------------------------------------------------- steps

    def step(self, action: Array) -> tuple[float, bool]:
        """Apply one action, float64 [7]. Return reward and success."""
        model, data, robot = self._model, self._data, self._robot_control
        for substep in range(self._substeps):
            seen_from = data.qpos.copy() if self._advance_sensor_clock() else None
            mujoco.mj_step1(model, data)
            if not self._once:
                mujoco.mj_forwardSkip(model, data, ALL_BUT_SOLVER, 1)
                if not robot.is_read:
                    mujoco.mj_fwdConstraint(model, data)  # the forward pass of the controller: only this differs
            if substep == 0:
                robot.set_goal(action)
            robot.write_controls()
            mujoco.mj_step2(model, data)
            if seen_from is not None:
                self.seen = self._read_sensors(seen_from)
        reward = self._env.reward(action)
        self._env._post_process()
        return reward, self._env._check_success()

    def _read_sensors(self, geometry: Array) -> SensorView:
        return SensorView(geometry, self._data.qpos.copy(), self._model.site_rgba.copy())

    def _advance_sensor_clock(self) -> bool:
        """Return whether the sensors are read in this sub-step. Reproduces the clock of robosuite's observables,
        rounding included."""
        self._since += self._env.model_timestep
        due = not self._sampled
        self._sampled = True
        if self._since >= self._period:
            self._since %= self._period
            self._sampled = False
        return due

    # ------------------------------------------------------------------------------------------------- contacts

    def _are_touching(self, one: Any, other: Any) -> bool:
        """Replace robosuite's `check_contact` for two of its models: return whether any of their geoms touch."""
        pairs = self._data.contact.geom
        of_one, of_other = self._geoms_of(one)[pairs], self._geoms_of(other)[pairs]
        return bool((of_one & of_other[:, ::-1]).any())

    def _geoms_of_model(self, model: Any) -> Array:
        """Return which geoms are contact geoms of a robosuite model, bool [ngeom]."""
        names, name_of = set(model.contact_geoms), self._env.sim.model.geom_id2name
        return np.array([name_of(geom) in names for geom in range(self._model.ngeom)])


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
