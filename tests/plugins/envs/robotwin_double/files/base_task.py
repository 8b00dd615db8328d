"""envs/_base_task.py of main at cf47ab5 (in stable_2.0 at 13c3c47 the same, but for names of data files)."""
# ruff: noqa: NPY002  the sources draw from NumPy's global generator

from pathlib import Path

import numpy as np
from robotwin.envs.camera.camera import Camera, Scene
from robotwin.envs.scene import EXPERT_STEPS, GRIPPERS, NEAR, REACH, SUB_STEPS, draw_image
from robotwin.envs.utils.create_actor import UnStableError

print("missing pytorch3d")  # as envs/camera/camera.py does when it is imported without

READ = {
    "now_ep_num", "seed", "is_test", "task_name", "task_config", "save_path", "render_freq", "data_type", "save_data",
    "eval_mode", "domain_randomization", "eval_video_save_dir", "save_freq", "need_plan", "left_joint_path",
    "right_joint_path", "camera", "left_embodiment_config", "right_embodiment_config", "left_robot_file",
    "right_robot_file", "dual_arm_embodied", "embodiment_dis", "head_camera_h", "head_camera_w", "embodiment",
    "embodiment_name", "episode_num", "use_seed", "language_num", "pcd_down_sample_num", "pcd_crop", "clear_cache_freq",
    "collect_data", "eval_video_log", "eval_instruction", "policy_name", "ckpt_setting", "step_lim",
}  # fmt: skip
"""Keys of the settings and those that script/eval_policy.py adds. `setup_demo` itself takes any keyword."""


class Robot:
    """envs/robot/robot.py: the drive targets of the joints, which is what these two give, and not where the joints
    are."""

    def __init__(self):
        self.targets = np.zeros(14)
        self.targets[GRIPPERS] = 1.0

    def get_left_arm_jointState(self):
        return self.targets[:7].tolist()

    def get_right_arm_jointState(self):
        return self.targets[7:].tolist()

    def left_plan_path(self, target_pose):
        return self._plan(target_pose, slice(0, 6))

    def right_plan_path(self, target_pose):
        return self._plan(target_pose, slice(7, 13))

    def _plan(self, pose, arm):
        """A plan to a position [m] and quaternion; of no points where the arm is there already. (In the double the six
        joints are the position and the quaternion's last three numbers.)"""
        if abs(np.linalg.norm(pose[3:]) - 1) > 1e-6:
            raise ValueError("a quaternion has the length 1")
        target = np.array([*pose[:3], *pose[4:]])
        if np.abs(target[:3]).max() > 2 * REACH:
            raise RuntimeError("Fail to parametrize path")
        if np.abs(target[:3]).max() > REACH:
            return {"status": "Fail"}
        points = 0 if np.allclose(target, self.targets[arm], atol=1e-6) else SUB_STEPS
        ways = np.arange(1, points + 1)[:, None] / SUB_STEPS
        return {"status": "Success", "position": self.targets[arm] + ways * (target - self.targets[arm])}


class Base_Task:
    READ = READ

    def __init__(self):
        pass

    def _init_task_env_(self, table_xy_bias=(0, 0), table_height_bias=0, **kwags):
        """What `setup_demo` of every task calls with its own keywords. Seeds NumPy and torch globally. Raises
        UnStableError after the scene was built, for a seed whose things do not come to rest; KeyError for a keyword
        of the evaluation script that is missing; AttributeError without domain_randomization or data_type."""
        unknown = set(kwags) - self.READ
        if unknown:
            raise TypeError(f"nothing reads {sorted(unknown)}")
        seed = kwags.get("seed", 0)
        if type(seed) is not int:
            raise TypeError(f"seed is an int, got {type(seed)}")
        np.random.seed(seed)
        self.ep_num = kwags.get("now_ep_num", 0)
        self.task_name = kwags.get("task_name")
        self.render_freq = kwags.get("render_freq", 10)
        if self.render_freq:
            raise RuntimeError("the viewer wants a display")
        self.data_type = kwags.get("data_type")
        self.eval_mode = kwags.get("eval_mode", False)
        self.random_background = kwags.get("domain_randomization").get("random_background", False)
        self.plan_success = True
        self.now_obs = {}
        self.take_action_cnt = 0
        self.eval_video_path = kwags.get("eval_video_save_dir")
        self.eval_success = False
        self.step_lim = None
        self.setup_scene()
        self._take_over(kwags)
        self._load_robot(kwags)
        self._load_objects()
        self.cameras = Camera(kwags["camera"])
        self.cameras.load_camera(self.scene)
        self.load_actors(seed)
        if self.unstable:
            raise UnStableError(f"Objects is unstable in seed({seed}), unstable objects: block")
        if self.eval_mode:
            self.step_lim = {"beat_block_hammer": 400, "place_empty_cup": 500}.get(self.task_name, 1000)
        self.info = {"cluttered_table_info": [], "texture_info": {}, "info": {}}

    def setup_scene(self, **kwargs):
        """Lights cast shadows unless `shadow` is False, which no caller gives."""
        self.scene, self.shadow = Scene(), kwargs.get("shadow", True)

    def _take_over(self, kwags):
        self.instruction = None

    def _load_robot(self, kwags):
        """The grippers are open after set-up."""
        for side, place in (("left", 0), ("right", 1)):
            kwags[f"{side}_robot_file"]
            if len(kwags[f"{side}_embodiment_config"]["arm_joints_name"][place]) != 6:
                raise RuntimeError("the double has arms of six joints")
        if not kwags["dual_arm_embodied"]:
            kwags["embodiment_dis"]
        self.robot = Robot()

    def _load_objects(self):
        """envs/utils/create_actor.py: meshes are named relative to the working directory, which has to be the checkout."""
        if not Path("assets/objects").is_dir():
            raise FileNotFoundError("assets/objects")

    def get_obs(self):
        """Renders. AttributeError before `setup_demo`. "rgb" and "vector" are there as `data_type` has it."""
        targets = self.robot.targets
        scene = np.concatenate([self.goal, targets])
        numbers = {"head_camera": scene, "left_camera": targets[:7], "right_camera": targets[7:]}
        shades = {"head_camera": 10, "left_camera": 20, "right_camera": 30}
        seen = {"observation": {}, "pointcloud": [], "joint_action": {}, "endpose": {}}
        for name, size in self.cameras.sizes.items():
            seen["observation"][name] = {
                "intrinsic_cv": np.eye(3),
                "extrinsic_cv": np.eye(3, 4),
                "cam2world_gl": np.eye(4),
            }
            if self.data_type.get("rgb", False):
                seen["observation"][name]["rgb"] = draw_image(size, shades[name], numbers[name])
        if self.data_type.get("qpos", False):
            seen["joint_action"] |= {
                "left_arm": targets[:6].tolist(),
                "left_gripper": float(targets[6]),
                "right_arm": targets[7:13].tolist(),
                "right_gripper": float(targets[13]),
                "vector": targets.copy(),
            }
        self.now_obs = seen
        return seen

    def set_instruction(self, instruction=None):
        self.instruction = instruction

    def get_instruction(self, instruction=None):
        return self.instruction

    def check_success(self):
        return bool((np.abs(self.robot.targets - self.goal) < NEAR).all())

    def take_action(self, action, action_type="qpos"):
        """One absolute target, [left arm, left gripper, right arm, right gripper]. Does nothing, and says nothing,
        after success and at the step limit; ends in the middle of the motion when the task is solved there. Prints.
        (The sources read past a 15th number; grippers are cut to 0..1, joints are not.)"""
        if action_type not in ("qpos", "ee"):
            raise UnboundLocalError(f"action_type is qpos or ee, got {action_type!r}")
        target, size = np.asarray(action), {"qpos": 14, "ee": 16}[action_type]
        if target.shape != (size,) or target.dtype.kind != "f":
            raise ValueError(f"an action is float [{size}], got {target.dtype} {list(target.shape)}")
        if self.take_action_cnt == self.step_lim or self.eval_success:
            return
        self.take_action_cnt += 1
        print(f"step: \033[92m{self.take_action_cnt} / {self.step_lim}\033[0m", end="\r")
        if action_type == "ee":
            target = self._planned(target)
        if self._move(target):
            self.eval_success = True
            self.get_obs()

    def get_arm_pose(self, arm_tag):
        """-> position [m] and quaternion (w, x, y, z) of the hand, in the world."""
        joints = self.robot.targets[:6] if arm_tag == "left" else self.robot.targets[7:13]
        w = np.sqrt(max(0.0, 1 - float(np.square(joints[3:]).sum())))
        return [*joints[:3].tolist(), w, *joints[3:].tolist()]

    def _planned(self, poses):
        """An arm without a plan stays. One whose plan has no points ends in a division by their number, and if both are
        such, nothing moves, grippers neither."""
        target, points = self.robot.targets.copy(), []
        for arm, plan, pose in (
            (slice(0, 6), self.robot.left_plan_path, poses[:7]),
            (slice(7, 13), self.robot.right_plan_path, poses[8:15]),
        ):
            result = plan(pose)
            planned = result["status"] == "Success"
            points.append(len(result["position"]) if planned else 50)
            if planned and points[-1]:
                target[arm] = result["position"][-1]
        if points == [0, 0]:
            return target
        1 / min(points)
        target[GRIPPERS] = poses[[7, 15]]
        return target

    def _move(self, target, steps=SUB_STEPS):
        """-> whether the task was solved on the way, where the robot then stands."""
        start, target = self.robot.targets.copy(), np.array(target, np.float64)
        target[GRIPPERS] = np.clip(target[GRIPPERS], 0, 1)
        for i in range(1, steps + 1):
            self.robot.targets = start + (target - start) * (i / steps)
            self.scene.step()
            if self.check_success():
                return True
        return False

    def play_once(self):
        """The expert: moves, and leaves `plan_success`. -> `info`, whose "info" fills the instruction's placeholders."""
        if self.hard == "raises":
            raise IndexError("list index out of range")
        self.plan_success = self.hard != "no plan"
        if self.plan_success:
            self._move(self.goal, EXPERT_STEPS)
        self.info["info"] = self.things
        return self.info

    def close_env(self, clear_cache=False):
        """main and stable_2.0 keep the scene's objects, so that `check_success` can still be asked (as
        script/eval_policy.py does)."""
        if not isinstance(clear_cache, bool):
            raise TypeError(f"clear_cache is a bool, got {clear_cache!r}")
