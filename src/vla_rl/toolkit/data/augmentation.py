"""Random changes of images for training, by the formulas that OpenVLA trains with (`augment_image` of `dlimp`,
TensorFlow's image functions). Each image draws its own numbers from a keyed generator."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
import torch
from torch.nn import functional

from vla_rl.core.augmentation import AugmentSpec, CropSpec
from vla_rl.core.errors import UserError, did_you_mean
from vla_rl.core.randomness import generator
from vla_rl.core.types import Array, Observation, to_numpy

Generators = Sequence[np.random.Generator]


def augment_images(obs: Observation, spec: AugmentSpec, seed: int, step: int, first: int) -> Observation:
    """Return the observation with changed images, uint8 [B, H, W, 3] as before. Raise UserError for a camera it lacks.

    Args:
        step: optimiser step, part of the key of the random numbers.
        first: number of the first sample within the step, over all ranks; the others follow.
    """
    images = dict(obs.images)
    for number, camera in enumerate(sorted(images) if spec.cameras is None else spec.cameras):
        if camera not in images:
            raise UserError(
                f"augment.cameras: there is no camera {camera!r}{did_you_mean(camera, images)}\n"
                f"  there are: {', '.join(images)}"
            )
        frames = to_numpy(images[camera])
        generators = [generator(seed, "augment", number, step, first + row) for row in range(len(frames))]
        images[camera] = change_images(frames, spec, generators)
    return attrs.evolve(obs, images=images)


def change_images(images: Array, spec: AugmentSpec, generators: Generators) -> Array:
    """Return images uint8 [B, H, W, 3], each changed by numbers of its generator."""
    changed = torch.from_numpy(np.ascontiguousarray(images)).float().movedim(-1, 1) / 255
    if spec.random_resized_crop is not None:
        changed = _resized_crop(changed, spec.random_resized_crop, generators)
    if spec.random_brightness:
        most = spec.random_brightness
        changed = (changed + _draw_uniform(generators, -most, most)).clamp(0, 1)
    if spec.random_contrast != (1.0, 1.0):
        mean = changed.mean((2, 3), keepdim=True)
        changed = (mean + (changed - mean) * _draw_uniform(generators, *spec.random_contrast)).clamp(0, 1)
    if spec.random_saturation != (1.0, 1.0):
        hue, saturation, value = hsv_of(changed)
        factor = _draw_uniform(generators, *spec.random_saturation)[:, 0]
        changed = rgb_of(hue, (saturation * factor).clamp(0, 1), value)
    if spec.random_hue:
        hue, saturation, value = hsv_of(changed)
        turn = _draw_uniform(generators, -spec.random_hue, spec.random_hue)[:, 0]
        changed = rgb_of((hue + turn) % 1, saturation, value)
    result: Array = (changed * 255).round().to(torch.uint8).movedim(1, -1).contiguous().numpy()
    return result


def _draw_uniform(generators: Generators, low: float, high: float) -> torch.Tensor:
    """Return a uniform number for each image, [B, 1, 1, 1]."""
    return torch.tensor([rng.uniform(low, high) for rng in generators]).float()[:, None, None, None]


def _resized_crop(images: torch.Tensor, crop: CropSpec, generators: Generators) -> torch.Tensor:
    """Return a random part of each image [B, 3, H, W], bilinearly stretched to the whole."""
    area = _draw_uniform(generators, *crop.scale).flatten()
    ratio = _draw_uniform(generators, *np.log(crop.ratio)).flatten().exp()
    height, width = (area / ratio).sqrt().clamp(0, 1), (area * ratio).sqrt().clamp(0, 1)
    top = _draw_uniform(generators, 0, 1).flatten() * (1 - height)
    left = _draw_uniform(generators, 0, 1).flatten() * (1 - width)
    rows = top[:, None] + height[:, None] * torch.linspace(0, 1, images.shape[2])
    columns = left[:, None] + width[:, None] * torch.linspace(0, 1, images.shape[3])
    shape = (len(images), images.shape[2], images.shape[3])
    grid = torch.stack([columns[:, None, :].expand(shape), rows[:, :, None].expand(shape)], dim=-1)
    return functional.grid_sample(images, 2 * grid - 1, mode="bilinear", padding_mode="border", align_corners=True)


def hsv_of(rgb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return hue, saturation and value, [B, H, W] each within 0 and 1, of colours [B, 3, H, W]."""
    value, largest = rgb.max(1)
    spread = value - rgb.min(1).values
    red, green, blue = rgb.unbind(1)
    divisor = spread.where(spread > 0, torch.ones_like(spread))
    sectors = torch.stack([(green - blue) / divisor % 6, (blue - red) / divisor + 2, (red - green) / divisor + 4])
    hue = sectors.gather(0, largest[None])[0] / 6
    saturation = spread / value.where(value > 0, torch.ones_like(value))
    return hue, saturation, value


def rgb_of(hue: torch.Tensor, saturation: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Return colours [B, 3, H, W] of hue, saturation and value, [B, H, W] each."""
    position = torch.stack([(number + hue * 6) % 6 for number in (5, 3, 1)], dim=1)
    share = torch.minimum(position, 4 - position).clamp(0, 1)
    return value[:, None] * (1 - saturation[:, None] * share)
