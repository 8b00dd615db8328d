from lerobot.cameras.configs import CameraConfig

__all__ = ["CameraConfig"]
