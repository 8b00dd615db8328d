from dataclasses import dataclass

from lerobot.cameras.configs import CameraConfig


@CameraConfig.register_subclass("drawn")
@dataclass
class DrawnCameraConfig(CameraConfig):
    """A camera whose image the robot draws."""
