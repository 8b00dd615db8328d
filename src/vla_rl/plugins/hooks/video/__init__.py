"""Hook `video`: records evaluation episodes as mp4 files."""

from __future__ import annotations

from vla_rl.core.declarations import HookPlugin

plugin = HookPlugin(
    config="vla_rl.plugins.hooks.video.config:VideoConfig",
    build="vla_rl.plugins.hooks.video.encoder:make_recorder",
    summary="evaluation episodes as mp4, with instruction and outcome",
    files=lambda config: ("videos",),
)
