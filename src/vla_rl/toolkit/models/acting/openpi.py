"""openpi's wire format: msgpack with NumPy arrays, as policy clients and servers exchange it over websockets.

An array is a map with the keys `__ndarray__`, `data` (bytes in C order), `dtype` and `shape`, a NumPy number one with
`__npgeneric__`, `data` and `dtype`; these keys are bytes. vla-evaluation-harness has text for keys, and images as PNG
or JPEG. `unpack_frame` reads both, and nothing that could run code: it is safe for untrusted frames. PNG and JPEG grow
a thousandfold, so a server decodes (`unpack(frame, decode=False)`) only those that its policy uses.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from attrs import field, frozen

from vla_rl.core.types import Array

MAX_FRAME = 64 << 20
"""Most bytes of a frame; four images of 224 px are 0.6 MB."""
MAX_DEPTH = 8
"""Deepest nesting of maps and lists."""
MAX_ITEMS = 20_000
"""Most items of all maps and lists of a frame together; numbers belong into arrays."""
MAX_LIST = 4096
"""Most items of one map or list."""
MAX_TEXT = 1 << 20
"""Most bytes of a text or a key."""
MAX_PIXELS = 1 << 24
"""Most pixels of all compressed images of a frame together: two of a 4K camera."""
LONGEST_DTYPE = 8
KINDS = "biuf"
"""Kinds of dtypes that are read: bool, integers, floats."""


class FrameError(ValueError):
    """A frame is not valid data of a policy's client or server."""


def pack_frame(data: Any, text_keys: bool = False) -> bytes:
    """Encode plain data, arrays and NumPy numbers as a frame. Raise FrameError for arrays of objects and the like.

    Args:
        text_keys: use text keys, as vla-evaluation-harness does; numbers become plain ones.
    """
    import msgpack

    packed: bytes = msgpack.packb(data, default=_described_by_text if text_keys else _describe_value)
    return packed


@frozen(eq=False)
class EncodedImage:
    """An image still encoded as PNG or JPEG. Only these two formats are ever tried."""

    content: bytes = field(repr=False)
    format: str

    @property
    def size(self) -> tuple[int, int]:
        """Height and width, read from the header alone. Raises FrameError."""
        with self._open_image() as image:
            return image.height, image.width

    def decode(self) -> Array:
        """Return the pixels, uint8 [H, W, 3] of a colour image. Call `check_pixels` first. Raise FrameError."""
        with self._open_image() as image:
            try:
                return np.asarray(image)
            except Exception as exc:
                raise self._unreadable_error(exc) from exc

    def _open_image(self) -> Any:
        from PIL import Image

        try:
            return Image.open(io.BytesIO(self.content), formats=[self.format])
        except Exception as exc:
            raise self._unreadable_error(exc) from exc

    def _unreadable_error(self, error: Exception) -> FrameError:
        return FrameError(f"an image cannot be read as {self.format}: {error}"[:300])


def check_pixels(images: Iterable[EncodedImage]) -> None:
    """Raise FrameError if the images of a frame have too many pixels together, before any of them is decoded."""
    total = 0
    for image in images:
        height, width = image.size
        total += height * width
        if total > MAX_PIXELS:
            raise FrameError(
                f"the images are too large: with one of {width} x {height} pixels they have more than {MAX_PIXELS} "
                f"together"
            )


def unpack_frame(frame: bytes, decode: bool = True) -> Any:
    """Decode a frame. Arrays are read-only views of it. Raise FrameError.

    Args:
        decode: False leaves compressed images encoded (EncodedImage), for callers that need only some of them.
    """
    import msgpack

    if len(frame) > MAX_FRAME:
        raise FrameError(f"the frame has {len(frame)} bytes, more than {MAX_FRAME}")
    left = MAX_ITEMS

    def count_items(items: int) -> None:
        nonlocal left
        left -= items
        if left < 0:
            raise FrameError(f"the frame has more than {MAX_ITEMS} items; send numbers as arrays")

    def read_map(data: dict[Any, Any]) -> Any:
        count_items(len(data))
        return _read_marked(data)

    def read_list(data: list[Any]) -> list[Any]:
        count_items(len(data))
        return data

    try:
        data = msgpack.unpackb(
            frame,
            object_hook=read_map,
            list_hook=read_list,
            max_str_len=MAX_TEXT,
            max_array_len=MAX_LIST,
            max_map_len=MAX_LIST,
            max_ext_len=0,
        )
    except FrameError:
        raise
    except Exception as exc:
        raise FrameError(f"the frame cannot be read as msgpack: {type(exc).__name__}: {exc}"[:300]) from exc
    images: list[EncodedImage] = []
    _look_through(data, MAX_DEPTH, images)
    if not decode or not images:
        return data
    check_pixels(images)
    return _decode_images(data)


def _describe_value(value: Any) -> dict[bytes, Any]:
    if not isinstance(value, np.ndarray | np.generic) or value.dtype.kind in "VOc":
        kind = f"dtype {value.dtype}" if hasattr(value, "dtype") else type(value).__name__
        raise FrameError(f"values of {kind} cannot be sent")
    if isinstance(value, np.ndarray):
        return {
            b"__ndarray__": True,
            b"data": value.tobytes(),
            b"dtype": value.dtype.str,
            b"shape": list(value.shape),
        }
    return {b"__npgeneric__": True, b"data": value.item(), b"dtype": value.dtype.str}


def _described_by_text(value: Any) -> Any:
    described = _describe_value(value)
    return value.item() if b"__npgeneric__" in described else {k.decode(): v for k, v in described.items()}


def _read_marked(data: dict[Any, Any]) -> Any:
    for marker, read in _READERS.items():
        if marker in data or marker.encode() in data:
            named = {key.decode() if isinstance(key, bytes) else key: value for key, value in data.items()}
            return read(named)
    return data


def _read_array(data: Mapping[str, Any]) -> Array:
    content, shape, dtype = data.get("data"), data.get("shape"), _read_dtype(data.get("dtype"))
    if not isinstance(content, bytes) or not isinstance(shape, list | tuple) or len(shape) > MAX_DEPTH:
        raise FrameError("an array needs bytes as its data, and a shape")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise FrameError(f"an array's shape is {str(shape)[:80]}")
    if math.prod(shape) * dtype.itemsize != len(content):
        raise FrameError(f"an array of {dtype} {list(shape)} has {len(content)} bytes of data")
    return np.frombuffer(content, dtype).reshape(shape)


def _read_number(data: Mapping[str, Any]) -> Any:
    value = data.get("data")
    if not isinstance(value, bool | int | float):
        raise FrameError("a NumPy scalar is not a number")
    return _read_dtype(data.get("dtype")).type(value)


def _read_image(data: Mapping[str, Any]) -> Array | EncodedImage:
    """Read an image of vla-evaluation-harness."""
    if data.get("format") == "raw":
        return _read_array(data)
    content, name = data.get("data"), data.get("format")
    if not isinstance(content, bytes) or name not in ("png", "jpeg"):
        raise FrameError(f"images are raw, png or jpeg, not {repr(name)[:80]}")
    return EncodedImage(content, name)


_READERS = {"__ndarray__": _read_array, "__npgeneric__": _read_number, "__image__": _read_image}


def _read_dtype(name: Any) -> np.dtype[Any]:
    """Return a dtype by its `dtype.str`. Raise FrameError for anything but plain numbers, such as structures."""
    if isinstance(name, bytes):
        name = name.decode("ascii", "replace")
    try:
        dtype = np.dtype(name) if isinstance(name, str) and len(name) <= LONGEST_DTYPE else None
    except (TypeError, ValueError, SyntaxError):
        dtype = None
    if dtype is None or dtype.kind not in KINDS or dtype.names is not None or dtype.subdtype is not None:
        raise FrameError(f"arrays are of bool, integers or floats, not {repr(name)[:80]}")
    return dtype


def _look_through(data: Any, left: int, images: list[EncodedImage]) -> None:
    """Check the depth, and collect the compressed images."""
    if isinstance(data, EncodedImage):
        images.append(data)
    if isinstance(data, dict | list):
        if not left:
            raise FrameError(f"the frame has more than {MAX_DEPTH} maps and lists within each other")
        for value in data.values() if isinstance(data, dict) else data:
            _look_through(value, left - 1, images)


def _decode_images(data: Any) -> Any:
    if isinstance(data, EncodedImage):
        return data.decode()
    if isinstance(data, dict):
        return {key: _decode_images(value) for key, value in data.items()}
    return [_decode_images(value) for value in data] if isinstance(data, list) else data
