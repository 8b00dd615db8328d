"""Reads single frames of video files by their time."""

from __future__ import annotations

from collections import OrderedDict
from pathlib import Path
from typing import Any

import av

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array

OPEN_FILES = 32


CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
"""Containers that FFmpeg may open. Others are refused because some, such as playlists, would open further files by
name."""


class Videos:
    """Video reader that keeps the `OPEN_FILES` most recently used files open."""

    def __init__(self, fps: float, pixels: int) -> None:
        """Create a reader.

        Args:
            pixels: most pixels of a frame, as the data set declares them; larger frames are not decoded.
        """
        self._tolerance = 0.5 / fps
        self._pixels = pixels
        self._open: OrderedDict[Path, Any] = OrderedDict()

    def frame(self, path: Path, seconds: float) -> Array:
        """Return the frame shown at this time, uint8 [H, W, 3]. Raise UserError when there is none, and for a file that
        cannot be decoded."""
        try:
            decoded = self._seek(path, seconds)
        except (av.FFmpegError, OverflowError) as exc:
            why = getattr(exc, "strerror", exc)
            raise UserError(f"{path} cannot be decoded at {seconds:.3f} s ({why}); download it again") from exc
        if decoded is None:
            raise UserError(f"{path} has no frame at {seconds:.3f} s; the video does not belong to this data")
        image: Array = decoded.to_ndarray(format="rgb24")
        return image

    def _seek(self, path: Path, seconds: float) -> Any:
        container = self._container(path)
        stream = container.streams.video[0]
        container.seek(max(0, int((seconds - self._tolerance) / stream.time_base)), stream=stream)
        for frame in container.decode(stream):
            if frame.time is not None and frame.time >= seconds - self._tolerance:
                return frame if frame.time <= seconds + self._tolerance else None
        return None

    def _container(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = self._opened(path)
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]

    def _opened(self, path: Path) -> Any:
        options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
        container = av.open(str(path.absolute()), options=options)
        if not container.streams.video:
            raise UserError(f"{path} holds no video; download it again")
        stream = container.streams.video[0]
        if stream.width * stream.height > self._pixels:
            raise UserError(
                f"{path} has frames of {stream.width} x {stream.height} pixels, meta/info.json declares "
                f"{self._pixels:,} pixels; correct its 'shape', or download the data again"
            )
        stream.codec_context.options = {"max_pixels": str(self._padded())}
        return container

    def _padded(self) -> int:
        """Return the pixels that a decoder may allocate: it rounds both sides up to whole blocks."""
        return 2 * self._pixels + (1 << 16)
