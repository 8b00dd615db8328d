import abc


class Robot(abc.ABC):
    def __init__(self, config):
        self.robot_type = self.name
        self.id = config.id

    @property
    @abc.abstractmethod
    def observation_features(self) -> dict: ...

    @property
    @abc.abstractmethod
    def action_features(self) -> dict: ...

    @property
    @abc.abstractmethod
    def is_connected(self) -> bool: ...

    @abc.abstractmethod
    def connect(self, calibrate: bool = True) -> None: ...

    @property
    @abc.abstractmethod
    def is_calibrated(self) -> bool: ...

    @abc.abstractmethod
    def calibrate(self) -> None: ...

    @abc.abstractmethod
    def configure(self) -> None: ...

    @abc.abstractmethod
    def get_observation(self) -> dict: ...

    @abc.abstractmethod
    def send_action(self, action: dict) -> dict: ...

    @abc.abstractmethod
    def disconnect(self) -> None: ...
