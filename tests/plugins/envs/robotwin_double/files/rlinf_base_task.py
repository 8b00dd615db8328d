"""envs/_base_task.py of RLinf_support at 0008ae6, robotwin/envs/_base_task.py of the wheel 0.1.3 (which reads its settings
from the package): what differs from main."""
# ruff: noqa: NPY002  the sources draw from NumPy's global generator

import os
from pathlib import Path

import numpy as np
from robotwin.envs._main_base_task import READ
from robotwin.envs._main_base_task import Base_Task as _MainBaseTask
from robotwin.envs.robot.planner import MplibWrapperPlanner


class Base_Task(_MainBaseTask):
    READ = READ | {"planner_backend", "instruction", "n_envs", "action_dim", "rdt_step"}

    def _take_over(self, kwags):
        self.step_lim = kwags.get("step_lim")
        self.instruction = kwags.get("instruction")

    def _load_robot(self, kwags):
        """envs/robot/robot.py: `planner_backend` is curobo unless given, and an assertion without cuRobo. Without it
        a robot that is there is not set up again: a scene has to be closed before the next one."""
        if kwags.get("planner_backend", "curobo") == "curobo":
            raise AssertionError(
                "CuroboPlanner is not imported correctly, please check if the curobo is installed correctly"
            )
        if getattr(self, "robot", None) is not None:
            raise TypeError("isinstance() arg 2 must be a type, a tuple of types, or a union")
        super()._load_robot(kwags)
        names = kwags["left_embodiment_config"]["arm_joints_name"]
        # SAPIEN orders the joints of an articulation by depth: the first of each arm, then the second of each, ...
        joints = (
            [name for pair in zip(*names, strict=True) for name in pair] if kwags["dual_arm_embodied"] else names[0]
        )
        sides = {"left": names[0], "right": names[1] if kwags["dual_arm_embodied"] else names[0]}
        self.planners = {side: MplibWrapperPlanner(None, arm, joints) for side, arm in sides.items()}

    def play_once(self):
        for planner in self.planners.values():
            posture = [0.1 * (1 + place) for place in range(len(planner.all_joints))]
            if planner.plan_path(posture, None)["status"] != "Success":
                self.plan_success = False
                return self.info
        return super().play_once()

    def _load_objects(self):
        """envs/utils/create_actor.py: meshes are below ASSETS_PATH, which the wheel's VectorEnv sets by itself."""
        if not (Path(os.environ["ASSETS_PATH"]) / "assets/objects").is_dir():
            raise FileNotFoundError("assets/objects")

    def get_info(self):
        """In every task: what `play_once` would put into info["info"], read off the scene."""
        return dict(self.things)

    def close_env(self, clear_cache=False):
        """Drops the scene: `get_obs` and `check_success` raise AttributeError or TypeError afterwards."""
        super().close_env(clear_cache)
        for name in ("cameras", "robot", "scene", "goal"):
            if hasattr(self, name):
                setattr(self, name, None)

    def gen_sparse_reward_data(self, chunk_actions, action_type="qpos"):
        """A whole chunk, float [C, 14]. -> (reward float32 [1], termination int32 [1], truncation int32 [1],
        {"success": bool}). After success, and when the count of actions equals the step limit, nothing moves. All of
        the chunk counts, also what was not executed. An arm that is commanded to stay is moved by noise of 2e-4 from
        NumPy's global generator (`compress_path`). The chunk is one motion (TOPP) that cuts the corners at its targets:
        only the last one is reached."""
        if not isinstance(chunk_actions, np.ndarray) or chunk_actions.dtype.kind != "f":
            raise TypeError(f"chunk_actions is a float array, got {type(chunk_actions)}")
        if chunk_actions.ndim != 2 or chunk_actions.shape[1] != 14:
            raise ValueError(f"chunk_actions is [C, 14], got {list(chunk_actions.shape)}")
        if self.eval_success:
            return *_flags(1, 1, 0), {"success": True}
        if self.take_action_cnt == self.step_lim:
            return *_flags(0, 0, 1), {"success": False}
        self.take_action_cnt += chunk_actions.shape[0]
        chunk_actions = chunk_actions.copy()
        for arm in (slice(0, 6), slice(7, 13)):
            if np.allclose(chunk_actions[:, arm], self.robot.targets[arm], atol=1e-5, rtol=0):
                chunk_actions[-1, arm] = self.robot.targets[arm] + np.random.normal(0, 2e-4, 6)
        corners = (chunk_actions[:-1] + chunk_actions[1:]) / 2
        for target in [*corners, chunk_actions[-1]]:
            if self._move(target):
                self.eval_success = True
                return *_flags(1, 1, 0), {"success": True}
        return *_flags(0, 0, int(self.take_action_cnt >= self.step_lim)), {"success": False}


def _flags(reward, termination, truncation):
    return np.array([reward], np.float32), np.array([termination], np.int32), np.array([truncation], np.int32)
