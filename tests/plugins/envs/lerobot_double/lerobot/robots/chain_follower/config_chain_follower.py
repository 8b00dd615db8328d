from dataclasses import dataclass, field

from lerobot.cameras import CameraConfig
from lerobot.robots.config import RobotConfig


@RobotConfig.register_subclass("chain_follower")
@dataclass
class ChainFollowerConfig(RobotConfig):
    """A chain of joints in a plane. Its serial port is a file: without it the robot is unplugged."""

    port: str
    log: str | None = None
    """File in which the robot notes its commands."""
    calibrated: bool = True
    hang_after: int | None = None
    """Actions after which it does not answer any more."""
    cameras: dict[str, CameraConfig] = field(default_factory=dict)
