"""Decoding of untrusted image files: only if they are as large as the data set declares."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array

MAX_PIXELS = 1 << 24
"""Most pixels of an image that is read at all: 4096 x 4096."""
FORMATS = ("PNG", "JPEG", "WEBP", "BMP")
"""Image formats that data sets contain. Pillow supports others that start programs (EPS) or are rarely tested."""


def decode_image(data: bytes, pixels: int) -> Array:
    """Decode an image to uint8 [H, W, 3]. Raise ValueError as `check_image` does."""
    with _open_image(data, pixels) as image:
        return np.asarray(image.convert("RGB"))


def check_image(data: bytes, pixels: int) -> None:
    """Read the header of an image. Raise ValueError for no image of 8 bits, and more than `pixels` pixels (a bomb)."""
    with _open_image(data, pixels):
        pass


@contextmanager
def _open_image(data: bytes, pixels: int) -> Iterator[Any]:
    """Yield an opened image, not yet decoded. Raise ValueError as `check_image` does, also for errors inside."""
    from PIL import Image

    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            if image.width * image.height > pixels:
                raise ValueError(f"it has {image.width} x {image.height} pixels, the data set declares {pixels:,}")
            if image.mode[0] in "IF":
                raise ValueError(f"its numbers have more than 8 bits (Pillow's mode {image.mode})")
            yield image
    except Image.DecompressionBombError as exc:
        raise ValueError(str(exc)) from exc
    except (OSError, SyntaxError, EOFError, IndexError, KeyError, TypeError, OverflowError) as exc:
        raise ValueError(f"{type(exc).__name__}: {exc}") from exc


def stack_images(source: str, name: str, frames: Sequence[Array]) -> Array:
    """Stack frames [H, W, 3] to [B, H, W, 3]. Raise UserError if their sizes differ."""
    sizes = sorted({frame.shape[:2] for frame in frames})
    if len(sizes) > 1:
        listed_sizes = " and ".join(f"{height} x {width}" for height, width in sizes[:3])
        raise UserError(f"{source}: images of {name} are {listed_sizes}; one size is expected, resize them")
    return np.stack(frames)
