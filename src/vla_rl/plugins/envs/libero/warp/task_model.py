"""What a batch needs to know of a LIBERO task, and the starts of its episodes, both read from robosuite on the host."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import mujoco
import numpy as np
from attrs import frozen

from vla_rl.core.types import Array
from vla_rl.plugins.envs.libero.compiled import CompiledModels
from vla_rl.plugins.envs.libero.config import LiberoConfig
from vla_rl.plugins.envs.libero.scene import LiberoScene
from vla_rl.plugins.envs.libero.scenes import MIB, SceneCache
from vla_rl.plugins.envs.libero.single_env import LiberoEnv
from vla_rl.plugins.envs.libero.suites import LiberoTask
from vla_rl.plugins.envs.libero.warp.goals import Predicate, read_goal

REMEMBERED = 4000
"""Most episode starts that are cached instead of computed again; about 25 kB each."""


@frozen(kw_only=True, eq=False)
class TaskModel:
    """A task's compiled model with its textures, and the indices that stepping, success and observations need."""

    task: LiberoTask
    model: mujoco.MjModel
    goal: tuple[Predicate, ...]
    hand_site: int
    hand_body: int
    arm_positions: Array
    """int64 [7]: indices of the arm's joint positions."""
    arm_velocities: Array
    """int64 [7]: indices of the arm's velocities."""
    arm_actuators: Array
    """int64 [7]"""
    finger_positions: Array
    """int64 [2]"""
    finger_actuators: Array
    """int64 [2]"""
    substeps: int
    """Physics steps of an action."""
    things: dict[str, int]
    """Object -> its body."""


class EpisodeStart(NamedTuple):
    """State of a world at the start of an episode, settled: float64 arrays of one world."""

    qpos: Array
    qvel: Array
    warm_start: Array
    """[nv]: acceleration from which the solver begins."""
    control: Array
    """[nu]"""
    body_pos: Array
    """[bodies, 3]: positions in the model, which the placement of fixtures changes."""
    body_quat: Array
    geom_pos: Array
    """[geoms, 3]: in the world. Those of fixtures do not move during an episode."""
    geom_mat: Array
    """[geoms, 3, 3]"""
    goal_hand: Array
    """[3]: goal of the controller."""
    goal_rotation: Array
    """[3, 3]"""
    posture: Array
    """[7]: joint angles to which the controller draws the arm."""
    grip: Array
    """[]: command of the gripper."""


class HostScenes:
    """Tasks and episode starts of a spec. One env instance of `libero` computes them on the host, with C MuJoCo."""

    def __init__(self, config: LiberoConfig) -> None:
        """Prepare to build scenes at their first use.

        Args:
            config: settings of `libero` that select the same tasks and states, without cameras.
        """
        self._compiled = CompiledModels(config.disk_mib * MIB)
        self._scenes = SceneCache(config, "cpu")
        self._env = LiberoEnv(0, self._scenes, config)
        self._models: dict[LiberoTask, TaskModel] = {}
        self.find_start = lru_cache(REMEMBERED)(self._compute_start)

    def _compute_start(self, state_id: int) -> tuple[LiberoTask, EpisodeStart]:
        """Return the task of a reset state and the start of its episodes."""
        scene = self.place_scene(state_id)
        if scene.task not in self._models:
            self._models[scene.task] = read_task(scene, self._compiled)
        return scene.task, read_start(scene, self._models[scene.task].model)

    def place_scene(self, state_id: int) -> LiberoScene:
        """Return the scene of a reset state's task on the host, at an episode's start. Valid until the next call."""
        self._env.reset(state_id, 0)
        return self._scenes.resume_scene(0)

    def find_model(self, task: LiberoTask) -> TaskModel:
        """Return the model of a task one of whose starts has been computed."""
        return self._models[task]

    def close(self) -> None:
        self._env.close()


def read_task(scene: LiberoScene, compiled: CompiledModels) -> TaskModel:
    """Return a scene's task for batches. Raise UserError for a goal that is not written for them."""
    env, robot = scene._env, scene._robot
    return TaskModel(
        task=scene.task,
        model=compiled.load_model(env.model.get_xml()),
        goal=read_goal(env, scene.task.name),
        hand_site=robot.eef_site_id,
        hand_body=env.sim.model.body_name2id(robot.robot_model.eef_name),
        arm_positions=np.array(robot._ref_joint_pos_indexes),
        arm_velocities=np.array(robot._ref_joint_vel_indexes),
        arm_actuators=np.array(robot._ref_joint_actuator_indexes),
        finger_positions=np.array(robot._ref_gripper_joint_pos_indexes),
        finger_actuators=np.array(robot._ref_joint_gripper_actuator_indexes),
        substeps=int(env.control_timestep / env.model_timestep),
        things={thing.name: env.obj_body_id[thing.name] for thing in env.objects},
    )


def read_start(scene: Any, drawn: mujoco.MjModel) -> EpisodeStart:
    """Return the present state of a scene. `drawn`: its model with the meshes that are only drawn, whose poses the
    scene's own model does not have."""
    data, model, controller = scene._data, scene._model, scene._robot.controller
    drawn.body_pos[:], drawn.body_quat[:] = model.body_pos, model.body_quat
    poses = mujoco.MjData(drawn)
    poses.qpos[:] = data.qpos
    mujoco.mj_kinematics(drawn, poses)
    return EpisodeStart(
        qpos=data.qpos.copy(),
        qvel=data.qvel.copy(),
        warm_start=data.qacc_warmstart.copy(),
        control=data.ctrl.copy(),
        body_pos=model.body_pos.copy(),
        body_quat=model.body_quat.copy(),
        geom_pos=poses.geom_xpos.copy(),
        geom_mat=poses.geom_xmat.reshape(-1, 3, 3).copy(),
        goal_hand=np.array(controller.goal_pos),
        goal_rotation=np.array(controller.goal_ori),
        posture=np.array(controller.initial_joint),
        grip=np.array(scene._loop._robot_control.grip[1]),  # the first finger has the opposite sign
    )
