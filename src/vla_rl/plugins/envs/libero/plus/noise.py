"""Sensor noise of LIBERO-Plus: five kinds of ImageNet-C in ten severities each, with NumPy and SciPy alone.
Bit-identical to the authors' code for equal random numbers; see benchmarks/libero_plus.py."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from scipy.ndimage import gaussian_filter, zoom

from vla_rl.core.paths import read_table
from vla_rl.core.types import Array

Draws = np.random.RandomState
"""Random numbers of one frame. The legacy generator, since the authors' code draws from it."""
SEVERITIES = read_table(__file__, "noise.yaml")
"""Kind of noise -> its numbers for each severity; the file says what they are."""
FOG_SIZE, FOG_SPREAD = 256, 100.0
"""Side of the fog's map in pixels, at least, and its variation at the coarsest scale."""
QUANTUM = 65535
"""Largest value of a channel in ImageMagick's usual build (Q16)."""


def add_noise(frame: Array, noise: int, draws: Draws) -> Array:
    """Return a frame with sensor noise, uint8 [H, W, 3].

    Args:
        frame: uint8 [H, W, 3] in the order in which MuJoCo draws it, bottom line first.
        noise: 1 to 50: motion blur, Gaussian blur, zoom blur, fog, glass blur, in ten severities each.
        draws: random numbers of this frame.
    """
    kind, severity = divmod(noise - 1, 10)
    return KINDS[kind](frame, severity, draws)


def motion_blur(frame: Array, severity: int, draws: Draws) -> Array:
    """Blur along a random direction, one-sided, as ImageMagick 6 (Q16) does."""
    radius, sigma = SEVERITIES["motion"][severity]
    angle = math.radians(draws.uniform(-45, 45))
    width = 2 * radius + 1
    weights = np.exp(-np.square(np.arange(width, dtype=np.float64)) / (2.0 * sigma * sigma))
    weights /= math.sqrt(2.0 * math.pi) * sigma
    weights /= sum(weights.tolist())
    x, y = width * math.sin(angle), width * math.cos(angle)
    length = math.hypot(x, y)
    height, columns = frame.shape[:2]
    rows, cells = np.arange(height)[:, None], np.arange(columns)[None]
    values = frame.astype(np.float64) * (QUANTUM // 255)
    total = np.zeros(frame.shape)
    for i, weight in enumerate(weights.tolist()):
        right, down = math.ceil(i * y / length - 0.5), math.ceil(i * x / length - 0.5)
        total += weight * values[np.clip(rows + down, 0, height - 1), np.clip(cells + right, 0, columns - 1)]
    quanta = np.clip(np.floor(total + 0.5), 0, QUANTUM).astype(np.int64)
    return _to_bytes(quanta // (QUANTUM // 255))


def gaussian_blur(frame: Array, severity: int, draws: Draws) -> Array:
    return _to_bytes(np.clip(_blur_image(frame / 255.0, severity + 1), 0, 1) * 255)


def zoom_blur(frame: Array, severity: int, draws: Draws) -> Array:
    """Average the frame over several enlargements of its middle."""
    factors = np.arange(1, *SEVERITIES["zoom"][severity])
    image = (frame / 255.0).astype(np.float32)
    total = np.zeros_like(image)
    for factor in factors:
        total += _zoom_image(image, factor)
    return _to_bytes(np.clip((image + total) / (len(factors) + 1), 0, 1) * 255)


def add_fog(frame: Array, severity: int, draws: Draws) -> Array:
    """Lighten the frame by a random cloud."""
    thickness, roughness = SEVERITIES["fog"][severity]
    image = frame / 255.0
    brightest = image.max()
    height, width = image.shape[:2]
    side = max(FOG_SIZE, 1 << (max(height, width) - 1).bit_length())
    image += thickness * _draw_cloud(side, roughness, draws)[:height, :width, np.newaxis]
    return _to_bytes(np.clip(image * brightest / (brightest + thickness), 0, 1) * 255)


def glass_blur(frame: Array, severity: int, draws: Draws) -> Array:
    """Blur, replace each pixel by a random one near it, and blur again. The authors' code looks like a swap of two
    pixels. It is none: both sides are views, so a pixel takes the other's value, and the other keeps it."""
    sigma, most, passes = SEVERITIES["glass"][severity]
    image = _to_bytes(_blur_image(frame / 255.0, sigma) * 255)
    height, width = image.shape[:2]
    rows, columns = np.arange(height - most, most, -1), np.arange(width - most, most, -1)
    targets = (rows[:, None] * width + columns[None]).ravel()
    source_of = list(range(height * width))
    for _ in range(passes):
        shifts = draws.randint(-most, most, size=(len(targets), 2))
        for target, source in zip(targets.tolist(), (targets + shifts @ [1, width]).tolist(), strict=True):
            source_of[target] = source_of[source]
    image = image.reshape(-1, 3)[source_of].reshape(image.shape)
    return _to_bytes(np.clip(_blur_image(image / 255.0, sigma), 0, 1) * 255)


KINDS: tuple[Callable[[Array, int, Draws], Array], ...] = (motion_blur, gaussian_blur, zoom_blur, add_fog, glass_blur)
"""Kinds of noise, in official order."""


def _to_bytes(image: Array) -> Array:
    return image.astype(np.uint8)


def _blur_image(image: Array, sigma: float) -> Array:
    return np.asarray(gaussian_filter(image, (sigma, sigma, 0), mode="nearest", truncate=4.0))


def _zoom_image(image: Array, factor: float) -> Array:
    """Return the middle of a frame, enlarged to the frame's size."""
    side = image.shape[0]
    part = math.ceil(side / float(factor))
    start = (side - part) // 2
    middle = zoom(image[start : start + part, start : start + part], (factor, factor, 1), order=1)
    rest = (middle.shape[0] - side) // 2
    return np.asarray(middle[rest : rest + side, rest : rest + side])


def _draw_cloud(side: int, roughness: float, draws: Draws) -> Array:
    """Return a random height map in [0, 1], float64 [side, side], by the diamond-square algorithm.

    Args:
        side: a power of two.
        roughness: divisor of the variation from each scale to the next finer one.
    """
    heights = np.zeros((side, side))
    step, spread = side, FOG_SPREAD

    def vary_heights(sums: Array) -> Array:
        return sums / 4 + spread * draws.uniform(-spread, spread, sums.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        sums = corners + np.roll(corners, -1, axis=0)
        sums += np.roll(sums, -1, axis=1)
        heights[half::step, half::step] = vary_heights(sums)
        centres = heights[half::step, half::step]
        corners = heights[::step, ::step]
        sums = (centres + np.roll(centres, 1, axis=0)) + (corners + np.roll(corners, -1, axis=1))
        heights[::step, half::step] = vary_heights(sums)
        sums = (centres + np.roll(centres, 1, axis=1)) + (corners + np.roll(corners, -1, axis=0))
        heights[half::step, ::step] = vary_heights(sums)
        step, spread = half, spread / roughness
    heights -= heights.min()
    return np.asarray(heights / heights.max())
