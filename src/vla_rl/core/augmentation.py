"""Spec keys of the random image changes in behaviour cloning."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen
from attrs import validators as v


@frozen(kw_only=True)
class CropSpec:
    """Random crop of an image, resized to the image's size."""

    scale: tuple[float, float] = field(default=(0.9, 0.9))
    """Range of the crop's area, as a share of the image's."""
    ratio: tuple[float, float] = field(default=(1.0, 1.0))
    """Range of the crop's width divided by its height, relative to the image's."""

    @scale.validator
    @ratio.validator
    def _check_crop_range(self, attribute: Any, value: tuple[float, float]) -> None:
        most = 1.0 if attribute.name == "scale" else 10.0
        if not 0 < value[0] <= value[1] <= most:
            raise ValueError(f"{list(value)} is not a range [low, high] within 0 and {most:g}")


@frozen(kw_only=True)
class AugmentSpec:
    """Random changes to the images of each sample, in this order; every camera has its own. The names and formulas are
    those of OpenVLA's training (`dlimp`, TensorFlow's image functions)."""

    random_resized_crop: CropSpec | None = None
    """Random crop. Act with `center_crop` where the model has that key."""
    random_brightness: float = field(default=0.0, validator=[v.ge(0), v.le(1)])
    """Most that is added to or subtracted from each pixel value of an image; pixel values are between 0 and 1."""
    random_contrast: tuple[float, float] = field(default=(1.0, 1.0))
    """Range of the factor of the deviation from the image's mean colour."""
    random_saturation: tuple[float, float] = field(default=(1.0, 1.0))
    """Range of the saturation's factor."""
    random_hue: float = field(default=0.0, validator=[v.ge(0), v.le(0.5)])
    """Most that the hue is turned either way; 1 is a full turn."""
    cameras: tuple[str, ...] | None = None
    """Cameras whose images are changed; null: all."""

    @random_contrast.validator
    @random_saturation.validator
    def _check_factor_range(self, attribute: Any, value: tuple[float, float]) -> None:
        if not 0 <= value[0] <= value[1] <= 100:
            raise ValueError(f"{list(value)} is not a range [low, high] within 0 and 100")

    def __attrs_post_init__(self) -> None:
        unchanged = (1.0, 1.0)
        ranges = self.random_contrast == unchanged and self.random_saturation == unchanged
        if self.random_resized_crop is None and ranges and not self.random_brightness and not self.random_hue:
            raise ValueError(
                "changes nothing; give one of random_resized_crop, random_brightness, random_contrast, "
                "random_saturation, random_hue, or leave augment out"
            )
