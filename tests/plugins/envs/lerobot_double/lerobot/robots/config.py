import abc
from dataclasses import dataclass
from pathlib import Path

import draccus


@dataclass(kw_only=True)
class RobotConfig(draccus.ChoiceRegistry, abc.ABC):
    id: str | None = None
    calibration_dir: Path | None = None

    def __post_init__(self):
        for config in getattr(self, "cameras", {}).values():
            for attr in ("width", "height", "fps"):
                if getattr(config, attr) is None:
                    raise ValueError(f"Specifying '{attr}' is required for the camera to be used in a robot")

    @property
    def type(self) -> str:
        return self.get_choice_name(self.__class__)
