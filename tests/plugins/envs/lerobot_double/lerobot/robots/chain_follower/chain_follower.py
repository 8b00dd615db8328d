import json
import time
from pathlib import Path

import numpy as np

from lerobot.robots.chain_follower.config_chain_follower import ChainFollowerConfig
from lerobot.robots.robot import Robot
from lerobot.utils.errors import DeviceNotConnectedError

JOINTS = ("shoulder.pos", "elbow.pos", "gripper.pos")


class ChainFollower(Robot):
    config_class = ChainFollowerConfig
    name = "chain_follower"

    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self.positions = dict.fromkeys(JOINTS, 0.0)
        self.sent = 0
        self._connected = False

    @property
    def observation_features(self) -> dict:
        images = {name: (camera.height, camera.width, 3) for name, camera in self.config.cameras.items()}
        return dict.fromkeys(JOINTS, float) | images

    @property
    def action_features(self) -> dict:
        return dict.fromkeys(JOINTS, float)

    @property
    def is_connected(self) -> bool:
        return self._connected

    def connect(self, calibrate: bool = True) -> None:
        self._note("connect", calibrate)
        if not Path(self.config.port).exists():
            raise DeviceNotConnectedError(f"no device at {self.config.port}")
        self._connected = True

    @property
    def is_calibrated(self) -> bool:
        return self.config.calibrated

    def calibrate(self) -> None:
        input("move the robot to the middle of its range")

    def configure(self) -> None:
        pass

    def get_observation(self) -> dict:
        self._check()
        images = {name: self._drawn(camera.height, camera.width) for name, camera in self.config.cameras.items()}
        return dict(self.positions) | images

    def send_action(self, action: dict) -> dict:
        self._check()
        self.sent += 1
        if self.config.hang_after is not None and self.sent > self.config.hang_after:
            time.sleep(3600)
        self._note("send", action)
        self.positions |= action
        return dict(action)

    def disconnect(self) -> None:
        self._note("disconnect")
        self._connected = False

    def _check(self) -> None:
        if not self._connected:
            raise DeviceNotConnectedError
        if not Path(self.config.port).exists():
            raise ConnectionError(f"could not read from {self.config.port}")

    def _drawn(self, height: int, width: int) -> np.ndarray:
        image = np.zeros((height, width, 3), np.uint8)
        for channel, position in enumerate(self.positions.values()):
            row = min(height - 1, int((position + 100) / 200 * height))
            image[row, channel * width // 3 : (channel + 1) * width // 3, channel] = 255
        return image

    def _note(self, *what) -> None:
        if self.config.log is not None:
            with Path(self.config.log).open("a", encoding="utf-8") as file:
                file.write(json.dumps(what) + "\n")
