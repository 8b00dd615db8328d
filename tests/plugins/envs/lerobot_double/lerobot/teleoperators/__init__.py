from lerobot.teleoperators.config import TeleoperatorConfig
from lerobot.teleoperators.teleoperator import Teleoperator
from lerobot.teleoperators.utils import TeleopEvents, make_teleoperator_from_config

__all__ = ["TeleopEvents", "Teleoperator", "TeleoperatorConfig", "make_teleoperator_from_config"]
