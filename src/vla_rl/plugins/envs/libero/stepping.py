"""robosuite's control step without the work whose result is never read.

The official step runs 25 sub-steps. In each it computes all of the physics three times from equal positions and
velocities (for itself, for the controller, to integrate), asks every observable whether it is due, looks names up,
and measures contacts pair by pair in Python. Here positions and velocities are computed once per sub-step. What
depends on the solver's warm start is computed as often and in the same order as there, so every bit of the state is
equal.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any, NamedTuple

import mujoco
import numpy as np

from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.robot_control import RobotControl

STATE = mujoco.mjtState.mjSTATE_INTEGRATION
"""State components that the future depends on, the solver's warm start included."""
CHANGING = ("body_pos", "body_quat", "site_rgba", "cam_pos", "cam_quat")
"""Model arrays that resets and steps change: fixtures are placed, burners light up, LIBERO-Plus moves a camera."""
ALL_BUT_SOLVER = mujoco.mjtStage.mjSTAGE_VEL
"""Stages to skip where positions and velocities have not changed since the last pass."""


class SensorView(NamedTuple):
    """State that the official environment's sensors and cameras see: that of one sub-step, usually the last but one of
    a step.

    Sensors are read after integration, so joint positions are new, and all that is derived from them is as before.
    """

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
        """Take over the state that robosuite's reset has left. Its sensors are read after a reset and after a
        placement."""
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
        """Replace robosuite's `check_contact` for two of its models: return whether any geom of one touches any of the
        other."""
        pairs = self._data.contact.geom
        of_one, of_other = self._geoms_of(one)[pairs], self._geoms_of(other)[pairs]
        return bool((of_one & of_other[:, ::-1]).any())

    def _geoms_of_model(self, model: Any) -> Array:
        """Return which geoms are contact geoms of a robosuite model, bool [ngeom]."""
        names, name_of = set(model.contact_geoms), self._env.sim.model.geom_id2name
        return np.array([name_of(geom) in names for geom in range(self._model.ngeom)])
