"""Hook `video`: evaluation episodes as mp4 files."""

from __future__ import annotations

from typing import Any

from attrs import field, frozen, validators

from vla_rl.core.types import Context, Plugin


@frozen(kw_only=True)
class VideoConfig:
    every: int = field(default=0, validator=validators.ge(0))
    """Record evaluations at multiples of this many steps, and the last one; 0: every evaluation."""
    episodes: int = field(default=4, validator=[validators.ge(1), validators.le(10_000)])
    """Episodes to record in an evaluation."""
    fps: float = field(default=5.0, validator=[validators.ge(0.1), validators.le(240.0)])
    """Frames a second; a frame is taken after each chunk of actions."""
    min_height: int = field(default=224, validator=[validators.ge(16), validators.le(2160)])
    """Enlarge cameras, by whole factors, to at least this many pixels."""


def _build(config: VideoConfig, context: Context) -> Any:
    from vla_rl.plugins.hooks.video.recorder import VideoRecorder

    return VideoRecorder(config)


plugin = Plugin(config=VideoConfig, build=_build, summary="evaluation episodes as mp4, with instruction and outcome")
