from lerobot.robots.config import RobotConfig
from lerobot.robots.robot import Robot
from lerobot.robots.utils import make_robot_from_config

__all__ = ["Robot", "RobotConfig", "make_robot_from_config"]
