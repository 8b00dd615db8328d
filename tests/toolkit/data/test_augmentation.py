"""Random changes of images: formulas, ranges, and numbers that depend on the sample alone."""

from __future__ import annotations

import colorsys

import numpy as np
import pytest
import torch

from vla_rl.core.augmentation import AugmentSpec, CropSpec
from vla_rl.core.errors import UserError
from vla_rl.core.types import Observation
from vla_rl.toolkit.data.augmentation import augment_images, change_images, hsv_of, rgb_of


def random_images(count: int = 4, height: int = 12, width: int = 16) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, height, width, 3)).astype(np.uint8)


def generators(count: int = 4) -> list[np.random.Generator]:
    return [np.random.default_rng(row) for row in range(count)]


def test_colours_are_converted_as_by_colorsys() -> None:
    colours = np.concatenate(
        [random_images(1), np.zeros((1, 12, 16, 3), np.uint8), np.full((1, 12, 16, 3), 77, np.uint8)]
    )
    rgb = torch.from_numpy(colours).float().movedim(-1, 1) / 255
    hsv = torch.stack(hsv_of(rgb), dim=-1).reshape(-1, 3)
    flat = rgb.movedim(1, -1).reshape(-1, 3)
    expected = np.array([colorsys.rgb_to_hsv(*colour) for colour in flat.tolist()])
    assert hsv.numpy() == pytest.approx(expected, abs=1e-5)
    assert rgb_of(*hsv_of(rgb)).numpy() == pytest.approx(rgb.numpy(), abs=1e-5)


def test_brightness_is_added() -> None:
    grey = np.full((200, 2, 2, 3), 128, np.uint8)
    changes = change_images(grey, AugmentSpec(random_brightness=0.2), generators(200)).astype(int) - 128
    assert (changes == changes[:, :1, :1, :1]).all()
    assert changes.min() >= -51 and changes.max() <= 51 and np.ptp(changes) > 90


def test_contrast_moves_colours_from_their_mean() -> None:
    original = random_images(1, 8, 8) // 4 + 96
    changed = change_images(original, AugmentSpec(random_contrast=(0.5, 0.5)), generators(1))
    mean = original.mean((1, 2), keepdims=True)
    assert changed == pytest.approx(mean + 0.5 * (original - mean), abs=0.51)


def test_saturation_and_hue() -> None:
    original = random_images(1)
    grey = change_images(original, AugmentSpec(random_saturation=(0.0, 0.0)), generators(1))
    assert (grey == original.max(-1, keepdims=True)).all()
    spec, rng = AugmentSpec(random_hue=0.4), generators(1)
    turned = change_images(original, spec, rng)
    turn = float(np.float32(np.random.default_rng(0).uniform(-0.4, 0.4)))
    for colour, result in zip(original.reshape(-1, 3)[:50], turned.reshape(-1, 3)[:50], strict=True):
        hue, saturation, value = colorsys.rgb_to_hsv(*(colour / 255))
        expected = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
        assert result == pytest.approx(expected, abs=0.6)


def test_a_crop_is_a_part_of_the_image_stretched_to_the_whole() -> None:
    """A part of 0.81 of the area shows 0.9 of the range of a ramp, from somewhere on."""
    ramp = np.broadcast_to(np.linspace(0, 250, 51)[None, None, :, None], (30, 51, 51, 3)).astype(np.uint8)
    spec = AugmentSpec(random_resized_crop=CropSpec(scale=(0.81, 0.81)))
    cropped = change_images(np.ascontiguousarray(ramp), spec, generators(30)).astype(float)
    assert cropped[:, :, -1, 0] - cropped[:, :, 0, 0] == pytest.approx(225, abs=1.1)
    left = cropped[:, 0, 0, 0]
    assert left.min() >= 0 and left.max() <= 25 and np.ptp(left) > 15
    whole = AugmentSpec(random_resized_crop=CropSpec(scale=(1.0, 1.0)))
    assert np.array_equal(change_images(random_images(), whole, generators()), random_images())


def test_numbers_depend_on_the_seed_the_step_and_the_sample_alone() -> None:
    spec = AugmentSpec(random_brightness=0.3, random_hue=0.1, random_resized_crop=CropSpec(scale=(0.5, 1.0)))
    obs = Observation(images={"a": random_images(), "b": random_images()}, instructions=("x",) * 4)
    whole = augment_images(obs, spec, seed=3, step=7, first=0)
    half = augment_images(obs.take(np.array([2, 3])), spec, seed=3, step=7, first=2)
    for camera in ("a", "b"):
        assert np.array_equal(whole.images[camera][2:], half.images[camera])
    assert not np.array_equal(whole.images["a"], whole.images["b"])
    for other in ({"seed": 4, "step": 7}, {"seed": 3, "step": 8}):
        assert not np.array_equal(augment_images(obs, spec, first=0, **other).images["a"], whole.images["a"])


def test_chosen_cameras_are_changed() -> None:
    obs = Observation(images={"a": random_images(), "b": random_images()}, instructions=("x",) * 4)
    result = augment_images(obs, AugmentSpec(random_brightness=0.3, cameras=("b",)), 0, 1, 0)
    assert np.array_equal(result.images["a"], random_images()) and not np.array_equal(
        result.images["b"], random_images()
    )
    with pytest.raises(UserError, match=r"augment.cameras: there is no camera 'wirst'\n  there are: a, b"):
        augment_images(obs, AugmentSpec(random_brightness=0.3, cameras=("wirst",)), 0, 1, 0)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "changes nothing; give one of random_resized_crop"),
        ({"random_contrast": (1.2, 0.8)}, r"\[1.2, 0.8\] is not a range \[low, high\] within 0 and 100"),
        ({"random_resized_crop": {"scale": (0.0, 0.9)}}, r"not a range \[low, high\] within 0 and 1"),
    ],
)
def test_wrong_settings(keys: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        crop = keys.pop("random_resized_crop", None)
        AugmentSpec(**keys, random_resized_crop=None if crop is None else CropSpec(**crop))
