import abc


class Teleoperator(abc.ABC):
    def __init__(self, config):
        self.id = config.id

    @property
    @abc.abstractmethod
    def action_features(self) -> dict: ...

    @property
    @abc.abstractmethod
    def feedback_features(self) -> dict: ...

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
    def get_action(self) -> dict: ...

    @abc.abstractmethod
    def send_feedback(self, feedback: dict) -> None: ...

    @abc.abstractmethod
    def disconnect(self) -> None: ...
