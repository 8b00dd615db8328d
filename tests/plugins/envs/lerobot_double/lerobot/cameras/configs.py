import abc
from dataclasses import dataclass

import draccus


@dataclass(kw_only=True)
class CameraConfig(draccus.ChoiceRegistry, abc.ABC):
    fps: int | None = None
    width: int | None = None
    height: int | None = None

    @property
    def type(self) -> str:
        return str(self.get_choice_name(self.__class__))
