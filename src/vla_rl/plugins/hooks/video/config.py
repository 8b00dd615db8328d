"""Settings of `video`."""

from __future__ import annotations

from attrs import field, frozen, validators


@frozen(kw_only=True)
class VideoConfig:
    """Spec keys of the hook `video`."""

    every: int = field(default=0, validator=validators.ge(0))
    """Record evaluations at multiples of this many steps, and the last one; 0: every evaluation."""
    episodes: int = field(default=4, validator=[validators.ge(1), validators.le(10_000)])
    """Number of episodes to record per evaluation, 1 to 10,000."""
    fps: float = field(default=5.0, validator=[validators.ge(0.1), validators.le(240.0)])
    """Frames per second of the video, 0.1 to 240; one frame is taken after each chunk of actions."""
