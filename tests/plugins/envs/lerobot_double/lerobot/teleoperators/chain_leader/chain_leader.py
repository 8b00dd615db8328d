from pathlib import Path

from lerobot.teleoperators.chain_leader.config_chain_leader import ChainLeaderConfig, ChainStickConfig
from lerobot.teleoperators.teleoperator import Teleoperator
from lerobot.teleoperators.utils import TeleopEvents
from lerobot.utils.errors import DeviceNotConnectedError


class ChainLeader(Teleoperator):
    config_class = ChainLeaderConfig
    name = "chain_leader"

    def __init__(self, config):
        super().__init__(config)
        self.config = config
        self._connected = False

    @property
    def action_features(self) -> dict:
        return dict.fromkeys(("shoulder.pos", "elbow.pos", "gripper.pos"), float)

    @property
    def feedback_features(self) -> dict:
        return {}

    @property
    def is_connected(self) -> bool:
        return self._connected and Path(self.config.port).exists()

    def connect(self, calibrate: bool = True) -> None:
        if not Path(self.config.port).exists():
            raise DeviceNotConnectedError(f"no device at {self.config.port}")
        self._connected = True

    @property
    def is_calibrated(self) -> bool:
        return True

    def calibrate(self) -> None:
        pass

    def configure(self) -> None:
        pass

    def get_action(self) -> dict:
        if not self.is_connected:
            raise DeviceNotConnectedError
        return dict.fromkeys(self.action_features, self.config.goal)

    def send_feedback(self, feedback: dict) -> None:
        pass

    def disconnect(self) -> None:
        self._connected = False


class ChainStick(ChainLeader):
    config_class = ChainStickConfig
    name = "chain_stick"

    def __init__(self, config):
        super().__init__(config)
        self.steps = 0

    def connect(self) -> None:
        """Connect, without calibration, as lerobot's gamepad does."""
        super().connect()

    def get_teleop_events(self) -> dict:
        step = self.steps % self.config.every
        self.steps += 1
        pressed = self.config.button if step == self.config.last else None
        return {
            TeleopEvents.IS_INTERVENTION: self.config.first <= step <= self.config.last,
            TeleopEvents.TERMINATE_EPISODE: pressed in ("failure", "rerecord_episode"),
            TeleopEvents.SUCCESS: pressed == "success",
            TeleopEvents.RERECORD_EPISODE: pressed == "rerecord_episode",
        }
