"""Scenes whose actions count in part only, or whose resets show something else than their steps; each names what
`check_env` has to say of it."""

from __future__ import annotations

from typing import Any

import numpy as np
from small_simulators import Scene, small_info

from vla_rl.toolkit.envs.single_env import Outcome

PART = "over the whole range of number"


class NothingBelowZero(Scene):
    """no effect of the part from -1 to 0"""

    def move(self, action: Any) -> None:
        super().move(np.maximum(action, 0))


class NothingAboveZero(Scene):
    """no effect of the part from 0 to 1"""

    def move(self, action: Any) -> None:
        super().move(np.array([min(action[0], 0), action[1]]))


class GripperOpensHalf(Scene):
    """no effect of the part from 0.25 to 0.5"""

    def move(self, action: Any) -> None:
        super().move(np.array([action[0], min(action[1], 0.25)]))


class ClippedToHalf(Scene):
    """no effect of the outer half (beyond -0.5 and 0.5)"""

    def move(self, action: Any) -> None:
        super().move(np.clip(action, -0.5, 0.5))


class SignLost(Scene):
    """no effect of the sign"""

    def move(self, action: Any) -> None:
        super().move(np.abs(action))


class FirstNumberLost(Scene):
    """no effect of number 0"""

    def move(self, action: Any) -> None:
        super().move(np.array([0.3, action[1]]))


class SecondNumberTwice(Scene):
    """no effect of number 0"""

    def move(self, action: Any) -> None:
        super().move(action[[1, 1]])


# ------------------------------------------------------------------------------- after a reset, after a step


class Eyes(Scene):
    """Images and numbers of the reset pass through `first`, those of steps through `later`."""

    fresh = False

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.fresh = True

    def step(self, action: Any) -> Outcome:
        self.fresh = False
        return super().step(action)

    def image(self) -> Any:
        image = super().image()
        image[0, :6] = (200, 100, 0)  # a corner that tells which way up it is, and which colour is which
        image[7, 20:] = (0, 0, 90)
        return self.first_image(image) if self.fresh else self.later_image(image)

    def numbers(self) -> Any:
        numbers = super().numbers()
        return (self.first_numbers(numbers) if self.fresh else self.later_numbers(numbers)).astype(np.float32)

    def first_image(self, image: Any) -> Any:
        return image

    def later_image(self, image: Any) -> Any:
        return image

    def first_numbers(self, numbers: Any) -> Any:
        return numbers

    def later_numbers(self, numbers: Any) -> Any:
        return numbers


class BgrAfterReset(Eyes):
    """got colours in another order (RGB and BGR)"""

    def first_image(self, image: Any) -> Any:
        return image[..., ::-1].copy()


class BgrAfterSteps(Eyes):
    """got colours in another order (RGB and BGR)"""

    def later_image(self, image: Any) -> Any:
        return image[..., ::-1].copy()


class UpsideDownAfterReset(Eyes):
    """got an image upside down"""

    def first_image(self, image: Any) -> Any:
        return image[::-1].copy()


class MirroredAfterSteps(Eyes):
    """got a mirrored image"""

    def later_image(self, image: Any) -> Any:
        return image[:, ::-1].copy()


class TurnedAfterReset(Eyes):
    """got an image turned by 180 degrees"""

    def first_image(self, image: Any) -> Any:
        return image[::-1, ::-1].copy()


class SmallAfterReset(Eyes):
    """got other numbers (up to"""

    def first_image(self, image: Any) -> Any:
        return (image / 255).round().astype(np.uint8)


class SmallAfterSteps(Eyes):
    """got other numbers (up to"""

    def later_image(self, image: Any) -> Any:
        return (image / 255).round().astype(np.uint8)


class InvertedAfterSteps(Eyes):
    """got inverted colours"""

    def later_image(self, image: Any) -> Any:
        return 255 - image


class BlackAfterReset(Eyes):
    """reset: image 'top': expected"""

    def image(self) -> Any:
        image = super().image()
        image[:, ::2] += 5  # what is on the table
        return np.zeros_like(image) if self.fresh else image // 8 + 100


class DegreesAfterReset(Eyes):
    """reset: state: expected the same units and numbers as after a step, got numbers that the first action multiplies"""

    def first_numbers(self, numbers: Any) -> Any:
        return np.rad2deg(numbers)


class RadiansAfterReset(Eyes):
    """got numbers that the first action multiplies by"""

    def later_numbers(self, numbers: Any) -> Any:
        return np.rad2deg(numbers)


class MillimetresAfterSteps(Eyes):
    """got numbers that the first action multiplies by"""

    def later_numbers(self, numbers: Any) -> Any:
        return numbers * np.array([1000, 1000, 1])


class OtherSignAfterReset(Eyes):
    """got numbers that the first action multiplies by -1"""

    def first_numbers(self, numbers: Any) -> Any:
        return -numbers


class ZerosAfterReset(Eyes):
    """expected the same units and numbers as after a step, got the same after the reset of each of"""

    def first_numbers(self, numbers: Any) -> Any:
        return 0 * numbers


class OtherOrderAfterReset(Eyes):
    """expected the same units and numbers as after a step"""

    def first_numbers(self, numbers: Any) -> Any:
        return numbers[[2, 0, 1]]


class OffsetAfterReset(Eyes):
    """expected the same units and numbers as after a step"""

    def first_numbers(self, numbers: Any) -> Any:
        return numbers - np.array([9, 9, 0])


class ImageOneActionLate(Scene):
    """expected images after the last action, got images of the reset"""

    drawn: Any = None

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.drawn = super().image()

    def step(self, action: Any) -> Outcome:
        self.drawn = super().image()
        return super().step(action)

    def image(self) -> Any:
        return self.drawn.copy() if self.drawn is not None else super().image()


class StateOneActionLate(Scene):
    """expected the state after the last action, got the state of the reset"""

    info = small_info()
    read: Any = None

    def reset(self, state: int, seed: int) -> None:
        super().reset(state, seed)
        self.read = super().numbers()

    def step(self, action: Any) -> Outcome:
        self.read = super().numbers()
        return super().step(action)

    def numbers(self) -> Any:
        return self.read.copy() if self.read is not None else super().numbers()


SCENES = tuple(
    kind
    for kind in vars().copy().values()
    if isinstance(kind, type) and issubclass(kind, Scene) and kind not in (Scene, Eyes)
)
