from enum import Enum

from lerobot.utils.import_utils import make_device_from_device_class


class TeleopEvents(Enum):
    SUCCESS = "success"
    FAILURE = "failure"
    RERECORD_EPISODE = "rerecord_episode"
    IS_INTERVENTION = "is_intervention"
    TERMINATE_EPISODE = "terminate_episode"


def make_teleoperator_from_config(config):
    return make_device_from_device_class(config)
