"""The recorder of the hook `video`, or none where this machine cannot encode videos."""

from __future__ import annotations

import logging
from functools import cache
from typing import TYPE_CHECKING

from vla_rl.core.errors import first_line
from vla_rl.core.installation import pip_command
from vla_rl.plugins.hooks.video.config import VideoConfig

if TYPE_CHECKING:
    from vla_rl.plugins.hooks.video.recorder import VideoRecorder

logger = logging.getLogger(__name__)


class NoVideos:
    """Hook that records nothing: a missing encoder does not stop a run."""


def make_recorder(config: VideoConfig) -> VideoRecorder | NoVideos:
    """Return the hook."""
    if encoder_missing():
        return NoVideos()
    from vla_rl.plugins.hooks.video.recorder import VideoRecorder

    return VideoRecorder(config)


@cache
def encoder_missing() -> str:
    """Return why videos cannot be encoded on this machine, and log it once; empty if they can."""
    try:
        import imageio_ffmpeg

        imageio_ffmpeg.get_ffmpeg_exe()
    except (ImportError, RuntimeError, OSError) as exc:
        reason = first_line(exc)
        command = f"{pip_command('install')} imageio-ffmpeg"
        logger.warning("hook video makes no videos: there is no encoder (%s); try: %s", reason, command)
        return reason
    return ""
