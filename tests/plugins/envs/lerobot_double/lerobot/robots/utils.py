from lerobot.utils.import_utils import make_device_from_device_class


def make_robot_from_config(config):
    return make_device_from_device_class(config)
