"""Hook `video`: records evaluation episodes as mp4 files."""

from __future__ import annotations

import logging
from functools import cache
from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin

logger = logging.getLogger(__name__)


@frozen(kw_only=True)
class VideoConfig:
    """Spec keys of the hook `video`."""

    every: int = field(default=0, validator=validators.ge(0))
    """Record evaluations at multiples of this many steps, and the last one; 0: every evaluation."""
    episodes: int = field(default=4, validator=[validators.ge(1), validators.le(10_000)])
    """Number of episodes to record per evaluation, 1 to 10,000."""
    fps: float = field(default=5.0, validator=[validators.ge(0.1), validators.le(240.0)])
    """Frames per second of the video, 0.1 to 240; one frame is taken after each chunk of actions."""
    min_height: int = field(default=224, validator=[validators.ge(16), validators.le(2160)])
    """Least height in pixels, 16 to 2160, to which camera images are enlarged, by whole factors."""


@cache
def encoder_missing() -> str:
    """Return why videos cannot be encoded on this machine, and log it once; empty if they can."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError, OSError) as exc:
        reason = f"{exc}".splitlines()[0] if str(exc) else type(exc).__name__
        logger.warning("hook video makes no videos: there is no encoder (%s); try: pip install imageio-ffmpeg", reason)
        return reason
    return ""


def _build(config: VideoConfig, context: Context) -> Any:
    if encoder_missing():
        return NoVideos()
    from vla_rl.plugins.hooks.video.recorder import VideoRecorder

    return VideoRecorder(config)


class NoVideos:
    """Hook that records nothing: a missing encoder does not stop a run."""


plugin = Plugin(
    config=VideoConfig,
    build=_build,
    summary="evaluation episodes as mp4, with instruction and outcome",
    files=lambda config: ("videos",),
)
