"""Reads single frames of video files by their time, and compares files with the episodes that they shall hold."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import av

from vla_rl.core.errors import UserError
from vla_rl.core.types import Array
from vla_rl.plugins.data.lerobot.frames import RecordedFrames
from vla_rl.toolkit.data.inspection.recorded import DataFinding

OPEN_FILES = 32


CONTAINERS = "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,avi"
"""Containers that FFmpeg may open. Others are refused: some, such as playlists, would open further files by name."""


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

    def read_frame(self, path: Path, seconds: float) -> Array:
        """Return the frame shown at this time, uint8 [H, W, 3]. Raise UserError when there is none, and for a file that
        cannot be decoded."""
        try:
            decoded = self._seek_frame(path, seconds)
        except (av.FFmpegError, OverflowError) as exc:
            why = getattr(exc, "strerror", exc)
            raise UserError(f"{path} cannot be decoded at {seconds:.3f} s ({why}); download it again") from exc
        if decoded is None:
            raise UserError(f"{path} has no frame at {seconds:.3f} s; the video does not belong to this data")
        image: Array = decoded.to_ndarray(format="rgb24")
        return image

    def _seek_frame(self, path: Path, seconds: float) -> Any:
        container = self._fetch_container(path)
        stream = container.streams.video[0]
        container.seek(max(0, int((seconds - self._tolerance) / stream.time_base)), stream=stream)
        for frame in container.decode(stream):
            if frame.time is not None and frame.time >= seconds - self._tolerance:
                return frame if frame.time <= seconds + self._tolerance else None
        return None

    def _fetch_container(self, path: Path) -> Any:
        if path not in self._open:
            self._open[path] = open_video(path, self._pixels)
            if len(self._open) > OPEN_FILES:
                self._open.popitem(last=False)[1].close()
        self._open.move_to_end(path)
        return self._open[path]


def find_clip_faults(rows: RecordedFrames, fps: float, pixels: Mapping[str, int]) -> Iterator[DataFinding]:
    """Read the header of each video file. Yield files that hold less than their episodes. Raise UserError for those
    with other images than colours of 8 bits.

    Args:
        pixels: video feature -> most pixels of a frame.
    """
    ends: dict[Path, float] = {}
    for name, most in pixels.items():
        short: dict[int, str] = {}
        for episode, length, row in zip(
            rows.episodes, rows.episode_lengths.tolist(), rows.last_rows.tolist(), strict=True
        ):
            clip = episode.clips[name]
            if clip.path not in ends:
                ends[clip.path] = _read_end(clip.path, name, most)
            last = clip.start + float(rows.table["timestamp"][row])
            missing = last + 1 / fps - ends[clip.path]
            if clip.end is not None:
                missing = max(missing, length / fps - (clip.end - clip.start))
            if missing > 0.5 / fps:
                short[episode.index] = f"{clip.path} lacks {math.ceil(missing * fps - 0.5)} of {length} frames"
        if short:
            index, text = next(iter(short.items()))
            yield DataFinding(
                subject=name,
                message=f"{text} of episode {index}",
                remedy="download it again",
                episodes=tuple(short),
            )


def _read_end(path: Path, name: str, pixels: int) -> float:
    """Return the time at which a video ends, in seconds, by its header. Raise UserError for a file that cannot be
    opened, and for images of more than 8 bits in one channel, which are depth maps or other measurements."""
    with open_video(path, pixels) as container:
        stream = container.streams.video[0]
        pixels_format: Any = stream.codec_context.format
        components: Sequence[Any] = pixels_format.components if pixels_format else ()
        if len(components) == 1 and components[0].bits > 8:
            raise UserError(
                f"{path} has one channel of {components[0].bits} bits, as depth maps have, and policies see colours; "
                f"choose another feature than {name!r} in `cameras`"
            )
        if stream.duration is None:
            return float(container.duration or math.inf) / av.time_base  # Matroska has no duration of a stream
        return float(((stream.start_time or 0) + stream.duration) * stream.time_base)


def open_video(path: Path, pixels: int) -> Any:
    """Open a video file, whose frames may have this many pixels at most. Raise UserError for anything else."""
    container = open_container(path)
    stream = container.streams.video[0]
    if stream.width * stream.height > pixels:
        raise UserError(
            f"{path} has frames of {stream.width} x {stream.height} pixels, meta/info.json declares {pixels:,} pixels; "
            "correct its 'shape', or download the data again"
        )
    # A decoder rounds both sides up to whole blocks.
    stream.codec_context.options = {"max_pixels": str(2 * pixels + (1 << 16))}
    return container


def open_container(path: Path) -> Any:
    """Open a file without reading its frames. Raise UserError for what is not a video."""
    options = {"format_whitelist": CONTAINERS, "protocol_whitelist": "file"}
    try:
        container = av.open(str(path.absolute()), options=options)
    except (av.FFmpegError, OverflowError) as exc:
        raise UserError(f"{path} cannot be opened ({getattr(exc, 'strerror', exc)}); download it again") from exc
    if not container.streams.video:
        raise UserError(f"{path} holds no video; download it again")
    return container
